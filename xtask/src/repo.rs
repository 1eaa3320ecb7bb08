//! Where things are: the repository, cargo's target folder, and the folders of xtask's own products.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// Paths of one checkout.
#[derive(Clone, Debug)]
pub(crate) struct Repo {
    pub(crate) root: PathBuf,
}

impl Repo {
    /// The checkout that cargo runs this program from, or the one around the current folder.
    pub(crate) fn find() -> Result<Self> {
        let start = match std::env::var_os("CARGO_MANIFEST_DIR") {
            Some(dir) => PathBuf::from(dir),
            None => std::env::current_dir().context("read the current folder")?,
        };
        for dir in start.ancestors() {
            if dir.join("xtask/Cargo.toml").is_file() && dir.join("dataplane-ebpf").is_dir() {
                return Ok(Self {
                    root: dir.to_path_buf(),
                });
            }
        }
        bail!(
            "no Weir checkout at or above {}: run this inside one",
            start.display()
        )
    }

    /// Folder of everything that xtask itself makes (images, tools, clusters, kernels).
    pub(crate) fn target(&self) -> PathBuf {
        self.root.join("target")
    }

    /// Where cargo puts its artefacts.
    pub(crate) fn cargo_target(&self) -> PathBuf {
        match std::env::var_os("CARGO_TARGET_DIR") {
            Some(dir) => self.root.join(dir),
            None => self.target(),
        }
    }

    pub(crate) fn tools(&self) -> PathBuf {
        self.target().join("tools")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.target().join("images")
    }

    pub(crate) fn bpf_object(&self) -> PathBuf {
        self.target().join("bpf/weir.bpf.o")
    }

    /// The cargo that started this program, run at the top of the checkout.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.root);
        // `cargo xtask` sets these for xtask; passed on, they would make nested builds look different from direct ones.
        for (key, _) in std::env::vars_os() {
            let name = key.to_string_lossy();
            if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
                cargo.env_remove(&key);
            }
        }
        cargo
    }
}

/// Finds a program on PATH, or at the usual system places that an unprivileged PATH leaves out.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/bin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|candidate| is_executable(candidate))
}

/// A regular file with an execute bit.
pub(crate) fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata()
        .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// Changes whenever the file is written anew.
pub(crate) fn file_version(path: &Path) -> Result<String> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = path
        .metadata()
        .with_context(|| format!("look at {}", path.display()))?;
    Ok(format!(
        "{} {}.{}",
        meta.len(),
        meta.mtime(),
        meta.mtime_nsec()
    ))
}

/// Writes the file unless it holds these bytes already.
pub(crate) fn write_if_changed(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    if std::fs::read(path).ok().as_deref() == Some(bytes) {
        return Ok(());
    }
    write_atomically(path, bytes, mode)
}

/// Writes a file so that readers see the old or the new content, never half of it.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let dir = path
        .parent()
        .with_context(|| format!("{} has no folder", path.display()))?;
    std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let name = path
        .file_name()
        .with_context(|| format!("{} names no file", path.display()))?;
    let temporary = dir.join(format!(
        ".{}.{}",
        name.to_string_lossy(),
        std::process::id()
    ));
    let write = || -> std::io::Result<()> {
        // A leftover of a killed run with the same pid would keep its old mode.
        let _ = std::fs::remove_file(&temporary);
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        file.write_all(bytes)?;
        std::fs::rename(&temporary, path)
    };
    write().with_context(|| format!("write {}", path.display()))
}
