//! Nodes of a case: their namespaces and links, Node objects, and the agents that run on them.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::handle::Handle;
use super::spec::{self, NodeSpec, Segment};
use super::{Cluster, add_address, prefixed, sysctl, usable_at_once};
use crate::topology::{Namespace, next_number};

/// How long the control side may take to notice that an agent has ended.
const AGENT_NOTICED_WITHIN: Duration = Duration::from_secs(3);
const AGENT_UP_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const LOG_LINES: usize = 12;

#[derive(Debug)]
pub(in crate::cases) struct Node {
    pub(in crate::cases) spec: NodeSpec,
    /// Position in the case, from 1: default addresses follow it.
    number: usize,
    pub(in crate::cases) ips: Vec<IpAddr>,
    pod_cidrs: Vec<String>,
    pub(in crate::cases) namespace: Namespace,
    plugs: Vec<Plug>,
    pub(in crate::cases) actor: Handle,
    pub(in crate::cases) folder: PathBuf,
    agent: Option<Child>,
    pub(in crate::cases) joined: bool,
}

/// A link of a namespace and the switch port at its other end.
#[derive(Clone, Debug)]
pub(in crate::cases) struct Plug {
    link: String,
    port: String,
    segment: String,
}

/// The keys of the agent's section `[dataplane]`, by what cases call them.
const AGENT_OPTIONS: &[(&str, &str)] = &[
    ("nodeport_addresses", "node_port_addresses"),
    ("nodeport_mode", "node_port_mode"),
    ("xdp", "xdp"),
    ("algorithm", "algorithm"),
    ("masquerade_except", "masquerade_except"),
    ("cgroup", "cgroup"),
    ("socket_translation", "socket_translation"),
];

/// The section `[dataplane]` for a case's options; empty when there are none.
///
/// # Errors
/// An option that the format does not have.
pub(in crate::cases) fn dataplane_section(options: &Map<String, Value>) -> Result<String> {
    let mut section = String::new();
    for (option, value) in options {
        let key = AGENT_OPTIONS.iter().find(|(name, _)| name == option);
        let (_, key) = key.with_context(|| format!("no agent option {option}"))?;
        // JSON's strings, booleans and lists of strings are TOML as well.
        section.push_str(&format!("{key} = {value}\n"));
    }
    if section.is_empty() {
        return Ok(section);
    }
    Ok(format!("[dataplane]\n{section}"))
}

impl Node {
    /// Names of its links into segments.
    pub(in crate::cases) fn uplinks(&self) -> impl Iterator<Item = &str> {
        self.plugs.iter().map(|plug| plug.link.as_str())
    }

    /// Whether an agent was started here and not stopped since.
    #[must_use]
    pub(in crate::cases) fn has_agent(&self) -> bool {
        self.agent.is_some()
    }
}

impl Cluster {
    pub(in crate::cases) fn build_node(
        &mut self,
        spec: &NodeSpec,
        number: usize,
        options: &Map<String, Value>,
    ) -> Result<()> {
        let namespace = Namespace::new(&format!("n-{}", spec.name))?;
        let settings = [
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
            // As distributions have it: a host that changes its address keeps the others.
            ("net/ipv4/conf/all/promote_secondaries", "1"),
        ];
        sysctl(&namespace, &settings)?;
        let ips = spec::node_ips(spec, number, &self.segments);
        let all: Vec<IpAddr> = ips.iter().chain(&spec.also).copied().collect();
        let plugs = self.plug(&namespace, &spec.segment, &all)?;
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
        let actor = Handle::start(&namespace, &folder.join("actor.log"))?;
        self.admit(&actor)?;
        let node = Node {
            spec: spec.clone(),
            number,
            ips,
            pod_cidrs: spec::pod_cidrs(spec, number),
            namespace,
            plugs,
            actor,
            folder,
            agent: None,
            joined: false,
        };
        let mut options = options.clone();
        match &self.cgroup {
            Some(cgroup) => options.insert("cgroup".into(), json!(cgroup.path())),
            None => options.insert("socket_translation".into(), json!(false)),
        };
        self.options = dataplane_section(&options)?;
        self.write_config(&node)?;
        self.nodes.insert(spec.name.clone(), node);
        Ok(())
    }

