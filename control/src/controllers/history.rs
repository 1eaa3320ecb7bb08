//! ControllerRevisions: the templates that a StatefulSet or DaemonSet has had. Which to make, renumber and delete. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};

use super::deployment::sets::template_hash;
use super::runtime::object::{Object, controller_reference, set};

pub(crate) const HASH_LABEL: &str = "controller-revision-hash";

/// What to do so that the current template has the highest revision.
#[derive(Debug, PartialEq)]
pub(crate) enum Step {
    /// It has already.
    Keep(Arc<Value>),
    /// The template was used before: its revision gets a new number.
    Renumber(Value),
    Create(Value),
}

/// The part of an owner that a revision remembers; applying it as a strategic patch brings the template back.
fn data(owner: &Value) -> Value {
    let mut template = owner
        .at(&["spec", "template"])
        .cloned()
        .unwrap_or(Value::Null);
    set(&mut template, &["$patch"], "replace".into());
    json!({"spec": {"template": template}})
}

pub(crate) fn number(revision: &Value) -> i64 {
    revision.number(&["revision"]).unwrap_or(0)
}

/// The template of a revision.
pub(crate) fn template(revision: &Value) -> Value {
    let mut template = revision
        .at(&["data", "spec", "template"])
        .cloned()
        .unwrap_or(Value::Null);
    super::runtime::object::unset(&mut template, &["$patch"]);
    template
}

/// The hash by which pods name a revision.
pub(crate) fn hash(revision: &Value) -> &str {
    revision.label(HASH_LABEL).unwrap_or_default()
}

/// `revisions` are all of the owner's.
pub(crate) fn step(
    owner: &Value,
    (api_version, kind): (&str, &str),
    revisions: &[Arc<Value>],
    collisions: i64,
) -> Step {
    let wanted = data(owner);
    let newest = revisions.iter().map(|r| number(r)).max().unwrap_or(0);
    let same = revisions
        .iter()
        .filter(|r| r.at(&["data"]) == Some(&wanted));
    if let Some(found) = same.max_by_key(|r| number(r)) {
        if number(found) == newest {
            return Step::Keep(found.clone());
        }
        let mut renumbered = found.as_ref().clone();
        set(&mut renumbered, &["revision"], (newest + 1).into());
        return Step::Renumber(renumbered);
    }
    let template = owner.at(&["spec", "template"]).unwrap_or(&Value::Null);
    let hash = template_hash(template, collisions);
    let mut labels = template
        .at(&["metadata", "labels"])
        .cloned()
        .unwrap_or_else(|| json!({}));
    set(&mut labels, &[HASH_LABEL], hash.clone().into());
    Step::Create(json!({
        "apiVersion": "apps/v1", "kind": "ControllerRevision",
        "metadata": {
            "name": format!("{}-{hash}", owner.name()), "namespace": owner.namespace(),
            "labels": labels,
            "ownerReferences": [controller_reference(owner, api_version, kind)],
        },
        "data": wanted, "revision": newest + 1,
    }))
}

/// The revisions beyond the history limit that no pod and no status names, oldest first.
pub(crate) fn surplus(
    owner: &Value,
    revisions: &[Arc<Value>],
    in_use: &BTreeSet<String>,
) -> Vec<Arc<Value>> {
    let limit = owner
        .number(&["spec", "revisionHistoryLimit"])
        .unwrap_or(10);
    let mut idle: Vec<Arc<Value>> = revisions
        .iter()
        .filter(|r| !in_use.contains(r.name()) && !in_use.contains(hash(r)))
        .cloned()
        .collect();
    idle.sort_by_key(|r| number(r));
    let surplus = idle
        .len()
        .saturating_sub(usize::try_from(limit).unwrap_or(usize::MAX));
    idle.truncate(surplus);
    idle
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(image: &str) -> Value {
        json!({"metadata": {"name": "o", "namespace": "ns", "uid": "u"},
            "spec": {"revisionHistoryLimit": 1, "template": {"metadata": {"labels": {"a": "b"}},
                "spec": {"containers": [{"name": "c", "image": image}]}}}})
    }

    fn made(image: &str, revisions: &[Arc<Value>]) -> Arc<Value> {
        match step(&owner(image), ("apps/v1", "DaemonSet"), revisions, 0) {
            Step::Create(object) | Step::Renumber(object) => Arc::new(object),
            Step::Keep(object) => object,
        }
    }

    #[test]
    fn a_template_that_comes_back_gets_a_new_number() {
        let one = made("1", &[]);
        let two = made("2", std::slice::from_ref(&one));
        assert_eq!((number(&one), number(&two)), (1, 2));
        assert_ne!(one.name(), two.name());
        let revisions = [one.clone(), two.clone()];
        assert!(matches!(
            step(&owner("2"), ("apps/v1", "DaemonSet"), &revisions, 0),
            Step::Keep(_)
        ));
        let back = made("1", &revisions);
        assert_eq!((number(&back), back.name()), (3, one.name()));
        assert_eq!(template(&back), owner("1")["spec"]["template"]);
    }

    #[test]
    fn history_beyond_the_limit_goes_unless_it_is_used() {
        let one = made("1", &[]);
        let two = made("2", std::slice::from_ref(&one));
        let three = made("3", &[one.clone(), two.clone()]);
        let all = [one.clone(), two.clone(), three.clone()];
        let used = BTreeSet::from([three.name().to_owned()]);
        assert_eq!(
            surplus(&owner("3"), &all, &used),
            std::slice::from_ref(&one)
        );
        let used = BTreeSet::from([three.name().to_owned(), hash(&one).to_owned()]);
        assert!(surplus(&owner("3"), &all, &used).is_empty());
    }
}
