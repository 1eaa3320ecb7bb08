//! Nodes with real agents on one segment, fed by the test.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use control_api::v1::{
    ClusterConfig, Endpoint, EndpointPort, EndpointSlice, Node, Object, Protocol, Service,
    ServicePort, ServiceType, object,
};
use serde_json::Value;
use weir_tests::topology::{Namespace, Switch};

use super::feed::{Control, PORT};
use super::support::{Runtime, addresses, program};

/// ClusterIPs that tests give to their services end with these.
pub(crate) const SERVICE_V4: &str = "10.96.0.50";
pub(crate) const SERVICE_V6: &str = "fd00:10:96::50";

/// Why real agents cannot run here, if so.
pub(crate) fn no_programs() -> Option<String> {
    let given = std::env::var_os("WEIR_BPF_OBJECT").map(PathBuf::from);
    let default = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/weir.bpf.o");
    let path = given.unwrap_or(default);
    (!path.exists()).then(|| {
        format!(
            "{} is missing: run `cargo xtask build ebpf`",
            path.display()
        )
    })
}

/// A node with its agent.
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) namespace: Namespace,
    pub(crate) runtime: Runtime,
    pub(crate) ips: [IpAddr; 2],
    agent: Option<Child>,
    bpffs: PathBuf,
    dir: tempfile::TempDir,
}

impl Member {
    fn new(number: u8, segment: &Segment, control: &Control, server: SocketAddr) -> Self {
        let name = format!("n{number}");
        let namespace = Namespace::new(&name).unwrap();
        let host = 10 + number;
        let (v4, v6) = segment.addresses(host);
        segment.plug(&namespace, host);
        for (family, gateway) in [("-4", segment.router().0), ("-6", segment.router().1)] {
            namespace
                .ip(&[family, "route", "add", "default", "via", &gateway])
                .unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        let bpffs = dir.path().join("bpf");
        std::fs::create_dir(&bpffs).unwrap();
        run("mount", &["-t", "bpf", "bpf", bpffs.to_str().unwrap()]);
        let mut config = String::new();
        let path = |name: &str| dir.path().join(name).display().to_string();
        write!(
            config,
            "node_name = {name:?}\nnode_ips = [{v4:?}, {v6:?}]\nuplinks = [\"eth0\"]\nstate_dir = {:?}\nrun_dir = {:?}\nbpffs = {:?}\n\
             {}[cni]\nconf_dir = {:?}\n[dns]\nupstreams = [\"127.0.0.1:53\"]\n",
            path("state"),
            path("run"),
            path("bpf"),
            control.feed_section(&name, dir.path(), server),
            path("net.d"),
        )
        .unwrap();
        std::fs::write(dir.path().join("agent.toml"), config).unwrap();
        let mut runtime = Runtime::new(&dir.path().join("run"));
        runtime.state_dir = dir.path().join("state");
        let ips = [v4.parse().unwrap(), v6.parse().unwrap()];
        Self {
            name,
            namespace,
            runtime,
            ips,
            agent: None,
            bpffs,
            dir,
        }
    }

    /// Changes the configuration of the agent that starts next.
    pub(crate) fn reconfigure(&self, from: &str, to: &str) {
        let path = self.dir.path().join("agent.toml");
        let config = std::fs::read_to_string(&path).unwrap();
        assert!(config.contains(from), "{from:?} in {config}");
        std::fs::write(&path, config.replace(from, to)).unwrap();
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) fn start_agent(&mut self) {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.path().join("agent.log"))
            .unwrap();
        let child = self
            .agent_command(&["run"])
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        self.agent = Some(child);
    }

    fn agent_command(&self, arguments: &[&str]) -> Command {
        let agent = program("weir-agent", "weir-agent");
        let mut command = self.namespace.command(agent.to_str().unwrap());
        command
            .arg("--config")
            .arg(self.dir.path().join("agent.toml"))
            .args(arguments);
        command
    }

