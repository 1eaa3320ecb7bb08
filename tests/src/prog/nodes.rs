//! Two nodes, each a network namespace with the dataplane, and pods, each a network namespace with real sockets. All
//! of it is nameless and goes with the thread that made it.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use control_api::desired::{Changes, DesiredState};
use control_api::v1;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use weir_agent::compile::routes::{GATEWAY_V4, GATEWAY_V6, Path as RoutePath, gateway_for};
use weir_agent::compile::surroundings::{Choices, surroundings};
use weir_agent::kernel::{HostLink, Kernel, Limits, NodeIdentity, PodLink, namespace_cookie};
use weir_agent::netlink::Netlink;
use weir_agent::netlink::base::{ensure_host_link, quiet, set_sysctls};
use weir_agent::netlink::changed_sysctls::ChangedSysctls;
use weir_agent::netlink::link::VethEnd;

use super::world;

/// How long a client waits for anything.
const PATIENCE: Duration = Duration::from_secs(3);
/// The port of every server here.
pub const SERVER_PORT: u16 = 8080;

/// A node with the dataplane.
#[derive(Debug)]
pub struct Node {
    pub netns: File,
    pub kernel: Kernel,
    pub addresses: Vec<IpAddr>,
    number: u8,
    identity: NodeIdentity,
    limits: Limits,
    changed: ChangedSysctls,
}

/// A pod: a namespace with one link into its node.
#[derive(Debug)]
pub struct Pod {
    pub netns: File,
    pub link: PodLink,
    pub v4: String,
    pub v6: String,
}

/// The two nodes, joined back to back, and what both are told to be.
#[derive(Debug)]
pub struct Nodes {
    pub nodes: [Node; 2],
    pub desired: DesiredState,
    bpffs: tempfile::TempDir,
}

/// Runs `work` on a thread inside a namespace.
///
/// # Errors
/// What `work` returns, or that the namespace could not be joined.
pub fn inside<T: Send>(netns: &File, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            setns(netns.as_fd(), CloneFlags::CLONE_NEWNET).context("join a namespace")?;
            work()
        });
        thread
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")))
    })
}

fn namespace() -> Result<File> {
    let thread = std::thread::spawn(|| -> Result<File> {
        unshare(CloneFlags::CLONE_NEWNET).context("a new network namespace")?;
        let mut netlink = Netlink::open()?;
        let lo = netlink.link("lo")?.context("the loopback link")?;
        netlink.set_link_up(lo.index, true)?;
        std::fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0")?;
        Ok(File::open("/proc/thread-self/ns/net")?)
    });
    thread
        .join()
        .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")))
}

impl Nodes {
    /// Moves the calling thread into a mount namespace of its own and builds two nodes.
    ///
    /// # Errors
    /// Says which part could not be made.
    pub fn new(limits: Limits) -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace")?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).context("private mounts")?;
        let bpffs = tempfile::tempdir()?;
        let (first, second) = (namespace()?, namespace()?);
        inside(&first, || {
            let near = VethEnd {
                name: "eth0",
                mac: [2, 0, 0, 0, 8, 1],
                netns: None,
            };
            let far = VethEnd {
                name: "eth0",
                mac: [2, 0, 0, 0, 8, 2],
                netns: Some(second.as_fd()),
            };
            Ok(Netlink::open()?.create_veth(&near, &far, 1500)?)
        })?;
        let one = Node::new(first, 1, bpffs.path(), limits)?;
        let two = Node::new(second, 2, bpffs.path(), limits)?;
        let mut desired = DesiredState::default();
        desired.config.service_cidrs = vec!["10.96.0.0/16".into(), "fd00:96::/112".into()];
        for node in [&one, &two] {
            let about = v1::Node {
                name: format!("n{}", node.number),
                internal_ips: node.addresses.iter().map(ToString::to_string).collect(),
                pod_cidrs: vec![
                    format!("10.244.{}.0/24", node.number),
                    format!("fd00:244:{}::/64", node.number),
                ],
                ..v1::Node::default()
            };
            desired.nodes.insert(about.name.clone(), about);
        }
        let nodes = Self {
            nodes: [one, two],
            desired,
            bpffs,
        };
        nodes.apply()?;
        Ok(nodes)
    }

    /// Serves `address`:80 by these endpoints on both nodes.
    ///
    /// # Errors
    /// When the maps cannot be changed.
    pub fn serve(&mut self, address: &str, backends: &[&str]) -> Result<()> {
        world::serve(&mut self.desired, address, backends);
        self.apply()
    }

    /// Makes the service maps of both nodes as `desired` says.
    ///
    /// # Errors
    /// When the maps cannot be changed.
    pub fn apply(&self) -> Result<()> {
        let everything = Changes {
            everything: true,
            ..Changes::default()
        };
        for node in &self.nodes {
            let name = format!("n{}", node.number);
            let choices = Choices::default();
            let surroundings = surroundings(&self.desired, &name, &node.addresses, &choices);
            node.kernel.set_surroundings(&surroundings)?;
            let report = node.kernel.apply(&self.desired, &everything)?;
            ensure!(
                report.failed.is_empty(),
                "not programmed: {:?}",
                report.failed
            );
        }
        Ok(())
    }

    /// Attaches the socket hooks of both nodes to one cgroup: each minds its own namespaces only.
    ///
    /// # Errors
    /// Why they cannot be attached.
    pub fn attach_sockets(&self, cgroup: &Path) -> Result<()> {
        for node in &self.nodes {
            inside(&node.netns, || Ok(node.kernel.attach_sockets(cgroup)?))?;
        }
        Ok(())
    }

    /// Ends the service at `address` on both nodes.
    ///
    /// # Errors
    /// When the maps cannot be changed.
    pub fn end(&mut self, address: &str) -> Result<()> {
        world::end(&mut self.desired, address);
        self.apply()
    }

    /// Opens the dataplane of both nodes anew, as agents that start again do.
    ///
    /// # Errors
    /// When one cannot be opened.
    pub fn restart(&mut self) -> Result<()> {
        for node in &mut self.nodes {
            let path = self.bpffs.path().join(format!("n{}", node.number));
            let (identity, limits) = (node.identity.clone(), node.limits);
            node.kernel = inside(&node.netns, || Ok(Kernel::open(&path, limits, identity)?))?;
        }
        self.apply()
    }
}

