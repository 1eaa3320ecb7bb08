//! A world on real namespaces: router, segments, nodes with agents, pods by the CNI plugin, externals. Kinds of cases share
//! it.

pub(in crate::cases) mod api;
pub(in crate::cases) mod capture;
pub(in crate::cases) mod handle;
pub(in crate::cases) mod node;
pub(in crate::cases) mod pod;
pub(in crate::cases) mod slices;
pub(in crate::cases) mod spec;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use weir_control::config::Network;

use self::api::Control;
use self::handle::Handle;
use self::node::Node;
use self::pod::Pod;
use self::spec::{
    CaseFile, ExternalSpec, Listen, NodeSpec, PodSpec, Segment, V4_PREFIX, V6_PREFIX,
};
use crate::actor::command::Command;
use crate::prog::cgroup::Cgroup;
use crate::topology::Namespace;

/// The control side's own link to the router: nodes reach it by their default route.
const CONTROL: &str = "100.127.0.2";
const CONTROL_ROUTER: &str = "100.127.0.1/30";
const FEED_PORT: u16 = 6444;

/// Binaries under test.
#[derive(Clone, Debug)]
pub struct Binaries {
    pub agent: PathBuf,
    pub cni: PathBuf,
    /// Also translate at the socket what pods and nodes send.
    pub sockets: bool,
}

#[derive(Debug)]
pub(in crate::cases) struct External {
    pub(in crate::cases) spec: ExternalSpec,
    pub(in crate::cases) ips: Vec<IpAddr>,
    pub(in crate::cases) namespace: Namespace,
    pub(in crate::cases) actor: Handle,
}

/// Settings of the overlay: UDP port, network identifier, address of every node's device.
#[derive(Clone, Copy, Debug)]
pub(in crate::cases) struct Overlay {
    pub(in crate::cases) port: u16,
    pub(in crate::cases) vni: u32,
    pub(in crate::cases) mac: [u8; 6],
}

/// Everything of one case.
#[derive(Debug)]
pub(in crate::cases) struct Cluster {
    pub(in crate::cases) pods: BTreeMap<String, Pod>,
    /// Specs of all pods of the case, present or not.
    pub(in crate::cases) specs: BTreeMap<String, PodSpec>,
    /// The last address of pods that are gone, for `$ip()`.
    pub(in crate::cases) gone: BTreeMap<String, Vec<IpAddr>>,
    pub(in crate::cases) nodes: BTreeMap<String, Node>,
    pub(in crate::cases) externals: BTreeMap<String, External>,
    pub(in crate::cases) control: Control,
    pub(in crate::cases) router: Namespace,
    control_namespace: Arc<Namespace>,
    pub(in crate::cases) segments: Vec<Segment>,
    pub(in crate::cases) binaries: Binaries,
    /// What socket hooks are attached to, with all processes of pods and nodes; none leaves them out.
    pub(in crate::cases) cgroup: Option<Cgroup>,
    pub(in crate::cases) folder: tempfile::TempDir,
    pub(in crate::cases) next_container: u32,
    /// Section of every agent's configuration that the case's options make.
    pub(in crate::cases) options: String,
    /// Nodes behind a control outage.
    pub(in crate::cases) outage: bool,
}

pub(in crate::cases) fn sysctl(namespace: &Namespace, settings: &[(&str, &str)]) -> Result<()> {
    namespace.enter(|| {
        for (key, value) in settings {
            let path = format!("/proc/sys/{key}");
            std::fs::write(&path, value).with_context(|| format!("write {path}"))?;
        }
        Ok(())
    })
}

/// No duplicate address detection on a link that is not up yet: a forwarding host asks for a neighbour from its
/// link-local address only, and while that is tentative the kernel does not ask at all.
pub(in crate::cases) fn usable_at_once(namespace: &Namespace, link: &str) -> Result<()> {
    let setting = format!("net/ipv6/conf/{link}/accept_dad");
    sysctl(namespace, &[(&setting, "0")])
}

