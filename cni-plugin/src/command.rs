//! What each CNI command does.

use std::fs::File;

use serde_json::{Value, json};

use crate::agent::{self, CallError, Reply};
use crate::config::Config;
use crate::delete_queue::Queued;
use crate::environment::{Command, Environment};
use crate::render;
use crate::spec::{Code, Error, NEWEST, SUPPORTED, Version};

/// What `main` writes, and where.
#[derive(Debug)]
pub(crate) enum Output {
    About(String),
    Silent,
    Result(Value),
    Error(Value),
}

/// Runs the command that the environment names. Stdin is read only by commands that have a configuration.
pub(crate) fn run(
    environment: &Environment,
    read_stdin: impl FnOnce() -> Result<Vec<u8>, Error>,
) -> Output {
    if environment.command.is_empty() {
        return Output::About(format!(
            "weir-cni {}: CNI plugin of Weir, called by container runtimes.\nCNI protocol versions supported: {}",
            env!("CARGO_PKG_VERSION"),
            SUPPORTED.join(", ")
        ));
    }
    let failed = |error: Error, version: Option<Version>| {
        Output::Error(error.to_json(version.map_or(NEWEST, Version::as_str)))
    };
    let command = match environment.command() {
        Ok(Command::Version) => return version(),
        Ok(command) => command,
        Err(error) => return failed(error, None),
    };
    let config = match read_stdin() {
        Ok(bytes) => Config::parse(&bytes),
        Err(error) => return failed(error, None),
    };
    let config = match config {
        Ok(config) => config,
        Err(e) => return failed(e.error, e.version),
    };
    match dispatch(command, environment, &config) {
        Ok(Some(result)) => Output::Result(result),
        Ok(None) => Output::Silent,
        Err(error) => failed(error, Some(config.version)),
    }
}

fn version() -> Output {
    Output::Result(json!({ "cniVersion": NEWEST, "supportedVersions": SUPPORTED }))
}

fn dispatch(
    command: Command,
    environment: &Environment,
    config: &Config,
) -> Result<Option<Value>, Error> {
    require_version(command, config.version)?;
    match command {
        Command::Add => add(environment, config).map(Some),
        Command::Del => del(environment, config).map(|()| None),
        Command::Check => check(environment, config).map(|()| None),
        Command::Status => status(environment, config).map(|()| None),
        Command::Gc => gc(environment, config).map(|()| None),
        Command::Version => Ok(None),
    }
}

/// CHECK came with 0.4.0, STATUS and GC with 1.1.0.
fn require_version(command: Command, version: Version) -> Result<(), Error> {
    let since = match command {
        Command::Check => Version::V0_4_0,
        Command::Status | Command::Gc => Version::V1_1_0,
        Command::Add | Command::Del | Command::Version => return Ok(()),
    };
    if version >= since {
        return Ok(());
    }
    Err(Error::new(
        Code::IncompatibleVersion,
        format!(
            "cniVersion {} does not know {}; it came with {}",
            version.as_str(),
            command.as_str(),
            since.as_str()
        ),
    ))
}

fn request(command: Command, environment: &Environment, config: &Config) -> Result<Value, Error> {
    Ok(json!({
        "command": command.as_str(),
        "network": config.name,
        "containerId": environment.container_id,
        "ifName": environment.ifname,
        "netns": environment.netns,
        "args": environment.args()?,
    }))
}

fn add(environment: &Environment, config: &Config) -> Result<Value, Error> {
    refuse_taken_interface(environment, config)?;
    let netns = open_netns(&environment.netns)?;
    let mut request = request(Command::Add, environment, config)?;
    request["portMappings"] = Value::from(config.port_mappings.clone());
    request["wanted"] = Value::from(config.ips.clone());
    request["mac"] = Value::from(config.mac.clone().unwrap_or_default());
    request["bandwidth"] = config.bandwidth.clone().unwrap_or_default();
    let Some(ipam) = &config.ipam else {
        let reply = ask(config, &request, Some(&netns))?;
        return render::added(config, &reply, None);
    };
    let given = ipam.add(environment)?;
    request["delegated"] = Value::from(given.addresses.clone());
    let added = ask(config, &request, Some(&netns))
        .and_then(|reply| render::added(config, &reply, given.dns.as_ref()));
    if added.is_err() {
        // What is told is why the ADD failed; an address that stays reserved is the runtime's to delete.
        let _ = ipam.tell(Command::Del, environment);
    }
    added
}