impl Node {
    fn new(netns: File, number: u8, bpffs: &Path, limits: Limits) -> Result<Self> {
        let addresses: Vec<IpAddr> = vec![
            Ipv4Addr::new(192, 0, 2, 10 + number).into(),
            Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x10 + u16::from(number)).into(),
        ];
        let path = bpffs.join(format!("n{number}"));
        std::fs::create_dir(&path)?;
        let state = bpffs.join(format!("state-{number}"));
        std::fs::create_dir(&state)?;
        let changed = ChangedSysctls::of(&state);
        mount(
            Some("bpf"),
            &path,
            Some("bpf"),
            MsFlags::empty(),
            None::<&str>,
        )
        .context("a bpffs")?;
        let identity = NodeIdentity {
            name: format!("n{number}"),
            addresses: addresses.clone(),
            dns_port: 0,
        };
        let kernel = inside(&netns, || {
            let mut netlink = Netlink::open()?;
            set_sysctls(&changed, &["eth0".to_owned()])?;
            uplink(&mut netlink, &addresses, number)?;
            let host = host_link(&mut netlink, &addresses)?;
            let kernel = Kernel::open(&path, limits, identity.clone())?;
            kernel.attach_uplink("eth0")?;
            kernel.attach_host_link(&host)?;
            Ok(kernel)
        })?;
        Ok(Self {
            netns,
            kernel,
            addresses,
            number,
            identity,
            limits,
            changed,
        })
    }

    /// A machine outside the cluster, on an uplink `eth1` of this node and with routes to the service ranges through it.
    /// Returns it with its addresses.
    ///
    /// # Errors
    /// Says which part could not be made.
    pub fn outsider(&self) -> Result<(File, [IpAddr; 2])> {
        let netns = namespace()?;
        let ours: [IpAddr; 2] = ["198.51.100.1".parse()?, "2001:db8:51::1".parse()?];
        let theirs: [IpAddr; 2] = ["198.51.100.9".parse()?, "2001:db8:51::9".parse()?];
        inside(&self.netns, || {
            let end = |name, last, netns| VethEnd {
                name,
                mac: [2, 0, 0, 0, 9, last],
                netns,
            };
            let far = end("eth0", 2, Some(netns.as_fd()));
            Netlink::open()?.create_veth(&end("eth1", 1, None), &far, 1500)?;
            set_sysctls(&self.changed, &["eth1".to_owned()])?;
            neighbours("eth1", &ours, &theirs)?;
            Ok(self.kernel.attach_uplink("eth1")?)
        })?;
        inside(&netns, || {
            let link = neighbours("eth0", &theirs, &ours)?;
            for (range, gateway) in ["10.96.0.0/16", "fd00:96::/112"].iter().zip(ours) {
                let path = RoutePath::Via {
                    gateway,
                    link,
                    source: None,
                };
                Netlink::open()?.add_route(range.parse()?, path)?;
            }
            Ok(())
        })?;
        Ok((netns, theirs))
    }

    /// A pod on this node, with `number` as the last part of its addresses.
    ///
    /// # Errors
    /// Says which part could not be made.
    pub fn pod(&self, number: u8) -> Result<Pod> {
        let netns = namespace()?;
        let v4 = Ipv4Addr::new(10, 244, self.number, number);
        let v6 = Ipv6Addr::new(0xfd00, 0x244, self.number.into(), 0, 0, 0, 0, number.into());
        let addresses: Vec<IpAddr> = vec![v4.into(), v6.into()];
        let (pod_mac, host_mac) = ([2, 0, 0, 1, number, 2], [2, 0, 0, 1, number, 1]);
        let host_name = format!("pod{number}");
        let netns_cookie = inside(&netns, || Ok(namespace_cookie()?)).ok();
        let link = inside(&self.netns, || {
            let mut netlink = Netlink::open()?;
            let near = VethEnd {
                name: &host_name,
                mac: host_mac,
                netns: None,
            };
            let far = VethEnd {
                name: "eth0",
                mac: pod_mac,
                netns: Some(netns.as_fd()),
            };
            netlink.create_veth(&near, &far, 1500)?;
            quiet(&host_name)?;
            let ifindex = netlink.link(&host_name)?.context("the pod's link")?.index;
            netlink.set_link_up(ifindex, true)?;
            for address in &addresses {
                netlink.add_route(
                    (*address).into(),
                    RoutePath::Link {
                        link: ifindex,
                        source: None,
                    },
                )?;
                netlink.set_neighbour(ifindex, *address, pod_mac)?;
            }
            let link = PodLink {
                ifindex,
                host_name: host_name.clone(),
                pod_mac,
                host_mac,
                addresses,
                netns_cookie,
            };
            world::attach_open_pod(&self.kernel, &link)?;
            Ok(link)
        })?;
        inside(&netns, || pod_side(&link))?;
        Ok(Pod {
            netns,
            link,
            v4: v4.to_string(),
            v6: v6.to_string(),
        })
    }
}

