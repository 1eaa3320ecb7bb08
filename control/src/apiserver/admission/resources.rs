//! What pods ask for: requests and limits of containers and of whole pods.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::apiserver::schema::quantity::Quantity;

/// Amounts by resource name.
pub type Amounts = BTreeMap<String, Quantity>;

/// One side of `resources`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Requests,
    Limits,
}

impl Side {
    #[must_use]
    pub const fn field(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Limits => "limits",
        }
    }
}

/// A resource list. Amounts that are no quantities are validation's to refuse.
#[must_use]
pub fn amounts(list: Option<&Value>) -> Amounts {
    let entries = list.and_then(Value::as_object).into_iter().flatten();
    entries
        .filter_map(|(name, amount)| Some((name.clone(), Quantity::from_json(amount).ok()?)))
        .collect()
}

#[must_use]
pub fn of_container(container: &Value, side: Side) -> Amounts {
    amounts(
        container
            .pointer("/resources")
            .and_then(|r| r.get(side.field())),
    )
}

/// Elements of a list of the spec.
pub fn items<'a>(spec: &'a Value, list: &str) -> &'a [Value] {
    spec.get(list)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// What a pod takes at its most demanding moment (KEP-753): all containers with all sidecars, or one init container
/// with the sidecars started before it; the pod's overhead comes on top.
#[must_use]
pub fn of_pod(pod: &Value, side: Side) -> Amounts {
    let spec = &pod["spec"];
    let mut running = Amounts::new();
    let mut peak = Amounts::new();
    for container in items(spec, "initContainers") {
        let own = of_container(container, side);
        if container["restartPolicy"] == "Always" {
            add(&mut running, own);
        } else {
            let mut step = running.clone();
            add(&mut step, own);
            raise(&mut peak, step);
        }
    }
    for container in items(spec, "containers") {
        add(&mut running, of_container(container, side));
    }
    raise(&mut running, peak);
    let mut overhead = amounts(spec.get("overhead"));
    if side == Side::Limits {
        overhead.retain(|name, _| running.contains_key(name));
    }
    add(&mut running, overhead);
    running
}

fn add(total: &mut Amounts, part: Amounts) {
    for (name, amount) in part {
        let slot = total.entry(name).or_insert_with(Quantity::zero);
        *slot = *slot + amount;
    }
}

fn raise(total: &mut Amounts, other: Amounts) {
    for (name, amount) in other {
        let slot = total.entry(name).or_insert(amount);
        *slot = (*slot).max(amount);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_takes_its_most_demanding_moment() {
        let asks = |cpu: &str| json!({"requests": {"cpu": cpu}});
        let pod = json!({"spec": {
            "initContainers": [
                {"resources": asks("900m")},
                {"restartPolicy": "Always", "resources": asks("100m")},
                {"resources": asks("1")},
            ],
            "containers": [{"resources": asks("250m")}, {"resources": asks("250m")}],
            "overhead": {"cpu": "10m", "memory": "1Mi"},
        }});
        let cpu = of_pod(&pod, Side::Requests)["cpu"].to_string();
        assert_eq!(cpu, "1110m", "the last init container beside the sidecar");
        assert!(of_pod(&pod, Side::Limits).is_empty());
    }
}
