//! Reading Kubernetes objects that are JSON values: by path, without copies, with a neutral answer where a field is missing.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// Namespace and name; the namespace is empty for cluster-scoped objects. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) namespace: Arc<str>,
    pub(crate) name: Arc<str>,
}

impl Key {
    pub(crate) fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// One entry of `metadata.ownerReferences`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner<'a> {
    pub(crate) api_version: &'a str,
    pub(crate) kind: &'a str,
    pub(crate) name: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) controller: bool,
    pub(crate) block_owner_deletion: bool,
}

/// Field access on an object.
pub(crate) trait Object {
    fn at(&self, path: &[&str]) -> Option<&Value>;
    /// The text there, "" when it is missing or no text.
    fn text(&self, path: &[&str]) -> &str;
    fn number(&self, path: &[&str]) -> Option<i64>;
    /// True only for a present `true`.
    fn flag(&self, path: &[&str]) -> bool;
    fn items(&self, path: &[&str]) -> &[Value];
    fn fields(&self, path: &[&str]) -> Option<&Map<String, Value>>;
    fn time(&self, path: &[&str]) -> Option<Timestamp>;

    fn name(&self) -> &str {
        self.text(&["metadata", "name"])
    }
    fn namespace(&self) -> &str {
        self.text(&["metadata", "namespace"])
    }
    fn uid(&self) -> &str {
        self.text(&["metadata", "uid"])
    }
    fn key(&self) -> Key {
        Key::new(self.namespace(), self.name())
    }
    fn revision(&self) -> u64 {
        self.text(&["metadata", "resourceVersion"])
            .parse()
            .unwrap_or(0)
    }
    fn generation(&self) -> i64 {
        self.number(&["metadata", "generation"]).unwrap_or(0)
    }
    fn labels(&self) -> Option<&Map<String, Value>> {
        self.fields(&["metadata", "labels"])
    }
    fn label(&self, name: &str) -> Option<&str> {
        self.labels()?.get(name)?.as_str()
    }
    fn annotation(&self, name: &str) -> Option<&str> {
        self.fields(&["metadata", "annotations"])?
            .get(name)?
            .as_str()
    }
    fn is_deleting(&self) -> bool {
        !self.text(&["metadata", "deletionTimestamp"]).is_empty()
    }
    fn created_at(&self) -> Option<Timestamp> {
        self.time(&["metadata", "creationTimestamp"])
    }
    fn owners(&self) -> impl Iterator<Item = Owner<'_>> {
        self.items(&["metadata", "ownerReferences"])
            .iter()
            .map(|o| Owner {
                api_version: o.text(&["apiVersion"]),
                kind: o.text(&["kind"]),
                name: o.text(&["name"]),
                uid: o.text(&["uid"]),
                controller: o.flag(&["controller"]),
                block_owner_deletion: o.flag(&["blockOwnerDeletion"]),
            })
    }
    /// The one owner that manages this object.
    fn controller(&self) -> Option<Owner<'_>> {
        self.owners().find(|o| o.controller)
    }
    /// The condition of this type in `status.conditions`.
    fn condition(&self, kind: &str) -> Option<&Value> {
        self.items(&["status", "conditions"])
            .iter()
            .find(|c| c.text(&["type"]) == kind)
    }
}

impl Object for Value {
    fn at(&self, path: &[&str]) -> Option<&Value> {
        path.iter()
            .try_fold(self, |value, step| value.as_object()?.get(*step))
    }
    fn text(&self, path: &[&str]) -> &str {
        self.at(path).and_then(Value::as_str).unwrap_or("")
    }
    fn number(&self, path: &[&str]) -> Option<i64> {
        self.at(path)?.as_i64()
    }
    fn flag(&self, path: &[&str]) -> bool {
        self.at(path).and_then(Value::as_bool).unwrap_or(false)
    }
    fn items(&self, path: &[&str]) -> &[Value] {
        self.at(path)
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice)
    }
    fn fields(&self, path: &[&str]) -> Option<&Map<String, Value>> {
        self.at(path)?.as_object()
    }
    fn time(&self, path: &[&str]) -> Option<Timestamp> {
        self.text(path).parse().ok()
    }
}

