//! What a Deployment writes into its ReplicaSets and reads back from them: names, hashes, revisions, sizes. Pure.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::controllers::runtime::object::{Object, controller_reference, set, unset};

pub(super) const API_VERSION: &str = "apps/v1";
pub(super) const KIND: &str = "Deployment";
pub(super) const HASH_LABEL: &str = "pod-template-hash";
pub(super) const REVISION: &str = "deployment.kubernetes.io/revision";
const REVISION_HISTORY: &str = "deployment.kubernetes.io/revision-history";
pub(super) const DESIRED_REPLICAS: &str = "deployment.kubernetes.io/desired-replicas";
const MAX_REPLICAS: &str = "deployment.kubernetes.io/max-replicas";
/// Annotations of a Deployment that say nothing about its ReplicaSets.
const NOT_COPIED: [&str; 6] = [
    "kubectl.kubernetes.io/last-applied-configuration",
    REVISION,
    REVISION_HISTORY,
    DESIRED_REPLICAS,
    MAX_REPLICAS,
    "deprecated.deployment.rollback.to",
];
/// Longest revision history kept in an annotation, bytes.
const HISTORY_LIMIT: usize = 2000;
/// Letters that cannot form words, as in every generated name of the API.
const SAFE_LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

pub(super) fn replicas(object: &Value) -> i64 {
    object.number(&["spec", "replicas"]).unwrap_or(1)
}

pub(super) fn count(object: &Value, field: &str) -> i64 {
    object.number(&["status", field]).unwrap_or(0)
}

pub(super) fn revision(rs: &Value) -> i64 {
    rs.annotation(REVISION)
        .and_then(|r| r.parse().ok())
        .unwrap_or(0)
}

/// Pods above and below the wanted number that a rolling update may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) surge: i64,
    pub(super) unavailable: i64,
}

/// Percentages of surge are rounded up, of unavailability down; both zero would never move, so one may be missing.
pub(super) fn bounds(d: &Value) -> Bounds {
    if !is_rolling(d) {
        return Bounds {
            surge: 0,
            unavailable: 0,
        };
    }
    let wanted = replicas(d);
    let resolve = |field: &str, up: bool| {
        let value = d.at(&["spec", "strategy", "rollingUpdate", field]);
        resolve_percent(value, wanted, up).unwrap_or_else(|| percent_of(25, wanted, up))
    };
    let surge = resolve("maxSurge", true);
    let mut unavailable = resolve("maxUnavailable", false);
    if surge == 0 && unavailable == 0 {
        unavailable = 1;
    }
    Bounds {
        surge,
        unavailable: unavailable.min(wanted),
    }
}

/// An int-or-percent value relative to `whole`.
pub(crate) fn resolve_percent(value: Option<&Value>, whole: i64, up: bool) -> Option<i64> {
    match value? {
        Value::Number(n) => n.as_i64(),
        Value::String(s) => {
            let percent = s.strip_suffix('%')?.parse::<i64>().ok()?;
            Some(percent_of(percent, whole, up))
        }
        _ => None,
    }
}

fn percent_of(percent: i64, whole: i64, up: bool) -> i64 {
    let scaled = percent.saturating_mul(whole);
    if up {
        scaled.saturating_add(99) / 100
    } else {
        scaled / 100
    }
}

pub(super) fn is_rolling(d: &Value) -> bool {
    d.text(&["spec", "strategy", "type"]) != "Recreate"
}

/// A short name for a template: FNV-1a over its canonical form, in letters that cannot form words.
pub(crate) fn template_hash(template: &Value, collisions: i64) -> String {
    let mut hash = 0x811c_9dc5_u32;
    let mut feed = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    };
    feed(canonical(template).to_string().as_bytes());
    if collisions > 0 {
        feed(&collisions.to_le_bytes());
    }
    let letter =
        |digit: u8| char::from(SAFE_LETTERS[usize::from(digit - b'0') % SAFE_LETTERS.len()]);
    hash.to_string().bytes().map(letter).collect()
}

/// The same value with its keys in order, so that equal templates have equal bytes.
fn canonical(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            Value::Object(
                keys.into_iter()
                    .map(|k| (k.clone(), canonical(&map[k])))
                    .collect(),
            )
        }
        Value::Array(items) => Value::Array(items.iter().map(canonical).collect()),
        other => other.clone(),
    }
}