/// An earlier plugin of the list may have made other interfaces of the container, but not this one.
fn refuse_taken_interface(environment: &Environment, config: &Config) -> Result<(), Error> {
    let interfaces = config
        .prev_result
        .as_ref()
        .and_then(|previous| previous.get("interfaces")?.as_array());
    let text = |interface: &Value, key: &str| {
        let value = interface.get(key).and_then(Value::as_str);
        value.unwrap_or_default().to_owned()
    };
    let taken = interfaces.into_iter().flatten().any(|interface| {
        text(interface, "name") == environment.ifname && !text(interface, "sandbox").is_empty()
    });
    if !taken {
        return Ok(());
    }
    Err(Error::new(
        Code::InvalidConfig,
        format!(
            "an earlier plugin of the list has made the interface {}, which is weir-cni's to make; take that plugin \
             out of the list",
            environment.ifname
        ),
    ))
}

fn check(environment: &Environment, config: &Config) -> Result<(), Error> {
    let Some(previous) = &config.prev_result else {
        return Err(Error::new(
            Code::InvalidConfig,
            "CHECK needs the key \"prevResult\"",
        ));
    };
    let netns = open_netns(&environment.netns)?;
    let mut request = request(Command::Check, environment, config)?;
    request["addresses"] = previous_addresses(previous, &environment.ifname);
    ask(config, &request, Some(&netns))?;
    let ipam = config.ipam.as_ref();
    ipam.map_or(Ok(()), |ipam| ipam.tell(Command::Check, environment))
}

/// Addresses that ADD gave to this interface, as the runtime remembers them. Those of plugins after us are left out.
fn previous_addresses(previous: &Value, ifname: &str) -> Value {
    let empty = Vec::new();
    let list = |key: &str| {
        previous
            .get(key)
            .and_then(Value::as_array)
            .unwrap_or(&empty)
            .clone()
    };
    let interfaces = list("interfaces");
    let ours = |ip: &Value| {
        let interface = ip
            .get("interface")
            .and_then(Value::as_u64)
            .and_then(|index| usize::try_from(index).ok())
            .and_then(|index| interfaces.get(index));
        let field = |key: &str| {
            interface
                .and_then(|i| i.get(key))
                .and_then(Value::as_str)
                .unwrap_or("")
        };
        interface.is_none() || (field("name") == ifname && !field("sandbox").is_empty())
    };
    list("ips")
        .iter()
        .filter(|ip| ours(ip))
        .filter_map(|ip| ip.get("address").cloned())
        .collect()
}

/// The link goes first, then its addresses are given back. Neither needs the other, nor the namespace.
fn del(environment: &Environment, config: &Config) -> Result<(), Error> {
    disconnect(environment, config)?;
    let ipam = config.ipam.as_ref();
    ipam.map_or(Ok(()), |ipam| ipam.tell(Command::Del, environment))
}

/// Succeeds without an agent: the work is queued for its next start, so that a pod can go while the agent is away.
fn disconnect(environment: &Environment, config: &Config) -> Result<(), Error> {
    // A malformed CNI_ARGS must not keep a pod from going.
    let request = json!({
        "command": Command::Del.as_str(),
        "network": config.name,
        "containerId": environment.container_id,
        "ifName": environment.ifname,
        "netns": environment.netns,
    });
    let lost = match agent::call(&config.socket, &request, None) {
        Ok(Reply::Ok(_)) => return Ok(()),
        Ok(Reply::Error(e)) => return Err(agent_error(e)),
        Err(lost) => lost,
    };
    if matches!(&lost, CallError::Broken { source, .. } if source.kind() == std::io::ErrorKind::TimedOut)
    {
        // The agent lives and still holds the request; the runtime calls again.
        return Err(unavailable(Code::TryAgain, &lost));
    }
    let queued = Queued::write(
        &config.state_dir,
        &environment.container_id,
        &environment.ifname,
    )
    .map_err(|e| {
        Error::new(
            Code::TryAgain,
            format!(
                "queue DEL in {} while the agent is away: {e}",
                config.state_dir.display()
            ),
        )
        .details(&lost)
    })?;
    // An agent that started in between has replayed the queue before this entry was in it.
    if let Ok(Reply::Ok(_)) = agent::call(&config.socket, &request, None) {
        queued.withdraw();
    }
    Ok(())
}

