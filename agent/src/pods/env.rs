//! A container's environment, and `$(VAR)` in its command and arguments. [pure]

use std::collections::BTreeMap;

use control_api::desired::{DesiredState, Name};
use control_api::v1::{
    Container, EnvVar, KeyRef, KeyedData, PodSpec, Protocol, Service, env_var::Source,
};

use super::downward::{field, resource};
use super::node::NodeFacts;

/// A container's configuration refers to something that is not there; the start is tried again when it may be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("configmap {0:?} not found")]
    NoConfigMap(String),
    #[error("secret {0:?} not found")]
    NoSecret(String),
    #[error("couldn't find key {key} in {kind} {object}")]
    NoKey {
        kind: &'static str,
        key: String,
        object: Name,
    },
    #[error("{0} of this node or pod cannot be used in a pod: field path {1:?} is not known")]
    Field(&'static str, String),
    #[error("divisor {0:?} is not a quantity above zero")]
    Divisor(String),
    #[error("{0}")]
    Invalid(String),
}

/// What a container's configuration is computed from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context<'a> {
    pub(crate) spec: &'a PodSpec,
    pub(crate) desired: &'a DesiredState,
    pub(crate) node: &'a NodeFacts,
    pub(crate) pod_ips: &'a [String],
}

/// Variables in the order they are given to the process; later ones refer to earlier ones.
pub(crate) fn environment(
    context: Context<'_>,
    container: &Container,
) -> Result<Vec<(String, String)>, ConfigError> {
    let services = service_environment(context);
    let mut env = Environment::default();
    for from in &container.env_from {
        for (key, value) in bulk(context, from)? {
            let name = format!("{}{key}", from.prefix);
            if !name.is_empty() && !name.contains(['=', '\0']) {
                env.set(name, value);
            }
        }
    }
    for var in &container.env {
        if let Some(value) = value_of(context, container, var, &env, &services)? {
            env.set(var.name.clone(), value);
        }
    }
    for (name, value) in services {
        if env.get(&name).is_none() {
            env.set(name, value);
        }
    }
    Ok(env.list)
}

#[derive(Debug, Default)]
struct Environment {
    list: Vec<(String, String)>,
    at: BTreeMap<String, usize>,
}

impl Environment {
    fn set(&mut self, name: String, value: String) {
        match self.at.get(&name) {
            Some(at) => self.list[*at].1 = value,
            None => {
                self.at.insert(name.clone(), self.list.len());
                self.list.push((name, value));
            }
        }
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.at.get(name).map(|at| self.list[*at].1.as_str())
    }
}

fn bulk(
    context: Context<'_>,
    from: &control_api::v1::EnvFrom,
) -> Result<Vec<(String, String)>, ConfigError> {
    let (objects, name, missing): (_, _, fn(String) -> ConfigError) = if from.secret.is_empty() {
        (
            &context.desired.config_maps,
            &from.config_map,
            ConfigError::NoConfigMap,
        )
    } else {
        (
            &context.desired.secrets,
            &from.secret,
            ConfigError::NoSecret,
        )
    };
    match objects.get(&Name::new(&context.spec.namespace, name)) {
        Some(object) => Ok(object
            .data
            .iter()
            .map(|(k, v)| (k.clone(), text(v)))
            .collect()),
        None if from.optional => Ok(Vec::new()),
        None => Err(missing(name.clone())),
    }
}

fn value_of(
    context: Context<'_>,
    container: &Container,
    var: &EnvVar,
    env: &Environment,
    services: &BTreeMap<String, String>,
) -> Result<Option<String>, ConfigError> {
    let desired = context.desired;
    Ok(match &var.source {
        None => Some(String::new()),
        Some(Source::Value(value)) => Some(expand(value, |name| {
            env.get(name)
                .or_else(|| services.get(name).map(String::as_str))
                .map(str::to_owned)
        })),
        Some(Source::FieldPath(path)) => Some(field(context, path)?),
        Some(Source::Resource(reference)) => Some(resource(context, reference, Some(container))?),
        Some(Source::ConfigMapKey(key)) => keyed(
            context,
            &desired.config_maps,
            key,
            "ConfigMap",
            ConfigError::NoConfigMap,
        )?,
        Some(Source::SecretKey(key)) => keyed(
            context,
            &desired.secrets,
            key,
            "Secret",
            ConfigError::NoSecret,
        )?,
    })
}

