//! `weirctl`: the operator's tool. Asks the agent of this node over its socket.

mod addresses;
mod policy;

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Parser, Subcommand};
use serde::de::DeserializeOwned;
use weir_agent::observe::{CounterReport, FlowsReport, SOCKET_NAME, ServiceReport, StatusReport};

const TIMEOUT: Duration = Duration::from_secs(10);

/// Shows what the Weir agent of this node knows and does.
///
/// Needs root: it talks to the agent over a socket that only root may open.
#[derive(Debug, Parser)]
#[command(name = "weirctl", version)]
struct Cli {
    /// The agent's run directory.
    #[arg(long, global = true, env = "WEIR_RUN_DIR", default_value = "/run/weir")]
    run_dir: PathBuf,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Health, feed, latency from commit to kernel, and the sums of everything.
    ///
    /// Exits with 1 while the agent is not ready.
    Status,
    /// Services with their ports and ready backends, as this node has been told, and what is refused of them.
    ///
    /// Exits with 1 when there is no service of the name that is asked for.
    Services {
        /// Also what the kernel's tables hold: frontends with their flags, and backends.
        #[arg(long, short)]
        programmed: bool,
        /// Only this namespace.
        #[arg(long, short)]
        namespace: Option<String>,
        /// Only this service.
        name: Option<String>,
    },
    /// Flows and the counters of the packet path: drops by reason, events.
    Flows {
        /// Also counters that are zero.
        #[arg(long)]
        all: bool,
    },
    /// Network policies: what becomes of a packet and why, which there are, what staged ones would change.
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Addresses of this node's pods.
    #[command(subcommand)]
    Ip(addresses::IpCommand),
    /// The metrics in Prometheus' text form.
    Metrics,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("weirctl: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode> {
    let socket = cli.run_dir.join(SOCKET_NAME);
    let mut code = ExitCode::SUCCESS;
    let text = match &cli.command {
        Command::Metrics => get(&socket, "/metrics")?,
        Command::Ip(command) => addresses::run(&socket, command, cli.json)?,
        Command::Policy(command) => {
            let (text, said) = policy::run(&socket, command, cli.json)?;
            code = said;
            text
        }
        Command::Status => {
            let body = get(&socket, "/v1/status")?;
            let status: StatusReport = parse(&body)?;
            if !status.ready {
                code = ExitCode::FAILURE;
            }
            if cli.json {
                pretty(&body)?
            } else {
                status_text(&status)?
            }
        }
        Command::Services {
            programmed,
            namespace,
            name,
        } => {
            let mut services: Vec<ServiceReport> = parse(&get(&socket, "/v1/services")?)?;
            services.retain(|service| {
                namespace.as_ref().is_none_or(|n| service.namespace == *n)
                    && name.as_ref().is_none_or(|n| service.name == *n)
            });
            let place = namespace.as_ref().map(|n| format!(" in namespace {n}"));
            let place = place.unwrap_or_default();
            if let (Some(name), []) = (name, &services[..]) {
                bail!("this node knows no service {name}{place}: weirctl services lists them");
            }
            if cli.json {
                serde_json::to_string_pretty(&services)? + "\n"
            } else if services.is_empty() {
                format!("No services{place}.\n")
            } else {
                services_text(&services) + &programmed_text(&services, *programmed)?
            }
        }
        Command::Flows { all } => {
            let body = get(&socket, "/v1/flows")?;
            let flows: FlowsReport = parse(&body)?;
            if cli.json {
                pretty(&body)?
            } else {
                flows_text(&flows, *all)?
            }
        }
    };
    // A reader that has seen enough (`| head`) is no error.
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(code),
    }
}

/// One request to the agent; the body of its answer.
fn get(socket: &Path, path: &str) -> Result<String> {
    ask(socket, path, TIMEOUT)
}

