//! `metadata.managedFields`: who owns which fields, and since when.

use serde_json::{Map, Value, json};

use super::fieldset::{Element, Set};

/// Entries of ordinary writes in one object; the oldest are put together beyond that.
const MAX_UPDATERS: usize = 10;
const ANCIENT: &str = "ancient-changes";

/// Metadata that the server writes, or that names the object: nobody owns it.
const UNOWNED_METADATA: &[&str] = &[
    "name",
    "namespace",
    "creationTimestamp",
    "selfLink",
    "uid",
    "clusterName",
    "generation",
    "managedFields",
    "resourceVersion",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Apply,
    Update,
}

impl Operation {
    const fn text(self) -> &'static str {
        match self {
            Self::Apply => "Apply",
            Self::Update => "Update",
        }
    }
}

/// One manager of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Manager {
    pub(super) name: String,
    pub(super) operation: Operation,
    pub(super) api_version: String,
    pub(super) subresource: String,
    /// RFC 3339, or empty.
    pub(super) time: String,
    pub(super) set: Set,
}

impl Manager {
    /// Appliers are one manager whatever version they used.
    fn is(&self, other: &Self) -> bool {
        self.name == other.name
            && self.operation == other.operation
            && self.subresource == other.subresource
            && (self.operation == Operation::Apply || self.api_version == other.api_version)
    }

    /// As conflict messages name it.
    pub(super) fn describe(&self) -> String {
        let mut text = format!("{:?}", self.name);
        if !self.subresource.is_empty() {
            text.push_str(&format!(" with subresource {:?}", self.subresource));
        }
        if self.operation == Operation::Update {
            text.push_str(&format!(" using {}", self.api_version));
            if !self.time.is_empty() {
                text.push_str(&format!(" at {}", self.time));
            }
        }
        text
    }
}

/// All managers of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Managers(pub(super) Vec<Manager>);

impl Managers {
    /// Reads `metadata.managedFields`; entries that cannot be understood are left out.
    pub(super) fn of(object: &Value) -> Self {
        let entries = object
            .pointer("/metadata/managedFields")
            .and_then(Value::as_array);
        Self(
            entries
                .into_iter()
                .flatten()
                .filter_map(read_entry)
                .collect(),
        )
    }

    pub(super) fn find(&self, like: &Manager) -> Option<&Manager> {
        self.0.iter().find(|m| m.is(like))
    }

    /// Replaces a manager's entry, or removes it when it owns nothing.
    pub(super) fn put(&mut self, manager: Manager) {
        self.0.retain(|m| !m.is(&manager));
        if !manager.set.is_empty() {
            self.0.push(manager);
        }
    }

    /// Takes fields from every manager.
    pub(super) fn take(&mut self, fields: &Set) {
        for manager in &mut self.0 {
            manager.set = manager.set.difference(fields);
        }
        self.0.retain(|m| !m.set.is_empty());
    }

    /// What anybody owns.
    pub(super) fn union(&self) -> Set {
        self.0
            .iter()
            .fold(Set::default(), |all, m| all.union(&m.set))
    }

    /// Writes `metadata.managedFields`.
    pub(super) fn write(mut self, object: &mut Value) {
        self.cap();
        self.0.sort_by(|a, b| {
            (
                a.operation,
                &a.time,
                &a.name,
                &a.api_version,
                &a.subresource,
            )
                .cmp(&(
                    b.operation,
                    &b.time,
                    &b.name,
                    &b.api_version,
                    &b.subresource,
                ))
        });
        let entries: Vec<Value> = self.0.iter().map(write_entry).collect();
        let Some(Value::Object(metadata)) = object.get_mut("metadata") else {
            return;
        };
        if entries.is_empty() {
            metadata.shift_remove("managedFields");
        } else {
            metadata.insert("managedFields".into(), entries.into());
        }
    }

    /// The oldest writers beyond the limit become one entry.
    fn cap(&mut self) {
        let mut updaters: Vec<Manager> = self
            .0
            .iter()
            .filter(|m| m.operation == Operation::Update)
            .cloned()
            .collect();
        if updaters.len() <= MAX_UPDATERS {
            return;
        }
        updaters.sort_by(|a, b| (&a.time, &a.name).cmp(&(&b.time, &b.name)));
        let excess = updaters.len() - MAX_UPDATERS + 1;
        for old in updaters.into_iter().take(excess) {
            self.0.retain(|m| !m.is(&old));
            let ancient = Manager {
                name: ANCIENT.into(),
                subresource: String::new(),
                ..old
            };
            let before = self
                .find(&ancient)
                .map(|m| m.set.clone())
                .unwrap_or_default();
            let set = ancient.set.union(&before);
            self.put(Manager { set, ..ancient });
        }
    }
}

fn read_entry(entry: &Value) -> Option<Manager> {
    let text = |key: &str| {
        entry
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let operation = match text("operation").as_str() {
        "Apply" => Operation::Apply,
        "Update" => Operation::Update,
        _ => return None,
    };
    Some(Manager {
        name: text("manager"),
        operation,
        api_version: text("apiVersion"),
        subresource: text("subresource"),
        time: text("time"),
        set: Set::from_json(entry.get("fieldsV1").unwrap_or(&Value::Null)),
    })
}

fn write_entry(manager: &Manager) -> Value {
    let mut entry = Map::new();
    entry.insert("manager".into(), manager.name.as_str().into());
    entry.insert("operation".into(), manager.operation.text().into());
    entry.insert("apiVersion".into(), manager.api_version.as_str().into());
    if !manager.time.is_empty() {
        entry.insert("time".into(), manager.time.as_str().into());
    }
    entry.insert("fieldsType".into(), "FieldsV1".into());
    entry.insert("fieldsV1".into(), manager.set.to_json());
    if !manager.subresource.is_empty() {
        entry.insert("subresource".into(), manager.subresource.as_str().into());
    }
    Value::Object(entry)
}

/// Fields that no manager of this subresource owns.
pub(super) fn unowned(subresource: &str) -> Set {
    let mut set = Set::default();
    for name in ["apiVersion", "kind"] {
        set.insert(&[Element::field(name)]);
    }
    for name in UNOWNED_METADATA {
        set.insert(&[Element::field("metadata"), Element::field(name)]);
    }
    set.insert(&[Element::field(if subresource == "status" {
        "spec"
    } else {
        "status"
    })]);
    set
}

/// Metadata with nothing owned below it is not worth a member of its own.
pub(super) fn owned(set: &Set, subresource: &str) -> Set {
    let mut bare = Set::default();
    bare.insert(&[Element::field("metadata")]);
    set.without(&unowned(subresource)).difference(&bare)
}

/// A client that sends one empty entry wants to be rid of all of them.
pub(super) fn is_reset(object: &Value) -> bool {
    match object.pointer("/metadata/managedFields") {
        Some(Value::Array(entries)) => entries.is_empty() || *entries == vec![json!({})],
        _ => false,
    }
}
