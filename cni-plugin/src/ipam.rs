//! Addresses from an IPAM plugin of the runtime's folder (specification, section 4: «Plugin Delegation»).
//!
//! The plugin gets the same environment and the whole configuration, and answers for addresses alone: the link, its
//! gateway and its routes are the agent's.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::environment::{Command, Environment, is_identifier};
use crate::spec::{Code, Error};

/// How long an IPAM plugin may take: a DHCP server answers within it or not at all.
const BUDGET: Duration = Duration::from_secs(60);
/// How often its end is looked for.
const POLL: Duration = Duration::from_millis(2);
/// Bytes of an answer at most.
const MAX_ANSWER_BYTES: u64 = 1024 * 1024;

/// The IPAM plugin of a configuration.
#[derive(Clone, Debug)]
pub(crate) struct Delegate {
    name: String,
    config: Vec<u8>,
}

/// What the plugin gave.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    /// Addresses with prefix length.
    pub(crate) addresses: Vec<Value>,
    pub(crate) dns: Option<Value>,
}

impl Delegate {
    /// `ipam` is the configuration's section, `config` the whole.
    pub(crate) fn parse(ipam: Option<&Value>, config: &[u8]) -> Result<Option<Self>, Error> {
        let Some(ipam) = ipam.filter(|ipam| !ipam.is_null()) else {
            return Ok(None);
        };
        let name = ipam.get("type").and_then(Value::as_str).unwrap_or_default();
        // It becomes part of a path.
        if is_identifier(name) {
            return Ok(Some(Self {
                name: name.to_owned(),
                config: config.to_vec(),
            }));
        }
        let message = format!(
            "ipam.type {name:?} is no name of a plugin; name one like host-local, or leave out \"ipam\" for the \
             addresses of the node's own pod range"
        );
        Err(Error::new(Code::InvalidConfig, message))
    }

    /// ADD: the addresses of this attachment.
    pub(crate) fn add(&self, environment: &Environment) -> Result<Given, Error> {
        let answer = self.call(Command::Add, environment)?;
        let unusable = |why: &str| {
            let message = format!("the answer of IPAM plugin {} {why}", self.name);
            Error::new(Code::Decode, message)
        };
        let answer: Value =
            serde_json::from_slice(&answer).map_err(|e| unusable("cannot be read").details(e))?;
        let ips = answer.get("ips").and_then(Value::as_array);
        let addresses = ips.into_iter().flatten().filter_map(|ip| ip.get("address"));
        let addresses: Vec<Value> = addresses.cloned().collect();
        if addresses.is_empty() {
            return Err(unusable("has no addresses"));
        }
        let dns = answer.get("dns").filter(|dns| {
            let empty = dns.as_object().is_none_or(serde_json::Map::is_empty);
            !empty
        });
        Ok(Given {
            addresses,
            dns: dns.cloned(),
        })
    }

    /// DEL and CHECK.
    pub(crate) fn tell(&self, command: Command, environment: &Environment) -> Result<(), Error> {
        self.call(command, environment).map(|_| ())
    }

    /// STATUS and GC. Plugins that are older than these commands say so, which is no failure.
    pub(crate) fn tell_if_known(
        &self,
        command: Command,
        environment: &Environment,
    ) -> Result<(), Error> {
        match self.call(command, environment) {
            Err(e) if matches!(e.code.number(), 1 | 4) => Ok(()),
            result => result.map(|_| ()),
        }
    }

    fn call(&self, command: Command, environment: &Environment) -> Result<Vec<u8>, Error> {
        let path = self.find(&environment.path)?;
        let failed = |action: &str, e: std::io::Error| {
            let message = format!("{action} IPAM plugin {}", path.display());
            Error::new(Code::Io, message).details(e)
        };
        // The process' own environment is that of the call, but for the command: a failed ADD ends with a DEL.
        let mut child = Process::new(&path)
            .env("CNI_COMMAND", command.as_str())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|e| failed("start", e))?;
        if let Some(mut stdin) = child.stdin.take() {
            // One that answers without reading closes the pipe.
            let _ = stdin.write_all(&self.config);
        }
        let stdout = child.stdout.take();
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = stdout.map(|s| s.take(MAX_ANSWER_BYTES).read_to_end(&mut bytes));
            read.transpose().map(|_| bytes)
        });
        let ended = wait(&mut child).map_err(|e| failed("wait for", e))?;
        let bytes = reader
            .join()
            .unwrap_or_else(|_| Err(std::io::Error::other("its reader panicked")))
            .map_err(|e| failed("read the answer of", e))?;
        if ended {
            return Ok(bytes);
        }
        Err(self.refusal(command, &bytes))
    }

    /// The plugin's own error, which the runtime is to see.
    fn refusal(&self, command: Command, bytes: &[u8]) -> Error {
        let said: Option<Value> = serde_json::from_slice(bytes).ok();
        let text = |key: &str| {
            let value = said.as_ref().and_then(|said| said.get(key));
            value.and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let code = said.as_ref().and_then(|said| said.get("code"));
        let code = code
            .and_then(Value::as_u64)
            .and_then(|code| u32::try_from(code).ok());
        let message = match text("msg") {
            msg if msg.is_empty() => "it failed without an error of the specification".into(),
            msg => msg,
        };
        let message = format!("IPAM plugin {}, {}: {message}", self.name, command.as_str());
        Error::new(Code::Agent(code.unwrap_or(Code::Io.number())), message).details(text("details"))
    }

    fn find(&self, path: &str) -> Result<PathBuf, Error> {
        let folders = path.split(':').filter(|folder| !folder.is_empty());
        let mut files = folders.map(|folder| Path::new(folder).join(&self.name));
        files.find(|file| file.is_file()).ok_or_else(|| {
            let message = format!(
                "IPAM plugin {} is in none of the folders of CNI_PATH={path}; install it there",
                self.name
            );
            Error::new(Code::InvalidEnvironment, message)
        })
    }
}

/// Waits for the end, and makes one after [`BUDGET`]. True when the plugin succeeded.
fn wait(child: &mut Child) -> std::io::Result<bool> {
    let deadline = Instant::now() + BUDGET;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            let message = format!("no answer within {} s", BUDGET.as_secs());
            return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, message));
        }
        std::thread::sleep(POLL);
    }
}
