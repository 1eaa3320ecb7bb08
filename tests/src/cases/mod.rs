//! Runners for folders of case files. Each kind has its own format, described by the folder's README.

pub mod api;
mod cluster;
pub mod dns;
pub mod policy;
mod run;
pub mod service;

use std::path::{Path, PathBuf};

/// How one case ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

/// Counts for the closing line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    pub passed: u32,
    pub failed: u32,
    pub skipped: u32,
}

impl Summary {
    pub fn count(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Failed(_) => self.failed += 1,
            Outcome::Skipped(_) => self.skipped += 1,
        }
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// The YAML files of a folder, in the order of their names, narrowed to names that contain `only`.
///
/// # Errors
/// When the folder cannot be read.
pub fn case_files(folder: &Path, only: Option<&str>) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = std::fs::read_dir(folder)
        .map_err(|e| anyhow::anyhow!("read case folder {}: {e}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let yaml = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
        if yaml && only.is_none_or(|o| name.contains(o)) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// What a case file is called in reports.
pub(crate) fn stem(path: &Path) -> String {
    path.file_stem()
        .map(|s| s.to_string_lossy().into_owned())
        .unwrap_or_default()
}