    /// SIGKILL, as when the machine's memory runs out.
    pub(crate) fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            // It may be dead already.
            let _ = agent.kill();
            agent.wait().unwrap();
        }
    }

    /// SIGTERM, and the end must be a clean one.
    pub(crate) fn stop_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let pid = nix::unistd::Pid::from_raw(i32::try_from(agent.id()).unwrap());
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
            assert!(agent.wait().unwrap().success(), "{}", self.log());
        }
    }

    /// Runs `weir-agent cleanup` and returns what it removed.
    pub(crate) fn cleanup(&self) -> String {
        let output = self.agent_command(&["cleanup"]).output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("agent.log")).unwrap_or_default()
    }

    /// True when the copy of the state on disk has this text in it.
    pub(crate) fn remembers(&self, text: &str) -> bool {
        let bytes = std::fs::read(self.dir.path().join("state/feed.snapshot")).unwrap_or_default();
        bytes
            .windows(text.len())
            .any(|window| window == text.as_bytes())
    }

    /// What a reboot does: pods, links, routes, programs and run-time files are gone, the disk is as it was.
    pub(crate) fn reboot(&mut self, pod: Namespace) {
        self.kill_agent();
        drop(pod);
        self.namespace.ip(&["link", "del", "weir_host"]).unwrap();
        for family in ["-4", "-6"] {
            self.namespace
                .ip(&[family, "route", "flush", "proto", "87"])
                .unwrap();
        }
        let bpffs = self.bpffs.to_str().unwrap();
        run("umount", &[bpffs]);
        run("mount", &["-t", "bpf", "bpf", bpffs]);
        std::fs::remove_dir_all(self.dir.path().join("run")).unwrap();
    }

    pub(crate) fn agent_pid(&self) -> u32 {
        self.agent.as_ref().unwrap().id()
    }

    /// Resident memory of the agent in kilobytes.
    pub(crate) fn agent_rss_kib(&self) -> u64 {
        let pid = self.agent_pid();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix("VmRSS:"))
            .unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    pub(crate) fn object(&self) -> Object {
        let number = self.name.trim_start_matches('n');
        let node = Node {
            name: self.name.clone(),
            internal_ips: self.ips.iter().map(ToString::to_string).collect(),
            pod_cidrs: vec![
                format!("10.244.{number}.0/24"),
                format!("fd00:10:244:{number}::/64"),
            ],
            ready: true,
            ..Node::default()
        };
        Object {
            kind: Some(object::Kind::Node(node)),
        }
    }

    /// Pins that are left below this node's bpffs.
    pub(crate) fn pins(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut folders = vec![self.bpffs.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path.clone());
                }
                // The kernel's own files, in every bpffs.
                if path.extension().is_none_or(|e| e != "debug") {
                    found.push(path);
                }
            }
        }
        found
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill_agent();
        if std::thread::panicking() {
            println!("--- log of {}\n{}", self.name, self.log());
        }
        let _ = Command::new("umount").arg(&self.bpffs).status();
    }
}

/// A pod: its namespace and its addresses.
pub(crate) struct Pod {
    pub(crate) container: String,
    pub(crate) namespace: Namespace,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) node: String,
}

/// A layer-2 segment with its prefixes.
struct Segment {
    switch: Switch,
    v4: &'static str,
    v6: &'static str,
}

impl Segment {
    const ROUTER: u8 = 254;

    fn addresses(&self, host: u8) -> (String, String) {
        (format!("{}{host}", self.v4), format!("{}{host}", self.v6))
    }

    fn router(&self) -> (String, String) {
        self.addresses(Self::ROUTER)
    }

    /// The link is `eth0`, or `eth1` in a namespace that has one.
    fn plug(&self, namespace: &Namespace, host: u8) {
        let (v4, v6) = self.addresses(host);
        let link = format!("eth{}", namespace.links().unwrap().len());
        self.switch
            .plug(
                namespace,
                &link,
                &[&format!("{v4}/24"), &format!("{v6}/64")],
            )
            .unwrap();
    }
}

/// Two segments, and a router between them that knows no pod.
struct Network {
    segments: [Segment; 2],
    _router: Namespace,
}

impl Network {
    fn new() -> Self {
        let segment = |v4, v6| Segment {
            switch: Switch::new().unwrap(),
            v4,
            v6,
        };
        let segments = [
            segment("192.0.2.", "2001:db8::"),
            segment("198.51.100.", "2001:db8:51::"),
        ];
        let router = Namespace::new("router").unwrap();
        router
            .enter(|| {
                std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
                Ok(std::fs::write(
                    "/proc/sys/net/ipv6/conf/all/forwarding",
                    "1",
                )?)
            })
            .unwrap();
        for segment in &segments {
            segment.plug(&router, Segment::ROUTER);
        }
        Self {
            segments,
            _router: router,
        }
    }
}

/// Nodes n1…nN, connected and programmed.
pub(crate) struct Cluster {
    pub(crate) control: Control,
    pub(crate) members: Vec<Member>,
    outside: Namespace,
    network: Network,
}

impl Cluster {
    /// All nodes on the first segment.
    pub(crate) async fn start(nodes: u8) -> Self {
        Self::start_on(&vec![0; usize::from(nodes)]).await
    }

