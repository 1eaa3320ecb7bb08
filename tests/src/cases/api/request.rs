//! The `http` step.

use base64::Engine as _;
use serde_json::Value;

use super::expect::{check_want, lookup};
use super::run::{Branch, Failure};
use super::server::{Identity, Request};
use super::vars::as_text;

/// Sends one request and checks the answer.
///
/// # Errors
/// What the answer lacked; its status goes along for `retry`.
pub(super) fn http(branch: &mut Branch, step: &Value) -> Result<(), Failure> {
    let request = build(step)?;
    let answer = branch.shared.server.send(&request, false)?;
    let status = answer.status().as_u16();
    branch.statuses.push(status);
    let headers = answer.headers().clone();
    let body = answer
        .bytes()
        .map_err(|e| format!("read the answer: {e}"))?
        .to_vec();
    check(step, status, &headers, &body).map_err(|message| Failure {
        message,
        status: Some(status),
    })?;
    capture(branch, step, &headers, &body)?;
    Ok(())
}

/// The request that a step describes (`watch` uses it as well).
///
/// # Errors
/// When the step itself is malformed.
pub(super) fn build(step: &Value) -> Result<Request, String> {
    let mut headers: Vec<(String, String)> = vec![];
    if let Some(map) = step["headers"].as_object() {
        headers.extend(map.iter().map(|(k, v)| (k.clone(), as_text(v))));
    }
    let has = |name: &str, list: &[(String, String)]| {
        list.iter().any(|(k, _)| k.eq_ignore_ascii_case(name))
    };
    if !has("accept", &headers) {
        headers.push(("Accept".into(), "application/json".into()));
    }
    let body = body_of(step)?;
    if let Some(content_type) = content_type(step, body.is_some())
        && !has("content-type", &headers)
    {
        headers.push(("Content-Type".into(), content_type.into()));
    }
    let identity = match &step["as"] {
        Value::Null => Identity::Admin,
        Value::String(s) if s == "anonymous" => Identity::Anonymous,
        Value::Object(map) => Identity::Token(map.get("token").map(as_text).unwrap_or_default()),
        other => return Err(format!("unknown identity {other}")),
    };
    Ok(Request {
        method: step["method"].as_str().unwrap_or("GET").to_owned(),
        path: as_text(&step["path"]),
        headers,
        identity,
        body,
    })
}

fn content_type(step: &Value, has_body: bool) -> Option<&'static str> {
    match step["type"].as_str() {
        Some("yaml") => Some("application/yaml"),
        Some("proto") => Some("application/vnd.kubernetes.protobuf"),
        Some("json-patch") => Some("application/json-patch+json"),
        Some("merge-patch") => Some("application/merge-patch+json"),
        Some("strategic-patch") => Some("application/strategic-merge-patch+json"),
        Some("apply-patch") => Some("application/apply-patch+yaml"),
        _ => has_body.then_some("application/json"),
    }
}

fn body_of(step: &Value) -> Result<Option<Vec<u8>>, String> {
    if let Some(raw) = step["raw"].as_str() {
        return Ok(Some(raw.as_bytes().to_vec()));
    }
    if let Some(raw) = step["raw_base64"].as_str() {
        let bytes = base64::engine::general_purpose::STANDARD.decode(raw);
        return bytes.map(Some).map_err(|e| format!("raw_base64: {e}"));
    }
    if step["body"].is_null() {
        return Ok(None);
    }
    let mut body = step["body"].clone();
    if let Some(set) = step["set"].as_object() {
        for (pointer, value) in set {
            assign(&mut body, pointer, Some(value.clone()))?;
        }
    }
    for pointer in step["unset"].as_array().into_iter().flatten() {
        assign(&mut body, &as_text(pointer), None)?;
    }
    Ok(Some(body.to_string().into_bytes()))
}

/// Sets or removes the value at a pointer, making missing maps on the way.
fn assign(document: &mut Value, pointer: &str, value: Option<Value>) -> Result<(), String> {
    let parts: Vec<String> = pointer
        .split('/')
        .skip(1)
        .map(|p| p.replace("~1", "/").replace("~0", "~"))
        .collect();
    let Some((last, path)) = parts.split_last() else {
        *document = value.unwrap_or(Value::Null);
        return Ok(());
    };
    let mut at = document;
    for part in path {
        at = match at {
            Value::Array(list) => {
                let index: usize = part.parse().map_err(|_| format!("bad pointer {pointer}"))?;
                list.get_mut(index)
                    .ok_or_else(|| format!("nothing at {pointer}"))?
            }
            Value::Object(map) => map
                .entry(part.clone())
                .or_insert_with(|| Value::Object(serde_json::Map::new())),
            _ => return Err(format!("nothing at {pointer}")),
        };
    }
    match (at, value) {
        (Value::Object(map), Some(value)) => {
            map.insert(last.clone(), value);
        }
        (Value::Object(map), None) => {
            map.remove(last);
        }
        (Value::Array(list), value) => {
            let end = list.len();
            let index = if last == "-" {
                end
            } else {
                last.parse().unwrap_or(end)
            };
            match value {
                Some(value) if index < end => list[index] = value,
                Some(value) => list.push(value),
                None if index < end => {
                    list.remove(index);
                }
                None => {}
            }
        }
        _ => return Err(format!("nothing at {pointer}")),
    }
    Ok(())
}

