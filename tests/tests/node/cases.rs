//! The repository's own cases on real agents. Policies: closed pods, labels that come and go, flows that are revoked,
//! agents that are killed, exchanged, and started without a control plane, with continuous probes all the while. Services: bad
//! input, sizes and underlays that the handed cases leave out, and policies together with what translates and wraps packets.

use std::path::Path;
use std::process::Command;

use super::cluster::no_programs;
use super::support::{program, skipped};

/// What follows is heavy on processes: two worlds at once are enough.
const JOBS: &str = "2";

fn own_cases_hold(test: &str, kind: &str, more: &[&str]) {
    if skipped(test) {
        return;
    }
    if let Some(why) = no_programs() {
        println!("SKIPPED {test}: {why}");
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("cases")
        .join(kind);
    let output = Command::new(program("weir-tests", "weir-cases"))
        .arg(kind)
        .arg(folder)
        .args(["--kernel", "--jobs", JOBS, "--agent"])
        .arg(program("weir-agent", "weir-agent"))
        .arg("--cni")
        .arg(program("weir-cni", "weir-cni"))
        .args(more)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
    println!("{said}");
}

#[test]
fn own_policy_cases_hold_on_real_agents() {
    own_cases_hold("own_policy_cases_hold_on_real_agents", "policy", &[]);
}

#[test]
fn own_service_cases_hold_on_real_agents() {
    own_cases_hold("own_service_cases_hold_on_real_agents", "service", &[]);
}

/// Both ends of a policy are asked, whoever translates.
#[test]
fn policies_hold_where_sockets_are_translated() {
    let test = "policies_hold_where_sockets_are_translated";
    own_cases_hold(test, "service", &["--sockets", "--only", "policies"]);
}
