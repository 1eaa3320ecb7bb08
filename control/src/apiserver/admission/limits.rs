//! LimitRanges: defaults for containers, and bounds for containers, pods and claims.

use serde_json::{Map, Value, json};

use super::resources::{Amounts, Side, amounts, items, of_container, of_pod};
use crate::apiserver::schema::quantity::Quantity;

/// Names what was filled in.
const ANNOTATION: &str = "kubernetes.io/limit-ranger";
const CONTAINER_LISTS: [(&str, &str); 2] = [
    ("containers", "container"),
    ("initContainers", "init container"),
];

/// Fills the defaults of the LimitRanges of the pod's namespace in. True when that changed the pod.
pub fn fill<'a>(pod: &mut Value, ranges: impl Iterator<Item = &'a Value>) -> bool {
    let mut notes = Vec::new();
    for range in ranges {
        let (requests, limits) = defaults(range);
        for (list, noun) in CONTAINER_LISTS {
            let slot = pod.get_mut("spec").and_then(|s| s.get_mut(list));
            for container in slot.and_then(Value::as_array_mut).into_iter().flatten() {
                fill_container(container, noun, (&requests, &limits), &mut notes);
            }
        }
    }
    if notes.is_empty() {
        return false;
    }
    if let Some(metadata) = pod.get_mut("metadata").and_then(Value::as_object_mut) {
        let slot = metadata.entry("annotations").or_insert_with(|| json!({}));
        if slot.is_null() {
            *slot = json!({});
        }
        if let Value::Object(annotations) = slot {
            let note = format!("LimitRanger plugin set: {}", notes.join("; "));
            annotations.insert(ANNOTATION.into(), note.into());
        }
    }
    true
}

/// Default requests and limits that a LimitRange gives to containers.
fn defaults(range: &Value) -> (Map<String, Value>, Map<String, Value>) {
    let (mut requests, mut limits) = (Map::new(), Map::new());
    for limit in items(&range["spec"], "limits") {
        if limit["type"] == "Container" {
            for (field, target) in [("defaultRequest", &mut requests), ("default", &mut limits)] {
                if let Some(amounts) = limit[field].as_object() {
                    target.extend(amounts.clone());
                }
            }
        }
    }
    (requests, limits)
}

fn fill_container(
    container: &mut Value,
    noun: &str,
    (requests, limits): (&Map<String, Value>, &Map<String, Value>),
    notes: &mut Vec<String>,
) {
    let name = container["name"].as_str().unwrap_or_default().to_owned();
    let Some(container) = container.as_object_mut() else {
        return;
    };
    for (side, given) in [(Side::Requests, requests), (Side::Limits, limits)] {
        let mut set = Vec::new();
        for (resource, amount) in given {
            let resources = container.entry("resources").or_insert_with(|| json!({}));
            let Value::Object(resources) = resources else {
                continue;
            };
            let list = resources.entry(side.field()).or_insert_with(|| json!({}));
            if list.is_null() {
                *list = json!({});
            }
            if let Value::Object(list) = list
                && !list.contains_key(resource)
            {
                list.insert(resource.clone(), amount.clone());
                set.push(resource.as_str());
            }
        }
        if !set.is_empty() {
            set.sort_unstable();
            let (what, side) = (set.join(", "), side.field().trim_end_matches('s'));
            notes.push(format!("{what} {side} for {noun} {name}"));
        }
    }
}

/// What of a pod is outside of the bounds of a LimitRange.
#[must_use]
pub fn check_pod(pod: &Value, range: &Value) -> Vec<String> {
    let mut errors = Vec::new();
    for limit in items(&range["spec"], "limits") {
        match limit["type"].as_str() {
            Some("Container") => {
                for (list, _) in CONTAINER_LISTS {
                    for container in items(&pod["spec"], list) {
                        let asked = |side| of_container(container, side);
                        let asked = (asked(Side::Requests), asked(Side::Limits));
                        bounds("Container", limit, &asked, &mut errors);
                    }
                }
            }
            Some("Pod") => {
                let asked = (of_pod(pod, Side::Requests), of_pod(pod, Side::Limits));
                bounds("Pod", limit, &asked, &mut errors);
            }
            _ => {}
        }
    }
    errors
}

/// What of a PersistentVolumeClaim is outside of the bounds of a LimitRange.
#[must_use]
pub fn check_claim(claim: &Value, range: &Value) -> Vec<String> {
    const KIND: &str = "PersistentVolumeClaim";
    let requests = amounts(claim.pointer("/spec/resources/requests"));
    let mut errors = Vec::new();
    let limits = items(&range["spec"], "limits").iter();
    for limit in limits.filter(|l| l["type"] == KIND) {
        for (name, min) in amounts(limit.get("min")) {
            errors.extend(too_little(KIND, &name, min, requests.get(&name), None));
        }
        for (name, max) in amounts(limit.get("max")) {
            let head = format!("maximum {name} usage per {KIND} is {max}");
            match requests.get(&name) {
                None => errors.push(format!("{head}.  No request is specified")),
                Some(asked) if *asked > max => {
                    errors.push(format!("{head}, but request is {asked}"));
                }
                Some(_) => {}
            }
        }
    }
    errors
}

