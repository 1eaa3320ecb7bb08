//! Expectations of API cases: literals, `$` operators and JSON pointers with `*`. Pure.

use serde_json::Value;

type Check = Result<(), String>;

/// Checks every `pointer: expectation` of a `want` map against a document.
///
/// # Errors
/// The first pointer that does not hold, with what was found.
pub(super) fn check_want(want: &Value, document: &Value) -> Check {
    let Some(map) = want.as_object() else {
        return Err(format!("want must be a map, found {want}"));
    };
    for (pointer, expectation) in map {
        let found = lookup(document, pointer);
        matches(expectation, found.as_ref(), false).map_err(|e| format!("{pointer}: {e}"))?;
    }
    Ok(())
}

/// The value at a JSON pointer; with `*` the list of everything found.
#[must_use]
pub(super) fn lookup(document: &Value, pointer: &str) -> Option<Value> {
    if pointer.is_empty() {
        return Some(document.clone());
    }
    let parts: Vec<String> = pointer
        .split('/')
        .skip(1)
        .map(|p| p.replace("~1", "/").replace("~0", "~"))
        .collect();
    if parts.iter().any(|p| p == "*") {
        let mut found = Vec::new();
        collect(document, &parts, &mut found);
        return Some(Value::Array(found));
    }
    parts
        .iter()
        .try_fold(document, |value, part| step(value, part))
        .cloned()
}

fn step<'a>(value: &'a Value, part: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map.get(part),
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        _ => None,
    }
}

fn collect(value: &Value, parts: &[String], found: &mut Vec<Value>) {
    let Some((first, rest)) = parts.split_first() else {
        found.push(value.clone());
        return;
    };
    if first == "*" {
        match value {
            Value::Array(list) => list.iter().for_each(|v| collect(v, rest, found)),
            Value::Object(map) => map.values().for_each(|v| collect(v, rest, found)),
            _ => {}
        }
    } else if let Some(next) = step(value, first) {
        collect(next, rest, found);
    }
}

/// Does `actual` meet `expectation`? With `subset`, maps may have more keys than expected.
///
/// # Errors
/// What differed.
pub(super) fn matches(expectation: &Value, actual: Option<&Value>, subset: bool) -> Check {
    let value = actual.unwrap_or(&Value::Null);
    match expectation {
        Value::Object(map) if !map.is_empty() && map.keys().all(|k| k.starts_with('$')) => {
            map.iter().try_for_each(|(op, argument)| {
                operator(op, argument, actual).map_err(|e| format!("{op}: {e}"))
            })
        }
        Value::Object(map) => match_map(map, value, subset),
        Value::Array(list) => match_list(list, value, subset),
        Value::Number(_) => {
            let same = number(expectation).is_some()
                && value.is_number()
                && number(expectation) == number(value);
            differs(same, expectation, value)
        }
        _ => differs(expectation == value, expectation, value),
    }
}

fn match_map(map: &serde_json::Map<String, Value>, value: &Value, subset: bool) -> Check {
    let Some(found) = value.as_object() else {
        return Err(format!("expected a map, found {}", short(value)));
    };
    for (key, expected) in map {
        matches(expected, found.get(key), subset).map_err(|e| format!(".{key}: {e}"))?;
    }
    if subset {
        return Ok(());
    }
    match found.keys().find(|k| !map.contains_key(*k)) {
        Some(extra) => Err(format!("unexpected key {extra} in {}", short(value))),
        None => Ok(()),
    }
}

fn match_list(list: &[Value], value: &Value, subset: bool) -> Check {
    let Some(found) = value.as_array() else {
        return Err(format!("expected a list, found {}", short(value)));
    };
    if found.len() != list.len() {
        return Err(format!(
            "expected {} elements, found {}",
            list.len(),
            short(value)
        ));
    }
    list.iter()
        .zip(found)
        .enumerate()
        .try_for_each(|(i, (expected, v))| {
            matches(expected, Some(v), subset).map_err(|e| format!("[{i}]: {e}"))
        })
}

fn differs(same: bool, expected: &Value, found: &Value) -> Check {
    if same {
        Ok(())
    } else {
        Err(format!("expected {expected}, found {}", short(found)))
    }
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(n) => n.as_f64(),
        Value::String(s) => s.parse().ok(),
        _ => None,
    }
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 400 {
        format!("{}…", text.chars().take(400).collect::<String>())
    } else {
        text
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
    }
}

fn ensure(holds: bool, found: &Value) -> Check {
    if holds {
        Ok(())
    } else {
        Err(format!("does not hold for {}", short(found)))
    }
}

fn compare(argument: &Value, value: &Value, holds: fn(f64, f64) -> bool) -> Check {
    match (number(value), number(argument)) {
        (Some(found), Some(bound)) => ensure(holds(found, bound), value),
        _ => Err(format!("cannot compare {} with {argument}", short(value))),
    }
}

fn elements(value: &Value) -> Result<Vec<&Value>, String> {
    match value {
        Value::Array(list) => Ok(list.iter().collect()),
        Value::Null => Ok(Vec::new()),
        Value::Object(map) => Ok(map.values().collect()),
        _ => Err(format!("expected a list, found {}", short(value))),
    }
}

