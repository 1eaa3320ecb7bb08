//! `weir-control`: the control plane in one process.

use std::io::{IsTerminal as _, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Parser, Subcommand};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;
use weir_control::config::Config;
use weir_control::pki::{self, Authority};
use weir_control::run;

#[derive(Debug, Parser)]
#[command(
    name = "weir-control",
    about = "The control plane of a Weir cluster.",
    version
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the control plane.
    Serve {
        /// TOML configuration.
        #[arg(long)]
        config: PathBuf,
    },
    /// Issue a node's certificate from the CA on disk: node.crt, node.key and ca.crt.
    IssueNode {
        #[arg(long)]
        config: PathBuf,
        /// Name of the node.
        #[arg(long)]
        name: String,
        /// Address of the node; may be given several times.
        #[arg(long, required = true)]
        ip: Vec<IpAddr>,
        /// Folder for the files.
        #[arg(long)]
        out: PathBuf,
    },
    /// Write the administrator's kubeconfig (mode 0600).
    Kubeconfig {
        #[arg(long)]
        config: PathBuf,
        /// URL of the API server.
        #[arg(long)]
        server: String,
        #[arg(long)]
        out: PathBuf,
    },
    /// Print the version.
    Version,
}

fn main() -> ExitCode {
    match execute(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "weir-control: {}", explain(&error));
            ExitCode::FAILURE
        }
    }
}

/// What was attempted, on what, and why it failed; causes that a message quotes already are not repeated.
fn explain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(cause.trim()) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

fn execute(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Serve { config } => serve(Config::load(&config)?),
        Command::IssueNode {
            config,
            name,
            ip,
            out,
        } => issue_node(&Config::load(&config)?, &name, &ip, &out),
        Command::Kubeconfig {
            config,
            server,
            out,
        } => kubeconfig(&Config::load(&config)?, &server, &out),
        Command::Version => {
            writeln!(
                std::io::stdout(),
                "weir-control {}",
                env!("CARGO_PKG_VERSION")
            )?;
            Ok(())
        }
    }
}

fn serve(config: Config) -> anyhow::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        let mut terminate =
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
                .context("wait for SIGTERM")?;
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            stop.cancel();
        });
        run::serve(config, shutdown)
            .await
            .context("run the control plane")
    })
}

/// Clients hold a connection each, and the usual soft limit of 1024 is for programs that use select(2).
fn raise_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "raise the limit of open files");
    }
}

fn issue_node(config: &Config, name: &str, ips: &[IpAddr], out: &Path) -> anyhow::Result<()> {
    let authority = Authority::load(&config.data_dir)?;
    let pair = authority.issue_node(name, ips)?;
    pki::write_pair(out, "node", &pair)?;
    pki::write_private(&out.join("ca.crt"), authority.ca_pem.as_bytes())?;
    Ok(())
}

fn kubeconfig(config: &Config, server: &str, out: &Path) -> anyhow::Result<()> {
    let (ca_pem, admin) = pki::admin(&config.data_dir)?;
    let encode = |text: &str| STANDARD.encode(text);
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: weir\nclusters:\n- name: weir\n  cluster:\n    server: {server}\n    certificate-authority-data: {}\nusers:\n- name: kubernetes-admin\n  user:\n    client-certificate-data: {}\n    client-key-data: {}\ncontexts:\n- name: weir\n  context:\n    cluster: weir\n    user: kubernetes-admin\n    namespace: default\n",
        encode(&ca_pem),
        encode(&admin.cert_pem),
        encode(&admin.key_pem),
    );
    pki::write_private(out, text.as_bytes())?;
    Ok(())
}
