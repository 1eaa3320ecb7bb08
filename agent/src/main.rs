//! `weir-agent`: the node's daemon, and the commands that put it on a node or take it off.

mod daemon;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use weir_agent::cni_api::conf;
use weir_agent::config::Config;

/// Weir's node agent: pod networking, services in eBPF, cluster DNS, and the pod runner.
#[derive(Debug, Parser)]
#[command(name = "weir-agent", version)]
struct Cli {
    /// Configuration file (TOML; for dns: a Corefile).
    #[arg(long, global = true, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent (the default). Ending it in any way leaves the traffic of pods running.
    Run,
    /// Remove every link, route, program and file that the agent made on this node, and set the sysctls that it changed back.
    /// The agent must not be running.
    Cleanup,
    /// Install the CNI plugin for the container runtime.
    InstallCni {
        /// The runtime's folder of CNI plugins.
        #[arg(long, default_value = "/opt/cni/bin")]
        bin_dir: PathBuf,
        /// The plugin to install; default: weir-cni beside this program.
        #[arg(long)]
        from: Option<PathBuf>,
    },
    /// Serve DNS alone, as the Corefile of --config says: no node, no pods, no root but for port 53.
    Dns {
        /// The configuration of an agent whose [feed] tells what the cluster has; needed for the directive kubernetes.
        #[arg(long, value_name = "FILE")]
        feed: Option<PathBuf>,
        /// Read the Corefile and what it imports, say what is wrong, and end.
        #[arg(long)]
        check: bool,
    },
    /// Print the version.
    Version,
}

const DEFAULT_CONFIG: &str = "/etc/weir/agent.toml";

/// Threads of the async runtime: the agent waits for others most of the time, and is to be small.
const RUNTIME_THREADS: usize = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match execute(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("weir-agent: {}", describe(&e));
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes, each said once: many of our messages name their cause already.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(cause.trim_end()) {
            text = format!("{text}: {cause}");
        }
    }
    text.trim_end().to_owned()
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(RUNTIME_THREADS)
        .enable_all()
        .build()
        .context("start the async runtime")
}

#[allow(
    clippy::print_stdout,
    reason = "what the commands report is their output"
)]
fn execute(cli: Cli) -> Result<()> {
    match cli.command.unwrap_or(Command::Run) {
        Command::Run => {
            weir_agent::kernel::share_heaps();
            let config = Config::load(&cli.config)?;
            let runtime = runtime()?;
            let result = runtime.block_on(daemon::run(config));
            // Blocking work that is still under way (a kernel call, a client that does not read) must not hold the end up.
            runtime.shutdown_background();
            result
        }
        Command::Cleanup => {
            let config = Config::load(&cli.config)?;
            for line in daemon::cleanup::run(&config)? {
                println!("{line}");
            }
            Ok(())
        }
        Command::InstallCni { bin_dir, from } => {
            let from = match from {
                Some(from) => from,
                None => std::env::current_exe()
                    .context("find this program's own path")?
                    .with_file_name(conf::PLUGIN_NAME),
            };
            println!(
                "installed {}",
                conf::install_plugin(&from, &bin_dir)?.display()
            );
            Ok(())
        }
        Command::Dns { .. } if cli.config == Path::new(DEFAULT_CONFIG) => {
            anyhow::bail!("dns serves a Corefile: name it with --config FILE")
        }
        Command::Dns { check: true, .. } => {
            let blocks = weir_agent::dns::check(&cli.config)?;
            println!(
                "{}: {blocks} server blocks, nothing wrong",
                cli.config.display()
            );
            Ok(())
        }
        Command::Dns { feed, .. } => {
            let feed = feed.map(|path| Config::load(&path)).transpose()?;
            runtime()?.block_on(daemon::dns(&cli.config, feed.as_ref()))
        }
        Command::Version => {
            println!("weir-agent {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_is_said_once() {
        let error = Config::load(std::path::Path::new("/none")).unwrap_err();
        let text = describe(&anyhow::Error::from(error).context("start"));
        assert_eq!(text.matches("os error 2").count(), 1, "{text}");
        assert!(
            text.starts_with("start: read configuration /none: "),
            "{text}"
        );
    }
}
