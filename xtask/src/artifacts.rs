//! Builds: the eBPF object, the product's programs, and static helpers for images and kernels.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::install::{self, BpfToolchain};
use crate::repo::{Repo, write_if_changed};
use crate::run::{loud, output};

/// The programs of the product, with the package that each comes from.
pub(crate) const PROGRAMS: [(&str, &str); 4] = [
    ("weir-control", "weir-control"),
    ("weir-agent", "weir-agent"),
    ("weir-agent", "weirctl"),
    ("weir-cni", "weir-cni"),
];

const BPF_TARGET: &str = "bpfel-unknown-none";
/// The binary of the eBPF crate.
const BPF_PROGRAM: &str = "weir";

/// Which cargo profile the product is built with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    Dev,
    Release,
}

impl Profile {
    pub(crate) fn from_release(release: bool) -> Self {
        if release { Self::Release } else { Self::Dev }
    }

    fn folder(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
        }
    }
}

/// Builds the eBPF object when its sources, manifest or compiler changed. Returns whether it did.
pub(crate) fn ebpf(repo: &Repo) -> Result<bool> {
    let object = repo.bpf_object();
    let toolchain = install::bpf_toolchain()?;
    let linker =
        install::bpf_linker(repo).context("bpf-linker is missing: run `cargo xtask install`")?;
    let digest = ebpf_digest(repo, &toolchain)?;
    let stamp = object.with_extension("o.sources");
    if object.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|s| s == digest) {
        return Ok(false);
    }
    let room = repo.root.join("dataplane-ebpf");
    let target_dir = repo.target().join("bpf-build");
    loud(&mut ebpf_command(
        repo,
        &toolchain,
        &linker,
        &room,
        &target_dir,
    ))
    .context("build the eBPF programs")?;
    let built = target_dir
        .join(BPF_TARGET)
        .join("release")
        .join(BPF_PROGRAM);
    let bytes = std::fs::read(&built).with_context(|| format!("read {}", built.display()))?;
    if !is_bpf_object(&bytes) {
        bail!(
            "{} is no BPF object: is the linker the one of eBPF?",
            built.display()
        );
    }
    // The agent embeds the object: the same bytes must not make cargo rebuild it.
    write_if_changed(&object, &bytes, 0o644)?;
    std::fs::write(&stamp, digest).with_context(|| format!("write {}", stamp.display()))?;
    Ok(true)
}

fn ebpf_command(
    repo: &Repo,
    toolchain: &BpfToolchain,
    linker: &Path,
    room: &Path,
    target_dir: &Path,
) -> Command {
    let mut cargo = match toolchain {
        BpfToolchain::Nightly => {
            let mut cargo = Command::new("cargo");
            cargo
                .args(["+nightly", "build", "-Z", "build-std=core"])
                .env_remove("RUSTUP_TOOLCHAIN")
                .env_remove("RUSTC");
            cargo
        }
        BpfToolchain::Debian { rustc } => {
            let mut cargo = repo.cargo();
            cargo
                .arg("build")
                .env("RUSTC", rustc)
                .env("RUSTC_BOOTSTRAP", "1");
            cargo
        }
    };
    cargo
        .args([
            "--quiet",
            "--release",
            "--locked",
            "--target",
            BPF_TARGET,
            "--target-dir",
        ])
        .arg(target_dir)
        .current_dir(room)
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", linker)
        .env(
            "CARGO_TARGET_BPFEL_UNKNOWN_NONE_RUSTFLAGS",
            "-Cdebuginfo=2 -Clink-arg=--btf",
        )
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTFLAGS");
    cargo
}

/// ELF for machine 247 (`EM_BPF`), little-endian.
fn is_bpf_object(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF") && bytes.get(18..20) == Some(&[247, 0])
}

