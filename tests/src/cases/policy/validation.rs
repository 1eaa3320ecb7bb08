//! What the API server takes and refuses: its own decoding, defaults and rules, in this process. Pure.

use anyhow::{Result, ensure};
use serde_json::Value;
use weir_control::apiserver::codec::{BodyFormat, FieldValidation, decode_object};
use weir_control::apiserver::defaults::apply_defaults;
use weir_control::apiserver::registry::Gvk;
use weir_control::apiserver::validation::validate_create;

use super::case::Validation;

/// Every object of the case is taken or refused as it says.
///
/// # Errors
/// All that are not.
pub(super) fn run(case: &Validation) -> Result<()> {
    let mut wrong = Vec::new();
    for judged in &case.objects {
        let name = judged.object["metadata"]["name"]
            .as_str()
            .unwrap_or_default();
        match (judged.valid, refusal(&judged.object)) {
            (true, Some(why)) => wrong.push(format!("{name} ({}) is refused: {why}", judged.why)),
            (false, None) => wrong.push(format!("{name} ({}) is taken", judged.why)),
            _ => {}
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

/// Why the API server would not create an object.
fn refusal(object: &Value) -> Option<String> {
    let version = object["apiVersion"].as_str().unwrap_or_default();
    let kind = object["kind"].as_str().unwrap_or_default();
    let gvk = Gvk::parse(version, kind);
    let body = object.to_string();
    let decoded = decode_object(
        BodyFormat::Json,
        body.as_bytes(),
        gvk,
        FieldValidation::Strict,
    );
    let mut object = match decoded {
        Ok(decoded) => decoded.object,
        Err(e) => return Some(e.to_string()),
    };
    apply_defaults(gvk, &mut object, None);
    let causes = validate_create(gvk, &object);
    let texts: Vec<String> = causes
        .iter()
        .map(|cause| format!("{}: {}", cause.field, cause.message))
        .collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}
