//! A cgroup of a test's own, for threads or processes: socket hooks on it see nobody else's sockets.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A cgroup below the process's own. Removed when dropped, from where the last of its members must have gone.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    parent: PathBuf,
    threaded: bool,
}

impl Cgroup {
    /// A cgroup for single threads.
    ///
    /// # Errors
    /// Says which part could not be made.
    pub fn new() -> Result<Self> {
        let mut cgroup = Self::for_processes()?;
        std::fs::write(cgroup.path.join("cgroup.type"), "threaded")
            .context("let single threads join")?;
        cgroup.threaded = true;
        Ok(cgroup)
    }

    /// A cgroup for whole processes.
    ///
    /// # Errors
    /// Says which part could not be made.
    pub fn for_processes() -> Result<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let own = own
            .lines()
            .find_map(|line| line.strip_prefix("0::/"))
            .context("a place in the cgroup v2 hierarchy")?;
        let parent = hierarchy()?.join(own);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("weir-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self {
            path,
            parent,
            threaded: false,
        })
    }

    /// Moves a process in.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn admit(&self, process: u32) -> Result<()> {
        let members = self.path.join("cgroup.procs");
        std::fs::write(&members, process.to_string())
            .with_context(|| format!("write {}", members.display()))
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

/// Where the cgroup v2 hierarchy is mounted.
fn hierarchy() -> Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").context("read the mounts")?;
    let found = mounts.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (_, path, kind) = (words.next()?, words.next()?, words.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(path))
    });
    found.context("no cgroup v2 hierarchy is mounted")
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        const ENDED_WITHIN: Duration = Duration::from_secs(2);
        // Clean-up goes on whatever one step says.
        if self.threaded {
            let _left = self.leave();
        }
        // A process that has ended leaves a little later than it is reaped.
        let deadline = Instant::now() + ENDED_WITHIN;
        while std::fs::remove_dir(&self.path).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
