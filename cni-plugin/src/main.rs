//! `weir-cni`: the CNI spec in, one call to the agent out.
//!
//! A container runtime starts this program for every pod, so it must be small and quick: no async runtime, no state of
//! its own. It checks what the spec demands of the input, passes the request to `weir-agent` over a unix socket, and
//! writes the answer in the version that was asked for. Links, addresses and programs are the agent's business and must
//! not be touched here.
//!
//! Source of the rules: the CNI specification, versions 0.3.1, 0.4.0, 1.0.0 and 1.1.0.

mod agent;
mod command;
mod config;
mod delete_queue;
mod environment;
mod ipam;
mod render;
mod spec;

use std::io::{Read, Write};
use std::process::ExitCode;

use command::Output;
use environment::Environment;

/// Bytes of network configuration read from stdin at most. Runtimes write a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 1024 * 1024;

fn main() -> ExitCode {
    let environment = Environment::from_process();
    let output = command::run(&environment, read_stdin);
    match output {
        Output::About(text) => {
            let _ = writeln!(std::io::stderr(), "{text}");
            ExitCode::SUCCESS
        }
        Output::Silent => ExitCode::SUCCESS,
        Output::Result(value) => emit(&value, ExitCode::SUCCESS),
        Output::Error(value) => emit(&value, ExitCode::FAILURE),
    }
}

/// The whole of stdin, refused beyond [`MAX_CONFIG_BYTES`].
fn read_stdin() -> Result<Vec<u8>, spec::Error> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(MAX_CONFIG_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| {
            spec::Error::new(spec::Code::Io, "read network configuration from stdin").details(e)
        })?;
    if bytes.len() as u64 > MAX_CONFIG_BYTES {
        return Err(spec::Error::new(
            spec::Code::InvalidConfig,
            format!("network configuration on stdin is larger than {MAX_CONFIG_BYTES} bytes"),
        ));
    }
    Ok(bytes)
}

/// A runtime that closed our stdout cannot be told anything; the exit code is all that is left.
fn emit(value: &serde_json::Value, code: ExitCode) -> ExitCode {
    let mut out = std::io::stdout().lock();
    match serde_json::to_writer(&mut out, value)
        .map_err(std::io::Error::from)
        .and_then(|()| out.write_all(b"\n"))
    {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}
