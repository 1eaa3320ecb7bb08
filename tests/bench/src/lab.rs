//! The network of one peer: two nodes joined back to back, a client pod and a server pod on the first, a server pod on
//! the second, and an outsider behind another link of the first node. All of it is nameless and goes with the process.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nix::sched::{CloneFlags, setns, unshare};

use crate::fleet::{Place, SERVER_PORT};
use crate::load::client::{Seen, Workload};

pub(crate) const NODES: [Ipv4Addr; 2] =
    [Ipv4Addr::new(192, 0, 2, 11), Ipv4Addr::new(192, 0, 2, 12)];
/// The outsider, and the first node's address on the link between them.
const OUTSIDER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
const OUTSIDE_ROUTER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// Uplinks of each node.
pub(crate) const UPLINKS: [&[&str]; 2] = [&["eth0", "eth1"], &["eth0"]];
const POD_GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const MTU: u32 = 1_500;

/// A network namespace that lives as long as somebody holds it.
#[derive(Debug)]
pub(crate) struct Namespace(File);

impl Namespace {
    pub(crate) fn new() -> Result<Self> {
        let made = std::thread::spawn(|| -> Result<File> {
            unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")?;
            Ok(File::open("/proc/thread-self/ns/net")?)
        });
        let namespace = Self(joined(made.join())?);
        namespace.batch("link set lo up")?;
        Ok(namespace)
    }

    /// Where other processes find it.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Runs `work` on a thread inside; processes that it starts are inside as well.
    pub(crate) fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET).context("join a namespace")?;
                work()
            });
            joined(thread.join())
        })
    }

    /// Starts a program inside.
    pub(crate) fn spawn(&self, command: &mut Command) -> Result<Child> {
        self.enter(|| {
            command
                .spawn()
                .with_context(|| format!("start {}", command.get_program().display()))
        })
    }

    /// Gives a program its whole input, and fails when it does.
    pub(crate) fn feed(&self, command: &mut Command, input: &str) -> Result<()> {
        let mut child = self.spawn(
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped()),
        )?;
        let wrote = child
            .stdin
            .take()
            .context("a standard input")?
            .write_all(input.as_bytes());
        let output = child.wait_with_output()?;
        ensure!(
            output.status.success(),
            "{}: {}",
            command.get_program().display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        wrote.context("write its input")
    }

    /// Lines for `ip -batch`.
    fn batch(&self, lines: &str) -> Result<()> {
        self.feed(Command::new("ip").args(["-batch", "-"]), lines)
            .with_context(|| format!("set up links: {lines}"))
    }

    pub(crate) fn sysctl(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.enter(|| {
            for (key, value) in settings {
                let path = format!("/proc/sys/net/{key}");
                std::fs::write(&path, value).with_context(|| format!("write {path}"))?;
            }
            Ok(())
        })
    }
}

fn joined<T>(result: std::thread::Result<Result<T>>) -> Result<T> {
    result.unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))
}

/// A pod: its namespace, address, and server if it has one.
#[derive(Debug)]
pub(crate) struct Pod {
    pub(crate) namespace: Namespace,
    pub(crate) address: Ipv4Addr,
}

/// Nodes and the outsider, without pods.
#[derive(Debug)]
pub(crate) struct Underlay {
    pub(crate) nodes: [Namespace; 2],
    pub(crate) outsider: Namespace,
}

/// Everything of one peer.
#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) underlay: Underlay,
    pub(crate) client: Pod,
    pub(crate) same: Pod,
    pub(crate) far: Pod,
    _servers: [Server; 2],
}

impl Underlay {
    pub(crate) fn new() -> Result<Self> {
        let nodes = [Namespace::new()?, Namespace::new()?];
        let outsider = Namespace::new()?;
        let (two, out) = (nodes[1].path(), outsider.path());
        let [a, b] = NODES;
        nodes[0].batch(&format!(
            "link add eth0 mtu {MTU} type veth peer name eth0 mtu {MTU} netns {two}\n\
             link add eth1 mtu {MTU} type veth peer name eth0 mtu {MTU} netns {out}\n\
             address add {a}/24 dev eth0\naddress add {OUTSIDE_ROUTER}/24 dev eth1\n\
             link set eth0 up\nlink set eth1 up"
        ))?;
        nodes[1].batch(&format!(
            "address add {b}/24 dev eth0\nlink set eth0 up\nroute add default via {a}"
        ))?;
        outsider.batch(&format!(
            "address add {OUTSIDER}/24 dev eth0\nlink set eth0 up\nroute add default via {OUTSIDE_ROUTER}"
        ))?;
        for node in &nodes {
            node.sysctl(&[("ipv4/ip_forward", "1")])?;
        }
        client_sysctls(&outsider)?;
        Ok(Self { nodes, outsider })
    }

    /// A pod wired by routes alone, the way that Weir's plugin does it.
    fn plain_pod(&self, node: usize, number: u8) -> Result<Pod> {
        let pod = Namespace::new()?;
        let address = Ipv4Addr::new(10, 244, u8::try_from(node + 1)?, number);
        let link = format!("pod{number}");
        let (near, inside) = (
            format!("02:00:00:00:{number:02}:01"),
            format!("02:00:00:00:{number:02}:02"),
        );
        self.nodes[node].batch(&format!(
            "link add {link} address {near} mtu {MTU} type veth peer name eth0 address {inside} mtu {MTU} netns {}\n\
             link set {link} up\nroute add {address}/32 dev {link}\n\
             neighbour add {address} lladdr {inside} nud permanent dev {link}",
            pod.path()
        ))?;
        pod.batch(&format!(
            "link set eth0 up\naddress add {address}/32 dev eth0\n\
             route add {POD_GATEWAY} dev eth0\nroute add default via {POD_GATEWAY} dev eth0\n\
             neighbour add {POD_GATEWAY} lladdr {near} nud permanent dev eth0"
        ))?;
        Ok(Pod {
            namespace: pod,
            address,
        })
    }

