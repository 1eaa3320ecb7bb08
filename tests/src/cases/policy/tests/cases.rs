//! Own cases, as people write them: the model passes the right ones and says what is wrong with the others.

use std::path::{Path, PathBuf};

use crate::cases::policy::{On, Options, run_folder};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cases/policy")
}

fn run(only: &str) -> (Vec<String>, crate::cases::Summary) {
    let options = Options {
        folder: folder(),
        only: Some(only.to_owned()),
        on: On::Model,
        jobs: 1,
        json: None,
    };
    let mut lines = Vec::new();
    let summary = run_folder(&options, |line| lines.push(line.to_owned())).unwrap();
    (lines, summary)
}

#[test]
fn own_cases_pass_on_the_model() {
    let (lines, summary) = run("");
    assert_eq!(summary.failed, 0, "{}", lines.join("\n"));
    assert!(summary.passed >= 5, "{}", lines.join("\n"));
}
