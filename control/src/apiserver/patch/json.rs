//! JSON patch, RFC 6902, with JSON pointers of RFC 6901.

use serde_json::Value;

use crate::status::ApiError;

/// Operations in one patch; more are refused with 413, as upstream does.
pub(super) const MAX_OPERATIONS: usize = 10_000;

/// What all copies of one patch may add: each can double the object.
const MAX_COPIED_BYTES: usize = 3 << 20;
/// A value without its text: members are charged for what they take in memory.
const NODE_BYTES: usize = 32;

/// Roughly what a copy of the value takes.
fn weight(value: &Value) -> usize {
    let inner = match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(weight).sum(),
        Value::Object(map) => map.iter().map(|(k, v)| k.len() + weight(v)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    NODE_BYTES + inner
}

/// Applies all operations, or none.
///
/// # Errors
/// 400 for a malformed patch, 422 when an operation cannot be applied.
pub(super) fn apply(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let Value::Array(operations) = patch else {
        return Err(ApiError::bad_request(
            "a JSON patch must be a list of operations",
        ));
    };
    if operations.len() > MAX_OPERATIONS {
        let message = format!(
            "the allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {}",
            operations.len()
        );
        return Err(ApiError::new(413, "RequestEntityTooLarge", message));
    }
    let mut result = target.clone();
    let mut copied = 0;
    for (index, operation) in operations.iter().enumerate() {
        apply_one(&mut result, operation, index, &mut copied)?;
    }
    *target = result;
    Ok(())
}

fn too_much_copied() -> ApiError {
    let message = format!("the copies of a JSON patch may add at most {MAX_COPIED_BYTES} bytes");
    ApiError::new(413, "RequestEntityTooLarge", message)
}

fn apply_one(
    target: &mut Value,
    operation: &Value,
    index: usize,
    copied: &mut usize,
) -> Result<(), ApiError> {
    let text = |key: &str| operation.get(key).and_then(Value::as_str);
    let malformed = |what: &str| {
        ApiError::bad_request(format!(
            "operation {index} of the JSON patch is malformed: {what}"
        ))
    };
    let op = text("op").ok_or_else(|| malformed("`op` is missing"))?;
    let pointer = |key: &str| {
        let path = text(key).ok_or_else(|| malformed(&format!("`{key}` is missing")))?;
        parse_pointer(path)
            .ok_or_else(|| malformed(&format!("`{key}` is not a JSON pointer: {path}")))
    };
    let path = pointer("path")?;
    let value = || {
        operation
            .get("value")
            .cloned()
            .ok_or_else(|| malformed("`value` is missing"))
    };
    let outcome = match op {
        "add" => add(target, &path, value()?),
        "remove" => remove(target, &path).map(|_| ()),
        "replace" => replace(target, &path, value()?),
        "test" => test(
            target,
            &path,
            operation.get("value").unwrap_or(&Value::Null),
        ),
        "copy" => {
            let from = pointer("from")?;
            let found = find(target, &from);
            *copied += found.map_or(0, weight);
            if *copied > MAX_COPIED_BYTES {
                return Err(too_much_copied());
            }
            let value = found.cloned();
            value.and_then(|value| add(target, &path, value))
        }
        "move" => {
            let from = pointer("from")?;
            if path.len() > from.len() && path.starts_with(&from) {
                None
            } else {
                remove(target, &from).and_then(|moved| add(target, &path, moved))
            }
        }
        other => return Err(malformed(&format!("unknown `op` {other}"))),
    };
    outcome.ok_or_else(|| {
        let message = format!(
            "the server rejected our request due to an error in our request: operation {index} of the JSON patch \
             ({op} {}) cannot be applied",
            text("path").unwrap_or_default()
        );
        ApiError::new(422, "Invalid", message)
    })
}

/// The reference tokens of a pointer, unescaped.
fn parse_pointer(text: &str) -> Option<Vec<String>> {
    if text.is_empty() {
        return Some(Vec::new());
    }
    let rest = text.strip_prefix('/')?;
    Some(
        rest.split('/')
            .map(|token| token.replace("~1", "/").replace("~0", "~"))
            .collect(),
    )
}

fn find<'a>(target: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(target, |value, token| match value {
        Value::Object(map) => map.get(token),
        Value::Array(items) => items.get(array_index(token, items.len())?),
        _ => None,
    })
}

fn find_mut<'a>(target: &'a mut Value, path: &[String]) -> Option<&'a mut Value> {
    path.iter().try_fold(target, |value, token| match value {
        Value::Object(map) => map.get_mut(token),
        Value::Array(items) => {
            let index = array_index(token, items.len())?;
            items.get_mut(index)
        }
        _ => None,
    })
}

/// An index up to and including `length` (one past the end, for insertion).
fn array_index(token: &str, length: usize) -> Option<usize> {
    let canonical =
        token == "0" || (!token.starts_with('0') && token.bytes().all(|b| b.is_ascii_digit()));
    let index: usize = token.parse().ok().filter(|_| canonical)?;
    (index <= length).then_some(index)
}

