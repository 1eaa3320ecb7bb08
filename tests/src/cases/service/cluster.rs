//! The case's world on real namespaces: router, segments, nodes with agents, pods by the CNI plugin, externals.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::api::Control;
use super::handle::Handle;
use super::slices::PodView;
use super::world::{
    self, CaseFile, ExternalSpec, Listen, NodeSpec, PodSpec, Segment, V4_PREFIX, V6_PREFIX,
};
use crate::actor::command::Command;
use crate::topology::Namespace;

/// The control side's own link to the router: nodes reach it by their default route.
const CONTROL: &str = "100.127.0.2";
const CONTROL_ROUTER: &str = "100.127.0.1/30";
const FEED_PORT: u16 = 6444;
const AGENT_UP_WITHIN: Duration = Duration::from_secs(15);
const CNI_WITHIN: Duration = Duration::from_secs(20);

/// Binaries under test.
#[derive(Clone, Debug)]
pub struct Binaries {
    pub agent: PathBuf,
    pub cni: PathBuf,
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) spec: NodeSpec,
    pub(super) ips: Vec<IpAddr>,
    pub(super) pod_cidrs: Vec<String>,
    pub(super) namespace: Namespace,
    pub(super) actor: Handle,
    folder: PathBuf,
    pub(super) agent: Option<Child>,
    pub(super) joined: bool,
}

#[derive(Debug)]
pub(super) struct External {
    pub(super) spec: ExternalSpec,
    pub(super) ips: Vec<IpAddr>,
    pub(super) namespace: Namespace,
    pub(super) actor: Handle,
}

#[derive(Debug)]
pub(super) struct Pod {
    pub(super) spec: PodSpec,
    pub(super) ips: Vec<IpAddr>,
    /// None for pods on the node's network.
    pub(super) namespace: Option<Namespace>,
    pub(super) actor: Handle,
    container_id: String,
}

/// Everything of one case.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) pods: BTreeMap<String, Pod>,
    /// Specs of all pods of the case, present or not.
    pub(super) specs: BTreeMap<String, PodSpec>,
    /// The last address of pods that are gone, for `$ip()`.
    pub(super) gone: BTreeMap<String, Vec<IpAddr>>,
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) externals: BTreeMap<String, External>,
    pub(super) control: Control,
    pub(super) router: Namespace,
    _control_namespace: Arc<Namespace>,
    pub(super) segments: Vec<Segment>,
    binaries: Binaries,
    folder: tempfile::TempDir,
    next_container: u32,
    /// Nodes behind a control outage.
    pub(super) outage: bool,
}

fn sysctl(namespace: &Namespace, settings: &[(&str, &str)]) -> Result<()> {
    namespace.enter(|| {
        for (key, value) in settings {
            let path = format!("/proc/sys/{key}");
            std::fs::write(&path, value).with_context(|| format!("write {path}"))?;
        }
        Ok(())
    })
}

fn prefixed(address: IpAddr) -> String {
    format!(
        "{address}/{}",
        if address.is_ipv4() {
            V4_PREFIX
        } else {
            V6_PREFIX
        }
    )
}

fn add_address(namespace: &Namespace, address: &str, link: &str) -> Result<()> {
    let mut arguments = vec!["address", "replace", address, "dev", link];
    if address.contains(':') {
        arguments.push("nodad");
    }
    namespace.ip(&arguments).map(drop)
}

