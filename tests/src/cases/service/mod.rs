//! Service and routing cases on real network namespaces. The folder's README describes the format.

mod api;
mod cluster;
mod handle;
mod judge;
mod resolve;
mod slices;
mod steps;
mod world;

use std::path::PathBuf;

use anyhow::Context;

use super::{Outcome, Summary};
use cluster::Cluster;
use steps::Run;
use world::CaseFile;

pub use cluster::Binaries;

/// What a run needs to know.
#[derive(Clone, Debug)]
pub struct Options {
    pub folder: PathBuf,
    pub only: Option<String>,
    pub binaries: Binaries,
    /// Also run cases that need half a minute or more.
    pub slow: bool,
}

/// Needs that runner, machine and product can meet.
const MET: &[&str] = &["multi-node", "ipv6", "raw", "load", "hostport", "vxlan"];

/// Runs a folder of cases: one line per case, then the counts.
///
/// # Errors
/// When the folder or a file cannot be read; failing cases are in the summary.
pub fn run_folder(options: &Options, mut print: impl FnMut(&str)) -> anyhow::Result<Summary> {
    if crate::topology::missing().is_none() {
        crate::topology::sweep()?;
    }
    let mut summary = Summary::default();
    for path in super::case_files(&options.folder, options.only.as_deref())? {
        let text = std::fs::read_to_string(&path)?;
        let mut document: serde_json::Value = serde_yaml_ng::from_str(&text)
            .with_context(|| format!("parse case {}", path.display()))?;
        zones_without_name(&mut document);
        drop_nulls(&mut document);
        let case: CaseFile = serde_json::from_value(document)
            .with_context(|| format!("understand case {}", path.display()))?;
        let name = path
            .file_stem()
            .map(|s| s.to_string_lossy().into_owned())
            .unwrap_or_default();
        let outcome = match unmet(&case, options) {
            Some(why) => Outcome::Skipped(why),
            None => run_case(&case, options),
        };
        summary.count(&outcome);
        print(&match &outcome {
            Outcome::Passed => format!("ok      {name}"),
            Outcome::Failed(why) => format!("FAILED  {name}: {why}"),
            Outcome::Skipped(why) => format!("skipped {name}: {why}"),
        });
    }
    Ok(summary)
}

/// `zone: none` is how a node says that it has none.
fn zones_without_name(document: &mut serde_json::Value) {
    for node in document["nodes"].as_array_mut().into_iter().flatten() {
        if node["zone"] == "none" {
            node["zone"] = serde_json::Value::Null;
        }
    }
}

/// A key without a value stands for its default.
fn drop_nulls(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        serde_json::Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn unmet(case: &CaseFile, options: &Options) -> Option<String> {
    if let Some(why) = crate::topology::missing() {
        return Some(why.to_owned());
    }
    let met = |need: &String| MET.contains(&need.as_str()) || (options.slow && need == "slow");
    case.needs
        .iter()
        .find(|n| !met(n))
        .map(|n| format!("needs {n}"))
}

fn run_case(case: &CaseFile, options: &Options) -> Outcome {
    let result = Cluster::build(case, &options.binaries)
        .context("build the cluster")
        .and_then(|cluster| Run::start(case, cluster).context("bring up the objects"))
        .and_then(|mut run| run.steps(&case.steps));
    match result {
        Ok(()) => Outcome::Passed,
        Err(e) => Outcome::Failed(format!("{e:#}")),
    }
}