fn ebpf_digest(repo: &Repo, toolchain: &BpfToolchain) -> Result<String> {
    let mut hasher = Sha256::new();
    hasher.update(format!("{toolchain:?}"));
    let mut files = Vec::new();
    source_files(&repo.root.join("dataplane-ebpf"), &mut files)?;
    files.sort();
    for file in files {
        hasher.update(file.to_string_lossy().as_bytes());
        hasher.update(std::fs::read(&file).with_context(|| format!("read {}", file.display()))?);
    }
    // The shared crate inherits versions and lints from the workspace manifest.
    hasher.update(std::fs::read(repo.root.join("Cargo.toml"))?);
    Ok(hex(&hasher.finalize()))
}

fn source_files(dir: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "target" {
                source_files(&path, into)?;
            }
        } else {
            into.push(path);
        }
    }
    Ok(())
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// Builds the product's programs in one cargo call and returns the folder that holds them.
pub(crate) fn product(repo: &Repo, profile: Profile) -> Result<PathBuf> {
    let mut cargo = repo.cargo();
    cargo.args(["build", "--quiet"]);
    for (package, program) in PROGRAMS {
        cargo.args(["--package", package, "--bin", program]);
    }
    if profile == Profile::Release {
        cargo.arg("--release");
    }
    cargo.env("WEIR_BPF_OBJECT", repo.bpf_object());
    println!(
        " … building weir-control, weir-agent, weirctl and weir-cni ({}); the first time takes minutes",
        profile.folder()
    );
    loud(&mut cargo).context("build weir-control, weir-agent, weirctl and weir-cni")?;
    Ok(product_dir(repo, profile))
}

/// Builds the measuring program and what it measures, all optimised, in one cargo call; returns their folder.
pub(crate) fn bench_programs(repo: &Repo) -> Result<PathBuf> {
    let mut cargo = repo.cargo();
    cargo.args(["build", "--quiet", "--release"]);
    for package in ["weir-bench", "weir-agent", "weir-cni"] {
        cargo.args(["--package", package]);
    }
    cargo.env("WEIR_BPF_OBJECT", repo.bpf_object());
    loud(&mut cargo).context("build weir-bench, weir-agent and weir-cni")?;
    Ok(product_dir(repo, Profile::Release))
}

/// Where cargo leaves the programs.
pub(crate) fn product_dir(repo: &Repo, profile: Profile) -> PathBuf {
    repo.cargo_target().join(profile.folder())
}

/// Builds one program with the dev profile, which shares its artefacts with the tests; returns its path.
pub(crate) fn dev_program(repo: &Repo, package: &str, program: &str) -> Result<PathBuf> {
    let mut cargo = repo.cargo();
    cargo.args(["build", "--quiet", "--package", package, "--bin", program]);
    cargo.env("WEIR_BPF_OBJECT", repo.bpf_object());
    loud(&mut cargo).with_context(|| format!("build {program}"))?;
    Ok(product_dir(repo, Profile::Dev).join(program))
}

/// Builds one program without any shared library, for images; returns its path.
pub(crate) fn static_program(repo: &Repo, package: &str, program: &str) -> Result<PathBuf> {
    let host = host_triple()?;
    let mut cargo = repo.cargo();
    let target_dir = repo.cargo_target().join("static");
    let flags_of_target = format!(
        "CARGO_TARGET_{}_RUSTFLAGS",
        host.to_uppercase().replace('-', "_")
    );
    cargo
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            package,
            "--bin",
            program,
        ])
        .args(["--target", &host, "--target-dir"])
        .arg(&target_dir)
        .env(flags_of_target, "-Ctarget-feature=+crt-static")
        // They run for seconds: what makes the product's programs small takes longer to build than it saves here.
        .env("CARGO_PROFILE_RELEASE_LTO", "false")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("WEIR_BPF_OBJECT", repo.bpf_object());
    loud(&mut cargo).with_context(|| format!("build a static {program}"))?;
    Ok(target_dir.join(host).join("release").join(program))
}

fn host_triple() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let said = output(Command::new(rustc).arg("-vV"))?;
    match said.lines().find_map(|line| line.strip_prefix("host: ")) {
        Some(host) => Ok(host.to_owned()),
        None => bail!("`rustc -vV` names no host"),
    }
}
