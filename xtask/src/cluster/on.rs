//! A command at one place of a running cluster: on a node, with its network, files and programs, or at its client.

use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::{Cluster, Role, node, node_index};

/// The command that runs at `place`; a shell when it is empty. The cluster's programs are on its PATH.
pub(crate) fn command(cluster: &Cluster, place: &str, command: &[String]) -> Result<Command> {
    let role = match (place, node_index(place)) {
        ("client", _) => Role::Client,
        ("control", _) => Role::Control,
        (_, Some(index)) => Role::Node(index),
        _ => bail!("{place:?} is no place of a cluster: give n1, n2, …, client or control"),
    };
    super::require_root("on")?;
    if !cluster.netns_path(role).exists() {
        bail!(
            "{place} of the cluster {:?} does not run: `cargo xtask status` shows what does",
            cluster.name
        );
    }
    let enter = match role {
        Role::Node(index) => node::enter(cluster, index),
        other => vec![
            "nsenter".into(),
            format!("--net={}", cluster.netns_path(other).display()),
            "--".into(),
        ],
    };
    let (program, before) = enter.split_first().context("nothing enters a place")?;
    let mut run = Command::new(program);
    run.args(before);
    if command.is_empty() {
        run.arg(std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into()));
    } else {
        run.args(command);
    }
    let mut path = cluster.bin().into_os_string();
    if let Some(before) = std::env::var_os("PATH") {
        path.push(":");
        path.push(before);
    }
    run.env("PATH", path);
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_are_none_are_refused() {
        let cluster = Cluster {
            name: "nowhere".into(),
            dir: "/nonexistent".into(),
        };
        for place in ["n01", "n", "switch", "", "../n1"] {
            let error = command(&cluster, place, &[]).unwrap_err().to_string();
            assert!(error.contains("no place of a cluster"), "{place}: {error}");
        }
    }
}