impl Cluster {
    /// Builds namespaces, control side, externals, joined nodes and their pods.
    ///
    /// # Errors
    /// The first thing that could not be built.
    pub(super) fn build(case: &CaseFile, binaries: &Binaries) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let segments = Segment::all(&case.segments);
        let router = Namespace::new("r")?;
        build_router(&router, &segments)?;
        let control_namespace = Arc::new(Namespace::new("c")?);
        join_control(&router, &control_namespace)?;
        let address = SocketAddr::new(CONTROL.parse()?, FEED_PORT);
        let control = Control::start(&control_namespace, address, folder.path())?;
        let mut cluster = Self {
            pods: BTreeMap::new(),
            specs: case.pods.iter().map(|p| (p.key(), p.clone())).collect(),
            gone: BTreeMap::new(),
            nodes: BTreeMap::new(),
            externals: BTreeMap::new(),
            control,
            router,
            _control_namespace: control_namespace,
            segments,
            binaries: binaries.clone(),
            folder,
            next_container: 0,
            outage: false,
        };
        for (index, spec) in case.nodes.iter().enumerate() {
            cluster.build_node(spec, index + 1, case)?;
        }
        for (index, spec) in case.external.iter().enumerate() {
            cluster.build_external(spec, index + 1)?;
        }
        for spec in case.nodes.iter().filter(|n| n.joined) {
            cluster.join(&spec.name)?;
        }
        Ok(cluster)
    }

    fn build_node(&mut self, spec: &NodeSpec, number: usize, case: &CaseFile) -> Result<()> {
        let namespace = Namespace::new(&format!("n-{}", spec.name))?;
        let ips = world::node_ips(spec, number, &self.segments);
        let all: Vec<IpAddr> = ips.iter().chain(&spec.also).copied().collect();
        let links = self.plug(&namespace, &spec.segment, &all)?;
        sysctl(
            &namespace,
            &[
                ("net/ipv4/ip_forward", "1"),
                ("net/ipv6/conf/all/forwarding", "1"),
            ],
        )?;
        let folder = self.folder.path().join(&spec.name);
        for sub in ["bpf", "state", "run"] {
            std::fs::create_dir_all(folder.join(sub))?;
        }
        let bpf = folder.join("bpf");
        let none: Option<&str> = None;
        nix::mount::mount(
            Some("bpf"),
            &bpf,
            Some("bpf"),
            nix::mount::MsFlags::empty(),
            none,
        )
        .with_context(|| format!("mount a bpffs at {}", bpf.display()))?;
        let config = self.agent_config(spec, &ips, &links, &folder, case)?;
        std::fs::write(folder.join("agent.toml"), config)?;
        let actor = Handle::start(&namespace)?;
        let node = Node {
            spec: spec.clone(),
            ips,
            pod_cidrs: world::pod_cidrs(spec, number),
            namespace,
            actor,
            folder,
            agent: None,
            joined: false,
        };
        self.nodes.insert(spec.name.clone(), node);
        Ok(())
    }

    fn agent_config(
        &self,
        spec: &NodeSpec,
        ips: &[IpAddr],
        links: &[String],
        folder: &Path,
        case: &CaseFile,
    ) -> Result<String> {
        ensure!(
            case.agent.is_empty(),
            "agent options {:?} are not offered",
            case.agent.keys()
        );
        let ips: Vec<String> = ips.iter().map(ToString::to_string).collect();
        let feed = self.control.feed_section(
            &spec.name,
            &ips.iter()
                .filter_map(|i| i.parse().ok())
                .collect::<Vec<_>>(),
            folder,
        )?;
        Ok(format!(
            "node_name = {:?}\nnode_ips = {ips:?}\nuplinks = {links:?}\nstate_dir = {:?}\nrun_dir = {:?}\nbpffs = {:?}\n{feed}\
             [dns]\nupstreams = [\"127.0.0.1:9\"]\n",
            spec.name,
            folder.join("state"),
            folder.join("run"),
            folder.join("bpf"),
        ))
    }

    fn build_external(&mut self, spec: &ExternalSpec, number: usize) -> Result<()> {
        let namespace = Namespace::new(&format!("e-{}", spec.name))?;
        let ips = world::external_ips(spec, number, &self.segments);
        self.plug(&namespace, &spec.segment, &ips)?;
        for cidr in &spec.owns {
            let v6 = cidr.contains(':');
            let family = if v6 { "-6" } else { "-4" };
            namespace.ip(&[family, "route", "add", "local", cidr, "dev", "lo"])?;
            if let Some(ip) = world::of_family(&ips, v6) {
                self.router
                    .ip(&[family, "route", "add", cidr, "via", &ip.to_string()])?;
            }
        }
        for route in &spec.routes {
            let v6 = route.to.contains(':');
            let node = self
                .nodes
                .get(&route.via)
                .with_context(|| format!("no node {}", route.via))?;
            let via = world::of_family(&node.ips, v6).context("the node lacks this family")?;
            namespace.ip(&["route", "add", &route.to, "via", &via.to_string()])?;
        }
        let actor = Handle::start(&namespace)?;
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

    /// Plugs a namespace into its segment, and into others that its addresses belong to. Returns the links.
    fn plug(&self, namespace: &Namespace, home: &str, ips: &[IpAddr]) -> Result<Vec<String>> {
        let mut links = Vec::new();
        let at_home = |s: &&Segment| s.name == home;
        let ordered = self
            .segments
            .iter()
            .filter(at_home)
            .chain(self.segments.iter().filter(|s| s.name != home));
        for segment in ordered {
            let own: Vec<IpAddr> = ips
                .iter()
                .copied()
                .filter(|ip| segment.holds(*ip))
                .collect();
            if own.is_empty() && segment.name != home {
                continue;
            }
            let link = format!("eth{}", links.len());
            let port = format!("{}-{}", segment.name, crate::topology::next_number());
            self.router.ip(&[
                "link",
                "add",
                &port,
                "type",
                "veth",
                "peer",
                "name",
                &link,
                "netns",
                namespace.name(),
            ])?;
            self.router.ip(&[
                "link",
                "set",
                &port,
                "master",
                &format!("br-{}", segment.name),
                "up",
            ])?;
            for ip in own {
                add_address(namespace, &prefixed(ip), &link)?;
            }
            namespace.ip(&["link", "set", &link, "up"])?;
            if links.is_empty() {
                for gateway in segment.router() {
                    namespace.ip(&[
                        "route",
                        "replace",
                        "default",
                        "via",
                        &gateway.to_string(),
                        "dev",
                        &link,
                    ])?;
                }
            }
            links.push(link);
        }
        // Addresses outside every segment still belong to the host.
        for ip in ips
            .iter()
            .filter(|ip| !self.segments.iter().any(|s| s.holds(**ip)))
        {
            add_address(
                namespace,
                &format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 }),
                "eth0",
            )?;
        }
        Ok(links)
    }

    /// Node object and agent appear, then the node's pods.
    ///
    /// # Errors
    /// When the agent does not come up or a pod cannot be wired.
    pub(super) fn join(&mut self, name: &str) -> Result<()> {
        self.put_node(name)?;
        self.start_agent(name)?;
        self.node_mut(name)?.joined = true;
        let present = |p: &PodSpec| p.node == name && p.present;
        let pods: Vec<PodSpec> = self
            .specs
            .values()
            .filter(|p| present(p))
            .cloned()
            .collect();
        for spec in pods {
            self.create_pod(&spec)?;
        }
        Ok(())
    }

    /// Node object and agent are gone, the host is unplugged.
    ///
    /// # Errors
    /// When the host cannot be unplugged.
    pub(super) fn leave(&mut self, name: &str) -> Result<()> {
        self.stop_agent(name, false)?;
        self.control.objects.remove("nodes", "", name);
        let node = self.node_mut(name)?;
        node.joined = false;
        node.namespace
            .ip(&["link", "set", "eth0", "down"])
            .map(drop)
    }

    fn node_mut(&mut self, name: &str) -> Result<&mut Node> {
        self.nodes
            .get_mut(name)
            .with_context(|| format!("no node {name}"))
    }

    /// Writes the Node object as the case has it now.
    ///
    /// # Errors
    /// When there is no such node.
    pub(super) fn put_node(&mut self, name: &str) -> Result<()> {
        let node = self.node_mut(name)?;
        let addresses: Vec<Value> = node
            .ips
            .iter()
            .chain(&node.spec.also)
            .map(|ip| json!({"type": "InternalIP", "address": ip.to_string()}))
            .collect();
        let mut labels = json!({"kubernetes.io/hostname": name});
        if let Some(zone) = &node.spec.zone {
            labels["topology.kubernetes.io/zone"] = json!(zone);
        }
        let object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
            "spec": {"podCIDR": node.pod_cidrs.first(), "podCIDRs": node.pod_cidrs},
            "status": {"addresses": addresses, "conditions": [{"type": "Ready", "status": "True"}]},
        });
        self.control.objects.put("nodes", object);
        Ok(())
    }

    /// Starts a node's agent and waits until it serves.
    ///
    /// # Errors
    /// When it does not come up, with the end of its log.
    pub(super) fn start_agent(&mut self, name: &str) -> Result<()> {
        let program = self.binaries.agent.display().to_string();
        let node = self.node_mut(name)?;
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(node.folder.join("agent.log"))?;
        let child = node
            .namespace
            .command(&program)
            .arg("--config")
            .arg(node.folder.join("agent.toml"))
            .arg("run")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start an agent")?;
        node.agent = Some(child);
        if self.outage {
            return Ok(());
        }
        let behind = self.control.settle(&[name.to_owned()], AGENT_UP_WITHIN);
        if !behind.is_empty() {
            bail!(
                "the agent of {name} did not come up: {}\n{}",
                self.control.errors(),
                self.log_tail(name)
            );
        }
        Ok(())
    }

    /// Ends a node's agent, at once or cleanly.
    ///
    /// # Errors
    /// When there is no such node.
    pub(super) fn stop_agent(&mut self, name: &str, kill: bool) -> Result<()> {
        let Some(mut child) = self.node_mut(name)?.agent.take() else {
            return Ok(());
        };
        if kill {
            child.kill()?;
        } else {
            let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id())?);
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        }
        child.wait()?;
        Ok(())
    }

    /// The last lines of an agent's log.
    #[must_use]
    pub(super) fn log_tail(&self, name: &str) -> String {
        let text = self
            .nodes
            .get(name)
            .and_then(|n| std::fs::read_to_string(n.folder.join("agent.log")).ok());
        let text = text.unwrap_or_default();
        let tail: Vec<&str> = text.lines().rev().take(12).collect();
        tail.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// Nodes whose agents run and reach the control side.
    #[must_use]
    pub(super) fn followers(&self) -> Vec<String> {
        if self.outage {
            return Vec::new();
        }
        let runs = |n: &&Node| n.joined && n.agent.is_some();
        self.nodes
            .values()
            .filter(runs)
            .map(|n| n.spec.name.clone())
            .collect()
    }

    /// A new pod: wired by the plugin, its servers listening, its object written.
    ///
    /// # Errors
    /// What the plugin said.
    pub(super) fn create_pod(&mut self, spec: &PodSpec) -> Result<()> {
        self.next_container += 1;
        let container_id = format!("{:0>12}{:x}", self.next_container, std::process::id());
        let node = self
            .nodes
            .get(&spec.node)
            .with_context(|| format!("no node {}", spec.node))?;
        let (namespace, ips, actor) = if spec.host_network {
            (None, node.ips.clone(), Handle::start(&node.namespace)?)
        } else {
            let namespace = Namespace::new(&format!("p-{}", spec.name))?;
            let ips = self.cni(node, "ADD", &container_id, Some(&namespace), spec)?;
            let actor = Handle::start(&namespace)?;
            (Some(namespace), ips, actor)
        };
        listen(&actor, &spec.listen, &spec.key())?;
        let pod = Pod {
            spec: spec.clone(),
            ips,
            namespace,
            actor,
            container_id,
        };
        self.pods.insert(spec.key(), pod);
        Ok(())
    }

    /// The pod's wire is cut, then CNI DEL; its object goes with the next sync.
    ///
    /// # Errors
    /// What the plugin said.
    pub(super) fn remove_pod(&mut self, key: &str) -> Result<()> {
        let pod = self
            .pods
            .remove(key)
            .with_context(|| format!("no pod {key}"))?;
        self.gone.insert(key.to_owned(), pod.ips.clone());
        let Some(namespace) = &pod.namespace else {
            return Ok(());
        };
        namespace.ip(&["link", "set", "eth0", "down"])?;
        let node = self.nodes.get(&pod.spec.node).context("the pod's node")?;
        self.cni(node, "DEL", &pod.container_id, Some(namespace), &pod.spec)?;
        Ok(())
    }

    fn cni(
        &self,
        node: &Node,
        verb: &str,
        container: &str,
        namespace: Option<&Namespace>,
        spec: &PodSpec,
    ) -> Result<Vec<IpAddr>> {
        let mappings: Vec<Value> = spec
            .host_ports
            .iter()
            .map(|h| json!({"hostPort": h.host_port, "containerPort": h.port, "protocol": h.protocol.name().to_lowercase(), "hostIP": h.host_ip}))
            .collect();
        let config = json!({
            "cniVersion": "1.0.0", "name": "weir", "type": "weir-cni",
            "socket": node.folder.join("run/cni.sock"), "stateDir": node.folder.join("state"),
            "capabilities": {"portMappings": true},
            "runtimeConfig": {"portMappings": mappings},
        });
        let mut command = std::process::Command::new("timeout");
        command
            .arg(CNI_WITHIN.as_secs().to_string())
            .arg(&self.binaries.cni)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env(
                "CNI_ARGS",
                format!(
                    "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={}",
                    spec.namespace, spec.name
                ),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(namespace) = namespace {
            command.env("CNI_NETNS", namespace.path());
        }
        let mut child = command.spawn().context("run weir-cni")?;
        if let Some(mut stdin) = child.stdin.take() {
            std::io::Write::write_all(&mut stdin, config.to_string().as_bytes())?;
        }
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success(),
            "CNI {verb} for {}: {said}{}",
            spec.name,
            String::from_utf8_lossy(&output.stderr)
        );
        if verb != "ADD" {
            return Ok(Vec::new());
        }
        let result: Value =
            serde_json::from_str(&said).with_context(|| format!("CNI result {said}"))?;
        let addresses = result["ips"].as_array().into_iter().flatten();
        let bare = |ip: &Value| {
            ip["address"]
                .as_str()
                .and_then(|a| a.split('/').next()?.parse().ok())
        };
        Ok(addresses.filter_map(bare).collect())
    }

    /// Pods as the slices see them.
    #[must_use]
    pub(super) fn pod_views(&self) -> Vec<PodView> {
        let view = |pod: &Pod| PodView {
            namespace: pod.spec.namespace.clone(),
            name: pod.spec.name.clone(),
            labels: pod.spec.labels.clone(),
            node: pod.spec.node.clone(),
            zone: self
                .nodes
                .get(&pod.spec.node)
                .and_then(|n| n.spec.zone.clone()),
            ips: pod.ips.clone(),
            listen: pod.spec.listen.clone(),
            ready: pod.spec.ready,
            terminating: pod.spec.terminating,
        };
        self.pods.values().map(view).collect()
    }

    /// The actor and the own addresses behind a source: a pod, `node:NAME` or `ext:NAME`.
    ///
    /// # Errors
    /// When there is no such source.
    pub(super) fn source(&self, reference: &str) -> Result<(&Handle, &[IpAddr], &Namespace)> {
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
            .get(&world::normal_key(reference))
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
    pub(super) fn addresses(&self, reference: &str) -> Result<Vec<IpAddr>> {
        if let Ok((_, ips, _)) = self.source(reference) {
            return Ok(ips.to_vec());
        }
        let gone = self.gone.get(&world::normal_key(reference));
        gone.cloned()
            .with_context(|| format!("no address of {reference}"))
    }

    /// Cuts or mends the way of all agents to the control side.
    ///
    /// # Errors
    /// When the link cannot be switched.
    pub(super) fn set_outage(&mut self, down: bool) -> Result<()> {
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
    sysctl(
        router,
        &[
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
        ],
    )?;
    for segment in segments {
        let bridge = format!("br-{}", segment.name);
        router.ip(&["link", "add", &bridge, "type", "bridge"])?;
        router.ip(&["link", "set", &bridge, "up"])?;
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
pub(super) fn listen(actor: &Handle, ports: &[Listen], name: &str) -> Result<()> {
    for port in ports {
        let protocol = port.protocol.spoken().context("SCTP is not spoken here")?;
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
