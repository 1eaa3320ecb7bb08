//! Kubernetes `Status` (meta/v1) as the one error of the API surface: code, reason, message, details.

use serde_json::{Map, Value, json};

/// One cause in `details.causes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// For example FieldValueInvalid.
    pub reason: &'static str,
    pub message: String,
    /// JSON path, for example spec.ports[0].port.
    pub field: String,
}

/// An API error that becomes a `Status` body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({code} {reason})")]
pub struct ApiError {
    pub code: u16,
    /// For example NotFound, AlreadyExists, Conflict, Invalid, BadRequest.
    pub reason: &'static str,
    pub message: String,
    pub details: Details,
}

/// `details` of a Status. Empty fields are left out of the body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    pub name: String,
    pub group: String,
    /// The resource (plural) for NotFound and AlreadyExists, the kind for Invalid, as upstream does.
    pub kind: String,
    pub uid: String,
    pub causes: Vec<Cause>,
    pub retry_after_s: u32,
}

impl ApiError {
    #[must_use]
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            details: Details::default(),
        }
    }

    /// 404 for one object.
    #[must_use]
    pub fn not_found(group: &str, resource: &str, name: &str) -> Self {
        let full = qualified(resource, group);
        let mut e = Self::new(404, "NotFound", format!("{full} \"{name}\" not found"));
        e.details = Details {
            name: name.into(),
            group: group.into(),
            kind: resource.into(),
            ..Details::default()
        };
        e
    }

    /// 409 for a create of a name that is taken.
    #[must_use]
    pub fn already_exists(group: &str, resource: &str, name: &str) -> Self {
        let full = qualified(resource, group);
        let mut e = Self::new(
            409,
            "AlreadyExists",
            format!("{full} \"{name}\" already exists"),
        );
        e.details = Details {
            name: name.into(),
            group: group.into(),
            kind: resource.into(),
            ..Details::default()
        };
        e
    }

    /// 409 for a stale resourceVersion or a failed precondition.
    #[must_use]
    pub fn conflict(group: &str, resource: &str, name: &str, why: &str) -> Self {
        let full = qualified(resource, group);
        let mut e = Self::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {full} \"{name}\": {why}"),
        );
        e.details = Details {
            name: name.into(),
            group: group.into(),
            kind: resource.into(),
            ..Details::default()
        };
        e
    }

    /// 400.
    #[must_use]
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 422 with one cause per field error.
    #[must_use]
    pub fn invalid(group: &str, kind: &str, name: &str, causes: Vec<Cause>) -> Self {
        let list: Vec<String> = causes
            .iter()
            .map(|c| format!("{}: {}", c.field, c.message))
            .collect();
        let joined = if list.len() == 1 {
            list.concat()
        } else {
            format!("[{}]", list.join(", "))
        };
        let full = qualified(kind, group);
        let mut e = Self::new(
            422,
            "Invalid",
            format!("{full} \"{name}\" is invalid: {joined}"),
        );
        e.details = Details {
            name: name.into(),
            group: group.into(),
            kind: kind.into(),
            causes,
            ..Details::default()
        };
        e
    }

    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.code == 404
    }

    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.code == 409 && self.reason == "Conflict"
    }

    #[must_use]
    pub fn is_already_exists(&self) -> bool {
        self.reason == "AlreadyExists"
    }

    /// The `Status` body.
    #[must_use]
    pub fn to_status(&self) -> Value {
        let mut details = Map::new();
        for (key, text) in [
            ("name", &self.details.name),
            ("group", &self.details.group),
            ("kind", &self.details.kind),
            ("uid", &self.details.uid),
        ] {
            if !text.is_empty() {
                details.insert(key.into(), Value::String(text.clone()));
            }
        }
        if !self.details.causes.is_empty() {
            let causes = self
                .details
                .causes
                .iter()
                .map(|c| json!({"reason": c.reason, "message": c.message, "field": c.field}));
            details.insert("causes".into(), Value::Array(causes.collect()));
        }
        if self.details.retry_after_s > 0 {
            details.insert(
                "retryAfterSeconds".into(),
                self.details.retry_after_s.into(),
            );
        }
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": "Failure", "message": self.message, "reason": self.reason,
        });
        if let Value::Object(map) = &mut status {
            if !details.is_empty() {
                map.insert("details".into(), Value::Object(details));
            }
            map.insert("code".into(), self.code.into());
        }
        status
    }
}

fn qualified(resource: &str, group: &str) -> String {
    if group.is_empty() {
        resource.to_owned()
    } else {
        format!("{resource}.{group}")
    }
}
