//! What the scheduler needs to know of a pod, read once from the object. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::rules::Rules;
use crate::controllers::runtime::object::{Key, Object};
use crate::controllers::runtime::quantity::{milli, units};
use crate::controllers::runtime::selector::Selector;

/// Scoring counts a pod that requests nothing as if it used this much, so that such pods spread as well.
const ASSUMED_CPU_MILLI: i64 = 100;
const ASSUMED_MEMORY: i64 = 200 * 1024 * 1024;

/// Amounts by resource: cpu in thousandths, everything else in units (bytes, devices).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Amounts(pub(super) BTreeMap<String, i64>);

impl Amounts {
    pub(super) fn read(object: Option<&Value>) -> Self {
        let mut out = Self::default();
        for (name, value) in object.and_then(Value::as_object).into_iter().flatten() {
            let amount = if name == "cpu" {
                milli(value)
            } else {
                units(value)
            };
            out.0.insert(name.clone(), amount.unwrap_or(0));
        }
        out
    }

    pub(super) fn get(&self, name: &str) -> i64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let slot = self.0.entry(name.clone()).or_insert(0);
            *slot = slot.saturating_add(*amount);
        }
    }

    pub(super) fn subtract(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let slot = self.0.entry(name.clone()).or_insert(0);
            *slot = slot.saturating_sub(*amount);
        }
    }

    fn raise_to(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let slot = self.0.entry(name.clone()).or_insert(0);
            *slot = (*slot).max(*amount);
        }
    }
}

/// A port that the pod takes on its node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct HostPort {
    pub(super) address: String,
    pub(super) protocol: String,
    pub(super) port: i64,
}

impl HostPort {
    /// The unspecified address overlaps with every other.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.port == other.port
            && self.protocol == other.protocol
            && (self.is_any() || other.is_any() || self.address == other.address)
    }

    fn is_any(&self) -> bool {
        matches!(self.address.as_str(), "" | "0.0.0.0" | "::")
    }
}

/// One node selector term: expressions over labels and over the node's name.
#[derive(Clone, Debug)]
pub(super) struct NodeTerm {
    labels: Selector,
    fields: Selector,
    empty: bool,
}

impl NodeTerm {
    fn read(term: &Value) -> Self {
        let (expressions, fields) = (
            term.items(&["matchExpressions"]),
            term.items(&["matchFields"]),
        );
        Self {
            labels: Selector::from_expressions(expressions),
            fields: Selector::from_expressions(fields),
            empty: expressions.is_empty() && fields.is_empty(),
        }
    }

    /// An empty term matches nothing.
    pub(super) fn matches(&self, node: &Value) -> bool {
        let field = |key: &str| (key == "metadata.name").then(|| node.name());
        !self.empty && self.labels.matches(node.labels()) && self.fields.matches_by(field)
    }
}

/// A pod as the scheduler sees it.
#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) object: Arc<Value>,
    pub(super) key: Key,
    pub(super) uid: String,
    pub(super) priority: i64,
    pub(super) requests: Amounts,
    /// Requests as scores count them.
    pub(super) weight_cpu_milli: i64,
    pub(super) weight_memory: i64,
    pub(super) ports: Vec<HostPort>,
    pub(super) node_selector: Selector,
    pub(super) required: Option<Vec<NodeTerm>>,
    pub(super) preferred: Vec<(i64, NodeTerm)>,
    pub(super) rules: Rules,
    /// The managing owner, by which pods are spread.
    pub(super) owner: String,
}

impl Pod {
    pub(super) fn read(object: Arc<Value>) -> Self {
        let requests = requests(&object);
        let (weight_cpu_milli, weight_memory) = weights(&object);
        let affinity = ["spec", "affinity", "nodeAffinity"];
        let node_affinity = object.at(&affinity);
        let required = node_affinity.and_then(|a| {
            let terms = a.at(&[
                "requiredDuringSchedulingIgnoredDuringExecution",
                "nodeSelectorTerms",
            ])?;
            Some(terms.items(&[]).iter().map(NodeTerm::read).collect())
        });
        let preferred = node_affinity.map_or(&[][..], |a| {
            a.items(&["preferredDuringSchedulingIgnoredDuringExecution"])
        });
        let preferred = preferred
            .iter()
            .map(|p| {
                let term = NodeTerm::read(p.at(&["preference"]).unwrap_or(&Value::Null));
                (p.number(&["weight"]).unwrap_or(0), term)
            })
            .collect();
        Self {
            key: object.key(),
            uid: object.uid().to_owned(),
            priority: object.number(&["spec", "priority"]).unwrap_or(0),
            requests,
            weight_cpu_milli,
            weight_memory,
            ports: host_ports(&object),
            node_selector: Selector::from_map(object.fields(&["spec", "nodeSelector"])),
            required,
            preferred,
            rules: Rules::read(&object),
            owner: object
                .controller()
                .map(|o| o.uid.to_owned())
                .unwrap_or_default(),
            object,
        }
    }

