//! The environment variables of a CNI call and the rules for their values.

use crate::spec::{Code, Error};

/// Linux interface names hold 15 bytes and a terminator.
const MAX_IFNAME_BYTES: usize = 15;

/// Bytes of a container id at most: it becomes part of a file name. Runtimes use 64.
const MAX_CONTAINER_ID_BYTES: usize = 128;

/// Bytes of CNI_ARGS at most.
const MAX_ARGS_BYTES: usize = 64 * 1024;

/// What a runtime asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Add,
    Del,
    Check,
    Version,
    Status,
    Gc,
}

impl Command {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "ADD" => Some(Self::Add),
            "DEL" => Some(Self::Del),
            "CHECK" => Some(Self::Check),
            "VERSION" => Some(Self::Version),
            "STATUS" => Some(Self::Status),
            "GC" => Some(Self::Gc),
            _ => None,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Version => "VERSION",
            Self::Status => "STATUS",
            Self::Gc => "GC",
        }
    }
}

/// The CNI variables as they were set; empty means unset, as the reference implementation has it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    pub(crate) command: String,
    pub(crate) container_id: String,
    pub(crate) netns: String,
    pub(crate) ifname: String,
    pub(crate) args: String,
    /// Folders of plugins, between colons.
    pub(crate) path: String,
}

impl Environment {
    pub(crate) fn from_process() -> Self {
        let get =
            |key| std::env::var_os(key).map_or(String::new(), |v| v.to_string_lossy().into_owned());
        Self {
            command: get("CNI_COMMAND"),
            container_id: get("CNI_CONTAINERID"),
            netns: get("CNI_NETNS"),
            ifname: get("CNI_IFNAME"),
            args: get("CNI_ARGS"),
            path: get("CNI_PATH"),
        }
    }

    /// The command, with every variable that it needs present and well-formed.
    pub(crate) fn command(&self) -> Result<Command, Error> {
        let command = Command::parse(&self.command).ok_or_else(|| {
            Error::new(
                Code::InvalidEnvironment,
                format!(
                    "CNI_COMMAND is {:?}; use ADD, DEL, CHECK, GC, STATUS or VERSION",
                    self.command
                ),
            )
        })?;
        self.require(command)?;
        if matches!(command, Command::Add | Command::Del | Command::Check) {
            check_container_id(&self.container_id)?;
            check_ifname(&self.ifname)?;
        }
        if self.args.len() > MAX_ARGS_BYTES {
            return Err(Error::new(
                Code::InvalidEnvironment,
                format!("CNI_ARGS is longer than {MAX_ARGS_BYTES} bytes"),
            ));
        }
        Ok(command)
    }

    fn require(&self, command: Command) -> Result<(), Error> {
        let sandbox = matches!(command, Command::Add | Command::Check);
        let attachment = sandbox || command == Command::Del;
        let missing: Vec<&str> = [
            ("CNI_CONTAINERID", attachment, &self.container_id),
            ("CNI_NETNS", sandbox, &self.netns),
            ("CNI_IFNAME", attachment, &self.ifname),
        ]
        .into_iter()
        .filter(|(_, needed, value)| *needed && value.is_empty())
        .map(|(name, _, _)| name)
        .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::new(
            Code::InvalidEnvironment,
            format!(
                "required environment variables missing: {}",
                missing.join(", ")
            ),
        ))
    }

    /// CNI_ARGS as pairs: `KEY=VALUE;KEY=VALUE`.
    pub(crate) fn args(&self) -> Result<serde_json::Map<String, serde_json::Value>, Error> {
        let mut pairs = serde_json::Map::new();
        for pair in self.args.split(';').filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| {
                Error::new(
                    Code::InvalidEnvironment,
                    format!("CNI_ARGS has {pair:?}, which is not KEY=VALUE"),
                )
            })?;
            pairs.insert(key.to_owned(), value.into());
        }
        Ok(pairs)
    }
}

/// Alphanumeric first, then alphanumerics, `_`, `.` and `-` (specification, "Network configuration format").
pub(crate) fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn check_container_id(id: &str) -> Result<(), Error> {
    if is_identifier(id) && id.len() <= MAX_CONTAINER_ID_BYTES {
        return Ok(());
    }
    Err(Error::new(
        Code::InvalidEnvironment,
        format!(
            "CNI_CONTAINERID {id:?} is not valid: at most {MAX_CONTAINER_ID_BYTES} of a-z A-Z 0-9 _ . -, \
             starting with a letter or digit"
        ),
    ))
}

fn check_ifname(name: &str) -> Result<(), Error> {
    let problem = if name.len() > MAX_IFNAME_BYTES {
        "is longer than 15 bytes"
    } else if matches!(name, "." | "..") {
        "is . or .."
    } else if name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control()) {
        "contains a slash, a colon or white space"
    } else {
        return Ok(());
    };
    Err(Error::new(
        Code::InvalidEnvironment,
        format!("CNI_IFNAME {name:?} {problem}"),
    ))
}
