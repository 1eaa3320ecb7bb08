//! The agent's answer in the shape of the version that the runtime asked for.

use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::spec::{Code, Error, Version};

/// Success of ADD. The agent answers in the shape of the newest version; older ones know fewer keys, and before 1.0.0 an
/// address carries its family.
pub(crate) fn added(config: &Config, reply: &Value) -> Result<Value, Error> {
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
    let interfaces: Vec<Value> = part("interfaces")?
        .into_iter()
        .map(|i| interface(i, config.version))
        .collect();
    let ips: Vec<Value> = part("ips")?
        .into_iter()
        .map(|i| address(i, config.version))
        .collect();
    let mut result = Map::new();
    result.insert("cniVersion".into(), config.version.as_str().into());
    result.insert("interfaces".into(), interfaces.into());
    result.insert("ips".into(), ips.into());
    result.insert("routes".into(), part("routes")?.into());
    result.insert(
        "dns".into(),
        config.dns.clone().unwrap_or_else(|| json!({})),
    );
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

fn address(mut value: Value, version: Version) -> Value {
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
