//! Object metadata: names, labels, annotations, owners, finalizers.

use serde_json::Value;

use super::cursor::At;
use super::names::{self, Rule};
use crate::apiserver::registry::Gvk;

/// Keys and values of all annotations together, in bytes.
const ANNOTATIONS_SIZE: usize = 256 * 1024;
/// CronJobs append eleven characters to their name for each Job.
const CRON_JOB_NAME: usize = 52;
const MANAGER_LENGTH: usize = 128;

fn rule(gvk: Gvk<'_>) -> Rule {
    match (gvk.group, gvk.kind) {
        ("", "Service" | "Namespace") => Rule::Label,
        ("rbac.authorization.k8s.io", _) | ("certificates.k8s.io", _) => Rule::Segment,
        ("batch", "CronJob") => Rule::Short(CRON_JOB_NAME),
        ("networking.k8s.io", "IPAddress") => Rule::Address,
        _ => Rule::Subdomain,
    }
}

pub(super) fn create(gvk: Gvk<'_>, metadata: &At<'_>) {
    let name = metadata.get("name");
    if name.is_empty() {
        name.required("name or generateName is required");
    } else {
        name.each_invalid(rule(gvk).check(name.text()));
    }
    common(metadata);
}

pub(super) fn update(metadata: &At<'_>, old: &At<'_>) {
    common(metadata);
    for field in ["name", "namespace", "uid", "creationTimestamp"] {
        if old.get(field).exists() {
            metadata.get(field).immutable(&old.get(field));
        }
    }
    if old.get("deletionTimestamp").exists() {
        let before: Vec<Value> = old
            .get("finalizers")
            .items()
            .iter()
            .filter_map(|f| f.value().cloned())
            .collect();
        let added: Vec<String> = metadata
            .get("finalizers")
            .items()
            .iter()
            .filter(|f| f.value().is_some_and(|v| !before.contains(v)))
            .map(|f| format!("{:?}", f.text()))
            .collect();
        if !added.is_empty() {
            metadata.get("finalizers").forbidden(&format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers [{}]",
                added.join(", ")
            ));
        }
    }
}

fn common(metadata: &At<'_>) {
    let namespace = metadata.get("namespace");
    if !namespace.is_empty() {
        namespace.each_invalid(names::label(namespace.text()));
    }
    metadata.get("generation").non_negative();
    labels(&metadata.get("labels"));
    annotations(&metadata.get("annotations"));
    owners(&metadata.get("ownerReferences"));
    finalizers(&metadata.get("finalizers"));
    for entry in metadata.get("managedFields").items() {
        // One empty entry asks for the removal of all.
        if entry.is_empty() {
            continue;
        }
        let operation = entry.get("operation");
        if !["Apply", "Update"].contains(&operation.text()) {
            operation.invalid("must be `Apply` or `Update`");
        }
        if entry.get("manager").text().len() > MANAGER_LENGTH {
            entry.get("manager").too_long(MANAGER_LENGTH);
        }
    }
}

/// Labels, or a selector that is a map of labels. Faults are of the whole map, as keys may hold anything.
pub(super) fn labels(map: &At<'_>) {
    for (key, value) in map.entries() {
        for error in names::qualified(key) {
            map.invalid_value(key, error);
        }
        for error in names::label_value(value.text()) {
            map.invalid_value(value.text(), error);
        }
    }
}

pub(super) fn annotations(map: &At<'_>) {
    let mut size = 0;
    for (key, value) in map.entries() {
        size += key.len() + value.text().len();
        for error in names::qualified(&key.to_lowercase()) {
            map.invalid_value(key, error);
        }
    }
    if size > ANNOTATIONS_SIZE {
        map.too_long(ANNOTATIONS_SIZE);
    }
}

fn owners(list: &At<'_>) {
    let mut controller = None;
    for owner in list.items() {
        // The index is not part of the path, as clients know it.
        let member = |key: &str| (list.get(key), owner.get(key));
        let (at, api_version) = member("apiVersion");
        if api_version.is_empty() || api_version.text().ends_with('/') {
            at.invalid_value(api_version.text(), "version must not be empty");
        }
        for key in ["kind", "name", "uid"] {
            let (at, value) = member(key);
            if value.is_empty() {
                at.invalid_value("", "must not be empty");
            }
        }
        if (api_version.text(), owner.get("kind").text()) == ("v1", "Event") {
            list.invalid_value(
                owner.value().cloned().unwrap_or_default(),
                "/v1, Kind=Event is disallowed from being an owner",
            );
        }
        if owner.get("controller").is_true() {
            let this = format!("{}/{}", owner.get("kind").text(), owner.get("name").text());
            match &controller {
                Some(first) => list.invalid(format!(
                    "Only one reference can have Controller set to true. Found \"true\" in references for {first} and \
                     {this}"
                )),
                None => controller = Some(this),
            }
        }
    }
}

fn finalizers(list: &At<'_>) {
    let mut propagation = 0;
    for finalizer in list.items() {
        for error in names::qualified(finalizer.text()) {
            list.invalid_value(finalizer.text(), error);
        }
        propagation += usize::from(["orphan", "foregroundDeletion"].contains(&finalizer.text()));
    }
    if propagation > 1 {
        list.invalid("finalizer orphan and foregroundDeletion cannot be both set");
    }
}

/// A label selector with `matchLabels` and `matchExpressions`.
pub(super) fn label_selector(selector: &At<'_>) {
    labels(&selector.get("matchLabels"));
    for expression in selector.get("matchExpressions").items() {
        let key = expression.get("key");
        key.each_invalid(names::qualified(key.text()));
        let values = expression.get("values");
        match expression.get("operator").text() {
            "In" | "NotIn" if values.is_empty() => {
                values.required("must be specified when `operator` is 'In' or 'NotIn'");
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                values.forbidden(
                    "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                );
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            _ => expression
                .get("operator")
                .invalid("not a valid selector operator"),
        }
        for value in values.items() {
            value.each_invalid(names::label_value(value.text()));
        }
    }
}