/// Sets a field, creating the maps on the way; what stood in the way and was no map is replaced.
pub(crate) fn set(object: &mut Value, path: &[&str], value: Value) {
    let mut here = object;
    for step in path {
        if !here.is_object() {
            *here = Value::Object(Map::new());
        }
        let Value::Object(map) = here else { return };
        here = map.entry((*step).to_owned()).or_insert(Value::Null);
    }
    *here = value;
}

/// Removes a field if it is there.
pub(crate) fn unset(object: &mut Value, path: &[&str]) {
    let Some((last, parents)) = path.split_last() else {
        return;
    };
    let mut here = object;
    for step in parents {
        match here.as_object_mut().and_then(|m| m.get_mut(*step)) {
            Some(next) => here = next,
            None => return,
        }
    }
    if let Some(map) = here.as_object_mut() {
        map.shift_remove(*last);
    }
}

/// The reference that makes `owner` the managing owner of another object.
pub(crate) fn controller_reference(owner: &Value, api_version: &str, kind: &str) -> Value {
    json!({
        "apiVersion": api_version, "kind": kind, "name": owner.name(), "uid": owner.uid(),
        "controller": true, "blockOwnerDeletion": true,
    })
}

/// RFC 3339 with seconds, the form of `metav1.Time`.
pub(crate) fn time_text(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Whole seconds from `from` until `to`, negative when `to` is earlier.
pub(crate) fn seconds_between(from: Timestamp, to: Timestamp) -> i64 {
    to.as_second() - from.as_second()
}

/// Sets or replaces a condition in `status.conditions`; the transition time moves only with the status. True when
/// status, reason or message changed.
pub(crate) fn set_condition(
    status: &mut Value,
    kind: &str,
    state: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> bool {
    let mut conditions = status.items(&["conditions"]).to_vec();
    let old = conditions.iter().position(|c| c.text(&["type"]) == kind);
    let mut transition = time_text(now);
    if let Some(old) = old.map(|i| &conditions[i])
        && old.text(&["status"]) == state
    {
        if old.text(&["reason"]) == reason && old.text(&["message"]) == message {
            return false;
        }
        transition = old.text(&["lastTransitionTime"]).to_owned();
    }
    let condition = json!({
        "type": kind, "status": state, "lastTransitionTime": transition,
        "reason": reason, "message": message,
    });
    match old {
        Some(i) => conditions[i] = condition,
        None => conditions.push(condition),
    }
    set(status, &["conditions"], Value::Array(conditions));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_fields_read_as_neutral() {
        let object = json!({"metadata": {"name": "a", "labels": {"x": "1"}}, "spec": 3});
        assert_eq!(object.name(), "a");
        assert_eq!(object.namespace(), "");
        assert_eq!(object.label("x"), Some("1"));
        assert_eq!(object.number(&["spec", "replicas"]), None);
        assert!(object.items(&["spec", "containers"]).is_empty());
        assert!(!object.is_deleting());
    }

    #[test]
    fn set_and_unset_make_their_way() {
        let mut object = json!({"spec": null});
        set(&mut object, &["spec", "a", "b"], json!(1));
        assert_eq!(object, json!({"spec": {"a": {"b": 1}}}));
        unset(&mut object, &["spec", "a", "b"]);
        unset(&mut object, &["nothing", "here"]);
        assert_eq!(object, json!({"spec": {"a": {}}}));
    }

    #[test]
    fn condition_keeps_its_transition_time_while_the_status_stays() {
        let start: Timestamp = "2024-01-01T00:00:00Z".parse().unwrap();
        let later: Timestamp = "2024-01-01T01:00:00Z".parse().unwrap();
        let mut status = json!({});
        assert!(set_condition(&mut status, "Ready", "True", "A", "m", start));
        assert!(!set_condition(
            &mut status,
            "Ready",
            "True",
            "A",
            "m",
            later
        ));
        assert!(set_condition(&mut status, "Ready", "True", "B", "m", later));
        assert_eq!(
            status.items(&["conditions"])[0].text(&["lastTransitionTime"]),
            "2024-01-01T00:00:00Z"
        );
        assert!(set_condition(
            &mut status,
            "Ready",
            "False",
            "B",
            "m",
            later
        ));
        assert_eq!(
            status.items(&["conditions"])[0].text(&["lastTransitionTime"]),
            "2024-01-01T01:00:00Z"
        );
    }
}