fn ask(socket: &Path, path: &str, patience: Duration) -> Result<String> {
    let shown = socket.display();
    let mut stream = UnixStream::connect(socket).with_context(|| {
        format!("connect to the agent at {shown} (is weir-agent running here, and are you root?)")
    })?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    // HTTP/1.0: the answer ends with the connection, and is never cut in chunks.
    let request = format!("GET {path} HTTP/1.0\r\nHost: agent\r\n\r\n");
    let mut answer = String::new();
    stream
        .write_all(request.as_bytes())
        .and_then(|()| stream.read_to_string(&mut answer))
        .map_err(|error| failed(error, &shown, patience))?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("the agent at {shown} did not answer HTTP"))?;
    let status = head.split_ascii_whitespace().nth(1).unwrap_or_default();
    match (status, body.trim()) {
        ("200", _) => Ok(body.to_owned()),
        (status, "") => bail!("the agent at {shown} answered {status}"),
        (_, why) => bail!("{why}"),
    }
}

/// A conversation that broke off. A time limit that passes is told as if it were a lack of resources.
fn failed(
    error: std::io::Error,
    socket: &std::path::Display<'_>,
    patience: Duration,
) -> anyhow::Error {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    if matches!(error.kind(), WouldBlock | TimedOut) {
        return anyhow!(
            "timeout: the agent at {socket} did not answer within {patience:?}; it hangs or the node is overloaded: see its log, and start it anew if it stays so (pods keep their traffic)"
        );
    }
    anyhow::Error::new(error).context(format!("ask the agent at {socket}"))
}

fn parse<T: DeserializeOwned>(body: &str) -> Result<T> {
    serde_json::from_str(body)
        .context("the agent's answer is not what this weirctl reads; are both of one version?")
}

