//! Real agents on the nodes of a lab, and pods wired by the real plugin.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use control_api::desired::Name;
use control_api::v1::{Node, Object};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::cni::Plugin;
use crate::feed::Feed;
use crate::fleet::Fleet;
use crate::lab::{Lab, NODES, Namespace, Pod, UPLINKS, Underlay};

pub(crate) const NAMES: [&str; 2] = ["n1", "n2"];
/// How long an agent may take to come up, or to apply what it is told, on a machine that does other things as well.
const PATIENCE: Duration = Duration::from_secs(300);
/// Objects sent as one change: far below the largest message.
const CHANGE_OBJECTS: usize = 2_000;

/// The end of an agent's configuration that leaves sockets alone.
pub(crate) const PER_PACKET: &str = "[dataplane]\nsocket_translation = false\n";

/// The end of an agent's configuration that translates at the sockets of a cgroup.
pub(crate) fn at_sockets(cgroup: &Path) -> String {
    format!("[dataplane]\nsocket_translation = true\ncgroup = {cgroup:?}\n")
}

/// Programs under measurement.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    pub(crate) agent: PathBuf,
    pub(crate) cni: PathBuf,
}

/// A running agent. It ends with the value; its folder and programs go with the process.
#[derive(Debug)]
pub(crate) struct Agent {
    child: Child,
    folder: tempfile::TempDir,
}

/// The nodes' agents and their feed.
pub(crate) struct Agents {
    pub(crate) feed: Feed,
    agents: Vec<Agent>,
}

/// Gives this process mounts of its own, so that every bpffs goes with it. Before the first thread starts.
pub(crate) fn own_mounts() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace (this needs root)")?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).context("make mounts private")
}

/// Both nodes as the feed tells them.
pub(crate) fn nodes() -> Vec<Node> {
    let node = |index: usize| Node {
        name: NAMES[index].into(),
        internal_ips: vec![NODES[index].to_string()],
        pod_cidrs: vec![format!("10.244.{}.0/24", index + 1)],
        ready: true,
        ..Node::default()
    };
    vec![node(0), node(1)]
}

impl Agent {
    /// Starts the agent of a node, with `extra` at the end of its configuration.
    pub(crate) fn start(
        programs: &Programs,
        namespace: &Namespace,
        node: usize,
        feed: &Feed,
        extra: &str,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        for name in ["bpf", "state", "run"] {
            std::fs::create_dir(path(name))?;
        }
        let bpf = path("bpf");
        mount(
            Some("bpf"),
            &bpf,
            Some("bpf"),
            MsFlags::empty(),
            None::<&str>,
        )
        .with_context(|| format!("mount a bpffs at {}", bpf.display()))?;
        let section = feed.serve(namespace, NAMES[node], folder.path())?;
        let config = format!(
            "node_name = {:?}\nnode_ips = [{:?}]\nuplinks = {:?}\nstate_dir = {:?}\nrun_dir = {:?}\nbpffs = {bpf:?}\n\
             {section}[dns]\nupstreams = [\"127.0.0.1:9\"]\n{extra}",
            NAMES[node],
            NODES[node].to_string(),
            UPLINKS[node],
            path("state"),
            path("run"),
        );
        std::fs::write(path("agent.toml"), config)?;
        let log = File::create(path("agent.log"))?;
        let child = namespace.spawn(
            Command::new(&programs.agent)
                .arg("--config")
                .arg(path("agent.toml"))
                .arg("run")
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log),
        )?;
        Ok(Self { child, folder })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The plugin of this agent's node.
    pub(crate) fn plugin(&self, programs: &Programs) -> Plugin {
        let folder = self.folder();
        Plugin {
            program: programs.cni.clone(),
            config: json!({
                "cniVersion": "1.0.0", "name": "weir", "type": "weir-cni",
                "socket": folder.join("run/cni.sock"), "stateDir": folder.join("state"),
            }),
        }
    }

    /// A pod wired by the plugin. One with a name is a pod of the cluster, and waits for what the feed tells of its policies.
    pub(crate) fn pod(
        &self,
        programs: &Programs,
        container: &str,
        name: Option<&Name>,
    ) -> Result<Pod> {
        let namespace = Namespace::new()?;
        let mut args = String::from("IgnoreUnknown=1");
        if let Some(Name { namespace, name }) = name {
            args.push_str(&format!(
                ";K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID={}",
                uid(namespace, name)
            ));
        }
        let container = format!("bench-{container}");
        let plugin = self.plugin(programs);
        let (said, _) = plugin.call("ADD", &container, &namespace.path(), &args)?;
        let result: Value = serde_json::from_str(&said).context("read the CNI result")?;
        Ok(Pod {
            namespace,
            address: first_v4(&result).context("an IPv4 address in the CNI result")?,
        })
    }