/// Takes a link up, with these addresses and routes to the others. Returns its index.
fn neighbours(name: &str, own: &[IpAddr], others: &[IpAddr]) -> Result<u32> {
    let mut netlink = Netlink::open()?;
    let link = netlink.link(name)?.context("the link")?.index;
    netlink.set_link_up(link, true)?;
    for (own, other) in own.iter().zip(others) {
        netlink.add_host_address(link, *own)?;
        let source = Some(*own);
        netlink.add_route((*other).into(), RoutePath::Link { link, source })?;
    }
    Ok(link)
}

fn uplink(netlink: &mut Netlink, addresses: &[IpAddr], number: u8) -> Result<()> {
    let link = netlink.link("eth0")?.context("the uplink")?.index;
    netlink.set_link_up(link, true)?;
    let other = 3 - number;
    let peers: [(IpAddr, String); 2] = [
        (
            Ipv4Addr::new(192, 0, 2, 10 + other).into(),
            format!("10.244.{other}.0/24"),
        ),
        (
            Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x10 + u16::from(other)).into(),
            format!("fd00:244:{other}::/64"),
        ),
    ];
    for (own, (peer, range)) in addresses.iter().zip(peers) {
        netlink.add_host_address(link, *own)?;
        let source = Some(*own);
        netlink.add_route(peer.into(), RoutePath::Link { link, source })?;
        netlink.add_route(
            range.parse()?,
            RoutePath::Via {
                gateway: peer,
                link,
                source,
            },
        )?;
    }
    Ok(())
}

fn host_link(netlink: &mut Netlink, addresses: &[IpAddr]) -> Result<HostLink> {
    let pair = ensure_host_link(netlink, 1500)?;
    let ranges = ["10.96.0.0/16", "fd00:96::/112"];
    for (own, range) in addresses.iter().zip(ranges) {
        let path = RoutePath::Via {
            gateway: gateway_for(*own),
            link: pair.near.index,
            source: Some(*own),
        };
        netlink.add_route(range.parse()?, path)?;
    }
    Ok(HostLink {
        peer_name: pair.far.name,
        peer_ifindex: pair.far.index,
        peer_mac: pair.far.mac,
        host_ifindex: pair.near.index,
        host_mac: pair.near.mac,
    })
}

