//! A policy case as values. Keys that the format does not have are refused. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::actor::command::Protocol;

pub(super) type Labels = BTreeMap<String, String>;

/// Who fixes what a case expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Firmness {
    Spec,
    Convention,
    Choice,
}

/// A host with a name and addresses: a node, or something outside the cluster.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HostSpec {
    pub(super) name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) labels: Labels,
    pub(super) ips: Vec<IpAddr>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NamespaceSpec {
    #[serde(alias = "namespace")]
    pub(super) name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) labels: Labels,
}

/// A declared container port.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PortSpec {
    #[serde(default)]
    pub(super) name: String,
    pub(super) port: u16,
    #[serde(default = "tcp")]
    pub(super) protocol: Protocol,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PodSpec {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) node: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) labels: Labels,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) ips: Vec<IpAddr>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) ports: Vec<PortSpec>,
    #[serde(default, rename = "hostNetwork")]
    pub(super) host_network: bool,
    pub(super) phase: Option<Phase>,
    pub(super) ready: Option<bool>,
    #[serde(rename = "deletionTimestamp")]
    pub(super) deletion_timestamp: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Phase {
    Pending,
    Running,
    Succeeded,
    Failed,
    Unknown,
}

impl Phase {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Unknown => "Unknown",
        }
    }

    /// Its containers have ended for good.
    pub(super) fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TargetPort {
    Number(u16),
    Name(String),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ServicePort {
    #[serde(default)]
    pub(super) name: String,
    pub(super) port: u16,
    #[serde(default = "tcp")]
    pub(super) protocol: Protocol,
    #[serde(rename = "targetPort")]
    pub(super) target_port: Option<TargetPort>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ServiceSpec {
    pub(super) namespace: String,
    pub(super) name: String,
    #[serde(rename = "clusterIP")]
    pub(super) cluster_ip: IpAddr,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) selector: Labels,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) ports: Vec<ServicePort>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Family {
    #[serde(rename = "IPv4")]
    V4,
    #[serde(rename = "IPv6")]
    V6,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawExpectation {
    flow: Option<String>,
    alive: Option<bool>,
    from: Option<String>,
    to: Option<String>,
    port: Option<u16>,
    protocol: Option<Protocol>,
    allow: Option<bool>,
    family: Option<Family>,
    size: Option<usize>,
    backend: Option<String>,
    why: Option<String>,
    firmness: Option<Firmness>,
}

/// A packet that may or may not pass.
#[derive(Clone, Debug)]
pub(super) struct Query {
    pub(super) from: String,
    pub(super) to: String,
    /// Zero for ICMP.
    pub(super) port: u16,
    pub(super) protocol: Protocol,
    pub(super) family: Option<Family>,
    /// Bytes of a datagram.
    pub(super) size: Option<usize>,
    /// The pod that the Service has to pick.
    pub(super) backend: Option<String>,
}

impl std::fmt::Display for Query {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (from, to, protocol) = (&self.from, &self.to, self.protocol.name());
        write!(f, "{from} -> {to}:{}/{protocol}", self.port)?;
        if let Some(backend) = &self.backend {
            write!(f, " at {backend}")?;
        }
        if self.family == Some(Family::V6) {
            write!(f, " over IPv6")?;
        }
        self.size.map_or(Ok(()), |size| write!(f, ", {size} bytes"))
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "RawExpectation")]
pub(super) enum Expectation {
    Verdict { query: Query, allow: bool },
    Flow { id: String, alive: bool },
}

impl TryFrom<RawExpectation> for Expectation {
    type Error = String;

    fn try_from(raw: RawExpectation) -> Result<Self, String> {
        // For people; nothing follows from them here.
        let _told = (raw.why, raw.firmness);
        if let Some(id) = raw.flow {
            let other = raw.from.is_some() || raw.to.is_some() || raw.allow.is_some();
            let more = other || raw.port.is_some() || raw.protocol.is_some();
            return match raw.alive {
                Some(alive) if !more => Ok(Self::Flow { id, alive }),
                _ => Err(format!("the expectation of flow {id} wants `alive` alone")),
            };
        }
        let (Some(from), Some(to), Some(allow)) = (raw.from, raw.to, raw.allow) else {
            return Err("an expectation wants `from`, `to` and `allow`, or `flow`".into());
        };
        let protocol = raw.protocol.unwrap_or(Protocol::Tcp);
        let port = match (protocol, raw.port) {
            (Protocol::Icmp, None) => 0,
            (Protocol::Icmp, Some(_)) => return Err("ICMP has no port".into()),
            (_, Some(port)) => port,
            (_, None) => return Err(format!("{from} -> {to} wants a port")),
        };
        let query = Query {
            from,
            to,
            port,
            protocol,
            family: raw.family,
            size: raw.size,
            backend: raw.backend,
        };
        Ok(Self::Verdict { query, allow })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum AgentChange {
    Kill,
    Start,
    GracefulRestart,
    ApiDown,
    ApiUp,
    /// Killed, and started on the tables of an earlier version whose layouts are the same.
    Upgrade,
    /// Killed, and started beside the tables and programs of a version with other layouts.
    UpgradeLayouts,
    /// The control plane is started anew on its store, which takes a while to be read.
    StoreRestart,
    /// Agents are killed, and what the machine forgets when it stops is gone: programs, tables, pods. Pods are made again.
    Boot,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PolicyRef {
    #[serde(default)]
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) kind: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LabelPod {
    pub(super) pod: String,
    pub(super) labels: Labels,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SetPod {
    pub(super) pod: String,
    pub(super) phase: Option<Phase>,
    pub(super) ready: Option<bool>,
    #[serde(rename = "deletionTimestamp")]
    pub(super) deletion_timestamp: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PodRef {
    pub(super) pod: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OpenFlow {
    pub(super) id: String,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) port: u16,
    #[serde(default = "tcp")]
    pub(super) protocol: Protocol,
    pub(super) family: Option<Family>,
    pub(super) backend: Option<String>,
}

impl OpenFlow {
    pub(super) fn query(&self) -> Query {
        Query {
            from: self.from.clone(),
            to: self.to.clone(),
            port: self.port,
            protocol: self.protocol,
            family: self.family,
            size: None,
            backend: self.backend.clone(),
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Change {
    Apply(Value),
    DeletePolicy(PolicyRef),
    LabelPod(LabelPod),
    LabelNamespace(NamespaceSpec),
    CreatePod(PodSpec),
    DeletePod(PodRef),
    SetPod(SetPod),
    CreateNamespace(NamespaceSpec),
    DeleteNamespace(NamespaceSpec),
    OpenFlow(OpenFlow),
    Agent(AgentChange),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Sampling {
    Continuous,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Step {
    #[serde(default, deserialize_with = "or_default")]
    pub(super) changes: Vec<Change>,
    pub(super) probe: Option<Sampling>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) expectations: Vec<Expectation>,
}

/// A cluster, what holds in it, and what changes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Traffic {
    name: String,
    #[serde(default)]
    summary: String,
    firmness: Firmness,
    #[serde(default)]
    tags: Vec<String>,
    #[serde(default)]
    sources: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) nodes: Vec<HostSpec>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) externals: Vec<HostSpec>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) namespaces: Vec<NamespaceSpec>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) pods: Vec<PodSpec>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) services: Vec<ServiceSpec>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) policies: Vec<Value>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) expectations: Vec<Expectation>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) steps: Vec<Step>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Judged {
    pub(super) valid: bool,
    #[serde(default)]
    pub(super) why: String,
    pub(super) object: Value,
}

/// Objects that the API server takes or refuses.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Validation {
    name: String,
    #[serde(rename = "kind")]
    _kind: String,
    #[serde(default)]
    summary: String,
    firmness: Firmness,
    #[serde(default)]
    tags: Vec<String>,
    #[serde(default)]
    sources: Vec<String>,
    pub(super) objects: Vec<Judged>,
}

/// A whole case file.
#[derive(Clone, Debug)]
pub(super) enum Case {
    Traffic(Box<Traffic>),
    Validation(Validation),
}

fn tcp() -> Protocol {
    Protocol::Tcp
}

/// A key without a value stands for its default.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a case file.
///
/// # Errors
/// What it has that the format has not, with the file and the key.
pub(super) fn read(path: &Path) -> Result<Case> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("read case {}", path.display()))?;
    parse(&text).with_context(|| format!("understand case {}", path.display()))
}

