//! A place in an object and the list of what is wrong with it: the tools of every validation.

use std::cell::RefCell;
use std::fmt::Display;
use std::rc::Rc;

use serde_json::Value;

use crate::status::Cause;

/// Causes in one answer; what is found beyond is left out, as a client fixes the first ones first.
const MAX_CAUSES: usize = 100;

/// A value, or its absence, with the path that leads to it.
#[derive(Clone)]
pub(super) struct At<'a> {
    value: Option<&'a Value>,
    path: String,
    causes: Rc<RefCell<Vec<Cause>>>,
}

impl<'a> At<'a> {
    /// The whole object.
    pub(super) fn root(object: &'a Value) -> Self {
        Self {
            value: Some(object),
            path: String::new(),
            causes: Rc::default(),
        }
    }

    /// Everything reported below this root.
    pub(super) fn into_causes(self) -> Vec<Cause> {
        self.causes.take()
    }

    pub(super) fn get(&self, key: &str) -> Self {
        let path = if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        };
        self.step(self.value.and_then(|v| v.get(key)), path)
    }

    /// The value of a map whose keys are data, not field names.
    pub(super) fn key(&self, key: &str) -> Self {
        self.step(
            self.value.and_then(|v| v.get(key)),
            format!("{}[{key}]", self.path),
        )
    }

    pub(super) fn items(&self) -> Vec<Self> {
        let items = self
            .value
            .and_then(Value::as_array)
            .map_or(&[][..], Vec::as_slice);
        items
            .iter()
            .enumerate()
            .map(|(i, v)| self.step(Some(v), format!("{}[{i}]", self.path)))
            .collect()
    }

    /// Keys and values of a map whose keys are data.
    pub(super) fn entries(&self) -> Vec<(&'a str, Self)> {
        let Some(map) = self.value.and_then(Value::as_object) else {
            return Vec::new();
        };
        map.keys()
            .map(|key| (key.as_str(), self.key(key)))
            .collect()
    }

    fn step(&self, value: Option<&'a Value>, path: String) -> Self {
        Self {
            value: value.filter(|v| !v.is_null()),
            path,
            causes: Rc::clone(&self.causes),
        }
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    pub(super) fn value(&self) -> Option<&'a Value> {
        self.value
    }

    pub(super) fn exists(&self) -> bool {
        self.value.is_some()
    }

    pub(super) fn text(&self) -> &'a str {
        self.value.and_then(Value::as_str).unwrap_or_default()
    }

    pub(super) fn int(&self) -> Option<i64> {
        self.value.and_then(Value::as_i64)
    }

    pub(super) fn is_true(&self) -> bool {
        self.value == Some(&Value::Bool(true))
    }

    /// Absent, or an empty text, list or map.
    pub(super) fn is_empty(&self) -> bool {
        match self.value {
            None => true,
            Some(Value::String(text)) => text.is_empty(),
            Some(Value::Array(items)) => items.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            Some(_) => false,
        }
    }

    fn report(&self, reason: &'static str, message: String) {
        let mut causes = self.causes.borrow_mut();
        if causes.len() < MAX_CAUSES {
            causes.push(Cause {
                reason,
                message,
                field: self.path.clone(),
            });
        }
    }

    pub(super) fn required(&self, detail: &str) {
        self.report("FieldValueRequired", with_detail("Required value", detail));
    }

    pub(super) fn invalid(&self, detail: impl Display) {
        let value = self.value.unwrap_or(&Value::Null);
        self.report(
            "FieldValueInvalid",
            format!("Invalid value: {value}: {detail}"),
        );
    }

    /// For values that the answer must not repeat, or that are not those of the field.
    pub(super) fn invalid_value(&self, value: impl Into<Value>, detail: impl Display) {
        self.report(
            "FieldValueInvalid",
            format!("Invalid value: {}: {detail}", value.into()),
        );
    }

    pub(super) fn not_supported(&self, supported: &[&str]) {
        let value = self.value.unwrap_or(&Value::Null);
        let list: Vec<String> = supported.iter().map(|s| format!("\"{s}\"")).collect();
        let message = format!(
            "Unsupported value: {value}: supported values: {}",
            list.join(", ")
        );
        self.report("FieldValueNotSupported", message);
    }

    pub(super) fn duplicate(&self) {
        let value = self.value.unwrap_or(&Value::Null);
        self.report("FieldValueDuplicate", format!("Duplicate value: {value}"));
    }

    pub(super) fn not_found(&self) {
        let value = self.value.unwrap_or(&Value::Null);
        self.report("FieldValueNotFound", format!("Not found: {value}"));
    }

    pub(super) fn forbidden(&self, detail: &str) {
        self.report("FieldValueForbidden", with_detail("Forbidden", detail));
    }

    pub(super) fn too_long(&self, limit: usize) {
        self.report(
            "FieldValueTooLong",
            format!("Too long: may not be more than {limit} bytes"),
        );
    }

    pub(super) fn too_many(&self, count: usize, limit: usize) {
        let noun = if limit == 1 { "item" } else { "items" };
        self.report(
            "FieldValueTooMany",
            format!("Too many: {count}: must have at most {limit} {noun}"),
        );
    }

    /// Reports each text as a reason why the value is invalid.
    pub(super) fn each_invalid(&self, details: Vec<String>) {
        for detail in details {
            self.invalid(detail);
        }
    }

    // The checks that many kinds share.

    /// Reports an absent or empty value and says whether there is one.
    pub(super) fn needed(&self) -> bool {
        if self.is_empty() {
            self.required("");
        }
        !self.is_empty()
    }

    /// One of a set of words; an absent word is fine unless `needed` says otherwise.
    pub(super) fn one_of(&self, supported: &[&str]) {
        if !self.is_empty() && !supported.contains(&self.text()) {
            self.not_supported(supported);
        }
    }

    pub(super) fn needed_one_of(&self, supported: &[&str]) {
        if self.needed() {
            self.one_of(supported);
        }
    }

    pub(super) fn non_negative(&self) {
        if self.int().is_some_and(|n| n < 0) {
            self.invalid("must be greater than or equal to 0");
        }
    }

    pub(super) fn in_range(&self, low: i64, high: i64) {
        if self.int().is_some_and(|n| !(low..=high).contains(&n)) {
            self.invalid(format!("must be between {low} and {high}, inclusive"));
        }
    }

    /// A TCP or UDP port; an absent one is fine.
    pub(super) fn port(&self) {
        self.in_range(1, 65535);
    }

    /// Reports a difference to the old value of a field that may not change.
    pub(super) fn immutable(&self, old: &At<'_>) {
        if self.value != old.value {
            self.invalid("field is immutable");
        }
    }
}

fn with_detail(what: &str, detail: &str) -> String {
    if detail.is_empty() {
        what.to_owned()
    } else {
        format!("{what}: {detail}")
    }
}