fn pod_side(link: &PodLink) -> Result<()> {
    let mut netlink = Netlink::open()?;
    let eth0 = netlink.link("eth0")?.context("the pod's interface")?.index;
    netlink.set_link_up(eth0, true)?;
    for address in &link.addresses {
        netlink.add_host_address(eth0, *address)?;
    }
    for (gateway, everything) in [(GATEWAY_V4, "0.0.0.0/0"), (GATEWAY_V6, "::/0")] {
        netlink.set_neighbour(eth0, gateway, link.host_mac)?;
        let path = RoutePath::Via {
            gateway,
            link: eth0,
            source: None,
        };
        netlink.add_route(everything.parse()?, path)?;
    }
    Ok(())
}

/// Servers for TCP and UDP on every address of a namespace. Each answers with its name and the peer that it saw, then
/// with what it was sent. They end with the process.
///
/// # Errors
/// When a socket cannot be opened.
pub fn start_servers(netns: &File, name: &str) -> Result<()> {
    let name = name.to_owned();
    inside(netns, move || {
        let address = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), SERVER_PORT);
        let listener = TcpListener::bind(address).context("listen for TCP")?;
        let socket = UdpSocket::bind(address).context("listen for UDP")?;
        let (tcp_name, udp_name) = (name.clone(), name);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let name = tcp_name.clone();
                std::thread::spawn(move || echo(stream, &name));
            }
        });
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
                let mut answer = greeting(&udp_name, peer).into_bytes();
                answer.extend(&buffer[..length]);
                // A client that is gone is no concern of the server.
                let _ = socket.send_to(&answer, peer);
            }
        });
        Ok(())
    })
}

fn greeting(name: &str, peer: SocketAddr) -> String {
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    format!("{name} {peer}\n")
}

fn echo(mut stream: TcpStream, name: &str) {
    let Ok(peer) = stream.peer_addr() else { return };
    let Ok(mut reader) = stream.try_clone() else {
        return;
    };
    // Errors are the client's to see.
    if stream.write_all(greeting(name, peer).as_bytes()).is_ok() {
        let _ = std::io::copy(&mut reader, &mut stream);
    }
}

/// What a client saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub server: String,
    /// The client as the server saw it.
    pub seen_as: SocketAddr,
    /// The client as it sees itself.
    pub client: SocketAddr,
}

fn parse(text: &[u8], client: SocketAddr) -> Result<(Answer, usize)> {
    let end = text
        .iter()
        .position(|byte| *byte == b'\n')
        .context("a greeting")?;
    let line = std::str::from_utf8(&text[..end])?;
    let (server, seen_as) = line.split_once(' ').context("a name and a peer")?;
    Ok((
        Answer {
            server: server.into(),
            seen_as: seen_as.parse()?,
            client,
        },
        end + 1,
    ))
}

/// Sends `payload` from inside a namespace over TCP, and expects it back.
///
/// # Errors
/// When anything but the whole payload comes back in time.
pub fn tcp(netns: &File, to: SocketAddr, payload: &[u8]) -> Result<Answer> {
    inside(netns, || {
        let stream = TcpStream::connect_timeout(&to, PATIENCE).context("connect")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let client = stream.local_addr()?;
        let mut received = Vec::new();
        let mut reader = stream.try_clone()?;
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| -> Result<()> {
                (&stream).write_all(payload)?;
                Ok(stream.shutdown(std::net::Shutdown::Write)?)
            });
            reader
                .read_to_end(&mut received)
                .context("read the answer")?;
            writer
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the writer panicked")))
        })?;
        let (answer, start) = parse(&received, client)?;
        ensure!(
            received[start..] == *payload,
            "{} bytes came back",
            received.len() - start
        );
        Ok(answer)
    })
}

/// Sends a datagram from inside a namespace, and expects it back.
///
/// # Errors
/// When nothing, or something else, comes back in time.
pub fn udp(netns: &File, to: SocketAddr, payload: &[u8]) -> Result<Answer> {
    inside(netns, || {
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(to)?;
        exchange(&socket, payload)
    })
}

/// One datagram over a connected socket and back.
///
/// # Errors
/// When nothing, or something else, comes back in time.
pub fn exchange(socket: &UdpSocket, payload: &[u8]) -> Result<Answer> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(payload).context("send")?;
    let mut buffer = [0; 4096];
    let length = socket.recv(&mut buffer).context("receive the answer")?;
    let (answer, start) = parse(&buffer[..length], socket.local_addr()?)?;
    ensure!(
        buffer[start..length] == *payload,
        "something else came back"
    );
    Ok(answer)
}
