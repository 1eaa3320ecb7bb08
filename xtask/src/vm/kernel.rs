//! Kernels of Debian suites, fetched by apt from the machine's own mirror with lists and caches of their own, so that
//! the machine's package state is never touched.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::repo::Repo;
use crate::run::{cmd, output, quiet};

/// What a suite's newest stock kernel for virtual machines is called.
const METAPACKAGE: &str = "linux-image-cloud-amd64";
/// Packages below it that carry the image or the modules.
const PARTS: [&str; 3] = ["linux-image-", "linux-binary-", "linux-modules-"];

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub(super) struct Files {
    pub(super) release: String,
    pub(super) image: PathBuf,
    /// By name with underscores, as the kernel calls them.
    pub(super) modules: BTreeMap<String, PathBuf>,
}

/// The suite's kernel, from the cache when it was fetched before.
pub(super) fn fetch(repo: &Repo, suite: &str) -> Result<Files> {
    let dir = repo.target().join("vm").join(suite);
    let tree = dir.join("tree");
    if !tree.is_dir() {
        println!("fetching the kernel of Debian {suite}");
        let apt = Apt::open(&dir.join("apt"), suite)?;
        let packages = apt.download(&dir.join("packages"))?;
        // Unpacked elsewhere and renamed: an interrupted run must not look like a finished one.
        let partial = dir.join("tree.partial");
        if partial.exists() {
            std::fs::remove_dir_all(&partial).context("remove a half-unpacked kernel")?;
        }
        for package in packages {
            quiet(cmd("dpkg-deb", ["-x"]).arg(&package).arg(&partial))?;
        }
        std::fs::rename(&partial, &tree).context("move the unpacked kernel in place")?;
    }
    scan(&tree).with_context(|| format!("the packages of {suite} do not look like a kernel's"))
}

fn scan(tree: &Path) -> Result<Files> {
    let mut all = Vec::new();
    files_below(tree, &mut all)?;
    let image = all
        .iter()
        .find(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz"))
        })
        .context("no vmlinuz")?
        .clone();
    let mut modules = BTreeMap::new();
    let mut release = None;
    for path in all {
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let Some((stem, rest)) = name.split_once(".ko") else {
            continue;
        };
        if !matches!(rest, "" | ".xz" | ".zst") {
            continue;
        }
        release = release.or_else(|| release_of(&path));
        modules.insert(stem.replace('-', "_"), path);
    }
    Ok(Files {
        release: release.context("no modules")?,
        image,
        modules,
    })
}

/// …/lib/modules/RELEASE/kernel/…
fn release_of(module: &Path) -> Option<String> {
    let mut parts = module.components().map(|c| c.as_os_str().to_string_lossy());
    parts.find(|p| p == "modules")?;
    parts.next().map(std::borrow::Cow::into_owned)
}

fn files_below(dir: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            files_below(&entry.path(), into)?;
        } else if entry.file_type()?.is_file() {
            into.push(entry.path());
        }
    }
    Ok(())
}

/// An apt of its own: one suite, own lists, own cache, no installed packages.
struct Apt {
    dir: PathBuf,
}

impl Apt {
    fn open(dir: &Path, suite: &str) -> Result<Self> {
        for folder in ["lists/partial", "cache/archives/partial"] {
            std::fs::create_dir_all(dir.join(folder))
                .with_context(|| format!("create {}", dir.join(folder).display()))?;
        }
        let mirror = mirror()?;
        std::fs::write(
            dir.join("sources.list"),
            format!("deb {mirror} {suite} main\n"),
        )?;
        std::fs::write(dir.join("status"), "")?;
        let apt = Self {
            dir: dir.to_path_buf(),
        };
        quiet(apt.command("apt-get").args(["update", "-q"]))
            .with_context(|| format!("read the index of Debian {suite} at {mirror}"))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let at = |name: &str| self.dir.join(name).display().to_string();
        for option in [
            format!("Dir::Etc::sourcelist={}", at("sources.list")),
            "Dir::Etc::sourceparts=/dev/null".into(),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            "Acquire::Languages=none".into(),
            "Acquire::Check-Valid-Until=false".into(),
            "APT::Architecture=amd64".into(),
            "APT::Sandbox::User=root".into(),
        ] {
            command.arg("-o").arg(option);
        }
        command
    }

    /// Downloads the kernel's packages and returns their files.
    fn download(&self, into: &Path) -> Result<Vec<PathBuf>> {
        let mut wanted = BTreeSet::new();
        self.collect(METAPACKAGE, &mut wanted)?;
        if wanted.is_empty() {
            bail!("{METAPACKAGE} depends on no kernel package");
        }
        std::fs::create_dir_all(into).with_context(|| format!("create {}", into.display()))?;
        let mut get = self.command("apt-get");
        get.current_dir(into).args(["download", "-q"]).args(&wanted);
        quiet(&mut get)?;
        let mut files = Vec::new();
        files_below(into, &mut files)?;
        files.retain(|f| f.extension().is_some_and(|e| e == "deb"));
        Ok(files)
    }

    /// The kernel packages below `package`, whatever way the suite splits them.
    fn collect(&self, package: &str, into: &mut BTreeSet<String>) -> Result<()> {
        let said = output(
            self.command("apt-cache")
                .args(["depends", "--important", package]),
        )?;
        for name in said
            .lines()
            .filter_map(|l| l.trim().strip_prefix("Depends: "))
        {
            if PARTS.iter().any(|p| name.starts_with(p)) && into.insert(name.to_owned()) {
                self.collect(name, into)?;
            }
        }
        Ok(())
    }
}

/// The Debian mirror that the machine's apt uses already.
fn mirror() -> Result<String> {
    let format = "$(REPO_URI) $(COMPONENT)";
    let said = output(&mut cmd(
        "apt-get",
        ["indextargets", "--format", format, "Created-By: Packages"],
    ))?;
    let mut mirrors =
        said.lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(uri, component)| {
                *component == "main" && uri.trim_end_matches('/').ends_with("/debian")
            });
    match mirrors.next() {
        Some((uri, _)) => Ok(uri.to_owned()),
        None => bail!("apt knows no Debian mirror: run `apt-get update` on a Debian machine first"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_tree_is_recognised_whatever_its_layout() {
        for (image, modules) in [
            (
                "boot/vmlinuz-6.1.0-x",
                "lib/modules/6.1.0-x/kernel/net/veth.ko",
            ),
            (
                "usr/lib/modules/7.2-y/vmlinuz",
                "usr/lib/modules/7.2-y/kernel/sch-ingress.ko.xz",
            ),
        ] {
            let dir = tempfile::tempdir().unwrap();
            for file in [image, modules] {
                let path = dir.path().join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, "x").unwrap();
            }
            let files = scan(dir.path()).unwrap();
            assert!(files.release == "6.1.0-x" || files.release == "7.2-y");
            assert!(
                files.modules.contains_key("veth") || files.modules.contains_key("sch_ingress")
            );
        }
    }
}
