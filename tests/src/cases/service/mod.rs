//! Service and routing cases on real network namespaces. The folder's README describes the format.

mod judge;
mod model;
mod probe;
mod raw;
mod resolve;
mod steps;
mod wire;

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use super::cluster::spec::CaseFile;
use super::cluster::{Cluster, Layout};
use super::run::Plan;
use super::{Outcome, Summary};
use steps::Run;

pub use super::cluster::Binaries;

/// Cases run side by side by default: they wait most of their time.
pub const DEFAULT_JOBS: usize = 4;

/// What the cases run on.
#[derive(Clone, Debug)]
pub enum On {
    /// Real agents on network namespaces (root).
    Kernel(Binaries),
    /// The model, without root. The seed decides its choices.
    Model { seed: u64 },
}

/// What a run needs to know.
#[derive(Clone, Debug)]
pub struct Options {
    pub folder: PathBuf,
    pub only: Option<String>,
    pub on: On,
    /// Also run cases that need half a minute or more.
    pub slow: bool,
    /// Cases run at once, at least one. Each has namespaces, agents and a control side of its own.
    pub jobs: usize,
    /// Where to write the results as JSON: `{"cases": [{name, outcome, why, seconds}], "passed", "failed", "skipped"}`.
    pub json: Option<PathBuf>,
}

/// Needs that runner and product meet on every machine.
const MET: &[&str] = &[
    "multi-node",
    "ipv6",
    "raw",
    "load",
    "hostport",
    "vxlan",
    "sniff",
    "dsr",
    "xdp",
    "maglev",
];

/// Runs a folder of cases: one line per case, in the order of the files, then the counts.
///
/// # Errors
/// When the folder cannot be read; files that cannot be understood count as failed cases.
pub fn run_folder(
    options: &Options,
    print: impl FnMut(&str) + std::marker::Send,
) -> anyhow::Result<Summary> {
    if matches!(options.on, On::Kernel(_)) && crate::topology::missing().is_none() {
        crate::topology::sweep()?;
    }
    let files = super::case_files(&options.folder, options.only.as_deref())?;
    let cases: Vec<_> = files
        .iter()
        .map(|path| (super::stem(path), read_case(path)))
        .collect();
    let plan = Plan {
        jobs: options.jobs,
        json: options.json.as_deref(),
    };
    plan.run(&cases, |case| run_case(case, options), print)
}

fn read_case(path: &Path) -> anyhow::Result<CaseFile> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("read case {}", path.display()))?;
    let mut document: Value =
        serde_yaml_ng::from_str(&text).with_context(|| format!("parse case {}", path.display()))?;
    zones_without_name(&mut document);
    drop_nulls(&mut document);
    serde_json::from_value(document).with_context(|| format!("understand case {}", path.display()))
}

/// `zone: none` is how a node says that it has none.
fn zones_without_name(document: &mut Value) {
    for node in document["nodes"].as_array_mut().into_iter().flatten() {
        if node["zone"] == "none" {
            node["zone"] = Value::Null;
        }
    }
}

/// A key without a value stands for its default.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn unmet(case: &CaseFile, options: &Options) -> Option<String> {
    if let Some(why) = crate::topology::missing() {
        return Some(why.to_owned());
    }
    case.needs.iter().find_map(|need| match need.as_str() {
        "slow" if options.slow => None,
        "slow" => Some("takes half a minute or more: run with --slow".to_owned()),
        "sctp" if sctp() => None,
        "sctp" => Some("this kernel has no SCTP sockets".to_owned()),
        known if MET.contains(&known) => None,
        other => Some(format!("needs {other}")),
    })
}

fn sctp() -> bool {
    let protocol = Some(socket2::Protocol::SCTP);
    socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, protocol).is_ok()
}

fn run_case(case: &CaseFile, options: &Options) -> Outcome {
    let binaries = match &options.on {
        On::Model { seed } => return model::run(case, *seed),
        On::Kernel(binaries) => binaries,
    };
    if let Some(why) = unmet(case, options) {
        return Outcome::Skipped(why);
    }
    let result = Cluster::build(&Layout::from(case), binaries)
        .context("build the cluster")
        .and_then(|cluster| Run::start(case, cluster).context("bring up the objects"))
        .and_then(|mut run| run.steps(&case.steps));
    match result {
        Ok(()) => Outcome::Passed,
        Err(e) => Outcome::Failed(format!("{e:#}")),
    }
}
