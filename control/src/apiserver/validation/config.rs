//! ConfigMaps and Secrets.

use base64::Engine as _;

use super::cursor::At;
use super::names;

/// Keys aside, the data of one ConfigMap or Secret, in bytes.
const MAX_DATA: usize = 1024 * 1024;
const IMMUTABLE: &str = "field is immutable when `immutable` is set";

pub(super) fn config_map(root: &At<'_>) {
    let (data, binary) = (root.get("data"), root.get("binaryData"));
    let mut size = 0;
    for (key, at) in data.entries() {
        for error in names::data_key(key) {
            at.invalid_value(key, error);
        }
        if binary.key(key).exists() {
            at.invalid_value(key, "duplicate of key present in binaryData");
        }
        size += at.text().len();
    }
    for (key, at) in binary.entries() {
        for error in names::data_key(key) {
            at.invalid_value(key, error);
        }
        size += decoded_length(at.text());
    }
    if size > MAX_DATA {
        root.too_long(MAX_DATA);
    }
}

/// Bytes that base64 text stands for.
fn decoded_length(text: &str) -> usize {
    text.trim_end_matches('=').len() * 3 / 4
}

/// What an immutable object keeps.
pub(super) fn immutable(new: &At<'_>, old: &At<'_>) {
    if !old.get("immutable").is_true() {
        return;
    }
    if !new.get("immutable").is_true() {
        new.get("immutable").forbidden(IMMUTABLE);
    }
    for field in ["data", "binaryData"] {
        if new.get(field).value() != old.get(field).value() {
            new.get(field).forbidden(IMMUTABLE);
        }
    }
}

pub(super) fn secret_update(new: &At<'_>, old: &At<'_>) {
    new.get("type").immutable(&old.get("type"));
    immutable(new, old);
}

pub(super) fn secret(root: &At<'_>) {
    let data = root.get("data");
    let mut size = 0;
    for (key, at) in data.entries() {
        for error in names::data_key(key) {
            at.invalid_value(key, error);
        }
        size += decoded_length(at.text());
    }
    if size > MAX_DATA {
        data.too_long(MAX_DATA);
    }
    match root.get("type").text() {
        "kubernetes.io/service-account-token" => {
            root.get("metadata")
                .get("annotations")
                .key("kubernetes.io/service-account.name")
                .needed();
        }
        "kubernetes.io/dockercfg" => json_member(&data.key(".dockercfg")),
        "kubernetes.io/dockerconfigjson" => json_member(&data.key(".dockerconfigjson")),
        "kubernetes.io/basic-auth" => {
            let (user, password) = (data.key("username"), data.key("password"));
            if !user.exists() && !password.exists() {
                user.required("");
                password.required("");
            }
        }
        "kubernetes.io/ssh-auth" => {
            data.key("ssh-privatekey").needed();
        }
        "kubernetes.io/tls" => {
            for key in ["tls.crt", "tls.key"] {
                if !data.key(key).exists() {
                    data.key(key).required("");
                }
            }
        }
        _ => {}
    }
}

fn json_member(at: &At<'_>) {
    if !at.exists() {
        at.required("");
        return;
    }
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(at.text())
        .unwrap_or_default();
    if serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&bytes).is_err() {
        // The answer must not repeat what a secret holds.
        at.invalid_value("<secret contents redacted>", "not a JSON object");
    }
}