fn pretty(body: &str) -> Result<String> {
    let value: serde_json::Value = parse(body)?;
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

fn status_text(status: &StatusReport) -> Result<String> {
    let mut out = String::new();
    let word = if status.ready { "ready" } else { "NOT READY" };
    writeln!(out, "Node       {} ({word})", status.node)?;
    writeln!(
        out,
        "Agent      {}, up {}, {:.1} MiB",
        status.version,
        duration_text(status.uptime_s),
        to_mib(status.resident_bytes)
    )?;
    for check in &status.checks {
        match &check.missing {
            None => writeln!(out, "  ok       {}", check.name)?,
            Some(why) => writeln!(out, "  MISSING  {}: {why}", check.name)?,
        }
    }
    if let Some(feed) = &status.feed {
        match feed.server.as_str() {
            "" => writeln!(out, "Feed       NOT CONNECTED: {}", feed.last_error)?,
            server => writeln!(out, "Feed       {server}")?,
        }
        writeln!(
            out,
            "Revision   {} held, {} in the kernel",
            feed.held_revision, feed.applied_revision
        )?;
        if !feed.apply_error.is_empty() {
            writeln!(out, "  FAILED   {}", feed.apply_error)?;
        }
    }
    if let Some(latency) = &status.latency {
        writeln!(
            out,
            "Latency    {:.1} ms median, {:.1} ms p99, {:.1} ms last, commit to kernel over {} changes",
            latency.median_ms, latency.p99_ms, latency.last_ms, latency.changes
        )?;
    }
    writeln!(
        out,
        "State      {} services, {} endpoints, {} nodes, {} pods attached",
        status.services, status.endpoints, status.nodes, status.attached_pods
    )?;
    if let Some(dns) = &status.dns {
        let synced = if dns.synced {
            ""
        } else {
            " (waiting for the first state)"
        };
        let corefile = if dns.from_cluster {
            "the cluster's Corefile"
        } else {
            "no Corefile in the cluster"
        };
        let addresses = dns.addresses.join(", ");
        writeln!(out, "DNS        {addresses}{synced}, {corefile}")?;
        if let Some(error) = &dns.error {
            writeln!(out, "           the last Corefile does not serve: {error}")?;
        }
    }
    if let Some(flows) = &status.flows {
        let dropped: u64 = flows.drops.iter().map(|drop| drop.packets).sum();
        writeln!(out, "Flows      {}, {dropped} packets dropped", flows.flows)?;
        counters_text(&mut out, &flows.drops, false)?;
    }
    Ok(out)
}

fn flows_text(flows: &FlowsReport, all: bool) -> Result<String> {
    let mut out = String::new();
    writeln!(out, "Flows   {}", flows.flows)?;
    for table in &flows.tables {
        let pressure = if table.pressure {
            " (nearly full: flows that were never established have to hurry)"
        } else {
            ""
        };
        writeln!(
            out,
            "  {:<24} {} of {}{pressure}",
            table.family, table.flows, table.capacity
        )?;
    }
    let collector = &flows.collector;
    writeln!(
        out,
        "Collector {} entries read in {:.1} s, {} flows, {} halves and {} affinities removed",
        collector.walked,
        collector.busy_s,
        collector.removed,
        collector.repaired,
        collector.affinities
    )?;
    writeln!(out, "Drops")?;
    counters_text(&mut out, &flows.drops, all)?;
    writeln!(out, "Events")?;
    counters_text(&mut out, &flows.events, all)?;
    writeln!(out, "Sockets")?;
    counters_text(&mut out, &flows.sockets, all)?;
    Ok(out)
}

fn counters_text(out: &mut String, counters: &[CounterReport], all: bool) -> std::fmt::Result {
    for counter in counters.iter().filter(|c| all || c.packets > 0) {
        writeln!(out, "  {:<24} {}", counter.name, counter.packets)?;
    }
    Ok(())
}

fn services_text(services: &[ServiceReport]) -> String {
    let mut rows = vec![
        ["NAMESPACE", "NAME", "TYPE", "ADDRESSES", "PORT", "BACKENDS"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for service in services {
        let addresses = if service.cluster_ips.is_empty() {
            "-".to_owned()
        } else {
            service.cluster_ips.join(",")
        };
        let head = [&service.namespace, &service.name, &service.kind, &addresses].map(Clone::clone);
        if service.ports.is_empty() {
            rows.push(
                head.iter()
                    .cloned()
                    .chain(["-".into(), "-".into()])
                    .collect(),
            );
        }
        for port in &service.ports {
            let mut shown = format!("{}/{}", port.port, port.protocol);
            if port.node_port != 0 {
                shown = format!("{}:{}/{}", port.port, port.node_port, port.protocol);
            }
            let mut backends = port.backends.join(" ");
            if backends.is_empty() {
                backends = "none".into();
            }
            if port.not_ready > 0 {
                backends = format!("{backends} ({} not ready)", port.not_ready);
            }
            rows.push(head.iter().cloned().chain([shown, backends]).collect());
        }
    }
    table(&rows)
}

/// What follows the table: the kernel's tables when asked for, and what is refused.
fn programmed_text(services: &[ServiceReport], programmed: bool) -> Result<String> {
    let mut out = String::new();
    for service in services {
        let show = programmed && !service.programmed.is_empty();
        if !show && service.refused.is_empty() {
            continue;
        }
        let separator = if service.namespace.is_empty() {
            ""
        } else {
            "/"
        };
        writeln!(out, "\n{}{separator}{}", service.namespace, service.name)?;
        for entry in service.programmed.iter().filter(|_| show) {
            for frontend in &entry.frontends {
                writeln!(out, "  {frontend} (id {})", entry.service_id)?;
            }
            for backend in &entry.backends {
                writeln!(out, "    to {backend}")?;
            }
            for backend in &entry.draining {
                writeln!(out, "    draining {backend}")?;
            }
        }
        for refused in &service.refused {
            writeln!(out, "  NOT SERVED  {refused}")?;
        }
    }
    Ok(out)
}

/// Columns as wide as their widest cell; the last one as it comes.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
    };
    let widths: Vec<usize> = (0..columns)
        .map(|column| width(column).unwrap_or_default())
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:<width$}   "));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

fn duration_text(seconds: u64) -> String {
    match (
        seconds / 86_400,
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60,
    ) {
        (0, 0, 0, s) => format!("{s} s"),
        (0, 0, m, s) => format!("{m} min {s} s"),
        (0, h, m, _) => format!("{h} h {m} min"),
        (d, h, ..) => format!("{d} d {h} h"),
    }
}

fn to_mib(bytes: i64) -> f64 {
    let kib = u32::try_from(bytes / 1024).unwrap_or(u32::MAX);
    f64::from(kib) / 1024.0
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn an_agent_that_does_not_answer_is_told_as_a_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join(SOCKET_NAME);
        let _hung = UnixListener::bind(&socket).unwrap();
        let error = ask(&socket, "/v1/status", Duration::from_millis(20)).unwrap_err();
        let said = format!("{error:#}");
        assert!(said.starts_with("timeout: the agent at "), "{said}");
        assert!(said.contains(SOCKET_NAME) && said.contains("20ms") && !said.contains("os error"));
    }
}
