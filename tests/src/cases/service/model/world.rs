//! The things of a case without a kernel: nodes, pods, externals and the addresses they have. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use crate::cases::cluster::slices::PodView;
use crate::cases::cluster::spec::{
    self, CaseFile, ExternalSpec, Listen, NodeSpec, PodSpec, Segment, cidr_holds,
};

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) spec: NodeSpec,
    pub(super) number: usize,
    pub(super) ips: Vec<IpAddr>,
    pub(super) cidrs: Vec<String>,
    pub(super) joined: bool,
    pub(super) agent: bool,
    given: u32,
}

impl Node {
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        self.ips.iter().chain(&self.spec.also).copied().collect()
    }
}

#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) spec: PodSpec,
    pub(super) ips: Vec<IpAddr>,
    /// Tells a pod from its predecessor of the same name, and open sockets from closed ones.
    pub(super) life: u64,
    pub(super) listening: bool,
    /// Its node left.
    pub(super) lost: bool,
}

#[derive(Clone, Debug)]
pub(super) struct External {
    pub(super) spec: ExternalSpec,
    pub(super) ips: Vec<IpAddr>,
}

/// Who is behind an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A server that answers; the number is the life of the pod that it belongs to.
    Server(String, u64),
    /// A host, or a node in place of a pod that is gone, that listens to nothing there.
    Closed,
    /// Something that is there no more and that nobody speaks for.
    Silent,
    Nobody,
}

#[derive(Clone, Debug, Default)]
pub(super) struct World {
    pub(super) segments: Vec<Segment>,
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) externals: BTreeMap<String, External>,
    pub(super) pods: BTreeMap<String, Pod>,
    pub(super) gone: BTreeMap<String, Vec<IpAddr>>,
    lives: u64,
}

fn listens(ports: &[Listen], to: SocketAddr, protocol: &str) -> bool {
    let is = |l: &Listen| l.port == to.port() && l.protocol.name() == protocol;
    ports.iter().any(is)
}

impl World {
    pub(super) fn new(case: &CaseFile) -> Self {
        let segments = Segment::all(&case.segments);
        let mut world = Self {
            segments,
            ..Self::default()
        };
        for (index, spec) in case.nodes.iter().enumerate() {
            let number = index + 1;
            let node = Node {
                spec: spec.clone(),
                number,
                ips: spec::node_ips(spec, number, &world.segments),
                cidrs: spec::pod_cidrs(spec, number),
                joined: spec.joined,
                agent: spec.joined,
                given: 1,
            };
            world.nodes.insert(spec.name.clone(), node);
        }
        for (index, spec) in case.external.iter().enumerate() {
            let ips = spec::external_ips(spec, index + 1, &world.segments);
            let spec = spec.clone();
            world
                .externals
                .insert(spec.name.clone(), External { spec, ips });
        }
        world
    }

    pub(super) fn next_life(&mut self) -> u64 {
        self.lives += 1;
        self.lives
    }

    pub(super) fn create(&mut self, spec: &PodSpec) {
        let life = self.next_life();
        let Some(node) = self.nodes.get_mut(&spec.node) else {
            return;
        };
        node.given += 1;
        let given = node.given;
        let own = |cidr: &String| spec::nth_of(cidr, given);
        let ips = if spec.host_network {
            node.ips.clone()
        } else {
            node.cidrs.iter().filter_map(own).collect()
        };
        let pod = Pod {
            spec: spec.clone(),
            ips,
            life,
            listening: true,
            lost: false,
        };
        self.pods.insert(spec.key(), pod);
    }

    pub(super) fn remove(&mut self, key: &str) {
        if let Some(pod) = self.pods.remove(key) {
            self.gone.insert(key.to_owned(), pod.ips);
        }
    }

    pub(super) fn leave(&mut self, name: &str) {
        if let Some(node) = self.nodes.get_mut(name) {
            (node.joined, node.agent) = (false, false);
        }
        for pod in self.pods.values_mut().filter(|p| p.spec.node == name) {
            pod.lost = true;
        }
    }

    pub(super) fn pod_views(&self) -> Vec<PodView> {
        let view = |pod: &Pod| {
            let node = self.nodes.get(&pod.spec.node);
            let zone = node.and_then(|n| n.spec.zone.as_deref());
            PodView::new(&pod.spec, &pod.ips, zone)
        };
        self.pods.values().filter(|p| !p.lost).map(view).collect()
    }

    /// The joined node that has an address.
    pub(super) fn node_at(&self, ip: IpAddr) -> Option<&str> {
        let mut joined = self.nodes.iter().filter(|(_, n)| n.joined);
        joined
            .find(|(_, n)| n.addresses().contains(&ip))
            .map(|(name, _)| name.as_str())
    }

    /// The node that has a pod with this address.
    pub(super) fn node_of_pod(&self, ip: IpAddr) -> Option<&str> {
        let mut pods = self.pods.values().filter(|p| !p.lost);
        pods.find(|p| p.ips.contains(&ip))
            .map(|p| p.spec.node.as_str())
    }

    /// True for addresses of pods and nodes, which are never masqueraded.
    pub(super) fn is_inside(&self, ip: IpAddr) -> bool {
        let ranges = |n: &Node| n.cidrs.iter().any(|c| cidr_holds(c, ip));
        let mut joined = self.nodes.values().filter(|n| n.joined);
        joined.any(|n| ranges(n) || n.addresses().contains(&ip))
    }

    /// The pod port behind a host port of a node address.
    pub(super) fn host_port(&self, to: SocketAddr, protocol: &str) -> Option<SocketAddr> {
        let node = self.node_at(to.ip())?;
        let here = self.pods.values().filter(|p| p.spec.node == node);
        for pod in here.filter(|p| !p.lost && !p.spec.host_network) {
            let is = |h: &&spec::HostPort| {
                h.host_port == to.port()
                    && h.protocol.name() == protocol
                    && (h.host_ip.is_empty() || h.host_ip.parse() == Ok(to.ip()))
            };
            if let Some(found) = pod.spec.host_ports.iter().find(is) {
                let ip = spec::of_family(&pod.ips, to.is_ipv6())?;
                return Some(SocketAddr::new(ip, found.port));
            }
        }
        None
    }

    /// Who answers at an address, without any Service.
    pub(super) fn at(&self, to: SocketAddr, protocol: &str) -> Found {
        let mut lost = false;
        let here = self.pods.values().filter(|p| p.ips.contains(&to.ip()));
        let mut closed = false;
        for pod in here {
            lost |= pod.lost;
            closed |= !pod.lost;
            if !pod.lost && pod.listening && listens(&pod.spec.listen, to, protocol) {
                return Found::Server(pod.spec.key(), pod.life);
            }
        }
        if closed || self.node_at(to.ip()).is_some() {
            return Found::Closed;
        }
        for (name, external) in &self.externals {
            let owns = external.spec.owns.iter().any(|c| cidr_holds(c, to.ip()));
            if owns || external.ips.contains(&to.ip()) {
                return if listens(&external.spec.listen, to, protocol) {
                    Found::Server(format!("ext:{name}"), 0)
                } else {
                    Found::Closed
                };
            }
        }
        let left: BTreeSet<IpAddr> = self.nodes.values().flat_map(Node::addresses).collect();
        if lost || left.contains(&to.ip()) {
            return Found::Silent;
        }
        // The node that has the range speaks for pods that are gone.
        if self.is_inside(to.ip()) {
            Found::Closed
        } else {
            Found::Nobody
        }
    }
}
