//! Versions, error codes and the error object of the CNI specification.

use std::fmt;

use serde_json::{Value, json};

/// Versions this plugin speaks, oldest first.
pub(crate) const SUPPORTED: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The version used where the request names none that we know (errors, VERSION).
pub(crate) const NEWEST: &str = "1.1.0";

/// A supported version of the specification; ordered by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    V0_3_1,
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

impl Version {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "0.3.1" => Some(Self::V0_3_1),
            "0.4.0" => Some(Self::V0_4_0),
            "1.0.0" => Some(Self::V1_0_0),
            "1.1.0" => Some(Self::V1_1_0),
            _ => None,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }
}

/// Error codes of the specification ("Error") that this plugin itself decides on; the agent may answer others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    IncompatibleVersion,
    InvalidEnvironment,
    Io,
    Decode,
    InvalidConfig,
    TryAgain,
    /// STATUS: the plugin cannot serve ADD requests.
    NotAvailable,
    /// A code chosen by the agent.
    Agent(u32),
}

impl Code {
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::IncompatibleVersion => 1,
            Self::InvalidEnvironment => 4,
            Self::Io => 5,
            Self::Decode => 6,
            Self::InvalidConfig => 7,
            Self::TryAgain => 11,
            Self::NotAvailable => 50,
            Self::Agent(code) => code,
        }
    }
}

/// What the runtime is told when a command fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Error {
    pub(crate) code: Code,
    pub(crate) message: String,
    pub(crate) details: String,
}

impl Error {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            details: String::new(),
        }
    }

    pub(crate) fn details(mut self, details: impl fmt::Display) -> Self {
        self.details = details.to_string();
        self
    }

    pub(crate) fn to_json(&self, version: &str) -> Value {
        let mut object = json!({
            "cniVersion": version,
            "code": self.code.number(),
            "msg": self.message,
        });
        if !self.details.is_empty() {
            object["details"] = Value::String(self.details.clone());
        }
        object
    }
}
