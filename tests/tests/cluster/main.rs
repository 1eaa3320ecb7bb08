//! The cluster tier: one local cluster with real parts, brought up, used with real kubectl, hurt, and taken down.
//!
//! A program of its own instead of the test harness: the checks share one cluster, run in order and print what they
//! measured. `cargo xtask test cluster` runs it; arguments behind `--` choose checks by parts of their names.

#![allow(
    clippy::print_stdout,
    reason = "a test program reports on standard output"
)]

mod balancer;
mod dns;
mod faults;
mod flow;
mod http;
mod support;
mod traffic;

use std::process::ExitCode;
use std::time::Instant;

use support::{Cluster, Result};

type Check = fn(&Cluster) -> Result<String>;

const CHECKS: &[(&str, Check)] = &[
    ("first_answer_within_the_bar", flow::first_answer),
    ("nodes_pods_services_and_slices_are_shown", flow::listings),
    ("describe_and_logs", flow::describe_and_logs),
    ("names_resolve_in_pods", traffic::names_resolve),
    ("dns_serves_its_config_map", dns::serves_its_config_map),
    ("pods_of_every_node_reach_all_replicas", traffic::from_pods),
    (
        "processes_of_every_node_reach_all_replicas",
        traffic::from_nodes,
    ),
    ("both_families_are_balanced", traffic::dual_stack),
    ("udp_is_balanced", traffic::udp),
    ("host_ports_lead_to_their_pod", traffic::host_ports),
    (
        "no_rules_of_iptables_nftables_or_ipvs",
        traffic::no_foreign_rules,
    ),
    ("idle_memory_within_the_bar", flow::idle_memory),
    ("scale_up_and_down", flow::scale),
    ("a_deleted_pod_is_replaced", flow::delete_pod),
    ("apply_creates_configures_and_leaves_alone", flow::apply),
    ("get_watch_follows_changes", flow::get_watch),
    ("traffic_survives_killed_agents", faults::agents_under_load),
    (
        "acknowledged_writes_survive_a_killed_control_plane",
        faults::control_writes,
    ),
    ("a_killed_containerd_comes_back", faults::containerd),
    ("everything_killed_at_once_converges", faults::everything),
    (
        "a_balancer_address_moves_when_its_node_is_lost",
        balancer::moves_when_its_node_is_lost,
    ),
    (
        "a_balancer_without_an_address_says_why",
        balancer::says_why_there_is_none,
    ),
    (
        "delete_deployment_removes_its_pods",
        flow::delete_deployment,
    ),
    ("up_again_and_fewer_nodes", flow::up_again),
];

fn main() -> ExitCode {
    let filters: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: a cluster needs root");
        return finish(0, 0, 1);
    }
    let cluster = match Cluster::up() {
        Ok(cluster) => cluster,
        Err(e) => {
            println!("test up ... FAILED\n{e:?}");
            return finish(0, 1, CHECKS.len());
        }
    };
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, check) in CHECKS {
        // The first check makes what the others use.
        let wanted = filters.is_empty() || filters.iter().any(|f| name.contains(f.as_str()));
        if !wanted && *name != CHECKS[0].0 {
            skipped += 1;
            continue;
        }
        let started = Instant::now();
        let outcome = check(&cluster);
        let took = started.elapsed().as_secs_f64();
        match outcome {
            Ok(figures) => {
                passed += 1;
                println!("test {name} ... ok ({took:.1} s) {figures}");
            }
            Err(e) => {
                failed += 1;
                println!(
                    "test {name} ... FAILED ({took:.1} s)\n{e:?}\n{}",
                    cluster.diagnosis()
                );
            }
        }
    }
    if std::env::var_os("WEIR_KEEP_CLUSTER").is_some() {
        println!("the cluster is left running (WEIR_KEEP_CLUSTER)");
        return finish(passed, failed, skipped);
    }
    match cluster.down() {
        Ok(figures) => {
            passed += 1;
            println!("test down_leaves_nothing ... ok {figures}");
        }
        Err(e) => {
            failed += 1;
            println!("test down_leaves_nothing ... FAILED\n{e:?}");
        }
    }
    finish(passed, failed, skipped)
}

/// The closing line has the form of cargo's own harness.
fn finish(passed: usize, failed: usize, skipped: usize) -> ExitCode {
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {word}. {passed} passed; {failed} failed; {skipped} ignored");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