fn bounds(
    kind: &str,
    limit: &Value,
    (requests, limits): &(Amounts, Amounts),
    errors: &mut Vec<String>,
) {
    for (name, min) in amounts(limit.get("min")) {
        let (request, limit) = (requests.get(&name), limits.get(&name));
        errors.extend(too_little(kind, &name, min, request, limit));
    }
    for (name, max) in amounts(limit.get("max")) {
        let (request, limit) = (requests.get(&name), limits.get(&name));
        errors.extend(too_much(kind, &name, max, request, limit));
    }
    for (name, ratio) in amounts(limit.get("maxLimitRequestRatio")) {
        let (request, limit) = (requests.get(&name), limits.get(&name));
        errors.extend(too_steep(kind, &name, ratio, request, limit));
    }
}

fn too_little(
    kind: &str,
    name: &str,
    min: Quantity,
    request: Option<&Quantity>,
    limit: Option<&Quantity>,
) -> Option<String> {
    let head = format!("minimum {name} usage per {kind} is {min}");
    match (request, limit) {
        (None, _) => Some(format!("{head}.  No request is specified")),
        (Some(request), _) if *request < min => Some(format!("{head}, but request is {request}")),
        (_, Some(limit)) if *limit < min => Some(format!("{head}, but limit is {limit}")),
        _ => None,
    }
}

fn too_much(
    kind: &str,
    name: &str,
    max: Quantity,
    request: Option<&Quantity>,
    limit: Option<&Quantity>,
) -> Option<String> {
    let head = format!("maximum {name} usage per {kind} is {max}");
    match (request, limit) {
        (_, None) => Some(format!("{head}.  No limit is specified")),
        (_, Some(limit)) if *limit > max => Some(format!("{head}, but limit is {limit}")),
        (Some(request), _) if *request > max => Some(format!("{head}, but request is {request}")),
        _ => None,
    }
}

fn too_steep(
    kind: &str,
    name: &str,
    max: Quantity,
    request: Option<&Quantity>,
    limit: Option<&Quantity>,
) -> Option<String> {
    let head = format!("{name} max limit to request ratio per {kind} is {max}");
    let Some(request) = request.filter(|r| !r.is_zero()) else {
        return Some(format!(
            "{head}, but no request is specified or request is 0"
        ));
    };
    let Some(limit) = limit.filter(|l| !l.is_zero()) else {
        return Some(format!("{head}, but no limit is specified or limit is 0"));
    };
    let ratio = limit.as_f64() / request.as_f64();
    (ratio > max.as_f64()).then(|| format!("{head}, but provided ratio is {ratio:.6}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(limit: Value) -> Value {
        json!({"spec": {"limits": [limit]}})
    }

    fn pod(resources: Value) -> Value {
        json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "resources": resources}]}})
    }

    #[test]
    fn defaults_fill_only_what_is_missing() {
        let range = range(json!({"type": "Container",
            "default": {"cpu": "200m", "memory": "64Mi"}, "defaultRequest": {"cpu": "100m"}}));
        let mut one = pod(json!({"requests": {"cpu": "150m"}}));
        assert!(fill(&mut one, [&range].into_iter()));
        let resources = &one["spec"]["containers"][0]["resources"];
        assert_eq!(
            *resources,
            json!({"requests": {"cpu": "150m"}, "limits": {"cpu": "200m", "memory": "64Mi"}})
        );
        assert_eq!(
            one["metadata"]["annotations"][ANNOTATION],
            "LimitRanger plugin set: cpu, memory limit for container c"
        );
        assert!(
            !fill(&mut one, [&range].into_iter()),
            "nothing is left to fill"
        );
    }

    #[test]
    fn bounds_name_what_is_outside() {
        let container = json!({"type": "Container", "min": {"cpu": "50m"}, "max": {"cpu": "500m"},
            "maxLimitRequestRatio": {"cpu": "4"}});
        let sum = json!({"type": "Pod", "max": {"cpu": "400m"}});
        for (limit, resources, want) in [
            (
                &container,
                json!({"requests": {"cpu": "200m"}, "limits": {"cpu": "400m"}}),
                &[][..],
            ),
            (
                &container,
                json!({"requests": {"cpu": "10m"}, "limits": {"cpu": "100m"}}),
                &[
                    "minimum cpu usage per Container is 50m, but request is 10m",
                    "cpu max limit to request ratio per Container is 4, but provided ratio is 10.000000",
                ],
            ),
            (
                &container,
                json!({"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}),
                &["maximum cpu usage per Container is 500m, but limit is 1"],
            ),
            (
                &sum,
                json!({"requests": {"cpu": "1"}}),
                &["maximum cpu usage per Pod is 400m.  No limit is specified"],
            ),
        ] {
            assert_eq!(check_pod(&pod(resources), &range(limit.clone())), want);
        }
    }

    #[test]
    fn claims_have_bounds_too() {
        let range = range(
            json!({"type": "PersistentVolumeClaim", "min": {"storage": "1Gi"}, "max": {"storage": "2Gi"}}),
        );
        let claim = |size: &str| json!({"spec": {"resources": {"requests": {"storage": size}}}});
        assert!(check_claim(&claim("2Gi"), &range).is_empty());
        assert_eq!(
            check_claim(&claim("3Gi"), &range),
            ["maximum storage usage per PersistentVolumeClaim is 2Gi, but request is 3Gi"]
        );
        assert_eq!(check_claim(&claim("1Mi"), &range).len(), 1);
    }
}