    /// The agent's configuration, as the node is now.
    fn write_config(&self, node: &Node) -> Result<()> {
        let ips: Vec<String> = node.ips.iter().map(ToString::to_string).collect();
        let links: Vec<&String> = node.plugs.iter().map(|p| &p.link).collect();
        let folder = &node.folder;
        let feed = self
            .control
            .feed_section(&node.spec.name, &node.ips, folder)?;
        let config = format!(
            "node_name = {:?}\nnode_ips = {ips:?}\nuplinks = {links:?}\nstate_dir = {:?}\nrun_dir = {:?}\nbpffs = {:?}\n{feed}\
             [dns]\nupstreams = [\"127.0.0.1:9\"]\n{}",
            node.spec.name,
            folder.join("state"),
            folder.join("run"),
            folder.join("bpf"),
            self.options,
        );
        std::fs::write(folder.join("agent.toml"), config).context("write an agent's configuration")
    }

    /// Plugs a namespace into its segment, and into others that its addresses belong to.
    pub(in crate::cases) fn plug(
        &self,
        namespace: &Namespace,
        home: &str,
        ips: &[IpAddr],
    ) -> Result<Vec<Plug>> {
        let mut plugs = vec![self.plug_into(namespace, home, 0)?];
        self.plug_further(namespace, &mut plugs, ips)?;
        self.place(namespace, &plugs, ips)?;
        Ok(plugs)
    }

    fn plug_further(
        &self,
        namespace: &Namespace,
        plugs: &mut Vec<Plug>,
        ips: &[IpAddr],
    ) -> Result<()> {
        for segment in &self.segments {
            let here = ips.iter().any(|ip| segment.holds(*ip));
            if here && !plugs.iter().any(|p| p.segment == segment.name) {
                plugs.push(self.plug_into(namespace, &segment.name, plugs.len())?);
            }
        }
        Ok(())
    }

    fn plug_into(&self, namespace: &Namespace, segment: &str, number: usize) -> Result<Plug> {
        let plug = Plug {
            link: format!("eth{number}"),
            port: format!("{segment}-{}", next_number()),
            segment: segment.to_owned(),
        };
        let veth = ["type", "veth", "peer", "name", &plug.link, "netns"];
        let mut add = vec!["link", "add", &plug.port];
        add.extend(veth);
        add.push(namespace.name());
        self.router.ip(&add)?;
        self.switch(&plug.port, segment)?;
        usable_at_once(namespace, &plug.link)?;
        namespace.ip(&["link", "set", &plug.link, "up"])?;
        Ok(plug)
    }

    fn switch(&self, port: &str, segment: &str) -> Result<()> {
        let bridge = format!("br-{segment}");
        let set = ["link", "set", port, "master", &bridge, "up"];
        self.router.ip(&set).map(drop)
    }

    /// Gives a host its addresses, each on the link of its segment, and its way to the router.
    fn place(&self, namespace: &Namespace, plugs: &[Plug], ips: &[IpAddr]) -> Result<()> {
        for ip in ips {
            let (link, address) = self.seat(plugs, *ip)?;
            add_address(namespace, &address, link)?;
        }
        self.default_routes(namespace, plugs, ips)
    }

