//! `weir-cases`: runs a folder of case files. People use `cargo xtask cases KIND DIR`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use weir_tests::cases::{Summary, api, dns, policy, service};

/// Runs a folder of case files: one line per case, then `N passed, N failed, N skipped`.
#[derive(Debug, Parser)]
#[command(name = "weir-cases")]
struct Cli {
    #[command(subcommand)]
    kind: Kind,
}

#[derive(Debug, Subcommand)]
enum Kind {
    /// API cases: kubectl and raw HTTP against a live control plane.
    Api {
        /// Folder of case files.
        dir: PathBuf,
        /// Run only cases whose file name contains this.
        #[arg(long)]
        only: Option<String>,
        /// The kubectl binary.
        #[arg(long, default_value = "kubectl")]
        kubectl: PathBuf,
        /// Start this weir-control on loopback for the run.
        #[arg(long)]
        control: Option<PathBuf>,
        /// Use the server of this kubeconfig instead (admin by client certificate).
        #[arg(long)]
        kubeconfig: Option<PathBuf>,
        /// Cases run at once.
        #[arg(long, default_value_t = 2)]
        jobs: usize,
        /// Also run cases that take more than about a minute.
        #[arg(long)]
        slow: bool,
    },
    /// DNS cases: questions to the zone and message code of the agent.
    Dns {
        /// Folder of case files.
        dir: PathBuf,
        /// Run only cases whose id contains this.
        #[arg(long)]
        only: Option<String>,
    },
    /// Service and routing cases: agents, CNI plugin and sockets on network namespaces (root).
    Service {
        /// Folder of case files.
        dir: PathBuf,
        /// Run only cases whose file name contains this.
        #[arg(long)]
        only: Option<String>,
        /// Run on the model, without root, instead of agents and namespaces.
        #[arg(long, conflicts_with = "kernel")]
        model: bool,
        /// Run on agents and namespaces (root); the default.
        #[arg(long)]
        kernel: bool,
        /// The model's choices follow from this number.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// The weir-agent binary.
        #[arg(long, required_unless_present = "model")]
        agent: Option<PathBuf>,
        /// The weir-cni binary.
        #[arg(long, required_unless_present = "model")]
        cni: Option<PathBuf>,
        /// Also run cases that take half a minute or more.
        #[arg(long)]
        slow: bool,
        /// Cases run at once.
        #[arg(long, default_value_t = service::DEFAULT_JOBS)]
        jobs: usize,
        /// Also write the results to this file.
        #[arg(long)]
        json: Option<PathBuf>,
        /// Translate at the socket what pods and nodes send, instead of each packet.
        #[arg(long)]
        sockets: bool,
    },
    /// Policy cases: NetworkPolicy and ClusterNetworkPolicy, on the model or on agents and namespaces.
    Policy {
        /// Folder of case files.
        dir: PathBuf,
        /// Run only cases whose file name contains this.
        #[arg(long)]
        only: Option<String>,
        /// Run on the model, without root; the default for everybody but root.
        #[arg(long, conflicts_with = "kernel")]
        model: bool,
        /// Run on agents and namespaces; the default for root.
        #[arg(long)]
        kernel: bool,
        /// The weir-agent binary.
        #[arg(long)]
        agent: Option<PathBuf>,
        /// The weir-cni binary.
        #[arg(long)]
        cni: Option<PathBuf>,
        /// Cases run at once.
        #[arg(long, default_value_t = policy::DEFAULT_JOBS)]
        jobs: usize,
        /// Also write the results to this file.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Serves and probes on command inside a network namespace (the runner starts it).
    #[command(hide = true)]
    Actor,
}

fn main() -> anyhow::Result<ExitCode> {
    let _another_installed = rustls::crypto::ring::default_provider().install_default();
    let Some(summary) = run(Cli::parse().kind)? else {
        return Ok(ExitCode::SUCCESS);
    };
    print(&summary.to_string());
    Ok(if summary.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs a folder; actors have no counts.
fn run(kind: Kind) -> anyhow::Result<Option<Summary>> {
    Ok(Some(match kind {
        Kind::Api {
            dir,
            only,
            kubectl,
            control,
            kubeconfig,
            jobs,
            slow,
        } => {
            let options = api::Options {
                folder: dir,
                only,
                kubectl,
                control,
                kubeconfig,
                jobs,
                slow,
            };
            api::run_folder(&options, print)?
        }
        service @ Kind::Service { .. } => service_cases(service)?,
        Kind::Policy {
            dir,
            only,
            model,
            kernel,
            agent,
            cni,
            jobs,
            json,
        } => {
            let on = policy_world(model, kernel, agent, cni)?;
            let options = policy::Options {
                folder: dir,
                only,
                on,
                jobs,
                json,
            };
            policy::run_folder(&options, print)?
        }
        Kind::Actor => {
            weir_tests::actor::run(std::io::stdin().lock(), std::io::stdout())?;
            return Ok(None);
        }
        Kind::Dns { dir, only } => dns::run_folder(&dns::Options { folder: dir, only }, print)?,
    }))
}

fn service_cases(kind: Kind) -> anyhow::Result<Summary> {
    let Kind::Service {
        dir,
        only,
        model,
        kernel: _,
        seed,
        agent,
        cni,
        slow,
        jobs,
        json,
        sockets,
    } = kind
    else {
        anyhow::bail!("no Service cases");
    };
    let on = match (model, agent, cni) {
        (false, Some(agent), Some(cni)) => service::On::Kernel(service::Binaries {
            agent,
            cni,
            sockets,
        }),
        _ => service::On::Model { seed },
    };
    let options = service::Options {
        folder: dir,
        only,
        on,
        slow,
        jobs,
        json,
    };
    service::run_folder(&options, print)
}

fn policy_world(
    model: bool,
    kernel: bool,
    agent: Option<PathBuf>,
    cni: Option<PathBuf>,
) -> anyhow::Result<policy::On> {
    let root = weir_tests::topology::missing().is_none();
    if model || (!kernel && !root) {
        return Ok(policy::On::Model);
    }
    match (agent, cni) {
        (Some(agent), Some(cni)) => Ok(policy::On::Kernel(policy::Binaries {
            agent,
            cni,
            sockets: false,
        })),
        _ => anyhow::bail!("on namespaces it takes --agent and --cni; --model takes neither"),
    }
}

#[allow(
    clippy::print_stdout,
    reason = "the report of a run goes to standard output"
)]
fn print(line: &str) {
    println!("{line}");
}
