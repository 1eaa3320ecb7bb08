//! Network namespaces joined by a switch: nodes, pods and outsiders of one machine, gone when dropped.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, bail};
use nix::sched::{CloneFlags, setns};

/// Start of every name that tests give to namespaces and links of the root namespace.
pub const PREFIX: &str = "weirt";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Why namespaces cannot be made here, if so.
#[must_use]
pub fn missing() -> Option<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root to make network namespaces");
    }
    let works = Command::new("ip")
        .arg("-V")
        .output()
        .is_ok_and(|o| o.status.success());
    (!works).then_some("needs the program ip (Debian package iproute2)")
}

/// A named network namespace; deleted when dropped.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Creates a namespace with `lo` up and a name of its own.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn new(what: &str) -> Result<Self> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}-{what}", std::process::id());
        ip(&["netns", "add", &name])?;
        let namespace = Self { name };
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the namespace can be opened.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// Runs `ip` inside.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn ip(&self, arguments: &[&str]) -> Result<String> {
        let mut all = vec!["-n", self.name.as_str()];
        all.extend(arguments);
        ip(&all)
    }

    /// A command that will run inside. Only the network namespace changes.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.path().display()))
            .arg("--")
            .arg(program);
        command
    }

    /// Runs a program inside and returns what it did.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn output(&self, program: &str, arguments: &[&str]) -> Result<Output> {
        self.command(program)
            .args(arguments)
            .output()
            .with_context(|| format!("run {program} in {}", self.name))
    }

    /// Runs `work` on a thread that has joined the namespace; threads it starts are inside as well.
    ///
    /// # Errors
    /// When the namespace cannot be joined, or what `work` returns.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let file = File::open(self.path()).with_context(|| format!("open {}", self.name))?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(file.as_fd(), CloneFlags::CLONE_NEWNET)
                    .with_context(|| format!("join {}", self.name))?;
                work()
            });
            match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Names of the links inside, without `lo`.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn links(&self) -> Result<Vec<String>> {
        let text = self.ip(&["-o", "link", "show"])?;
        let name = |line: &str| {
            let word = line.split_whitespace().nth(1)?.trim_end_matches(':');
            Some(word.split('@').next().unwrap_or(word).to_owned())
        };
        Ok(text
            .lines()
            .filter_map(name)
            .filter(|n| n != "lo")
            .collect())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = ip(&["netns", "del", &self.name]);
    }
}

/// A layer-2 segment: a bridge in a namespace of its own.
#[derive(Debug)]
pub struct Switch {
    namespace: Namespace,
}

impl Switch {
    /// Creates a segment without members.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn new() -> Result<Self> {
        let namespace = Namespace::new("sw")?;
        namespace.ip(&["link", "add", "br0", "type", "bridge"])?;
        namespace.ip(&["link", "set", "br0", "up"])?;
        Ok(Self { namespace })
    }

    /// Plugs a namespace in: its `link` gets these addresses (with prefix length), usable at once.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn plug(&self, member: &Namespace, link: &str, addresses: &[&str]) -> Result<()> {
        let port = format!("p{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let peer = [
            "link",
            "add",
            &port,
            "type",
            "veth",
            "peer",
            "name",
            link,
            "netns",
            member.name(),
        ];
        self.namespace.ip(&peer)?;
        self.namespace
            .ip(&["link", "set", &port, "master", "br0", "up"])?;
        for address in addresses {
            let mut add = vec!["address", "add", address, "dev", link];
            if address.contains(':') {
                add.push("nodad");
            }
            member.ip(&add)?;
        }
        member.ip(&["link", "set", link, "up"])?;
        Ok(())
    }
}

/// Runs `ip`.
///
/// # Errors
/// When it fails, with what it said.
pub fn ip(arguments: &[&str]) -> Result<String> {
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .context("run ip")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("ip {}: {}", arguments.join(" "), said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A number that no link of this process has yet.
pub fn next_number() -> u32 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Deletes namespaces that runs left which were killed before they could clean up.
///
/// # Errors
/// When namespaces cannot be listed.
pub fn sweep() -> Result<()> {
    for line in ip(&["netns", "list"])?.lines() {
        let name = line.split_whitespace().next().unwrap_or_default();
        let maker = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if let Some(pid) = maker
            && !PathBuf::from(format!("/proc/{pid}")).exists()
        {
            ip(&["netns", "del", name])?;
        }
    }
    Ok(())
}
