//! A large cluster: namespaces whose pods several policies each select, of the kinds that people write.

use control_api::desired::Name;
use control_feed::Kind;
use serde_json::{Value, json};

use super::cluster::{self, Cluster, node_name, pod_address};

/// Values of the label `app`; the first five have a policy of their own in every namespace.
const APPS: usize = 10;
const COLOURS: usize = 3;
/// Values of the namespaces' label `team`.
const TEAMS: usize = 20;
pub(super) const POLICIES_OF_NAMESPACE: usize = 5;

/// How large.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) namespaces: usize,
    pub(super) pods: usize,
    /// As many as a kubelet runs by default.
    pub(super) pods_of_node: usize,
}

impl Size {
    pub(super) const FULL: Self = Self {
        namespaces: 200,
        pods: 10_000,
        pods_of_node: 110,
    };
    pub(super) const QUICK: Self = Self {
        namespaces: 20,
        pods: 1_000,
        pods_of_node: 20,
    };

    pub(super) fn nodes(self) -> usize {
        self.pods.div_ceil(self.pods_of_node)
    }

    pub(super) fn policies(self) -> usize {
        self.namespaces * POLICIES_OF_NAMESPACE
    }
}

/// A pod, as far as its labels depend on something.
#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) name: Name,
    /// Number of its node, from 1 on.
    pub(super) node: usize,
    place: usize,
    app: usize,
    colour: usize,
}

impl Pod {
    pub(super) fn object(&self) -> Value {
        let labels =
            json!({"app": format!("app-{}", self.app), "colour": format!("c{}", self.colour)});
        let address = pod_address(self.node, self.place);
        cluster::pod(&self.name, &node_name(self.node), &labels, Some(address))
    }

    /// Another colour, which rules about its namespace ask for.
    pub(super) fn recolour(&mut self) {
        self.colour = (self.colour + 1) % COLOURS;
    }

    /// Another application: other policies select it, and other rules speak of it.
    pub(super) fn rededicate(&mut self) {
        self.app = (self.app + 1) % APPS;
    }
}

/// All pods. Those of one namespace are spread over the nodes.
pub(super) fn pods(size: Size) -> Vec<Pod> {
    let nodes = size.nodes();
    let mut used = vec![0; nodes];
    let pod = |number: usize| {
        let (namespace, serial) = (number % size.namespaces, number / size.namespaces);
        let node = (number + serial * 7) % nodes;
        used[node] += 1;
        Pod {
            name: Name::new(namespace_name(namespace), format!("pod-{serial}")),
            node: node + 1,
            place: used[node] - 1,
            app: serial % APPS,
            colour: serial / APPS % COLOURS,
        }
    };
    (0..size.pods).map(pod).collect()
}

fn namespace_name(number: usize) -> String {
    format!("ns-{number}")
}

pub(super) fn policies(size: Size) -> Vec<Value> {
    let all = (0..size.namespaces).flat_map(|namespace| {
        (0..POLICIES_OF_NAMESPACE).map(move |kind| {
            let name = Name::new(namespace_name(namespace), format!("policy-{kind}"));
            cluster::policy(&name, &spec(namespace, kind))
        })
    });
    all.collect()
}

fn spec(namespace: usize, kind: usize) -> Value {
    let app = |number: usize| json!({"matchLabels": {"app": format!("app-{number}")}});
    let team = json!({"matchLabels": {"team": format!("t{}", namespace % TEAMS)}});
    match kind {
        // The namespace for itself.
        0 => json!({"podSelector": {}, "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {}}]}]}),
        // A service for the team's other namespaces.
        1 => json!({"podSelector": app(0), "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"namespaceSelector": team, "podSelector": app(1)}],
                "ports": [{"port": "http"}, {"port": 9090}]}]}),
        // A front end: its back ends, names and some of the world.
        2 => json!({"podSelector": app(1), "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"colour": "c1"}}}], "ports": [{"port": 80}]}],
            "egress": [
                {"to": [{"podSelector": app(0)}, {"podSelector": app(2)}], "ports": [{"port": 8080}]},
                {"to": [{"namespaceSelector": {"matchLabels": {"team": "t0"}}}],
                    "ports": [{"protocol": "UDP", "port": 53}, {"port": 53}]},
                {"to": [{"ipBlock": {"cidr": format!("172.{}.0.0/16", 16 + namespace % 16),
                    "except": [format!("172.{}.{}.0/24", 16 + namespace % 16, namespace)]}}]}]}),
        // Everybody in the cluster, and a range of ports.
        3 => json!({"podSelector": app(2), "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"namespaceSelector": {}}], "ports": [{"port": 8443}]},
                {"from": [{"podSelector": app(3)}], "ports": [{"port": 7000, "endPort": 7999}]}]}),
        // What may not speak to other teams.
        _ => json!({"podSelector": {"matchExpressions": [
                {"key": "app", "operator": "In", "values": ["app-3", "app-4"]}]},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"namespaceSelector": team}]}]}),
    }
}

/// The cluster with its pods and policies.
pub(super) fn build(size: Size, pods: &[Pod], policies: &[Value]) -> Cluster {
    let mut cluster = Cluster::new(size.nodes());
    for number in 0..size.namespaces {
        let labels = json!({"team": format!("t{}", number % TEAMS)});
        cluster.put(
            Kind::Namespace,
            &cluster::namespace(&namespace_name(number), &labels),
        );
    }
    cluster.replace(Kind::NetworkPolicy, policies);
    let objects: Vec<Value> = pods.iter().map(Pod::object).collect();
    cluster.replace(Kind::Pod, &objects);
    cluster
}