fn status(environment: &Environment, config: &Config) -> Result<(), Error> {
    let request = json!({
        "command": Command::Status.as_str(),
        "network": config.name,
        "delegates": config.ipam.is_some(),
    });
    match agent::call(&config.socket, &request, None) {
        Ok(Reply::Ok(_)) => {}
        Ok(Reply::Error(e)) => return Err(agent_error(e)),
        Err(lost) => return Err(unavailable(Code::NotAvailable, &lost)),
    }
    let ipam = config.ipam.as_ref();
    ipam.map_or(Ok(()), |ipam| {
        ipam.tell_if_known(Command::Status, environment)
    })
}

fn gc(environment: &Environment, config: &Config) -> Result<(), Error> {
    let Some(valid) = &config.valid_attachments else {
        return Err(Error::new(
            Code::InvalidConfig,
            "GC needs the key \"cni.dev/valid-attachments\"",
        ));
    };
    let valid: Vec<Value> = valid
        .iter()
        .map(|a| json!({ "containerId": a.container_id, "ifName": a.ifname }))
        .collect();
    let request = json!({
        "command": Command::Gc.as_str(),
        "network": config.name,
        "validAttachments": valid,
    });
    ask(config, &request, None)?;
    let ipam = config.ipam.as_ref();
    ipam.map_or(Ok(()), |ipam| ipam.tell_if_known(Command::Gc, environment))
}

fn ask(config: &Config, request: &Value, netns: Option<&File>) -> Result<Value, Error> {
    match agent::call(&config.socket, request, netns) {
        Ok(Reply::Ok(value)) => Ok(value),
        Ok(Reply::Error(e)) => Err(agent_error(e)),
        Err(lost) => Err(unavailable(Code::TryAgain, &lost)),
    }
}

fn agent_error(e: agent::AgentError) -> Error {
    Error::new(Code::Agent(e.code), e.msg).details(e.details)
}

fn unavailable(code: Code, lost: &CallError) -> Error {
    Error::new(
        code,
        "weir-agent is not available on this node; try again when it runs",
    )
    .details(lost)
}

fn open_netns(path: &str) -> Result<File, Error> {
    File::open(path).map_err(|e| {
        Error::new(
            Code::InvalidEnvironment,
            format!("open network namespace CNI_NETNS={path}: {e}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever a runtime sends: an answer, never a panic, and errors are objects of the specification.
        #[test]
        fn any_input_is_answered(
            command in "(ADD|DEL|CHECK|GC|STATUS|VERSION|[A-Z]{0,4})",
            id in "[a-zA-Z0-9_./-]{0,12}",
            ifname in "\\PC{0,16}",
            args in "\\PC{0,40}",
            bytes in proptest::collection::vec(any::<u8>(), 0..80),
            version in "(0\\.3\\.1|0\\.4\\.0|1\\.0\\.0|1\\.1\\.0|[0-9.]{0,5})",
            valid in any::<bool>(),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let environment = Environment {
                command,
                container_id: id,
                netns: "/proc/self/ns/net".into(),
                ifname,
                args,
                path: String::new(),
            };
            let stdin = if valid {
                json!({
                    "name": "weir",
                    "cniVersion": version,
                    "socket": directory.path().join("none"),
                    "stateDir": directory.path(),
                    "junk": String::from_utf8_lossy(&bytes),
                })
                .to_string()
                .into_bytes()
            } else {
                bytes
            };
            if let Output::Error(error) = run(&environment, || Ok(stdin)) {
                prop_assert!(error["code"].as_u64().is_some_and(|code| code > 0));
                prop_assert!(error["msg"].as_str().is_some_and(|text| !text.is_empty()));
                prop_assert!(error["cniVersion"].is_string());
            }
        }
    }
}
