//! `cargo xtask vm`: boots Debian's kernels under QEMU and has every eBPF program loaded, attached and tried there.

mod cpio;
mod initramfs;
mod kernel;
mod qemu;

use std::path::Path;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::artifacts;
use crate::install::{self, Purpose};
use crate::repo::Repo;
use crate::run::{cmd, output};
use crate::test::Counts;

/// The kernels that Weir is tried on: each is the stock kernel of a Debian suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// The oldest supported (Debian bullseye).
    #[value(name = "5.10")]
    V5_10,
    /// Debian bookworm.
    #[value(name = "6.1")]
    V6_1,
    /// Debian trixie.
    #[value(name = "6.12")]
    V6_12,
    /// The newest that Debian carries (forky).
    #[value(name = "newest")]
    Newest,
}

impl Kernel {
    fn suite(self) -> &'static str {
        match self {
            Self::V5_10 => "bullseye",
            Self::V6_1 => "bookworm",
            Self::V6_12 => "trixie",
            Self::Newest => "forky",
        }
    }
}

/// Why this machine cannot run the tier at all.
pub(crate) fn obstacle() -> Option<String> {
    (std::env::consts::ARCH != "x86_64").then(|| {
        format!(
            "kernels are booted on x86_64 only, this is {}",
            std::env::consts::ARCH
        )
    })
}

/// Boots the kernels (all when none is named); prints a line per check.
pub(crate) fn run(repo: &Repo, asked: &[Kernel]) -> Result<Counts> {
    if let Some(reason) = obstacle() {
        println!("skipped: {reason}");
        return Ok(Counts {
            skipped: 1,
            ..Counts::default()
        });
    }
    let kernels = if asked.is_empty() {
        Kernel::value_variants()
    } else {
        asked
    };
    install::ensure(repo, &[Purpose::Ebpf, Purpose::Vm])?;
    artifacts::ebpf(repo)?;
    let program = artifacts::dev_program(repo, "weir-tests", "weir_vmtest")?;
    let payload = initramfs::Payload {
        busybox: crate::image::static_busybox(repo)?,
        libraries: libraries(&program)?,
        test: stripped(&program)?,
    };
    let mut total = Counts::default();
    for kernel in kernels {
        let counts = match run_one(repo, *kernel, &payload) {
            Ok(counts) => counts,
            Err(e) => {
                println!(" ✗ {}: {e:#}", kernel.suite());
                Counts {
                    failed: 1,
                    ..Counts::default()
                }
            }
        };
        total.add(counts);
    }
    Ok(total)
}

/// What the program loads, by path: a foreign kernel runs this machine's libraries just as well.
fn libraries(program: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let said = output(cmd("ldd", [program]).env("LC_ALL", "C"))?;
    let paths = said
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    paths
        .map(|path| {
            let bytes = std::fs::read(path).with_context(|| format!("read {path}"))?;
            Ok((path.trim_start_matches('/').to_owned(), bytes))
        })
        .collect()
}

/// The program without debug information, which an emulated machine would only have to unpack.
fn stripped(program: &Path) -> Result<Vec<u8>> {
    let to = tempfile::NamedTempFile::new().context("make a temporary file")?;
    let mut strip = cmd("strip", ["-o"]);
    strip.arg(to.path()).arg(program);
    let small = crate::run::succeeds(&mut strip);
    let path = if small { to.path() } else { program };
    std::fs::read(path).with_context(|| format!("read {}", path.display()))
}

fn run_one(repo: &Repo, kernel: Kernel, payload: &initramfs::Payload) -> Result<Counts> {
    let files = kernel::fetch(repo, kernel.suite())?;
    let dir = repo.target().join("vm").join(kernel.suite());
    let accelerator = qemu::accelerator(repo, &files, payload)?;
    let image = dir.join("initramfs.cpio");
    let bytes = initramfs::build(&files, payload)?;
    std::fs::write(&image, bytes).with_context(|| format!("write {}", image.display()))?;
    println!(
        "kernel {} (Debian {}, {accelerator})",
        files.release,
        kernel.suite()
    );
    let mut counts = Counts::default();
    let outcome = qemu::boot(
        &files.image,
        &image,
        accelerator,
        qemu::TEST_LIMIT,
        &mut |line| match line.split_once(' ') {
            Some(("PASS", rest)) => {
                counts.passed += 1;
                println!("   ✓ {rest}");
            }
            Some(("FAIL", rest)) => {
                counts.failed += 1;
                println!("   ✗ {rest}");
            }
            Some(("SKIP", rest)) => {
                counts.skipped += 1;
                println!("   - skipped: {rest}");
            }
            _ => println!("     {line}"),
        },
    )?;
    let broken = outcome.exit_code != Some(0) || counts.passed + counts.failed == 0;
    if broken && counts.failed == 0 {
        counts.failed = 1;
        println!("   ✗ {}", outcome.explain());
    }
    println!("   {counts} in {:.0} s", outcome.seconds);
    Ok(counts)
}