/// Whether two templates ask for the same pods; the hash label is not part of what is asked for.
pub(super) fn same_template(a: &Value, b: &Value) -> bool {
    let plain = |template: &Value| {
        let mut copy = template.clone();
        unset(&mut copy, &["metadata", "labels", HASH_LABEL]);
        copy
    };
    plain(a) == plain(b)
}

/// The set of the current template: the oldest, should there be several.
pub(super) fn find_new<'a>(d: &Value, sets: &'a [Arc<Value>]) -> Option<&'a Arc<Value>> {
    let template = d.at(&["spec", "template"])?;
    let mut same: Vec<&Arc<Value>> = sets
        .iter()
        .filter(|rs| {
            rs.at(&["spec", "template"])
                .is_some_and(|t| same_template(t, template))
        })
        .collect();
    same.sort_by_key(|rs| (rs.created_at(), rs.name().to_owned()));
    same.first().copied()
}

/// The set for the current template, of this size and revision.
pub(super) fn build(d: &Value, size: i64, new_revision: i64) -> Value {
    let template = d.at(&["spec", "template"]).cloned().unwrap_or(Value::Null);
    let collisions = count(d, "collisionCount");
    let hash = template_hash(&template, collisions);
    let mut labeled = template;
    set(
        &mut labeled,
        &["metadata", "labels", HASH_LABEL],
        hash.clone().into(),
    );
    let mut selector = d.at(&["spec", "selector"]).cloned().unwrap_or(Value::Null);
    set(
        &mut selector,
        &["matchLabels", HASH_LABEL],
        hash.clone().into(),
    );
    let labels = labeled.at(&["metadata", "labels"]).cloned();
    let mut rs = json!({
        "apiVersion": API_VERSION, "kind": "ReplicaSet",
        "metadata": {
            "name": format!("{}-{hash}", d.name()), "namespace": d.namespace(),
            "labels": labels, "annotations": {},
            "ownerReferences": [controller_reference(d, API_VERSION, KIND)],
        },
        "spec": {"replicas": size, "selector": selector, "template": labeled},
    });
    if let Some(min_ready) = d.number(&["spec", "minReadySeconds"]).filter(|m| *m > 0) {
        set(&mut rs, &["spec", "minReadySeconds"], min_ready.into());
    }
    annotate(&mut rs, d, new_revision);
    annotate_size(&mut rs, d);
    rs
}

/// Brings the annotations of the new set up to date. A set that comes back keeps its old revisions as history.
pub(super) fn annotate(rs: &mut Value, d: &Value, new_revision: i64) {
    let empty = Map::new();
    for (key, value) in d.fields(&["metadata", "annotations"]).unwrap_or(&empty) {
        if !NOT_COPIED.contains(&key.as_str()) && rs.annotation(key) != value.as_str() {
            set(rs, &["metadata", "annotations", key], value.clone());
        }
    }
    let old = revision(rs);
    if old >= new_revision {
        return;
    }
    if old > 0 {
        let mut history = rs
            .annotation(REVISION_HISTORY)
            .unwrap_or_default()
            .to_owned();
        if !history.is_empty() {
            history.push(',');
        }
        history.push_str(&old.to_string());
        while history.len() > HISTORY_LIMIT {
            history = history
                .split_once(',')
                .map_or_else(String::new, |(_, rest)| rest.to_owned());
        }
        set(
            rs,
            &["metadata", "annotations", REVISION_HISTORY],
            history.into(),
        );
    }
    set(
        rs,
        &["metadata", "annotations", REVISION],
        new_revision.to_string().into(),
    );
}

/// Notes the sizes that this size was computed from, for proportional scaling.
pub(super) fn annotate_size(rs: &mut Value, d: &Value) {
    let desired = replicas(d);
    let most = desired + bounds(d).surge;
    for (name, number) in [(DESIRED_REPLICAS, desired), (MAX_REPLICAS, most)] {
        set(
            rs,
            &["metadata", "annotations", name],
            number.to_string().into(),
        );
    }
}

pub(super) fn max_replicas(rs: &Value) -> Option<i64> {
    rs.annotation(MAX_REPLICAS)?.parse().ok()
}

pub(super) fn desired_replicas(rs: &Value) -> Option<i64> {
    rs.annotation(DESIRED_REPLICAS)?.parse().ok()
}