    pub(super) fn node(&self) -> &str {
        self.object.text(&["spec", "nodeName"])
    }

    pub(super) fn revision(&self) -> &str {
        self.object.text(&["metadata", "resourceVersion"])
    }

    /// Whether a newer form of the pod asks for the same: its status alone does not matter to the scheduler.
    pub(super) fn asks_same(&self, newer: &Self) -> bool {
        let labels = ["metadata", "labels"];
        self.object.at(&["spec"]) == newer.object.at(&["spec"])
            && self.object.at(&labels) == newer.object.at(&labels)
    }

    pub(super) fn tolerations(&self) -> &[Value] {
        self.object.items(&["spec", "tolerations"])
    }

    /// `nodeSelector` and required node affinity.
    pub(super) fn accepts(&self, node: &Value) -> bool {
        self.node_selector.matches(node.labels())
            && self
                .required
                .as_ref()
                .is_none_or(|terms| terms.iter().any(|t| t.matches(node)))
    }
}

fn is_sidecar(container: &Value) -> bool {
    container.text(&["restartPolicy"]) == "Always"
}

/// Containers and sidecars together, or the most demanding init step if that is more; plus overhead.
fn requests(pod: &Value) -> Amounts {
    let of = |container: &Value| Amounts::read(container.at(&["resources", "requests"]));
    let mut total = Amounts::default();
    for container in pod.items(&["spec", "containers"]) {
        total.add(&of(container));
    }
    let mut sidecars = Amounts::default();
    let mut peak = Amounts::default();
    for container in pod.items(&["spec", "initContainers"]) {
        let mut step = of(container);
        if is_sidecar(container) {
            sidecars.add(&step);
            step = sidecars.clone();
        } else {
            step.add(&sidecars);
        }
        peak.raise_to(&step);
    }
    total.add(&sidecars);
    total.raise_to(&peak);
    // Requests of the pod as a whole stand in place of the sums.
    for (name, amount) in Amounts::read(pod.at(&["spec", "resources", "requests"])).0 {
        total.0.insert(name, amount);
    }
    total.add(&Amounts::read(pod.at(&["spec", "overhead"])));
    total
}

fn weights(pod: &Value) -> (i64, i64) {
    let (mut cpu, mut memory) = (0_i64, 0_i64);
    for container in pod.items(&["spec", "containers"]) {
        let requests = Amounts::read(container.at(&["resources", "requests"]));
        let or = |name: &str, assumed: i64| match requests.get(name) {
            0 => assumed,
            amount => amount,
        };
        cpu = cpu.saturating_add(or("cpu", ASSUMED_CPU_MILLI));
        memory = memory.saturating_add(or("memory", ASSUMED_MEMORY));
    }
    (cpu, memory)
}

fn host_ports(pod: &Value) -> Vec<HostPort> {
    let sidecars = pod
        .items(&["spec", "initContainers"])
        .iter()
        .filter(|c| is_sidecar(c));
    pod.items(&["spec", "containers"])
        .iter()
        .chain(sidecars)
        .flat_map(|c| c.items(&["ports"]))
        .filter_map(|p| {
            let port = p.number(&["hostPort"]).filter(|p| *p > 0)?;
            let protocol = match p.text(&["protocol"]) {
                "" => "TCP",
                protocol => protocol,
            };
            Some(HostPort {
                address: p.text(&["hostIP"]).to_owned(),
                protocol: protocol.to_owned(),
                port,
            })
        })
        .collect()
}

/// Waits for this scheduler: no node yet, not on its way out, no gate, and no other scheduler named.
pub(super) fn wants_node(object: &Value) -> bool {
    let scheduler = object.text(&["spec", "schedulerName"]);
    object.text(&["spec", "nodeName"]).is_empty()
        && !object.is_deleting()
        && !crate::controllers::pods::is_finished(object)
        && object.items(&["spec", "schedulingGates"]).is_empty()
        && (scheduler.is_empty() || scheduler == "default-scheduler")
}