fn check(step: &Value, status: u16, headers: &http::HeaderMap, body: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(body);
    let shown = || text.chars().take(500).collect::<String>();
    let allowed = match &step["status"] {
        Value::Null => true,
        Value::Array(list) => list.iter().any(|s| s.as_u64() == Some(u64::from(status))),
        one => one.as_u64() == Some(u64::from(status)),
    };
    if !allowed {
        return Err(format!(
            "status {status}, expected {}: {}",
            step["status"],
            shown()
        ));
    }
    let json: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    if let Some(reason) = step["reason"].as_str() {
        let right = json["kind"] == "Status"
            && json["status"] == "Failure"
            && json["reason"] == reason
            && json["code"].as_u64() == Some(u64::from(status));
        if !right {
            return Err(format!(
                "expected a Status with reason {reason} and code {status}: {}",
                shown()
            ));
        }
    }
    if !step["want"].is_null() {
        check_want(&step["want"], &json)?;
    }
    for part in step["text_has"].as_array().into_iter().flatten() {
        if !text.contains(&as_text(part)) {
            return Err(format!("body lacks {part}: {}", shown()));
        }
    }
    check_headers(step, headers)?;
    if let Some(prefix) = step["bytes_hex_prefix"].as_str() {
        let hex: String = body
            .iter()
            .take(prefix.len() / 2)
            .map(|b| format!("{b:02x}"))
            .collect();
        if !hex.eq_ignore_ascii_case(prefix) {
            return Err(format!("body begins with {hex}, expected {prefix}"));
        }
    }
    Ok(())
}

fn check_headers(step: &Value, headers: &http::HeaderMap) -> Result<(), String> {
    if let Some(map) = step["headers_has"].as_object() {
        for (name, part) in map {
            let found = header(headers, name);
            if !found.contains(&as_text(part)) {
                return Err(format!("header {name} is {found:?}, expected {part} in it"));
            }
        }
    }
    let warnings = warnings(headers);
    for part in step["warnings_has"].as_array().into_iter().flatten() {
        if !warnings.iter().any(|w| w.contains(&as_text(part))) {
            return Err(format!("no warning holds {part}: {warnings:?}"));
        }
    }
    if step["no_warnings"] == true && !warnings.is_empty() {
        return Err(format!("unexpected warnings {warnings:?}"));
    }
    Ok(())
}

fn header(headers: &http::HeaderMap, name: &str) -> String {
    let values: Vec<String> = headers
        .get_all(name)
        .iter()
        .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned())
        .collect();
    values.join(", ")
}

/// Unquoted texts of the `Warning: 299` headers.
fn warnings(headers: &http::HeaderMap) -> Vec<String> {
    headers
        .get_all("warning")
        .iter()
        .filter_map(|v| {
            let text = String::from_utf8_lossy(v.as_bytes()).into_owned();
            let rest = text.strip_prefix("299 ")?;
            let start = rest.find('"')?;
            let end = rest.rfind('"')?;
            (end > start).then(|| {
                rest[start + 1..end]
                    .replace("\\\"", "\"")
                    .replace("\\\\", "\\")
            })
        })
        .collect()
}

fn capture(
    branch: &mut Branch,
    step: &Value,
    headers: &http::HeaderMap,
    body: &[u8],
) -> Result<(), String> {
    if let Some(map) = step["capture"].as_object() {
        let json: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
        for (name, pointer) in map {
            let found = lookup(&json, &as_text(pointer))
                .ok_or_else(|| format!("capture {name}: nothing at {pointer}"))?;
            branch.vars.insert(name.clone(), found);
        }
    }
    if let Some(map) = step["capture_headers"].as_object() {
        for (name, header_name) in map {
            let found = header(headers, &as_text(header_name));
            branch.vars.insert(name.clone(), Value::String(found));
        }
    }
    Ok(())
}