    /// One node for each number of a segment.
    pub(crate) async fn start_on(segments: &[usize]) -> Self {
        let network = Network::new();
        let outside = Namespace::new("ctl").unwrap();
        let home = &network.segments[0];
        home.plug(&outside, 1);
        for (family, gateway) in [("-4", home.router().0), ("-6", home.router().1)] {
            outside
                .ip(&[family, "route", "add", "default", "via", &gateway])
                .unwrap();
        }
        let server = SocketAddr::new("192.0.2.1".parse().unwrap(), PORT);
        let control = Control::start(&outside, server);
        let mut members: Vec<Member> = (1..)
            .zip(segments)
            .map(|(n, segment)| Member::new(n, &network.segments[*segment], &control, server))
            .collect();
        let config = ClusterConfig {
            cluster_domain: "cluster.local".into(),
            service_cidrs: vec!["10.96.0.0/16".into(), "fd00:10:96::/112".into()],
            pod_cidrs: vec!["10.244.0.0/16".into(), "fd00:10:244::/56".into()],
            namespaces: vec!["default".into()],
            node_port_first: 30000,
            node_port_last: 32767,
            policies: true,
            ..ClusterConfig::default()
        };
        let config = Object {
            kind: Some(object::Kind::Config(config)),
        };
        let mut objects = vec![("config", config)];
        objects.extend(members.iter().map(|m| (m.name.as_str(), m.object())));
        let revision = control.change(objects, Vec::new());
        for member in &mut members {
            member.start_agent();
        }
        let cluster = Self {
            control,
            members,
            outside,
            network,
        };
        cluster.programmed(revision).await;
        cluster
    }

    /// A machine on the first segment that is no node.
    pub(crate) fn outsider(&self, host: u8) -> Namespace {
        let namespace = Namespace::new("out").unwrap();
        self.network.segments[0].plug(&namespace, host);
        namespace
    }

    /// From now on nobody reaches the control plane.
    pub(crate) fn cut_control(&self) {
        self.outside.ip(&["link", "set", "eth0", "down"]).unwrap();
    }

    pub(crate) async fn programmed(&self, revision: u64) {
        let names: Vec<&str> = self.members.iter().map(|m| m.name.as_str()).collect();
        self.control.programmed(&names, revision).await;
    }

    /// Makes a pod on the node with this index.
    pub(crate) fn pod(&self, node: usize, container: &str) -> Pod {
        let namespace = Namespace::new("pod").unwrap();
        let result = self.members[node].runtime.add(container, &namespace);
        self.attached(node, container, namespace, &result.unwrap())
    }

    /// Makes a pod of the cluster, which has policies.
    pub(crate) fn cluster_pod(&self, node: usize, container: &str, of: &str, name: &str) -> Pod {
        let namespace = Namespace::new("pod").unwrap();
        let runtime = &self.members[node].runtime;
        let result = runtime.add_named(container, &namespace, of, name);
        self.attached(node, container, namespace, &result.unwrap())
    }

    fn attached(&self, node: usize, container: &str, namespace: Namespace, result: &Value) -> Pod {
        Pod {
            container: container.into(),
            namespace,
            ips: addresses(result),
            node: self.members[node].name.clone(),
        }
    }

    /// A service on port 80 whose endpoints are these pods at `port`.
    pub(crate) async fn serve(&self, pods: &[&Pod], port: u16) {
        let endpoints = |v6: bool| -> Vec<Endpoint> {
            pods.iter()
                .map(|pod| Endpoint {
                    addresses: vec![pod.ips[usize::from(v6)].to_string()],
                    ready: true,
                    serving: true,
                    node_name: pod.node.clone(),
                    ..Endpoint::default()
                })
                .collect()
        };
        self.serve_endpoints(endpoints(false), endpoints(true), port)
            .await;
    }

    pub(crate) async fn serve_endpoints(&self, v4: Vec<Endpoint>, v6: Vec<Endpoint>, port: u16) {
        let service = Service {
            namespace: "default".into(),
            name: "web".into(),
            uid: "web".into(),
            r#type: ServiceType::ClusterIp.into(),
            cluster_ips: vec![SERVICE_V4.into(), SERVICE_V6.into()],
            ports: vec![ServicePort {
                name: String::new(),
                protocol: Protocol::Tcp.into(),
                port: 80,
                node_port: 0,
            }],
            ..Service::default()
        };
        let slice = |name: &str, family: control_api::v1::AddressFamily, endpoints| {
            let slice = EndpointSlice {
                namespace: "default".into(),
                name: name.into(),
                service: "web".into(),
                family: family.into(),
                ports: vec![EndpointPort {
                    name: String::new(),
                    protocol: Protocol::Tcp.into(),
                    port: u32::from(port),
                }],
                endpoints,
            };
            Object {
                kind: Some(object::Kind::EndpointSlice(slice)),
            }
        };
        let revision = self.control.change(
            vec![
                (
                    "web",
                    Object {
                        kind: Some(object::Kind::Service(service)),
                    },
                ),
                (
                    "web-4",
                    slice("web-4", control_api::v1::AddressFamily::Ipv4, v4),
                ),
                (
                    "web-6",
                    slice("web-6", control_api::v1::AddressFamily::Ipv6, v6),
                ),
            ],
            Vec::new(),
        );
        self.programmed(revision).await;
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}");
}