    /// The link that an address belongs on, and how it is written there: alone if it is of no segment.
    fn seat<'p>(&self, plugs: &'p [Plug], ip: IpAddr) -> Result<(&'p str, String)> {
        let home = plugs.first().context("a host without links")?;
        let Some(segment) = self.segments.iter().find(|s| s.holds(ip)) else {
            let alone = format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 });
            return Ok((&home.link, alone));
        };
        let plug = plugs.iter().find(|p| p.segment == segment.name);
        Ok((&plug.unwrap_or(home).link, prefixed(ip)))
    }

    fn default_routes(&self, namespace: &Namespace, plugs: &[Plug], ips: &[IpAddr]) -> Result<()> {
        let home = plugs.first().context("a host without links")?;
        let segment = self.segment(&home.segment)?;
        for gateway in segment.router() {
            let reachable = |ip: &&IpAddr| ip.is_ipv4() == gateway.is_ipv4() && segment.holds(**ip);
            if ips.iter().any(|ip| reachable(&ip)) {
                let via = gateway.to_string();
                let route = [
                    "route", "replace", "default", "via", &via, "dev", &home.link,
                ];
                namespace.ip(&route)?;
            }
        }
        Ok(())
    }

    pub(in crate::cases) fn segment(&self, name: &str) -> Result<&Segment> {
        let found = self.segments.iter().find(|s| s.name == name);
        found.with_context(|| format!("no segment {name}"))
    }

    /// Node objects and agents appear, side by side; pods are made by `create`.
    ///
    /// # Errors
    /// When an agent does not come up.
    pub(in crate::cases) fn join(&mut self, names: &[String]) -> Result<()> {
        for name in names {
            let node = self.node(name)?;
            for plug in &node.plugs {
                node.namespace.ip(&["link", "set", &plug.link, "up"])?;
            }
            // A node that was unplugged has lost its routes and its IPv6 addresses.
            let all: Vec<IpAddr> = node.ips.iter().chain(&node.spec.also).copied().collect();
            self.place(&node.namespace, &node.plugs, &all)?;
            self.node_mut(name)?.joined = true;
            self.put_node(name)?;
            self.spawn_agent(name)?;
        }
        self.agents_up(names)
    }

    /// Node object, its pods' objects and the agent are gone, the host is unplugged.
    ///
    /// # Errors
    /// When the host cannot be unplugged.
    pub(in crate::cases) fn leave(&mut self, name: &str) -> Result<()> {
        self.stop_agent(name, false)?;
        self.control.objects.remove("nodes", "", name);
        let node = self.node_mut(name)?;
        node.joined = false;
        for plug in &node.plugs {
            node.namespace.ip(&["link", "set", &plug.link, "down"])?;
        }
        for pod in self.pods.values_mut().filter(|p| p.spec.node == name) {
            pod.lost = true;
            let (namespace, name) = (&pod.spec.namespace, &pod.spec.name);
            self.control.objects.remove("pods", namespace, name);
        }
        Ok(())
    }

    fn node(&self, name: &str) -> Result<&Node> {
        let node = self.nodes.get(name);
        node.with_context(|| format!("no node {name}"))
    }

    fn node_mut(&mut self, name: &str) -> Result<&mut Node> {
        let node = self.nodes.get_mut(name);
        node.with_context(|| format!("no node {name}"))
    }

    /// Changes the live node and its object: `ips`, `also`, `zone`, `segment`.
    ///
    /// # Errors
    /// When there is no such node or its host refuses.
    pub(in crate::cases) fn set_node(&mut self, name: &str, body: &Value) -> Result<()> {
        let list = |key: &str| -> Result<Option<Vec<IpAddr>>> {
            match &body[key] {
                Value::Null => Ok(None),
                list => Ok(Some(serde_json::from_value(list.clone())?)),
            }
        };
        let segment = body["segment"].as_str();
        if let Some(segment) = segment {
            self.segment(segment)?;
        }
        let mut spec = self.node(name)?.spec.clone();
        let mut ips = self.node(name)?.ips.clone();
        if let Some(zone) = body["zone"].as_str() {
            spec.zone = (zone != "none").then(|| zone.to_owned());
        }
        if let Some(segment) = segment.filter(|s| *s != spec.segment) {
            spec.segment = segment.to_owned();
            spec.ips = None;
            ips = spec::node_ips(&spec, self.node(name)?.number, &self.segments);
        }
        if let Some(new) = list("ips")? {
            ips = new;
        }
        if let Some(new) = list("also")? {
            spec.also = new;
        }
        self.resettle(name, spec, ips)?;
        if self.node(name)?.joined {
            self.put_node(name)?;
        }
        Ok(())
    }

    /// Moves a running host to its new segment and addresses.
    fn resettle(&mut self, name: &str, spec: NodeSpec, ips: Vec<IpAddr>) -> Result<()> {
        let node = self.nodes.get(name).context("no such node")?;
        let all = |spec: &NodeSpec, ips: &[IpAddr]| -> Vec<IpAddr> {
            ips.iter().chain(&spec.also).copied().collect()
        };
        let before = all(&node.spec, &node.ips);
        let after = all(&spec, &ips);
        let mut plugs = node.plugs.clone();
        let moved = spec.segment != node.spec.segment;
        if moved {
            for ip in &before {
                let (link, address) = self.seat(&plugs, *ip)?;
                node.namespace
                    .ip(&["address", "del", &address, "dev", link])?;
            }
            let home = plugs.first_mut().context("a host without links")?;
            self.switch(&home.port, &spec.segment)?;
            home.segment.clone_from(&spec.segment);
        }
        self.plug_further(&node.namespace, &mut plugs, &after)?;
        self.place(&node.namespace, &plugs, &after)?;
        for ip in before.iter().filter(|ip| !moved && !after.contains(ip)) {
            let (link, address) = self.seat(&plugs, *ip)?;
            node.namespace
                .ip(&["address", "del", &address, "dev", link])?;
        }
        self.default_routes(&node.namespace, &plugs, &after)?;
        for pod in self.pods.values_mut() {
            if pod.spec.host_network && pod.spec.node == name {
                pod.ips.clone_from(&ips);
            }
        }
        let node = self.node_mut(name)?;
        (node.spec, node.ips, node.plugs) = (spec, ips, plugs);
        self.write_config(self.node(name)?)
    }

    /// Writes the Node object as the case has it now.
    ///
    /// # Errors
    /// When there is no such node.
    fn put_node(&self, name: &str) -> Result<()> {
        let node = self.node(name)?;
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
    pub(in crate::cases) fn start_agent(&mut self, name: &str) -> Result<()> {
        self.spawn_agent(name)?;
        self.agents_up(&[name.to_owned()])
    }

    /// Starts agents side by side.
    ///
    /// # Errors
    /// As [`Self::start_agent`].
    pub(in crate::cases) fn start_agents(&mut self, names: &[String]) -> Result<()> {
        for name in names {
            self.spawn_agent(name)?;
        }
        self.agents_up(names)
    }

    /// Does a node's agent serve its runtime (CNI STATUS)?
    ///
    /// # Errors
    /// What the plugin said.
    pub(in crate::cases) fn status(&self, name: &str) -> Result<()> {
        self.cni_status(self.node(name)?)
    }

    fn spawn_agent(&mut self, name: &str) -> Result<()> {
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
        Ok(())
    }

    fn agents_up(&mut self, names: &[String]) -> Result<()> {
        if self.outage {
            return Ok(());
        }
        self.confirmed(names, AGENT_UP_WITHIN)
    }

    /// Waits until these agents have confirmed everything up to now.
    ///
    /// # Errors
    /// Those that have not within `limit`, or have ended, and what is known of them.
    pub(in crate::cases) fn confirmed(&mut self, names: &[String], limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let behind = self.control.settle(names, left.min(LOOK_EVERY));
            if behind.is_empty() {
                return Ok(());
            }
            self.alive()?;
            if left.is_zero() {
                bail!("not confirmed within {limit:?}: {}", self.behind(&behind));
            }
        }
    }

    /// Ends a node's agent, at once or cleanly.
    ///
    /// # Errors
    /// When there is no such node.
    pub(in crate::cases) fn stop_agent(&mut self, name: &str, kill: bool) -> Result<()> {
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
        if !self.outage {
            self.control.part(name, AGENT_NOTICED_WITHIN);
        }
        Ok(())
    }

    /// Does every agent and actor still run?
    ///
    /// # Errors
    /// The first that ended although nobody asked it to, with the end of its log.
    pub(in crate::cases) fn alive(&mut self) -> Result<()> {
        for (name, node) in &mut self.nodes {
            if let Some(agent) = &mut node.agent
                && let Some(status) = agent.try_wait()?
            {
                let log = tail(&node.folder.join("agent.log"));
                bail!("the agent of {name} ended ({status}):\n{log}");
            }
        }
        let nodes = self.nodes.iter_mut().map(|(n, x)| (n, &mut x.actor));
        let pods = self.pods.iter_mut().map(|(n, x)| (n, &mut x.actor));
        let externals = self.externals.iter_mut().map(|(n, x)| (n, &mut x.actor));
        for (name, actor) in nodes.chain(pods).chain(externals) {
            let ended = actor.ended()?;
            ensure!(
                ended.is_none(),
                "the actor of {name} ended: {}",
                ended.unwrap_or_default()
            );
        }
        Ok(())
    }

    /// What is known of agents that have not confirmed.
    #[must_use]
    pub(in crate::cases) fn behind(&self, names: &[String]) -> String {
        let one = |name: &String| {
            let node = self.nodes.get(name);
            let log = node.map(|n| tail(&n.folder.join("agent.log")));
            let log = log.unwrap_or_default();
            format!("{}\n{log}", self.control.standing(name))
        };
        names.iter().map(one).collect::<Vec<_>>().join("\n")
    }

    /// Nodes whose agents run and reach the control side.
    #[must_use]
    pub(in crate::cases) fn followers(&self) -> Vec<String> {
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
}

/// The last lines of a log.
#[must_use]
pub(in crate::cases) fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let tail: Vec<&str> = text.lines().rev().take(LOG_LINES).collect();
    tail.into_iter().rev().collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_a_section_only_when_a_case_has_some() {
        let section = |options: Value| dataplane_section(options.as_object().unwrap());
        assert_eq!(section(json!({})).unwrap(), "");
        let some =
            json!({"nodeport_addresses": ["192.0.2.0/24"], "nodeport_mode": "dsr", "xdp": true});
        assert_eq!(
            section(some).unwrap(),
            "[dataplane]\nnode_port_addresses = [\"192.0.2.0/24\"]\nnode_port_mode = \"dsr\"\nxdp = true\n"
        );
        assert!(section(json!({"turbo": true})).is_err());
    }
}