pub(in crate::cases) fn prefixed(address: IpAddr) -> String {
    format!(
        "{address}/{}",
        if address.is_ipv4() {
            V4_PREFIX
        } else {
            V6_PREFIX
        }
    )
}

pub(in crate::cases) fn add_address(
    namespace: &Namespace,
    address: &str,
    link: &str,
) -> Result<()> {
    let mut arguments = vec!["address", "replace", address, "dev", link];
    if address.contains(':') {
        arguments.push("nodad");
    }
    namespace.ip(&arguments).map(drop)
}

/// What a world is made of.
#[derive(Clone, Debug)]
pub(in crate::cases) struct Layout {
    pub(in crate::cases) segments: Vec<Segment>,
    pub(in crate::cases) nodes: Vec<NodeSpec>,
    pub(in crate::cases) externals: Vec<ExternalSpec>,
    /// All pods that may come to be.
    pub(in crate::cases) pods: Vec<PodSpec>,
    /// Options of the agents.
    pub(in crate::cases) options: Map<String, Value>,
    pub(in crate::cases) network: Network,
}

impl From<&CaseFile> for Layout {
    fn from(case: &CaseFile) -> Self {
        Self {
            segments: Segment::all(&case.segments),
            nodes: case.nodes.clone(),
            externals: case.external.clone(),
            pods: case.pods.clone(),
            options: case.agent.clone(),
            network: api::network(),
        }
    }
}

impl Cluster {
    /// Lets socket hooks see a process of a pod or a node.
    ///
    /// # Errors
    /// When it cannot be moved.
    pub(in crate::cases) fn admit(&self, actor: &Handle) -> Result<()> {
        self.cgroup
            .as_ref()
            .map_or(Ok(()), |cgroup| cgroup.admit(actor.process()))
    }

