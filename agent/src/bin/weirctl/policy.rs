//! `weirctl policy`: what applies to a packet, which policies there are, what staged ones would change.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;
use weir_agent::policy::{DiffReport, Explanation, PolicyList};

use super::{get, parse, pretty, table};

/// This node allows it, and another one has still to judge it. Two is taken: arguments that cannot be read.
const UNDECIDED: u8 = 3;

#[derive(Debug, Subcommand)]
pub(super) enum PolicyCommand {
    /// Whether a packet may pass, and why: which policies isolate, which rule decides, what the others lacked.
    ///
    /// Policies are asked after services are translated: what is sent to a Service's address or NodePort is explained for
    /// each backend that this node's kernel may choose. Each end is judged on its own node.
    ///
    /// Exits with 0 when it is allowed, 1 when this node denies it (or the question has an error), and 3 when this node
    /// allows it and another has still to judge it: ask there as well.
    Explain {
        /// namespace/pod, node/NAME, an address, or a domain name of a rule.
        from: String,
        /// TO:PORT, TO:PORT/PROTOCOL, or TO/PROTOCOL for protocols without ports, as in shop/db/icmp.
        ///
        /// TO is as FROM, or svc/namespace/name; IPv6 addresses in brackets. Protocols are tcp (when there is none), udp,
        /// sctp, icmp (that of the family), or a number.
        to: String,
    },
    /// Policies that select pods of this node, pods that are shut, and the last packets that policies dropped.
    List {
        /// Also the last packets that were dropped: why, how often and when last.
        #[arg(long)]
        drops: bool,
        /// Also the domain names of rules, with the addresses that DNS answers gave them.
        #[arg(long)]
        names: bool,
    },
    /// Flows and dropped packets that staged policies (annotation weir.dev/staged) would treat otherwise.
    Diff,
}

pub(super) fn run(
    socket: &Path,
    command: &PolicyCommand,
    json: bool,
) -> Result<(String, ExitCode)> {
    let mut code = ExitCode::SUCCESS;
    let text = match command {
        PolicyCommand::Explain { from, to } => {
            let path = format!("/v1/policy/explain?from={}&to={}", encode(from), encode(to));
            let body = get(socket, &path)?;
            let said: Vec<Explanation> = parse(&body)?;
            if said.iter().any(|one| !one.allowed) {
                code = ExitCode::FAILURE;
            } else if said.iter().any(|one| !one.undecided.is_empty()) {
                code = ExitCode::from(UNDECIDED);
            }
            if json {
                pretty(&body)?
            } else {
                explain_text(&said)?
            }
        }
        PolicyCommand::List { drops, names } => {
            let body = get(socket, "/v1/policy/list")?;
            if json {
                pretty(&body)?
            } else {
                list_text(&parse(&body)?, *drops, *names)?
            }
        }
        PolicyCommand::Diff => {
            let body = get(socket, "/v1/policy/diff")?;
            if json {
                pretty(&body)?
            } else {
                diff_text(&parse(&body)?)?
            }
        }
    };
    Ok((text, code))
}

/// For a query: everything but what needs no mark there.
fn encode(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

fn explain_text(said: &[Explanation]) -> Result<String> {
    let mut out = String::new();
    for (place, one) in said.iter().enumerate() {
        if place > 0 {
            writeln!(out)?;
        }
        let word = match (one.allowed, &one.undecided[..]) {
            (false, _) => "DENIED",
            (true, []) => "ALLOWED",
            (true, _) => "ALLOWED BY THIS NODE",
        };
        writeln!(out, "{word}  {} to {}, {}", one.from, one.to, one.port)?;
        if !one.undecided.is_empty() {
            writeln!(out, "  {}: ask weirctl there", one.undecided.join(", "))?;
        }
        if let Some(through) = &one.through {
            writeln!(out, "  through {through}")?;
        }
        if !one.names.is_empty() {
            let names = one.names.join(", ");
            writeln!(out, "  DNS answers gave the address for {names}")?;
        }
        for side in &one.directions {
            writeln!(
                out,
                "  {} of {}: {} ({})",
                side.direction, side.pod, side.verdict, side.reason
            )?;
            if let Some(rule) = &side.rule {
                writeln!(out, "    rule      {rule}")?;
            }
            if !side.isolated_by.is_empty() {
                writeln!(out, "    isolated  by {}", side.isolated_by.join(", "))?;
            }
            for line in &side.lacking {
                writeln!(out, "    not       {line}")?;
            }
        }
    }
    Ok(out)
}

fn list_text(list: &PolicyList, drops: bool, names: bool) -> Result<String> {
    let mut rows = vec![
        [
            "TIER",
            "NAMESPACE",
            "NAME",
            "PRIORITY",
            "ISOLATES",
            "RULES",
            "PODS",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for policy in &list.policies {
        let isolates = match (policy.isolates_ingress, policy.isolates_egress) {
            (true, true) => "ingress,egress",
            (true, false) => "ingress",
            (false, true) => "egress",
            (false, false) => "-",
        };
        let mut tier = policy.tier.clone();
        if policy.staged {
            tier.push_str(" (staged)");
        }
        let cluster = policy.namespace.is_empty();
        rows.push(vec![
            tier,
            if cluster {
                "-".into()
            } else {
                policy.namespace.clone()
            },
            policy.name.clone(),
            if cluster {
                policy.priority.to_string()
            } else {
                "-".into()
            },
            isolates.into(),
            format!("{} in, {} out", policy.ingress_rules, policy.egress_rules),
            policy.pods.join(" "),
        ]);
    }
    let mut out = table(&rows);
    for shut in &list.shut {
        writeln!(out, "SHUT  {}: {}", shut.pod, shut.why)?;
    }
    for one in list.names.iter().filter(|_| names) {
        let addresses = one
            .addresses
            .iter()
            .map(|learnt| match learnt.seconds_left {
                0 => format!("{} (in use)", learnt.address),
                seconds => format!("{} ({seconds} s)", learnt.address),
            });
        let addresses: Vec<String> = addresses.collect();
        writeln!(out, "NAME  {}: {}", one.name, addresses.join(", "))?;
    }
    if drops {
        drops_text(&mut out, list)?;
    }
    Ok(out)
}

fn drops_text(out: &mut String, list: &PolicyList) -> std::fmt::Result {
    for one in &list.drops {
        let drop = &one.drop;
        writeln!(
            out,
            "DROPPED  {} times, last at {}: {} to {}, {}, by {} of {}: {}",
            one.count, one.last, drop.from, drop.to, drop.port, drop.direction, drop.pod, drop.why
        )?;
    }
    if list.untold_drops > 0 {
        writeln!(
            out,
            "DROPPED  {} more since the agent's start, too many at once to be told one by one",
            list.untold_drops
        )?;
    }
    Ok(())
}

fn diff_text(diff: &DiffReport) -> Result<String> {
    let mut out = String::new();
    if diff.staged.is_empty() {
        writeln!(out, "No staged policy selects a pod of this node.")?;
        return Ok(out);
    }
    writeln!(
        out,
        "With {}, of {} flows and dropped packets of this node:",
        diff.staged.join(", "),
        diff.looked_at
    )?;
    for entry in &diff.changes {
        writeln!(
            out,
            "  {} to {}, {}: {} now, {} then ({})",
            entry.from, entry.to, entry.port, entry.enforced, entry.staged, entry.why
        )?;
    }
    if diff.more > 0 {
        writeln!(out, "  and {} more", diff.more)?;
    }
    if diff.changes.is_empty() {
        writeln!(out, "  nothing would change")?;
    }
    Ok(out)
}
