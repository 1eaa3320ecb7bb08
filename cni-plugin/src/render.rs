//! The agent's answer in the shape of the version that the runtime asked for.

use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::spec::{Code, Error, Version};

/// Success of ADD. The agent answers in the shape of the newest version; older ones know fewer keys, and before 1.0.0 an
/// address carries its family. What earlier plugins of the list have done comes first, as they wrote it.
pub(crate) fn added(config: &Config, reply: &Value, dns: Option<&Value>) -> Result<Value, Error> {
    let part = |key: &str| {
        reply
            .get(key)
            .and_then(Value::as_array)
            .cloned()
            .ok_or_else(|| {
                Error::new(
                    Code::Decode,
                    format!("reply of weir-agent lacks the list {key:?}"),
                )
            })
    };
    let mut result = match &config.prev_result {
        Some(Value::Object(previous)) => previous.clone(),
        _ => Map::new(),
    };
    let earlier = |key: &str| {
        let list = config
            .prev_result
            .as_ref()
            .and_then(|p| p.get(key)?.as_array());
        list.cloned().unwrap_or_default()
    };
    let mut interfaces = earlier("interfaces");
    let shift = interfaces.len();
    interfaces.extend(
        part("interfaces")?
            .into_iter()
            .map(|i| interface(i, config.version)),
    );
    let mut ips = earlier("ips");
    ips.extend(
        part("ips")?
            .into_iter()
            .map(|i| address(i, shift, config.version)),
    );
    let mut routes = earlier("routes");
    routes.extend(part("routes")?);
    result.insert("cniVersion".into(), config.version.as_str().into());
    result.insert("interfaces".into(), interfaces.into());
    result.insert("ips".into(), ips.into());
    result.insert("routes".into(), routes.into());
    if let Some(dns) = config.dns.as_ref().or(dns) {
        result.insert("dns".into(), dns.clone());
    }
    result.entry("dns").or_insert_with(|| json!({}));
    Ok(Value::Object(result))
}

fn interface(mut value: Value, version: Version) -> Value {
    if version < Version::V1_1_0
        && let Some(object) = value.as_object_mut()
    {
        object.remove("mtu");
    }
    value
}

/// `shift` interfaces come before those that the agent counts.
fn address(mut value: Value, shift: usize, version: Version) -> Value {
    if let Some(index) = value.get("interface").and_then(Value::as_u64) {
        value["interface"] = json!(usize::try_from(index).unwrap_or(0) + shift);
    }
    if version < Version::V1_0_0
        && let Some(object) = value.as_object_mut()
    {
        let v6 = object
            .get("address")
            .and_then(Value::as_str)
            .is_some_and(|text| text.contains(':'));
        object.insert("version".into(), if v6 { "6" } else { "4" }.into());
    }
    value
}