    /// Builds namespaces, control side, externals, joined nodes and their pods.
    ///
    /// # Errors
    /// The first thing that could not be built.
    pub(in crate::cases) fn build(layout: &Layout, binaries: &Binaries) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let segments = layout.segments.clone();
        let router = Namespace::new("r")?;
        build_router(&router, &segments)?;
        let control_namespace = Arc::new(Namespace::new("c")?);
        join_control(&router, &control_namespace)?;
        let address = SocketAddr::new(CONTROL.parse()?, FEED_PORT);
        let control = Control::start(&control_namespace, address, folder.path(), &layout.network)?;
        let mut cluster = Self {
            pods: BTreeMap::new(),
            specs: layout.pods.iter().map(|p| (p.key(), p.clone())).collect(),
            gone: BTreeMap::new(),
            nodes: BTreeMap::new(),
            externals: BTreeMap::new(),
            control,
            router,
            control_namespace,
            segments,
            binaries: binaries.clone(),
            cgroup: binaries.sockets.then(Cgroup::for_processes).transpose()?,
            folder,
            next_container: 0,
            options: String::new(),
            outage: false,
        };
        for (index, spec) in layout.nodes.iter().enumerate() {
            cluster.build_node(spec, index + 1, &layout.options)?;
        }
        for (index, spec) in layout.externals.iter().enumerate() {
            cluster.build_external(spec, index + 1)?;
        }
        let joined: Vec<String> = layout
            .nodes
            .iter()
            .filter(|n| n.joined)
            .map(|n| n.name.clone())
            .collect();
        cluster.join(&joined)?;
        for spec in layout
            .pods
            .iter()
            .filter(|p| p.present && joined.contains(&p.node))
        {
            cluster.create_pod(spec)?;
        }
        Ok(cluster)
    }

    fn build_external(&mut self, spec: &ExternalSpec, number: usize) -> Result<()> {
        let namespace = Namespace::new(&format!("e-{}", spec.name))?;
        let ips = spec::external_ips(spec, number, &self.segments);
        self.plug(&namespace, &spec.segment, &ips)?;
        for cidr in &spec.owns {
            let v6 = cidr.contains(':');
            let family = if v6 { "-6" } else { "-4" };
            namespace.ip(&[family, "route", "add", "local", cidr, "dev", "lo"])?;
            if let Some(ip) = spec::of_family(&ips, v6) {
                self.route(cidr, ip)?;
            }
        }
        for route in &spec.routes {
            let node = self
                .nodes
                .get(&route.via)
                .with_context(|| format!("no node {}", route.via))?;
            let via = spec::of_family(&node.ips, route.to.contains(':'));
            let via = via.context("the node lacks this family")?;
            if self.near(&ips, via) {
                namespace.ip(&["route", "replace", &route.to, "via", &via.to_string()])?;
            } else {
                self.route(&route.to, via)?;
            }
        }
        let actor = Handle::start(&namespace, &self.actor_log())?;
        listen(&actor, &spec.listen, &format!("ext:{}", spec.name))?;
        self.externals.insert(
            spec.name.clone(),
            External {
                spec: spec.clone(),
                ips,
                namespace,
                actor,
            },
        );
        Ok(())
    }

    /// A route of the router, with the path MTU of the segment that it leads into.
    ///
    /// # Errors
    /// When the router refuses.
    pub(in crate::cases) fn route(&self, to: &str, via: IpAddr) -> Result<()> {
        let gateway = via.to_string();
        let mut route = vec!["route", "replace", to, "via", &gateway];
        let segment = self.segments.iter().find(|s| s.holds(via));
        let mtu = segment.and_then(|s| s.path_mtu).map(|m| m.to_string());
        if let Some(mtu) = &mtu {
            route.extend(["mtu", "lock", mtu]);
        }
        self.router.ip(&route).map(drop)
    }

    /// Is a host with these addresses on the segment of another address?
    #[must_use]
    pub(in crate::cases) fn near(&self, own: &[IpAddr], other: IpAddr) -> bool {
        let segment = self.segments.iter().find(|s| s.holds(other));
        own.iter().any(|ip| segment.is_some_and(|s| s.holds(*ip)))
    }

    /// How nodes of different segments wrap packets.
    #[must_use]
    pub(in crate::cases) fn overlay() -> Overlay {
        let settings = weir_agent::config::Overlay::default();
        Overlay {
            port: settings.port,
            vni: settings.vni,
            mac: dataplane_common::OVERLAY_MAC,
        }
    }

    /// Index of a segment's bridge, which sees every frame of the segment.
    ///
    /// # Errors
    /// When there is no such segment.
    pub(in crate::cases) fn bridge(&self, segment: &str) -> Result<usize> {
        let name = format!("br-{}", self.segment(segment)?.name);
        let index = || Ok(nix::net::if_::if_nametoindex(name.as_str())?);
        Ok(usize::try_from(self.router.enter(index)?)?)
    }

    /// Where the next actor writes what goes wrong with it.
    #[must_use]
    pub(in crate::cases) fn actor_log(&self) -> PathBuf {
        let number = crate::topology::next_number();
        self.folder.path().join(format!("actor-{number}.log"))
    }

    /// The actor and the own addresses behind a source: a pod, `node:NAME` or `ext:NAME`.
    ///
    /// # Errors
    /// When there is no such source.
    pub(in crate::cases) fn source(
        &self,
        reference: &str,
    ) -> Result<(&Handle, &[IpAddr], &Namespace)> {
        if let Some(name) = reference.strip_prefix("node:") {
            let node = self
                .nodes
                .get(name)
                .with_context(|| format!("no node {name}"))?;
            return Ok((&node.actor, &node.ips, &node.namespace));
        }
        if let Some(name) = reference.strip_prefix("ext:") {
            let external = self
                .externals
                .get(name)
                .with_context(|| format!("no external {name}"))?;
            return Ok((&external.actor, &external.ips, &external.namespace));
        }
        let pod = self
            .pods
            .get(&spec::normal_key(reference))
            .with_context(|| format!("no pod {reference}"))?;
        let namespace = match (&pod.namespace, self.nodes.get(&pod.spec.node)) {
            (Some(own), _) => own,
            (None, Some(node)) => &node.namespace,
            (None, None) => bail!("no node {}", pod.spec.node),
        };
        Ok((&pod.actor, &pod.ips, namespace))
    }

    /// Addresses of a pod (the last ones, if it is gone), node or external.
    ///
    /// # Errors
    /// When there never was such a thing.
    pub(in crate::cases) fn addresses(&self, reference: &str) -> Result<Vec<IpAddr>> {
        if let Ok((_, ips, _)) = self.source(reference) {
            return Ok(ips.to_vec());
        }
        let gone = self.gone.get(&spec::normal_key(reference));
        gone.cloned()
            .with_context(|| format!("no address of {reference}"))
    }

    /// The control side ends and starts anew on the same objects.
    ///
    /// # Errors
    /// When it does not start.
    pub(in crate::cases) fn restart_control(&mut self) -> Result<()> {
        self.control.restart(&self.control_namespace)
    }

    /// Cuts or mends the way of all agents to the control side.
    ///
    /// # Errors
    /// When the link cannot be switched.
    pub(in crate::cases) fn set_outage(&mut self, down: bool) -> Result<()> {
        self.outage = down;
        self.router
            .ip(&["link", "set", "control", if down { "down" } else { "up" }])?;
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        for name in names {
            // Clean-up goes on whatever one step says.
            let _ended = self.stop_agent(&name, true);
        }
        self.pods.clear();
        for node in self.nodes.values() {
            let deadline = Instant::now() + Duration::from_secs(5);
            let bpf = node.folder.join("bpf");
            while nix::mount::umount(&bpf) == Err(nix::errno::Errno::EBUSY)
                && Instant::now() < deadline
            {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn build_router(router: &Namespace, segments: &[Segment]) -> Result<()> {
    let settings = [
        ("net/ipv4/ip_forward", "1"),
        ("net/ipv6/conf/all/forwarding", "1"),
        // It answers every packet that it cannot deliver, not only so many a second.
        ("net/ipv4/icmp_ratelimit", "0"),
        ("net/ipv6/icmp/ratelimit", "0"),
    ];
    sysctl(router, &settings)?;
    for segment in segments {
        let bridge = format!("br-{}", segment.name);
        router.ip(&["link", "add", &bridge, "type", "bridge"])?;
        usable_at_once(router, &bridge)?;
        // Promiscuous: what passes between two ports is to be seen as well.
        router.ip(&["link", "set", &bridge, "promisc", "on", "up"])?;
        for address in segment.router() {
            add_address(router, &prefixed(address), &bridge)?;
        }
        if let Some(mtu) = segment.path_mtu {
            let mtu = mtu.to_string();
            for net in [
                format!("{}/{V4_PREFIX}", segment.v4),
                format!("{}/{V6_PREFIX}", segment.v6),
            ] {
                router.ip(&[
                    "route", "replace", &net, "dev", &bridge, "mtu", "lock", &mtu,
                ])?;
            }
        }
    }
    for family in ["-4", "-6"] {
        router.ip(&[family, "route", "add", "unreachable", "default"])?;
    }
    Ok(())
}

fn join_control(router: &Namespace, control: &Namespace) -> Result<()> {
    router.ip(&[
        "link",
        "add",
        "control",
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        control.name(),
    ])?;
    add_address(router, CONTROL_ROUTER, "control")?;
    router.ip(&["link", "set", "control", "up"])?;
    add_address(control, &format!("{CONTROL}/30"), "eth0")?;
    control.ip(&["link", "set", "eth0", "up"])?;
    let gateway = CONTROL_ROUTER.split('/').next().unwrap_or_default();
    control
        .ip(&["route", "add", "default", "via", gateway])
        .map(drop)
}

/// Opens the ports of a pod or an external.
///
/// # Errors
/// When one cannot be opened.
pub(in crate::cases) fn listen(actor: &Handle, ports: &[Listen], name: &str) -> Result<()> {
    for port in ports {
        let protocol = port.protocol;
        actor.call(
            Command::Listen {
                protocol,
                port: port.port,
                name: name.to_owned(),
            },
            Duration::ZERO,
        )?;
    }
    Ok(())
}
