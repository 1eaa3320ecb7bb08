//! Policies on real agents, case by case: closed pods, labels that come and go, flows that are revoked, agents that are
//! killed and started without a control plane. Continuous probes look all the while.

use std::path::Path;
use std::process::Command;

use super::cluster::no_programs;
use super::support::{program, skipped};

/// What follows is heavy on processes: two worlds at once are enough.
const JOBS: &str = "2";

#[test]
fn own_policy_cases_hold_on_real_agents() {
    let test = "own_policy_cases_hold_on_real_agents";
    if skipped(test) {
        return;
    }
    if let Some(why) = no_programs() {
        println!("SKIPPED {test}: {why}");
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases/policy");
    let output = Command::new(program("weir-tests", "weir-cases"))
        .arg("policy")
        .arg(folder)
        .args(["--kernel", "--jobs", JOBS, "--agent"])
        .arg(program("weir-agent", "weir-agent"))
        .arg("--cni")
        .arg(program("weir-cni", "weir-cni"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let more = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{more}");
    println!("{said}");
}
