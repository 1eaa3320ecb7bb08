//! JSON and YAML text to a value, noticing keys that occur twice in one object (the last one counts).

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Duplicate fields that are named in one answer.
const MAX_REPORTED: usize = 100;
/// Nesting beyond this is refused; serde_json has the same limit of its own, the YAML reader does not.
const MAX_DEPTH: usize = 128;
/// The YAML reader looks at every open `[` and `{` for every token, before anything can be refused for its depth. So
/// the product of both numbers is bounded: about a second of work.
const MAX_YAML_STEPS: usize = 1 << 29;

/// A parsed document and the paths of its duplicate keys.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) value: Value,
    pub(crate) duplicates: Vec<String>,
}

/// Parses one JSON document.
pub(crate) fn parse_json(body: &[u8]) -> Result<Parsed, String> {
    let state = State::default();
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let value = Seed {
        state: &state,
        depth: 0,
    }
    .deserialize(&mut deserializer)
    .map_err(|e| e.to_string())?;
    deserializer.end().map_err(|e| e.to_string())?;
    Ok(state.finish(value))
}

/// Parses one YAML document; JSON is YAML, too, and what most clients send as YAML.
pub(crate) fn parse_yaml(body: &[u8]) -> Result<Parsed, String> {
    if body.trim_ascii_start().first() == Some(&b'{')
        && let Ok(parsed) = parse_json(body)
    {
        return Ok(parsed);
    }
    if yaml_steps(body) > MAX_YAML_STEPS {
        return Err("too many flow collections for YAML; send JSON".into());
    }
    let state = State::default();
    let value = Seed {
        state: &state,
        depth: 0,
    }
    .deserialize(serde_yaml_ng::Deserializer::from_slice(body))
    .map_err(|e| e.to_string())?;
    Ok(state.finish(value))
}

/// At least as many steps as the YAML reader takes over its open collections. Brackets in text count as well: what is
/// text is known only after reading.
fn yaml_steps(body: &[u8]) -> usize {
    let count = |set: &[u8]| body.iter().filter(|b| set.contains(b)).count();
    count(b"[{").saturating_mul(count(b"[]{},:?\n"))
}

#[derive(Default)]
struct State {
    path: RefCell<Vec<String>>,
    duplicates: RefCell<Vec<String>>,
}

impl State {
    fn finish(self, value: Value) -> Parsed {
        Parsed {
            value,
            duplicates: self.duplicates.into_inner(),
        }
    }

    fn note_duplicate(&self) {
        let mut duplicates = self.duplicates.borrow_mut();
        let text = self.path.borrow().concat();
        let path = text.strip_prefix('.').unwrap_or(&text).to_owned();
        if duplicates.len() < MAX_REPORTED && !duplicates.contains(&path) {
            duplicates.push(path);
        }
    }
}

#[derive(Clone, Copy)]
struct Seed<'a> {
    state: &'a State,
    depth: usize,
}

impl Seed<'_> {
    fn deeper<E: Error>(self) -> Result<Self, E> {
        if self.depth >= MAX_DEPTH {
            return Err(E::custom("the document is nested too deeply"));
        }
        Ok(Self {
            depth: self.depth + 1,
            ..self
        })
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_f64<E: Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v)
            .map(Value::Number)
            .ok_or_else(|| E::custom("a number is not finite"))
    }
    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }
    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }
    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let inner = self.deeper()?;
        let mut items = Vec::new();
        loop {
            self.state
                .path
                .borrow_mut()
                .push(format!("[{}]", items.len()));
            let item = seq.next_element_seed(inner)?;
            self.state.path.borrow_mut().pop();
            match item {
                Some(item) => items.push(item),
                None => return Ok(Value::Array(items)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let inner = self.deeper()?;
        let mut map = Map::new();
        while let Some(key) = access.next_key_seed(KeySeed)? {
            self.state.path.borrow_mut().push(format!(".{key}"));
            if map.contains_key(&key) {
                self.state.note_duplicate();
            }
            let value = access.next_value_seed(inner)?;
            self.state.path.borrow_mut().pop();
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

/// Keys as text; YAML also knows numbers and booleans as keys.
struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = String;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for KeySeed {
    type Value = String;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_str<E>(self, v: &str) -> Result<String, E> {
        Ok(v.to_owned())
    }
    fn visit_string<E>(self, v: String) -> Result<String, E> {
        Ok(v)
    }
    fn visit_bool<E>(self, v: bool) -> Result<String, E> {
        Ok(v.to_string())
    }
    fn visit_i64<E>(self, v: i64) -> Result<String, E> {
        Ok(v.to_string())
    }
    fn visit_u64<E>(self, v: u64) -> Result<String, E> {
        Ok(v.to_string())
    }
    fn visit_f64<E>(self, v: f64) -> Result<String, E> {
        Ok(v.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn duplicates_are_named_and_the_last_counts() {
        let parsed = parse_json(br#"{"a":1,"b":[{"c":1,"c":2}],"a":3}"#).unwrap();
        assert_eq!(parsed.value, json!({"a": 3, "b": [{"c": 2}]}));
        assert_eq!(parsed.duplicates, ["b[0].c", "a"]);
    }

    #[test]
    fn yaml_reads_what_kubectl_sends() {
        let parsed = parse_yaml(b"a: {1: x, true: y}\nb:\n- 1.5\n- null\n- '07'\n").unwrap();
        assert_eq!(
            parsed.value,
            json!({"a": {"1": "x", "true": "y"}, "b": [1.5, null, "07"]})
        );
        assert!(parse_yaml(b"a: b: c").is_err());
    }

    #[test]
    fn deep_nesting_is_refused_without_a_crash() {
        let deep = "[".repeat(100_000);
        assert!(parse_json(deep.as_bytes()).is_err());
        assert!(parse_yaml(deep.as_bytes()).is_err());
        assert!(parse_yaml("{a: ".repeat(100_000).as_bytes()).is_err());
    }

    #[test]
    fn what_the_yaml_reader_would_chew_on_for_hours_is_refused_at_once() {
        let open = "[".repeat(1_000);
        let long = format!("a: {open}{}", "b,".repeat(1_000_000));
        assert!(yaml_steps(long.as_bytes()) > MAX_YAML_STEPS);
        assert!(parse_yaml(long.as_bytes()).unwrap_err().contains("JSON"));
        // JSON is never read by the YAML reader.
        let members = vec![r#"{"a":["b"]}"#; 50_000].join(",");
        let json = format!(r#"{{"list":[{members}]}}"#);
        assert!(yaml_steps(json.as_bytes()) > MAX_YAML_STEPS);
        assert!(parse_yaml(json.as_bytes()).is_ok());
    }
}