    /// The end of its log, for errors.
    pub(crate) fn log(&self) -> String {
        let text = std::fs::read_to_string(self.folder().join("agent.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(8)..].join("\n")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = nix::mount::umount(&self.folder.path().join("bpf"));
    }
}

impl Agents {
    /// Agents on both nodes that know these objects; returns once both have applied them. `extra` ends the configuration
    /// of the first.
    pub(crate) fn start(
        programs: &Programs,
        underlay: &Underlay,
        runtime: &Arc<Runtime>,
        objects: Vec<Object>,
        extra: &str,
    ) -> Result<Self> {
        let feed = Feed::new(Arc::clone(runtime), objects)?;
        let agents = (0..NAMES.len())
            .map(|node| {
                let extra = if node == 0 { extra } else { PER_PACKET };
                Agent::start(programs, &underlay.nodes[node], node, &feed, extra)
            })
            .collect::<Result<_>>()?;
        let agents = Self { feed, agents };
        agents.applied(&NAMES, 1)?;
        Ok(agents)
    }

    /// Waits until nodes have a revision that they were sent.
    pub(crate) fn applied(&self, nodes: &[&str], revision: u64) -> Result<Instant> {
        self.feed
            .applied(nodes, revision, PATIENCE)
            .with_context(|| {
                let logs: Vec<String> = self.agents.iter().map(Agent::log).collect();
                format!("agents say:\n{}", logs.join("\n"))
            })
    }

    /// Sends objects in several changes, one right after the other, and waits until the last is in both kernels.
    pub(crate) fn tell(&self, objects: &[Object]) -> Result<()> {
        let mut revision = 1;
        for part in objects.chunks(CHANGE_OBJECTS) {
            revision = self.feed.change(part.to_vec()).0;
        }
        self.applied(&NAMES, revision).map(drop)
    }

    /// A pod wired by the plugin on one of the nodes; [`Agent::pod`].
    pub(crate) fn pod(
        &self,
        programs: &Programs,
        node: usize,
        container: &str,
        name: Option<&Name>,
    ) -> Result<Pod> {
        self.agents[node].pod(programs, container, name)
    }

    /// The plugin of a node.
    pub(crate) fn plugin(&self, programs: &Programs, node: usize) -> Plugin {
        self.agents[node].plugin(programs)
    }
}

/// What the agent of the calling thread's namespace serves as `/metrics`.
pub(crate) fn metrics() -> Result<String> {
    const ADDRESS: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 9_965);
    let mut stream = TcpStream::connect(ADDRESS).context("connect to the agent's metrics")?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .context("read the agent's metrics")?;
    Ok(answer)
}

/// Of a pod of the cluster.
pub(crate) fn uid(namespace: &str, name: &str) -> String {
    format!("uid-{namespace}-{name}")
}

fn first_v4(result: &Value) -> Option<Ipv4Addr> {
    let addresses = result["ips"].as_array()?;
    addresses.iter().find_map(|ip| {
        let text = ip["address"].as_str()?;
        match text.split('/').next()?.parse().ok()? {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    })
}

/// A lab with Weir, and its services.
pub(crate) fn weir_lab(
    programs: &Programs,
    runtime: &Arc<Runtime>,
    services: usize,
    endpoints: usize,
    extra: &str,
    realtime: bool,
) -> Result<(Lab, Agents, Fleet)> {
    let underlay = Underlay::new()?;
    let empty = Fleet {
        services: Vec::new(),
    };
    let agents = Agents::start(programs, &underlay, runtime, empty.objects(&nodes()), extra)?;
    let pods = [
        agents.pod(programs, 0, "client", None)?,
        agents.pod(programs, 0, "same", None)?,
        agents.pod(programs, 1, "far", None)?,
    ];
    let lab = Lab::with_pods(underlay, pods, realtime)?;
    let fleet = Fleet::new(services, endpoints, lab.same.address, lab.far.address);
    agents.tell(&fleet.objects(&nodes()))?;
    Ok((lab, agents, fleet))
}
