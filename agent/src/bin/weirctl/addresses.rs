//! `weirctl ip`: which pod has which address, and which addresses rest.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;
use clap::Subcommand;
use weir_agent::observe::AddressesReport;

use super::{duration_text, get, parse, pretty, table};

#[derive(Debug, Subcommand)]
pub(super) enum IpCommand {
    /// Addresses with their pods, ranges, and addresses that rest until another pod may get them.
    List,
}

pub(super) fn run(socket: &Path, command: &IpCommand, json: bool) -> Result<String> {
    match command {
        IpCommand::List => {
            let body = get(socket, "/v1/addresses")?;
            let report: AddressesReport = parse(&body)?;
            if json { pretty(&body) } else { text(&report) }
        }
    }
}

fn text(report: &AddressesReport) -> Result<String> {
    let mut rows = vec![
        ["ADDRESSES", "POD", "CONTAINER", "INTERFACE", "HOST LINK"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for attachment in &report.attachments {
        let pod = match attachment.pod.as_str() {
            "" => "-",
            pod => pod,
        };
        rows.push(vec![
            attachment.addresses.join(","),
            pod.into(),
            attachment.container_id.clone(),
            attachment.interface.clone(),
            attachment.host_link.clone(),
        ]);
    }
    let mut out = table(&rows);
    for resting in &report.resting {
        let left = duration_text(resting.left_s);
        writeln!(out, "RESTING  {} for {left}", resting.address)?;
    }
    if !report.problem.is_empty() {
        writeln!(out, "NO ADDRESSES  {}", report.problem)?;
    } else {
        writeln!(out, "Ranges   {}", report.ranges.join(", "))?;
    }
    Ok(out)
}