fn text_of(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

fn operator(op: &str, argument: &Value, actual: Option<&Value>) -> Check {
    let value = actual.unwrap_or(&Value::Null);
    match op {
        "$exists" => ensure(actual.is_some() == (argument == &Value::Bool(true)), value),
        "$empty" => ensure(is_empty(value) == (argument == &Value::Bool(true)), value),
        "$ne" => ensure(matches(argument, actual, false).is_err(), value),
        "$in" => {
            let options = argument.as_array().map(Vec::as_slice).unwrap_or_default();
            ensure(
                options.iter().any(|o| matches(o, actual, false).is_ok()),
                value,
            )
        }
        "$gt" => compare(argument, value, |a, b| a > b),
        "$gte" => compare(argument, value, |a, b| a >= b),
        "$lt" => compare(argument, value, |a, b| a < b),
        "$lte" => compare(argument, value, |a, b| a <= b),
        "$has" => ensure(
            !value.is_null() && text_of(value).contains(&text_of(argument)),
            value,
        ),
        "$re" => {
            let pattern = regex::Regex::new(&text_of(argument)).map_err(|e| e.to_string())?;
            ensure(!value.is_null() && pattern.is_match(&text_of(value)), value)
        }
        "$sub" => matches(argument, actual, true),
        _ => list_operator(op, argument, value),
    }
}

fn list_operator(op: &str, argument: &Value, value: &Value) -> Check {
    if op == "$len" {
        let length = match value {
            Value::Array(a) => a.len(),
            Value::Object(o) => o.len(),
            _ => 0,
        };
        return matches(argument, Some(&Value::from(length)), false)
            .map_err(|e| format!("length {e}, in {}", short(value)));
    }
    let found = elements(value)?;
    let some = |e: &Value| found.iter().any(|v| matches(e, Some(v), true).is_ok());
    match op {
        "$set" => same_set(argument, &found),
        "$unique" => {
            let twice = found
                .iter()
                .enumerate()
                .any(|(i, v)| found.iter().skip(i + 1).any(|w| w == v));
            ensure(!twice, value)
        }
        "$each" => found
            .iter()
            .try_for_each(|v| matches(argument, Some(v), false)),
        "$any" => match argument {
            Value::Array(list) => match list.iter().find(|e| !some(e)) {
                Some(e) => Err(format!("no element matches {e} in {}", short(value))),
                None => Ok(()),
            },
            one if some(one) => Ok(()),
            one => Err(format!("no element matches {one} in {}", short(value))),
        },
        "$all" => {
            ensure(!found.is_empty(), value)?;
            found
                .iter()
                .try_for_each(|v| matches(argument, Some(v), true))
        }
        "$none" => ensure(!some(argument), value),
        _ => Err(format!("unknown operator {op}")),
    }
}

/// The same elements in any order, repeats counted: a perfect matching between the two lists.
fn same_set(argument: &Value, found: &[&Value]) -> Check {
    let expected = argument.as_array().map(Vec::as_slice).unwrap_or_default();
    let found_text = || short(&Value::Array(found.iter().map(|v| (*v).clone()).collect()));
    if expected.len() != found.len() {
        return Err(format!(
            "expected {} elements, found {}",
            expected.len(),
            found_text()
        ));
    }
    let mut owner: Vec<Option<usize>> = vec![None; found.len()];
    for (index, element) in expected.iter().enumerate() {
        let mut seen = vec![false; found.len()];
        if !assign(index, expected, found, &mut owner, &mut seen) {
            return Err(format!("{element} has no partner in {}", found_text()));
        }
    }
    Ok(())
}

fn assign(
    index: usize,
    expected: &[Value],
    found: &[&Value],
    owner: &mut [Option<usize>],
    seen: &mut [bool],
) -> bool {
    for candidate in 0..found.len() {
        if seen[candidate] || matches(&expected[index], Some(found[candidate]), false).is_err() {
            continue;
        }
        seen[candidate] = true;
        let free = match owner[candidate] {
            None => true,
            Some(other) => assign(other, expected, found, owner, seen),
        };
        if free {
            owner[candidate] = Some(index);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn literals_compare_exactly_and_operators_as_documented() {
        let doc = json!({"a": {"b": [{"n": 1, "t": "x"}, {"n": 2}]}, "s": "12", "z": 1.0});
        let holds = [
            json!({"/z": 1, "/a/b/*/n": [1, 2], "/a/b/0/t": "x", "/nope": {"$exists": false}}),
            json!({"/a/b": {"$any": [{"t": "x"}, {"n": 2}], "$len": 2}, "/s": {"$gt": 11}}),
            json!({"/a/b/*/n": {"$set": [2, 1], "$unique": true, "$each": {"$gte": 1}}}),
            json!({"/a": {"$sub": {"b": [{"n": 1}, {"n": 2}]}}, "/nope": {"$empty": true, "$ne": 1}}),
            json!({"/s": {"$re": "^1", "$has": "2", "$in": ["12", "13"]}, "/a/b": {"$none": {"n": 3}}}),
        ];
        for want in holds {
            assert_eq!(check_want(&want, &doc), Ok(()), "{want}");
        }
        let fails = [
            json!({"/a/b/0": {"n": 1}}),
            json!({"/a/b/*/n": {"$set": [1, 1]}}),
            json!({"/nope": {"$has": ""}}),
            json!({"/a/b": {"$all": {"t": "x"}}}),
            json!({"/s": 12}),
        ];
        for want in fails {
            assert!(check_want(&want, &doc).is_err(), "{want}");
        }
    }
}