fn add(target: &mut Value, path: &[String], value: Value) -> Option<()> {
    let Some((last, parents)) = path.split_last() else {
        *target = value;
        return Some(());
    };
    match find_mut(target, parents)? {
        Value::Object(map) => {
            map.insert(last.clone(), value);
        }
        Value::Array(items) => {
            let index = if last == "-" {
                items.len()
            } else {
                array_index(last, items.len())?
            };
            items.insert(index, value);
        }
        _ => return None,
    }
    Some(())
}

fn remove(target: &mut Value, path: &[String]) -> Option<Value> {
    let (last, parents) = path.split_last()?;
    match find_mut(target, parents)? {
        Value::Object(map) => map.shift_remove(last),
        Value::Array(items) => {
            let index = array_index(last, items.len()).filter(|i| *i < items.len())?;
            Some(items.remove(index))
        }
        _ => None,
    }
}

fn replace(target: &mut Value, path: &[String], value: Value) -> Option<()> {
    *find_mut(target, path)? = value;
    Some(())
}

/// A missing value equals null: clients test for absence that way.
fn test(target: &Value, path: &[String], expected: &Value) -> Option<()> {
    let found = find(target, path).unwrap_or(&Value::Null);
    same(found, expected).then_some(())
}

/// Equality by value: 1 and 1.0 are the same number.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
        (Value::Array(x), Value::Array(y)) => {
            x.len() == y.len() && x.iter().zip(y).all(|(a, b)| same(a, b))
        }
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(k, v)| y.get(k).is_some_and(|w| same(v, w)))
        }
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patched(mut target: Value, patch: Value) -> Result<Value, u16> {
        apply(&mut target, &patch)
            .map(|()| target)
            .map_err(|e| e.code)
    }

    #[test]
    fn each_operation_of_the_rfc() {
        for (target, patch, expected) in [
            (
                json!({"a": 1}),
                json!([{"op": "add", "path": "/b", "value": 2}]),
                json!({"a": 1, "b": 2}),
            ),
            (
                json!([1, 3]),
                json!([{"op": "add", "path": "/1", "value": 2}]),
                json!([1, 2, 3]),
            ),
            (
                json!([1]),
                json!([{"op": "add", "path": "/-", "value": 2}]),
                json!([1, 2]),
            ),
            (
                json!({"a/b": 1, "c~d": 2}),
                json!([{"op": "remove", "path": "/a~1b"}, {"op": "remove", "path": "/c~0d"}]),
                json!({}),
            ),
            (
                json!({"a": 1}),
                json!([{"op": "replace", "path": "/a", "value": null}]),
                json!({"a": null}),
            ),
            (
                json!({"a": {"b": 1}}),
                json!([{"op": "move", "from": "/a/b", "path": "/c"}]),
                json!({"a": {}, "c": 1}),
            ),
            (
                json!({"a": [1]}),
                json!([{"op": "copy", "from": "/a", "path": "/b"}]),
                json!({"a": [1], "b": [1]}),
            ),
            (
                json!({"a": 1}),
                json!([{"op": "test", "path": "/a", "value": 1.0}]),
                json!({"a": 1}),
            ),
            (
                json!({"a": 1}),
                json!([{"op": "test", "path": "/b", "value": null}]),
                json!({"a": 1}),
            ),
            (
                json!({"a": 1}),
                json!([{"op": "replace", "path": "", "value": 5}]),
                json!(5),
            ),
        ] {
            assert_eq!(patched(target, patch), Ok(expected));
        }
    }

    #[test]
    fn what_cannot_be_applied_is_422_and_changes_nothing() {
        for patch in [
            json!([{"op": "add", "path": "/b", "value": 1}, {"op": "test", "path": "/a", "value": 9}]),
            json!([{"op": "remove", "path": "/missing"}]),
            json!([{"op": "replace", "path": "/missing", "value": 1}]),
            json!([{"op": "add", "path": "/x/y", "value": 1}]),
            json!([{"op": "add", "path": "/l/5", "value": 1}]),
            json!([{"op": "remove", "path": "/l/01"}]),
            json!([{"op": "move", "from": "/l", "path": "/l/0"}]),
        ] {
            let mut target = json!({"a": 1, "l": [1, 2]});
            let before = target.clone();
            assert_eq!(apply(&mut target, &patch).unwrap_err().code, 422, "{patch}");
            assert_eq!(target, before);
        }
    }

    #[test]
    fn malformed_patches_are_400() {
        for patch in [
            json!({"op": "remove", "path": "/a"}),
            json!([{"path": "/a"}]),
            json!([{"op": "frob", "path": "/a"}]),
            json!([{"op": "remove", "path": "a"}]),
            json!([{"op": "add", "path": "/a"}]),
            json!([3]),
        ] {
            assert_eq!(patched(json!({"a": 1}), patch.clone()), Err(400), "{patch}");
        }
    }

    #[test]
    fn copies_that_double_the_object_are_bounded() {
        let copies =
            (0..64).map(|n| json!({"op": "copy", "from": "/x", "path": format!("/x/{n}")}));
        let patch = Value::Array(copies.collect());
        let mut target = json!({"x": {"a": "b"}});
        assert_eq!(apply(&mut target, &patch).unwrap_err().code, 413);
        assert_eq!(target, json!({"x": {"a": "b"}}));
    }
}
