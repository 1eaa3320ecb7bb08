//! Label and field selectors of lists and watches. Pure.

use serde_json::Value;

use super::registry::FieldLabels;
use crate::status::ApiError;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Operator {
    In,
    NotIn,
    Exists,
    NotExists,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
    values: Vec<String>,
}

/// A parsed `labelSelector`: all requirements must hold. The default selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector {
    requirements: Vec<Requirement>,
}

impl LabelSelector {
    /// Parses the text of the query parameter.
    ///
    /// # Errors
    /// 400 that quotes the selector and says what was expected.
    pub fn parse(text: &str) -> Result<Self, ApiError> {
        let bad = |why: String| {
            ApiError::bad_request(format!("unable to parse requirement of {text:?}: {why}"))
        };
        let mut parser = Parser { rest: text };
        let mut requirements = Vec::new();
        parser.spaces();
        while !parser.rest.is_empty() {
            requirements.push(parser.requirement().map_err(bad)?);
            parser.spaces();
            if parser.rest.is_empty() {
                break;
            }
            parser.take(",").map_err(bad)?;
            parser.spaces();
            if parser.rest.is_empty() {
                return Err(bad("found the end, expected a key".into()));
            }
        }
        Ok(Self { requirements })
    }

    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Whether labels, looked up by key, match.
    pub fn matches<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.requirements.iter().all(|r| {
            let value = get(&r.key);
            match r.operator {
                Operator::Exists => value.is_some(),
                Operator::NotExists => value.is_none(),
                Operator::In => value.is_some_and(|v| r.values.iter().any(|w| w == v)),
                Operator::NotIn => value.is_none_or(|v| r.values.iter().all(|w| w != v)),
            }
        })
    }

    /// Whether the object's labels match.
    #[must_use]
    pub fn matches_object(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.matches(|key| labels.get(key).and_then(Value::as_str))
    }

    /// A `LabelSelector` object (matchLabels and matchExpressions). `None` (absent) matches nothing.
    #[must_use]
    pub fn from_object(selector: &Value) -> Option<Self> {
        let selector = selector.as_object()?;
        let mut requirements = Vec::new();
        let labels = selector.get("matchLabels").and_then(Value::as_object);
        for (key, value) in labels.into_iter().flatten() {
            requirements.push(Requirement {
                key: key.clone(),
                operator: Operator::In,
                values: vec![value.as_str()?.to_owned()],
            });
        }
        let expressions = selector.get("matchExpressions").and_then(Value::as_array);
        for expression in expressions.into_iter().flatten() {
            let operator = match expression["operator"].as_str()? {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::NotExists,
                _ => return None,
            };
            let values = expression["values"].as_array();
            let values = values.into_iter().flatten().filter_map(Value::as_str);
            requirements.push(Requirement {
                key: expression["key"].as_str()?.to_owned(),
                operator,
                values: values.map(str::to_owned).collect(),
            });
        }
        Some(Self { requirements })
    }
}

