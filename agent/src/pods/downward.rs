//! The downward API: fields of the pod and resources of its containers as text. [pure]

use std::collections::BTreeMap;

use control_api::v1::{Container, ResourceRef};

use super::env::{ConfigError, Context};

/// One field of the pod, by its path.
pub(crate) fn field(context: Context<'_>, path: &str) -> Result<String, ConfigError> {
    let spec = context.spec;
    let ips: Vec<String> = context.node.ips.iter().map(ToString::to_string).collect();
    let first = |list: &[String]| list.first().cloned().unwrap_or_default();
    Ok(match path {
        "metadata.name" => spec.name.clone(),
        "metadata.namespace" => spec.namespace.clone(),
        "metadata.uid" => spec.uid.clone(),
        "metadata.labels" => pairs(&spec.labels),
        "metadata.annotations" => pairs(&spec.annotations),
        "spec.nodeName" => context.node.name.clone(),
        "spec.serviceAccountName" => spec.service_account.clone(),
        "status.hostIP" => first(&ips),
        "status.hostIPs" => ips.join(","),
        "status.podIP" => first(context.pod_ips),
        "status.podIPs" => context.pod_ips.join(","),
        _ => {
            let (map, key) =
                subscript(path).ok_or_else(|| ConfigError::Field("a field", path.to_owned()))?;
            match map {
                "metadata.labels" => spec.labels.get(key).cloned().unwrap_or_default(),
                "metadata.annotations" => spec.annotations.get(key).cloned().unwrap_or_default(),
                _ => return Err(ConfigError::Field("a field", path.to_owned())),
            }
        }
    })
}

/// `metadata.labels['app']` as (`metadata.labels`, `app`).
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, rest) = path.split_once('[')?;
    let key = rest.strip_suffix(']')?;
    let key = key
        .strip_prefix('\'')
        .and_then(|k| k.strip_suffix('\''))
        .or_else(|| key.strip_prefix('"').and_then(|k| k.strip_suffix('"')))?;
    Some((map, key))
}

/// `key="value"` lines, sorted by key, values quoted like Go strings.
fn pairs(map: &BTreeMap<String, String>) -> String {
    let lines: Vec<String> = map
        .iter()
        .map(|(k, v)| format!("{k}={}", quote(v)))
        .collect();
    lines.join("\n")
}

fn quote(value: &str) -> String {
    let mut quoted = String::from("\"");
    for c in value.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// A container's request or limit in units of the divisor, rounded up; a missing limit is what the node has. Without a
/// name the reference means `own`.
pub(crate) fn resource(
    context: Context<'_>,
    reference: &ResourceRef,
    own: Option<&Container>,
) -> Result<String, ConfigError> {
    let spec = context.spec;
    let named = || {
        let mut all = spec.containers.iter().chain(&spec.init_containers);
        all.find(|c| c.name == reference.container)
    };
    let container = own
        .filter(|c| reference.container.is_empty() || reference.container == c.name)
        .or_else(named)
        .ok_or_else(|| {
            ConfigError::Invalid(format!(
                "resource {:?} refers to container {:?}, which the pod does not have",
                reference.resource, reference.container
            ))
        })?;
    let milli = resource_milli(context, container, &reference.resource)?;
    let divisor = match reference.divisor.as_str() {
        "" | "0" => 1000,
        text => quantity_milli(text)
            .filter(|d| *d > 0)
            .ok_or_else(|| ConfigError::Divisor(text.to_owned()))?,
    };
    let whole = milli / divisor + i128::from(milli % divisor > 0);
    Ok(whole.to_string())
}

fn resource_milli(
    context: Context<'_>,
    container: &Container,
    name: &str,
) -> Result<i128, ConfigError> {
    let resources = container.resources.unwrap_or_default();
    let or = |value: i64, fallback: i64| i128::from(if value > 0 { value } else { fallback });
    Ok(match name {
        "limits.cpu" => or(resources.limit_cpu_millis, context.node.cpu_millis),
        "limits.memory" => or(resources.limit_memory_bytes, context.node.memory_bytes) * 1000,
        "requests.cpu" => or(resources.request_cpu_millis, 0),
        "requests.memory" => or(resources.request_memory_bytes, 0) * 1000,
        _ => return Err(ConfigError::Field("a resource", name.to_owned())),
    })
}

/// A Kubernetes quantity in thousandths, for example `1Mi` or `100m`.
pub(crate) fn quantity_milli(text: &str) -> Option<i128> {
    const UNITS: [(&str, i128); 13] = [
        ("Ki", 1 << 10),
        ("Mi", 1 << 20),
        ("Gi", 1 << 30),
        ("Ti", 1 << 40),
        ("Pi", 1 << 50),
        ("Ei", 1 << 60),
        ("k", 1_000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
        ("P", 1_000_000_000_000_000),
        ("E", 1_000_000_000_000_000_000),
        ("", 1),
    ];
    if let Some(number) = text.strip_suffix('m') {
        return number.parse::<i64>().ok().map(i128::from);
    }
    let (number, unit) = UNITS
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole: i64 = whole.parse().ok()?;
    let digits: String = fraction.chars().chain("000".chars()).take(3).collect();
    let thousandths: i64 = digits.parse().ok()?;
    Some((i128::from(whole) * 1000 + i128::from(thousandths)) * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities() {
        for (text, milli) in [
            ("1", 1000),
            ("100m", 100),
            ("1Ki", 1_024_000),
            ("1.5", 1500),
            ("2k", 2_000_000),
            ("0.25Gi", 268_435_456_000),
        ] {
            assert_eq!(quantity_milli(text), Some(milli), "{text}");
        }
        for text in ["", "x", "1Xi", "Mi", "1.x", "99999999999999999999"] {
            assert_eq!(quantity_milli(text), None, "{text}");
        }
    }

    #[test]
    fn subscripts() {
        assert_eq!(
            subscript("metadata.labels['a.b/c']"),
            Some(("metadata.labels", "a.b/c"))
        );
        assert_eq!(subscript("metadata.labels[a]"), None);
        assert_eq!(subscript("metadata.labels"), None);
    }

    #[test]
    fn values_are_quoted() {
        let map = BTreeMap::from([
            ("b".to_owned(), "2".to_owned()),
            ("a".into(), "x\"\n".into()),
        ]);
        assert_eq!(pairs(&map), "a=\"x\\\"\\n\"\nb=\"2\"");
    }
}
