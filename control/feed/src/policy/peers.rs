//! Pods and nodes as policies see them.

use control_api::v1::{NamedPort, PolicyPeer};
use serde_json::Value;

use super::selector::{Labels, labels};
use crate::translate::{
    addresses, flag, items, micros, name, namespace, node, protocol, text, unsigned,
};

/// On the object that a kubelet makes for a pod of its own (a static pod): the UID under which the pod itself runs.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// A pod or a node with the labels that selectors look at. `message` has neither sets nor policies yet.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Peer {
    pub(crate) message: PolicyPeer,
    pub(crate) labels: Labels,
}

/// `None` for a pod on the host's network: it is its node.
pub(crate) fn pod(object: &Value) -> Option<Peer> {
    let (spec, status) = (&object["spec"], &object["status"]);
    if flag(&spec["hostNetwork"]) {
        return None;
    }
    // Another pod may have the address of one that has ended.
    let ended = status["phase"] == "Succeeded" || status["phase"] == "Failed";
    let addresses = match addresses(items(&status["podIPs"]).map(|ip| &ip["ip"])) {
        _ if ended => Vec::new(),
        list if list.is_empty() => addresses(std::iter::once(&status["podIP"])),
        list => list,
    };
    let metadata = &object["metadata"];
    let uid = match metadata["annotations"][MIRROR_ANNOTATION].as_str() {
        Some(uid) => uid.to_owned(),
        None => text(&metadata["uid"]),
    };
    let message = PolicyPeer {
        namespace: namespace(object),
        name: name(object),
        uid,
        node: text(&spec["nodeName"]),
        addresses,
        named_ports: named_ports(spec),
        created_at_us: micros(&object["metadata"]["creationTimestamp"]),
        ..PolicyPeer::default()
    };
    Some(Peer {
        message,
        labels: labels(object),
    })
}

/// Of containers and of sidecars (KEP-753). The first port of a name and protocol counts, as for Services.
fn named_ports(spec: &Value) -> Vec<NamedPort> {
    let sidecars = items(&spec["initContainers"]).filter(|c| c["restartPolicy"] == "Always");
    let mut ports: Vec<NamedPort> = Vec::new();
    for port in items(&spec["containers"])
        .chain(sidecars)
        .flat_map(|container| items(&container["ports"]))
    {
        let port = NamedPort {
            name: text(&port["name"]),
            protocol: protocol(&port["protocol"]).into(),
            port: unsigned(&port["containerPort"]),
        };
        let known = |p: &NamedPort| p.name == port.name && p.protocol == port.protocol;
        if !port.name.is_empty() && !ports.iter().any(known) {
            ports.push(port);
        }
    }
    ports
}

/// A node, by the addresses that it has for others.
pub(crate) fn of_node(object: &Value) -> Peer {
    let node = node(object);
    let mut addresses = node.internal_ips;
    addresses.extend(node.external_ips);
    let message = PolicyPeer {
        name: node.name.clone(),
        uid: text(&object["metadata"]["uid"]),
        node: node.name,
        addresses,
        created_at_us: micros(&object["metadata"]["creationTimestamp"]),
        ..PolicyPeer::default()
    };
    Peer {
        message,
        labels: labels(object),
    }
}