impl std::fmt::Display for LabelSelector {
    /// The text form, as in `status.selector` of a Scale.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, r) in self.requirements.iter().enumerate() {
            if n > 0 {
                f.write_str(",")?;
            }
            let key = &r.key;
            match (&r.operator, r.values.as_slice()) {
                (Operator::Exists, _) => write!(f, "{key}")?,
                (Operator::NotExists, _) => write!(f, "!{key}")?,
                (Operator::In, [one]) => write!(f, "{key}={one}")?,
                (Operator::In, many) => write!(f, "{key} in ({})", many.join(","))?,
                (Operator::NotIn, many) => write!(f, "{key} notin ({})", many.join(","))?,
            }
        }
        Ok(())
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn word(&mut self) -> &'a str {
        self.spaces();
        let end = self
            .rest
            .find(|c: char| c.is_whitespace() || ",()=!<>".contains(c))
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    fn accept(&mut self, token: &str) -> bool {
        self.spaces();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn take(&mut self, token: &str) -> Result<(), String> {
        if self.accept(token) {
            Ok(())
        } else {
            Err(self.expected(&format!("{token:?}")))
        }
    }

    fn expected(&self, what: &str) -> String {
        let found = if self.rest.is_empty() {
            "the end"
        } else {
            self.rest
        };
        format!("found {found:?}, expected {what}")
    }

    fn requirement(&mut self) -> Result<Requirement, String> {
        let absent = self.accept("!");
        let key = self.word().to_owned();
        if !is_label_key(&key) {
            return Err(format!("{key:?} is not a label key"));
        }
        let plain = |operator, values| Requirement {
            key: key.clone(),
            operator,
            values,
        };
        if absent {
            return Ok(plain(Operator::NotExists, Vec::new()));
        }
        self.spaces();
        if self.rest.is_empty() || self.rest.starts_with(',') {
            return Ok(plain(Operator::Exists, Vec::new()));
        }
        if self.accept("!=") {
            return Ok(plain(Operator::NotIn, vec![self.value()?]));
        }
        if self.accept("==") || self.accept("=") {
            return Ok(plain(Operator::In, vec![self.value()?]));
        }
        let operator = match self.word() {
            "in" => Operator::In,
            "notin" => Operator::NotIn,
            _ => return Err(self.expected("one of =, ==, !=, in, notin")),
        };
        self.take("(")?;
        let mut values = vec![self.value()?];
        while self.accept(",") {
            values.push(self.value()?);
        }
        self.take(")")?;
        Ok(plain(operator, values))
    }

    fn value(&mut self) -> Result<String, String> {
        let value = self.word();
        if is_label_value(value) {
            Ok(value.to_owned())
        } else {
            Err(format!("{value:?} is not a label value"))
        }
    }
}

/// Most characters of a label's name or value.
const LABEL_CHARS: usize = 63;
/// Most characters of a label key's prefix.
const PREFIX_CHARS: usize = 253;