    /// Routes to the pods of the other node.
    fn join_pods(&self) -> Result<()> {
        let [a, b] = NODES;
        self.nodes[0].batch(&format!("route add 10.244.2.0/24 via {b}"))?;
        self.nodes[1].batch(&format!("route add 10.244.1.0/24 via {a}"))
    }
}

impl Lab {
    /// Pods and routes without any dataplane.
    pub(crate) fn plain(realtime: bool) -> Result<Self> {
        let underlay = Underlay::new()?;
        underlay.join_pods()?;
        let pods = [
            underlay.plain_pod(0, 2)?,
            underlay.plain_pod(0, 3)?,
            underlay.plain_pod(1, 3)?,
        ];
        Self::with_pods(underlay, pods, realtime)
    }

    /// Starts the servers of pods that are there: client, server on its node, server on the other.
    pub(crate) fn with_pods(underlay: Underlay, pods: [Pod; 3], realtime: bool) -> Result<Self> {
        let [client, same, far] = pods;
        client_sysctls(&client.namespace)?;
        let servers = [
            Server::start(&same.namespace, realtime)?,
            Server::start(&far.namespace, realtime)?,
        ];
        Ok(Self {
            underlay,
            client,
            same,
            far,
            _servers: servers,
        })
    }

    /// All ports of the server at a place.
    pub(crate) fn server_ports(&self, place: Place) -> Vec<SocketAddrV4> {
        let server = match place {
            Place::SameNode => self.same.address,
            Place::CrossNode => self.far.address,
        };
        let all = (0..SERVER_PORTS).map(|port| SocketAddrV4::new(server, SERVER_PORT + port));
        all.collect()
    }
}

/// Many short connections need many ports, and ports that wait may be used again after a second.
fn client_sysctls(namespace: &Namespace) -> Result<()> {
    namespace.sysctl(&[
        ("ipv4/ip_local_port_range", "1024 65535"),
        ("ipv4/tcp_tw_reuse", "1"),
    ])
}

/// The CPUs of the two ends.
pub(crate) fn cpus() -> (usize, usize) {
    let many = std::thread::available_parallelism().is_ok_and(|count| count.get() > 1);
    (0, usize::from(many))
}

/// Ports that every server listens on.
pub(crate) const SERVER_PORTS: u16 = 10;

#[derive(Debug)]
struct Server(Child);

impl Server {
    fn start(namespace: &Namespace, realtime: bool) -> Result<Self> {
        let mut command = own_program(realtime)?;
        command
            .args(["serve", "--cpu", &cpus().1.to_string()])
            .args(["--first", &SERVER_PORT.to_string()])
            .args(["--count", &SERVER_PORTS.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = namespace.spawn(&mut command)?;
        let output = child.stdout.take().context("a standard output")?;
        let mut word = String::new();
        BufReader::new(output).read_line(&mut word)?;
        let server = Self(child);
        ensure!(word == "ready\n", "the server did not come up");
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It ends with its standard input; killing is for one that hangs.
        drop(self.0.stdin.take());
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// This program, before all others in the queue for a CPU where `realtime` asks for it.
fn own_program(realtime: bool) -> Result<Command> {
    let program = std::env::current_exe().context("find this program")?;
    if !realtime {
        return Ok(Command::new(program));
    }
    let mut command = Command::new("chrt");
    command.args(["--fifo", "1"]).arg(program);
    Ok(command)
}

/// A cgroup of version 2 for clients.
#[derive(Debug)]
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    pub(crate) fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mounts = std::fs::read_to_string("/proc/self/mounts")?;
        let root = mounts
            .lines()
            .find_map(|line| {
                let mut words = line.split_whitespace().skip(1);
                let path = words.next()?;
                (words.next()? == "cgroup2").then_some(path)
            })
            .context("no cgroup2 hierarchy is mounted")?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("weir-bench-{}-{number}", std::process::id());
        let path = Path::new(root).join(name);
        std::fs::create_dir(&path).with_context(|| format!("make {}", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Moves the calling process into a cgroup.
pub(crate) fn join_cgroup(path: &Path) -> Result<()> {
    std::fs::write(path.join("cgroup.procs"), "0")
        .with_context(|| format!("join {}", path.display()))
}

/// How long one measurement takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Length {
    pub(crate) warm_up: Duration,
    pub(crate) time: Duration,
    /// Before all other processes.
    pub(crate) realtime: bool,
}

/// Runs a workload from inside a namespace, and a cgroup where one is named.
pub(crate) fn drive(
    from: &Namespace,
    cgroup: Option<&Path>,
    workload: Workload,
    targets: &[SocketAddrV4],
    length: Length,
) -> Result<Seen> {
    let names: Vec<String> = targets.iter().map(ToString::to_string).collect();
    let mut command = own_program(length.realtime)?;
    command
        .args(["drive", "--cpu", &cpus().0.to_string()])
        .args(["--warm-up-ms", &length.warm_up.as_millis().to_string()])
        .args(["--time-ms", &length.time.as_millis().to_string()])
        .args(["--workload", workload_name(workload)])
        .args(cgroup.map(|path| format!("--cgroup={}", path.display())))
        .args(names)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = from.spawn(&mut command)?.wait_with_output()?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("read what the client saw")
}

fn workload_name(workload: Workload) -> &'static str {
    match workload {
        Workload::ShortTcp => "short-tcp",
        Workload::Request => "request",
        Workload::Stream => "stream",
        Workload::UdpRequest => "udp-request",
    }
}
