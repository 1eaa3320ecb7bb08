//! A cgroup of a test's own, which single threads join: socket hooks on it see nobody else's sockets.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};

/// A threaded cgroup below the process's own. Removed when dropped, on a thread that has joined it or any other.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    parent: PathBuf,
    mount: tempfile::TempDir,
}

impl Cgroup {
    /// Mounts the cgroup v2 hierarchy, which needs a mount namespace of the caller's own, and makes a cgroup.
    ///
    /// # Errors
    /// Says which part could not be made.
    pub fn new() -> Result<Self> {
        let directory = tempfile::tempdir().context("a folder for cgroups")?;
        let none = None::<&str>;
        mount(
            Some("cgroup2"),
            directory.path(),
            Some("cgroup2"),
            MsFlags::empty(),
            none,
        )
        .context("mount the cgroup v2 hierarchy")?;
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let own = own
            .lines()
            .find_map(|line| line.strip_prefix("0::/"))
            .context("a place in the cgroup v2 hierarchy")?;
        let parent = directory.path().join(own);
        let name = format!("weir-test-{}-{}", std::process::id(), nix::unistd::gettid());
        let path = parent.join(name);
        std::fs::create_dir(&path).with_context(|| format!("create {}", path.display()))?;
        let cgroup = Self {
            path,
            parent,
            mount: directory,
        };
        std::fs::write(cgroup.path.join("cgroup.type"), "threaded")
            .context("let single threads join")?;
        Ok(cgroup)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the calling thread in; threads that it starts are inside as well.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn join(&self) -> Result<()> {
        enter(&self.path)
    }

    /// Moves the calling thread back.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn leave(&self) -> Result<()> {
        enter(&self.parent)
    }
}

fn enter(path: &Path) -> Result<()> {
    let tid = nix::unistd::gettid().to_string();
    std::fs::write(path.join("cgroup.threads"), tid)
        .with_context(|| format!("join {}", path.display()))
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Clean-up goes on whatever one step says.
        let _left = self.leave();
        let _removed = std::fs::remove_dir(&self.path);
        let _unmounted = nix::mount::umount2(self.mount.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}
