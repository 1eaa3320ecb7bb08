//! The developer and user door: every task is a `cargo xtask` command.
#![allow(
    clippy::print_stdout,
    reason = "a command-line tool speaks on standard output"
)]

mod artifacts;
mod bench;
mod cases;
mod cluster;
mod gen_schema;
mod image;
mod install;
mod repo;
mod run;
mod test;
mod tidy;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

use artifacts::Profile;
use cluster::Cluster;
use install::Purpose;
use repo::Repo;

/// Builds, runs, tests and removes Weir on this machine.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    disable_version_flag = true
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Start a local cluster: control plane, nodes, client. Safe to repeat; a new --nodes adds or removes nodes.
    Up {
        #[command(flatten)]
        which: Which,
        /// Number of nodes.
        #[arg(long, default_value_t = 3)]
        nodes: u32,
        /// Programs of the dev profile: quicker to build, slower to run.
        #[arg(long)]
        dev: bool,
        /// Build nothing: run the programs of the last `cargo xtask build --release` (with --dev: of `cargo xtask build`).
        #[arg(long)]
        no_build: bool,
    },
    /// Stop the cluster, remove everything of it and prove that nothing is left.
    Down {
        #[command(flatten)]
        which: Which,
    },
    /// Show programs, memory, restarts, logs and nodes of the cluster; fails when something is wrong.
    Status {
        #[command(flatten)]
        which: Which,
    },
    /// Run the pinned kubectl against the cluster.
    Kubectl {
        #[command(flatten)]
        which: Which,
        /// Arguments of kubectl.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run a command on a node of the cluster (n1, n2, …), on its client or beside its control plane.
    ///
    /// `cargo xtask on n1 -- weirctl status` asks the agent of n1; without a command a shell starts.
    On {
        #[command(flatten)]
        which: Which,
        /// n1, n2, …, client or control.
        place: String,
        /// Command with its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Run test tiers: all that this machine can run, or the named ones.
    Test {
        #[arg(value_enum, value_name = "TIER")]
        tiers: Vec<test::Tier>,
    },
    /// Run a folder of case files: one line per case, then `N passed, N failed, N skipped`.
    Cases(cases::Cases),
    /// Measure the product's optimised programs.
    Bench {
        #[command(subcommand)]
        what: bench::Bench,
    },
    /// Boot Debian kernels under QEMU and load, attach and try every eBPF program there.
    Vm {
        /// Only this kernel; repeatable.
        #[arg(long, value_enum)]
        kernel: Vec<vm::Kernel>,
    },
    /// Check what the compiler does not: pure rooms, sizes, dependencies, stray paths; rustfmt and clippy.
    Tidy,
    /// Compile: the eBPF object, or the product's programs (with the object inside).
    Build {
        #[arg(value_enum, default_value_t = What::All)]
        what: What,
        /// Optimised programs (the eBPF object always is).
        #[arg(long)]
        release: bool,
    },
    /// Make the images for local clusters from Debian packages: nginx, busybox and the sandbox image.
    Image {
        /// Make them anew although nothing changed.
        #[arg(long)]
        refresh: bool,
    },
    /// Install what is missing for all tasks, and say what: Debian packages, eBPF toolchain, kubectl.
    Install,
    /// Write the API server's table of Kubernetes types from their Go sources (developers only; needs Go).
    GenSchema,
    /// Runs the programs of a cluster.
    #[command(hide = true)]
    Supervise { dir: PathBuf },
}

/// Which cluster a task is about.
#[derive(Clone, Debug, Args)]
struct Which {
    /// Name of the cluster; it prefixes namespaces and cgroups.
    #[arg(long, default_value = "weir")]
    name: String,
    /// Folder of its files; default: target/cluster.
    #[arg(long)]
    dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The eBPF object.
    Ebpf,
    /// Object and programs.
    All,
}

impl Which {
    fn cluster(&self, repo: &Repo) -> Result<Cluster> {
        Cluster::new(repo, &self.name, self.dir.as_deref())
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(code) => code,
        Err(e) => {
            // Not `{e:?}`: a user wants the causes, not this program's backtrace.
            eprintln!("error: {e}");
            for cause in e.chain().skip(1) {
                eprintln!("  because: {cause}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    if let Task::Supervise { dir } = task {
        cluster::supervise::run(&dir)?;
        return Ok(ExitCode::SUCCESS);
    }
    // What reads the output may end first, as `head` does: that ends this program as well, quietly.
    sigpipe::reset();
    let repo = Repo::find()?;
    let ok = match task {
        Task::Up {
            which,
            nodes,
            dev,
            no_build,
        } => {
            let wanted = cluster::up::Wanted {
                nodes,
                profile: Profile::from_release(!dev),
                no_build,
            };
            cluster::up::up(&repo, &which.cluster(&repo)?, &wanted).map(|()| true)?
        }
        Task::Down { which } => {
            cluster::require_root("down")?;
            cluster::down::down(&which.cluster(&repo)?).map(|()| true)?
        }
        Task::Status { which } => cluster::status::status(&repo, &which.cluster(&repo)?)?,
        Task::Kubectl { which, args } => {
            let mut kubectl = cluster::api::kubectl(&repo, &which.cluster(&repo)?)?;
            return Ok(exit_code(kubectl.args(args).status()?));
        }
        Task::On {
            which,
            place,
            command,
        } => {
            cluster::require_root("on")?;
            let status =
                cluster::on::command(&which.cluster(&repo)?, &place, &command)?.status()?;
            return Ok(exit_code(status));
        }
        Task::Test { tiers } => test::run(&repo, &tiers)?,
        Task::Cases(which) => cases::run(&repo, &which)?,
        Task::Bench { what } => bench::run(&repo, &what)?,
        Task::Vm { kernel } => passed(&vm::run(&repo, &kernel)?),
        Task::Tidy => passed(&tidy::run(&repo)?),
        Task::Build { what, release } => build(&repo, what, release).map(|()| true)?,
        Task::Image { refresh } => make_images(&repo, refresh).map(|()| true)?,
        Task::Install => {
            if !install::ensure(&repo, &[Purpose::Ebpf, Purpose::Cluster, Purpose::Vm])? {
                println!(" ✓ nothing is missing");
            }
            true
        }
        Task::GenSchema => {
            gen_schema::run(&repo.root.join("control/src/apiserver/schema/types.tsv"))?;
            println!(" ✓ the schema table is written");
            true
        }
        Task::Supervise { .. } => true,
    };
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn make_images(repo: &Repo, refresh: bool) -> Result<()> {
    let (path, made) = image::archive(repo, refresh)?;
    let note = if made { "made" } else { "unchanged" };
    println!(" ✓ {} {note}: {}", path.display(), image::IMAGES.join(", "));
    Ok(())
}

/// Prints what a run came to. Returns whether nothing failed.
fn passed(counts: &test::Counts) -> bool {
    println!("{counts}");
    counts.failed == 0
}

fn build(repo: &Repo, what: What, release: bool) -> Result<()> {
    install::ensure(repo, &[Purpose::Ebpf])?;
    let note = if artifacts::ebpf(repo)? {
        "compiled"
    } else {
        "unchanged"
    };
    println!(" ✓ {} {note}", repo.bpf_object().display());
    if what == What::All {
        let dir = artifacts::product(repo, Profile::from_release(release))?;
        println!(
            " ✓ weir-control, weir-agent, weirctl, weir-cni in {}",
            dir.display()
        );
    }
    Ok(())
}

/// The exit code of a child; a death by signal counts as failure.
fn exit_code(status: std::process::ExitStatus) -> ExitCode {
    status
        .code()
        .and_then(|c| u8::try_from(c).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from)
}