/// As [`read`], of a text.
///
/// # Errors
/// As [`read`].
pub(super) fn parse(text: &str) -> Result<Case> {
    let document: Value = serde_yaml_ng::from_str(text)?;
    let kind = document["kind"].as_str();
    ensure!(
        kind.is_none_or(|k| k == "validation") && (kind.is_some() || document["kind"].is_null()),
        "unknown kind {}",
        document["kind"]
    );
    if kind.is_some() {
        let case: Validation = serde_json::from_value(document)?;
        let _told = (
            &case.name,
            &case.summary,
            case.firmness,
            &case.tags,
            &case.sources,
        );
        return Ok(Case::Validation(case));
    }
    let case: Traffic = serde_json::from_value(document)?;
    let _told = (
        &case.name,
        &case.summary,
        case.firmness,
        &case.tags,
        &case.sources,
    );
    Ok(Case::Traffic(Box::new(case)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str =
        "name: x\nfirmness: spec\nnodes: [{name: n1, ips: [192.0.2.1]}]\nexpectations:\n";

    fn refused(text: &str) -> String {
        format!("{:#}", parse(text).unwrap_err())
    }

    #[test]
    fn unknown_keys_and_half_expectations_are_refused_by_name() {
        assert!(refused("name: x\nfirmness: spec\nnode: []").contains("`node`"));
        let more = format!("{SMALL}  - {{from: a/b, to: c/d, port: 1, allow: true, colour: red}}");
        assert!(refused(&more).contains("`colour`"));
        let half = format!("{SMALL}  - {{from: a/b, to: c/d, port: 1}}");
        assert!(refused(&half).contains("`allow`"));
        let step = "name: x\nfirmness: spec\nsteps: [{changes: [{paint-pod: {pod: a}}]}]";
        assert!(refused(step).contains("`paint-pod`"));
        assert!(refused("name: x\nkind: other\nfirmness: spec").contains("kind"));
    }

    #[test]
    fn every_change_is_read() {
        let text = format!(
            "{SMALL}  - {{flow: f, alive: false, why: gone}}\n  - {{from: a/b, to: 'node:n1', protocol: ICMP, allow: true}}\n\
            steps:\n  - probe: continuous\n    changes:\n      - agent: graceful-restart\n      - agent: api-down\n\
            \x20     - create-namespace: {{name: red, labels: {{a: b}}}}\n      - delete-namespace: {{namespace: red}}\n\
            \x20     - label-pod: {{pod: a/b, labels: {{}}}}\n      - set-pod: {{pod: a/b, phase: Failed, ready: false}}\n\
            \x20     - open-flow: {{id: f, from: a/b, to: a/c, port: 80, protocol: UDP}}\n      - delete-policy: {{name: a}}\n"
        );
        let Case::Traffic(case) = parse(&text).unwrap() else {
            panic!("not a validation");
        };
        assert_eq!(case.steps[0].changes.len(), 8);
        assert!(
            matches!(&case.expectations[1], Expectation::Verdict { query, .. } if query.port == 0)
        );
    }
}