fn is_label_name(name: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    name.len() <= LABEL_CHARS
        && edge(name.chars().next())
        && edge(name.chars().last())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn is_label_value(value: &str) -> bool {
    value.is_empty() || is_label_name(value)
}

fn is_label_key(key: &str) -> bool {
    match key.split_once('/') {
        None => is_label_name(key),
        Some((prefix, name)) => {
            let part = |p: &str| {
                !p.is_empty()
                    && !p.starts_with('-')
                    && !p.ends_with('-')
                    && p.chars()
                        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            };
            prefix.len() <= PREFIX_CHARS && prefix.split('.').all(part) && is_label_name(name)
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FieldTerm {
    path: Vec<String>,
    equal: bool,
    value: String,
}

/// A parsed `fieldSelector`: all terms must hold. The default selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldSelector {
    terms: Vec<FieldTerm>,
}

impl FieldSelector {
    /// Parses the text of the query parameter; `labels` are the fields of the kind that may be selected besides
    /// metadata.name and metadata.namespace.
    ///
    /// # Errors
    /// 400 for syntax errors and fields that cannot be selected.
    pub fn parse(text: &str, labels: FieldLabels) -> Result<Self, ApiError> {
        let mut terms = Vec::new();
        for term in split_unescaped(text).into_iter().filter(|t| !t.is_empty()) {
            let (field, equal, value) = split_term(&term).ok_or_else(|| {
                let why = format!("invalid selector: {text:?}; can't understand {term:?}");
                ApiError::bad_request(why)
            })?;
            let path = match field {
                "metadata.name" | "metadata.namespace" => field,
                _ => {
                    let found = labels.iter().find(|(label, _)| *label == field);
                    let unknown =
                        || ApiError::bad_request(format!("field label not supported: {field}"));
                    found.ok_or_else(unknown)?.1
                }
            };
            let path = path.split('.').map(str::to_owned).collect();
            terms.push(FieldTerm {
                path,
                equal,
                value: unescape(value),
            });
        }
        Ok(Self { terms })
    }

    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.terms.is_empty()
    }

    /// The one name that can match, when the selector requires one.
    #[must_use]
    pub fn only_name(&self) -> Option<&str> {
        let named = |t: &&FieldTerm| t.equal && t.path == ["metadata", "name"];
        self.terms.iter().find(named).map(|t| t.value.as_str())
    }

    #[must_use]
    pub fn matches(&self, object: &Value) -> bool {
        self.terms
            .iter()
            .all(|t| (field_text(object, &t.path) == t.value) == t.equal)
    }
}

/// The text that a field is compared by; absent flags are false and absent counts are 0.
fn field_text(object: &Value, path: &[String]) -> String {
    let mut at = object;
    for key in path {
        at = &at[key.as_str()];
    }
    match (at, path.last().map(String::as_str)) {
        (Value::String(text), _) => text.clone(),
        (Value::Null, Some("unschedulable" | "hostNetwork")) => "false".into(),
        (Value::Null, Some("replicas" | "succeeded")) => "0".into(),
        (Value::Null, _) => String::new(),
        (other, _) => other.to_string(),
    }
}

fn split_unescaped(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut escaped = false;
    for c in text.chars() {
        if c == ',' && !escaped {
            parts.push(String::new());
            continue;
        }
        escaped = c == '\\' && !escaped;
        if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
}

fn split_term(term: &str) -> Option<(&str, bool, &str)> {
    let at = term.find(['=', '!'])?;
    let (field, rest) = term.split_at(at);
    if field.is_empty() {
        return None;
    }
    if let Some(value) = rest.strip_prefix("!=") {
        return Some((field, false, value));
    }
    let value = rest.strip_prefix("==").or_else(|| rest.strip_prefix('='))?;
    Some((field, true, value))
}

fn unescape(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    let mut escaped = false;
    for c in value.chars() {
        if c == '\\' && !escaped {
            escaped = true;
        } else {
            escaped = false;
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn labels(selector: &str) -> Vec<&'static str> {
        let selector = LabelSelector::parse(selector).unwrap();
        let objects = [
            (
                "a",
                json!({"metadata": {"labels": {"app": "web", "tier": "front"}}}),
            ),
            (
                "b",
                json!({"metadata": {"labels": {"app": "web", "tier": "back"}}}),
            ),
            ("c", json!({"metadata": {"labels": {"app": "db"}}})),
            ("d", json!({"metadata": {}})),
        ];
        objects
            .iter()
            .filter(|(_, o)| selector.matches_object(o))
            .map(|(n, _)| *n)
            .collect()
    }

    #[test]
    fn label_selectors_of_every_form() {
        assert_eq!(labels("app=web"), ["a", "b"]);
        assert_eq!(labels("app == web"), ["a", "b"]);
        assert_eq!(labels("app!=web"), ["c", "d"]);
        assert_eq!(labels("app in (web, db)"), ["a", "b", "c"]);
        assert_eq!(labels("app notin (web)"), ["c", "d"]);
        assert_eq!(labels("tier"), ["a", "b"]);
        assert_eq!(labels("!tier"), ["c", "d"]);
        assert_eq!(labels("app in (web,db),!tier"), ["c"]);
        assert_eq!(labels(""), ["a", "b", "c", "d"]);
    }

    #[test]
    fn unreadable_label_selectors_are_refused() {
        for bad in [
            "app in",
            "a=b=c",
            "app in () x",
            "app in (x",
            "=x",
            "a,",
            "a=b c",
            "!",
            "a=-x",
        ] {
            assert_eq!(LabelSelector::parse(bad).unwrap_err().code, 400, "{bad}");
        }
    }

    #[test]
    fn field_selectors_know_their_fields() {
        let labels: FieldLabels = &[("spec.nodeName", "spec.nodeName")];
        let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n,1"}});
        let matches = |s: &str| FieldSelector::parse(s, labels).unwrap().matches(&pod);
        assert!(matches("metadata.name=p,spec.nodeName=n\\,1"));
        assert!(matches("spec.nodeName!=other"));
        assert!(!matches("metadata.name!=p"));
        assert_eq!(
            FieldSelector::parse("metadata.name", labels)
                .unwrap_err()
                .code,
            400
        );
        let unknown = FieldSelector::parse("data.k=v", labels).unwrap_err();
        assert!(unknown.message.contains("field label not supported"));
    }
}
