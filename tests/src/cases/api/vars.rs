//! `${…}` variables of API cases. Pure.

use std::collections::BTreeMap;

use serde_json::Value;

/// Variables of one case (or of one branch of it).
pub(super) type Vars = BTreeMap<String, Value>;

/// Replaces variables in every string of a step, keys included.
///
/// # Errors
/// Names the variable that is not set.
pub(super) fn substitute(value: &Value, vars: &Vars) -> Result<Value, String> {
    Ok(match value {
        Value::String(text) => replace(text, vars)?,
        Value::Array(list) => Value::Array(
            list.iter()
                .map(|v| substitute(v, vars))
                .collect::<Result<_, _>>()?,
        ),
        Value::Object(map) => {
            let mut out = serde_json::Map::new();
            for (key, v) in map {
                out.insert(as_text(&replace(key, vars)?), substitute(v, vars)?);
            }
            Value::Object(out)
        }
        other => other.clone(),
    })
}

fn replace(text: &str, vars: &Vars) -> Result<Value, String> {
    if let Some(name) = text.strip_prefix("${").and_then(|t| t.strip_suffix('}'))
        && !name.contains("${")
    {
        return variable(name, vars);
    }
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        out.push_str(&rest[..start]);
        let tail = &rest[start + 2..];
        let end = tail
            .find('}')
            .ok_or_else(|| format!("unclosed variable in {text}"))?;
        out.push_str(&as_text(&variable(&tail[..end], vars)?));
        rest = &tail[end + 1..];
    }
    out.push_str(rest);
    Ok(Value::String(out))
}

fn variable(name: &str, vars: &Vars) -> Result<Value, String> {
    if let Some(count) = name.strip_prefix("fill:") {
        let count: usize = count
            .parse()
            .map_err(|_| format!("bad count in ${{{name}}}"))?;
        return Ok(Value::String("a".repeat(count)));
    }
    if let Some(inner) = name.strip_prefix("url:") {
        return Ok(Value::String(percent_encode(&as_text(&variable(
            inner, vars,
        )?))));
    }
    vars.get(name)
        .cloned()
        .ok_or_else(|| format!("variable ${{{name}}} is not set"))
}

/// A value inside longer text.
#[must_use]
pub(super) fn as_text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

fn percent_encode(text: &str) -> String {
    use std::fmt::Write as _;
    text.bytes().fold(String::new(), |mut out, b| {
        if b.is_ascii_alphanumeric() || b"-._~".contains(&b) {
            out.push(char::from(b));
        } else {
            let _infallible = write!(out, "%{b:02X}");
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn whole_string_keeps_the_type_and_parts_become_text() {
        let vars: Vars = [("n".into(), json!(3)), ("c".into(), json!("a/b="))].into();
        let step = json!({"k${n}": "${n}", "t": "x${n}${fill:2}", "u": "${url:c}"});
        let expected = json!({"k3": 3, "t": "x3aa", "u": "a%2Fb%3D"});
        assert_eq!(substitute(&step, &vars), Ok(expected));
        assert!(substitute(&json!("${missing}"), &vars).is_err());
    }
}
