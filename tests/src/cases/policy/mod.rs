//! Policy cases: NetworkPolicy and ClusterNetworkPolicy, on the model and on real network namespaces. The folder's README
//! describes the format.

mod case;
mod chain;
mod kernel;
mod layout;
mod model;
mod oracle;
#[cfg(test)]
mod tests;
mod validation;
mod world;

use std::path::PathBuf;

use super::run::Plan;
use super::{Outcome, Summary};
use case::Case;

pub use super::cluster::Binaries;

/// Cases run side by side by default: they wait most of their time.
pub const DEFAULT_JOBS: usize = 4;

/// What the cases run on.
#[derive(Clone, Debug)]
pub enum On {
    /// Real agents on network namespaces (root).
    Kernel(Binaries),
    /// Feed, compiler and packet decisions as plain code, without root.
    Model,
}

/// What a run needs to know.
#[derive(Clone, Debug)]
pub struct Options {
    pub folder: PathBuf,
    pub only: Option<String>,
    pub on: On,
    /// Cases run at once, at least one. Each has namespaces, agents and a control side of its own.
    pub jobs: usize,
    /// Where to write the results as JSON: `{"cases": [{name, outcome, why, seconds}], "passed", "failed", "skipped"}`.
    pub json: Option<PathBuf>,
}

/// Runs a folder of cases: one line per case, in the order of the files, then the counts.
///
/// # Errors
/// When the folder cannot be read; files that cannot be understood count as failed cases.
pub fn run_folder(options: &Options, print: impl FnMut(&str) + Send) -> anyhow::Result<Summary> {
    if matches!(options.on, On::Kernel(_)) && crate::topology::missing().is_none() {
        crate::topology::sweep()?;
    }
    let files = super::case_files(&options.folder, options.only.as_deref())?;
    let cases: Vec<_> = files
        .iter()
        .map(|path| (super::stem(path), case::read(path)))
        .collect();
    let plan = Plan {
        jobs: options.jobs,
        json: options.json.as_deref(),
    };
    plan.run(&cases, |case| run_case(case, &options.on), print)
}

fn run_case(case: &Case, on: &On) -> Outcome {
    let done = match (case, on) {
        (Case::Validation(case), _) => validation::run(case),
        (Case::Traffic(case), On::Kernel(binaries)) => {
            if let Some(why) = crate::topology::missing() {
                return Outcome::Skipped(why.to_owned());
            }
            kernel::run(case, binaries)
        }
        (Case::Traffic(case), On::Model) => model::run(case),
    };
    match done {
        Ok(()) => Outcome::Passed,
        Err(e) => Outcome::Failed(format!("{e:#}")),
    }
}