fn keyed(
    context: Context<'_>,
    objects: &BTreeMap<Name, KeyedData>,
    reference: &KeyRef,
    kind: &'static str,
    missing: fn(String) -> ConfigError,
) -> Result<Option<String>, ConfigError> {
    let name = Name::new(&context.spec.namespace, &reference.name);
    let Some(object) = objects.get(&name) else {
        return if reference.optional {
            Ok(None)
        } else {
            Err(missing(reference.name.clone()))
        };
    };
    match object.data.get(&reference.key) {
        Some(value) => Ok(Some(text(value))),
        None if reference.optional => Ok(None),
        None => Err(ConfigError::NoKey {
            kind,
            key: reference.key.clone(),
            object: name,
        }),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Replaces `$(NAME)` by the variable's value; `$$` stands for `$`, and unknown names stay as they are.
pub(crate) fn expand(input: &str, lookup: impl Fn(&str) -> Option<String>) -> String {
    let mut output = String::with_capacity(input.len());
    let mut rest = input;
    while let Some(at) = rest.find('$') {
        output.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            output.push('$');
            rest = after;
        } else if let Some((name, after)) = rest
            .strip_prefix('(')
            .and_then(|inner| inner.split_once(')'))
        {
            match lookup(name) {
                Some(value) => output.push_str(&value),
                None => output.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            output.push('$');
        }
    }
    output.push_str(rest);
    output
}

/// Variables for the services that exist when the container starts: the API server always, the services of the pod's own
/// namespace when it asks for links.
fn service_environment(context: Context<'_>) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    let spec = context.spec;
    for (name, service) in &context.desired.services {
        let master = name.namespace == "default" && name.name == "kubernetes";
        let linked = spec.enable_service_links && name.namespace == spec.namespace;
        // The API server's variables yield to a namesake in the pod's own namespace.
        if (master || linked) && !service.cluster_ips.is_empty() {
            let own = name.namespace == spec.namespace;
            for (key, value) in service_variables(service) {
                if own {
                    env.insert(key, value);
                } else {
                    env.entry(key).or_insert(value);
                }
            }
        }
    }
    env
}

fn service_variables(service: &Service) -> Vec<(String, String)> {
    let (Some(ip), Some(first)) = (service.cluster_ips.first(), service.ports.first()) else {
        return Vec::new();
    };
    let upper = |name: &str| name.replace('-', "_").to_ascii_uppercase();
    let name = upper(&service.name);
    let host = if ip.contains(':') {
        format!("[{ip}]")
    } else {
        ip.clone()
    };
    let mut env = vec![
        (format!("{name}_SERVICE_HOST"), ip.clone()),
        (format!("{name}_SERVICE_PORT"), first.port.to_string()),
    ];
    for port in service.ports.iter().filter(|p| !p.name.is_empty()) {
        env.push((
            format!("{name}_SERVICE_PORT_{}", upper(&port.name)),
            port.port.to_string(),
        ));
    }
    for (at, port) in service.ports.iter().enumerate() {
        let protocol = match port.protocol() {
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
            Protocol::Tcp | Protocol::Unspecified => "tcp",
        };
        let url = format!("{protocol}://{host}:{}", port.port);
        if at == 0 {
            env.push((format!("{name}_PORT"), url.clone()));
        }
        let prefix = format!(
            "{name}_PORT_{}_{}",
            port.port,
            protocol.to_ascii_uppercase()
        );
        env.push((format!("{prefix}_PROTO"), protocol.into()));
        env.push((format!("{prefix}_PORT"), port.port.to_string()));
        env.push((format!("{prefix}_ADDR"), ip.clone()));
        env.push((prefix, url));
    }
    env
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
