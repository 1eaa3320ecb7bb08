//! Debian packages as a source of files: fetched by apt from the machine's own mirrors, unpacked without installing.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::oci::Layer;
use crate::run::{cmd, output};

/// A folder of fetched packages.
pub(crate) struct Packages {
    dir: PathBuf,
}

/// The files of one or more packages, by path without a leading slash.
#[derive(Default)]
pub(crate) struct Files {
    files: BTreeMap<String, (Vec<u8>, u32)>,
    links: BTreeMap<String, String>,
}

impl Packages {
    pub(crate) fn open(dir: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        Ok(Self { dir })
    }

    /// The direct dependencies of a package whose names start with one of the prefixes.
    pub(crate) fn dependencies(&self, name: &str, prefixes: &[&str]) -> Result<Vec<String>> {
        let said = output(&mut cmd("apt-cache", ["depends", "--important", name]))?;
        let names: BTreeSet<String> = said
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .filter(|dep| prefixes.iter().any(|p| dep.starts_with(p)))
            .map(str::to_owned)
            .collect();
        Ok(names.into_iter().collect())
    }

    /// Fetches the packages and reads the files whose paths `wanted` accepts.
    pub(crate) fn files(&self, names: &[&str], wanted: fn(&str) -> bool) -> Result<Files> {
        let mut files = Files::default();
        for name in names {
            let package = self.fetch(name)?;
            files
                .read(&package, wanted)
                .with_context(|| format!("read package {name}"))?;
        }
        Ok(files)
    }

    fn fetch(&self, name: &str) -> Result<PathBuf> {
        // A folder per package: the file's name carries a version that only apt knows.
        let dir = self.dir.join(name);
        std::fs::create_dir_all(&dir)?;
        if let Some(found) = package_in(&dir)? {
            return Ok(found);
        }
        output(cmd("apt-get", ["download", "-q", name]).current_dir(&dir)).with_context(|| {
            format!("fetch package {name}; run `apt-get update` when the index is out of date")
        })?;
        package_in(&dir)?.with_context(|| format!("apt-get download {name} left no package"))
    }
}

fn package_in(dir: &Path) -> Result<Option<PathBuf>> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .with_context(|| format!("list {}", dir.display()))?
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "deb"))
        .collect();
    found.sort();
    Ok(found.pop())
}

impl Files {
    fn read(&mut self, package: &Path, wanted: fn(&str) -> bool) -> Result<()> {
        let mut tar = cmd("dpkg-deb", ["--fsys-tarfile"]);
        tar.arg(package).stdout(std::process::Stdio::piped());
        let mut child = tar.spawn().context("start dpkg-deb")?;
        let stream = child.stdout.take().context("dpkg-deb has no output")?;
        let mut archive = tar::Archive::new(stream);
        for entry in archive.entries()? {
            let mut entry = entry?;
            let path = entry
                .path()?
                .to_string_lossy()
                .trim_start_matches("./")
                .to_owned();
            if !wanted(&path) {
                continue;
            }
            let kind = entry.header().entry_type();
            if kind.is_file() {
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes)?;
                let mode = entry.header().mode()? & 0o755;
                self.files.insert(path, (bytes, mode));
            } else if kind.is_symlink() {
                let target = entry.link_name()?.context("link without a target")?;
                self.links
                    .insert(path, target.to_string_lossy().into_owned());
            }
        }
        let status = child.wait()?;
        if !status.success() {
            bail!("dpkg-deb failed on {}: {status}", package.display());
        }
        Ok(())
    }

    /// Removes one file from the set and returns its bytes.
    pub(crate) fn take(&mut self, path: &str) -> Result<Vec<u8>> {
        let (bytes, _) = self
            .files
            .remove(path)
            .with_context(|| format!("no package brought {path}"))?;
        Ok(bytes)
    }

    /// Adds everything that is left to a layer.
    pub(crate) fn add_to(self, layer: &mut Layer) -> Result<()> {
        for (path, (bytes, mode)) in self.files {
            layer.file(&path, &bytes, mode)?;
        }
        for (path, target) in self.links {
            layer.symlink(&path, &target)?;
        }
        Ok(())
    }
}

/// Shared libraries in the loader's own folders, and the loader; not plug-ins, locales or documentation.
pub(crate) fn is_library(path: &str) -> bool {
    let Some((dir, name)) = path.rsplit_once('/') else {
        return false;
    };
    let dir = dir.strip_prefix("usr/").unwrap_or(dir);
    let depth_ok = dir == "lib64"
        || dir == "lib"
        || (dir.starts_with("lib/") && dir.matches('/').count() == 1);
    depth_ok
        && (name.contains(".so.") || name.ends_with(".so"))
        && !name.starts_with("libnss_compat")
}

#[cfg(test)]
mod tests {
    use super::is_library;

    #[test]
    fn only_files_of_the_loaders_folders_are_libraries() {
        for yes in [
            "lib/x86_64-linux-gnu/libc.so.6",
            "usr/lib/x86_64-linux-gnu/libssl.so.3",
            "lib64/ld-linux-x86-64.so.2",
        ] {
            assert!(is_library(yes), "{yes}");
        }
        for no in [
            "usr/lib/x86_64-linux-gnu/gconv/BIG5.so",
            "usr/lib/x86_64-linux-gnu/engines-3/afalg.so",
            "usr/share/doc/libc6/copyright",
            "ld.so",
        ] {
            assert!(!is_library(no), "{no}");
        }
    }
}
