//! Reading an object for its cells, and the texts that several kinds share.

use jiff::Timestamp;
use serde_json::Value;

use crate::apiserver::schema::time::{human_duration, parse_time};

pub(super) const NONE: &str = "<none>";
pub(super) const UNKNOWN: &str = "<unknown>";
pub(super) const UNSET: &str = "<unset>";

/// One object and the time it is looked at.
pub(super) struct Row<'a> {
    object: &'a Value,
    now: Timestamp,
}

impl<'a> Row<'a> {
    pub(super) fn new(object: &'a Value, now: Timestamp) -> Self {
        Self { object, now }
    }

    pub(super) fn at(&self, pointer: &str) -> Option<&'a Value> {
        self.object.pointer(pointer)
    }

    pub(super) fn text(&self, pointer: &str) -> &'a str {
        self.at(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    /// The text at a pointer, or another where there is none.
    pub(super) fn text_or(&self, pointer: &str, otherwise: &'static str) -> String {
        let text = self.text(pointer);
        if text.is_empty() {
            otherwise.to_owned()
        } else {
            text.to_owned()
        }
    }

    pub(super) fn int(&self, pointer: &str) -> i64 {
        self.at(pointer).and_then(Value::as_i64).unwrap_or_default()
    }

    pub(super) fn is_true(&self, pointer: &str) -> bool {
        self.at(pointer) == Some(&Value::Bool(true))
    }

    pub(super) fn list(&self, pointer: &str) -> &'a [Value] {
        self.at(pointer)
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice)
    }

    pub(super) fn texts(&self, pointer: &str) -> Vec<&'a str> {
        self.list(pointer)
            .iter()
            .filter_map(Value::as_str)
            .collect()
    }

    pub(super) fn name(&self) -> Value {
        self.text("/metadata/name").into()
    }

    pub(super) fn age(&self) -> Value {
        self.since("/metadata/creationTimestamp").into()
    }

    pub(super) fn is_deleted(&self) -> bool {
        self.at("/metadata/deletionTimestamp").is_some()
    }

    /// The time since the timestamp at a pointer.
    pub(super) fn since(&self, pointer: &str) -> String {
        self.since_text(self.text(pointer))
    }

    pub(super) fn since_text(&self, text: &str) -> String {
        parse_time(text).map_or_else(
            || UNKNOWN.to_owned(),
            |then| human_duration(self.now.as_second() - then.as_second()),
        )
    }

    /// Whether a status condition of this type is True.
    pub(super) fn has_condition(&self, kind: &str) -> bool {
        self.list("/status/conditions")
            .iter()
            .any(|c| member(c, "type") == kind && member(c, "status") == "True")
    }

    /// Names and images of the containers of a pod template.
    pub(super) fn containers(&self, pod_spec: &str) -> (Value, Value) {
        let containers = self.list(&format!("{pod_spec}/containers"));
        let join = |key: &str| {
            let texts: Vec<&str> = containers.iter().map(|c| member(c, key)).collect();
            Value::String(texts.join(","))
        };
        (join("name"), join("image"))
    }
}

pub(super) fn member<'a>(object: &'a Value, key: &str) -> &'a str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// `a=1,b=2`, or `<none>`.
pub(super) fn labels(map: Option<&Value>) -> String {
    let mut pairs: Vec<String> = map
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    pairs.sort();
    if pairs.is_empty() {
        NONE.to_owned()
    } else {
        pairs.join(",")
    }
}

/// The text form of a label selector; empty for one that selects by nothing.
pub(super) fn selector(selector: Option<&Value>) -> String {
    let Some(selector) = selector else {
        return String::new();
    };
    let mut parts: Vec<(String, String)> = selector
        .get("matchLabels")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(key, value)| {
            (
                key.clone(),
                format!("{key}={}", value.as_str().unwrap_or_default()),
            )
        })
        .collect();
    for expression in selector
        .get("matchExpressions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let key = member(expression, "key");
        let mut values: Vec<&str> = expression
            .get("values")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        values.sort_unstable();
        let values = values.join(",");
        let text = match member(expression, "operator") {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "DoesNotExist" => format!("!{key}"),
            _ => key.to_owned(),
        };
        parts.push((key.to_owned(), text));
    }
    parts.sort();
    parts
        .into_iter()
        .map(|(_, text)| text)
        .collect::<Vec<_>>()
        .join(",")
}

/// [`selector`], or `<none>`.
pub(super) fn selector_or_none(value: Option<&Value>) -> Value {
    let text = selector(value);
    if text.is_empty() {
        NONE.into()
    } else {
        text.into()
    }
}

/// The first few of a list and how many more there are.
pub(super) fn with_more(items: &[String], shown: usize) -> String {
    if items.is_empty() {
        return "<unset>".to_owned();
    }
    let text = items[..items.len().min(shown)].join(",");
    if items.len() > shown {
        format!("{text} + {} more...", items.len() - shown)
    } else {
        text
    }
}
