//! The `node` tier's socket hooks: real processes in pods and on nodes whose system calls are translated.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use weir_agent::kernel::{Kernel, Limits, namespace_cookie};
use weir_tests::prog::cgroup::Cgroup;
use weir_tests::prog::nodes::{Nodes, Pod, exchange, inside, start_servers, tcp};
use weir_tests::prog::world::unable;

const VIPS: [&str; 2] = ["10.96.0.20", "fd00:96::20"];
/// The first of [`VIPS`] as an IPv6 socket names it.
const MAPPED: &str = "::ffff:10.96.0.20";
const LIMITS: Limits = Limits {
    flows: 16_384,
    frontends: 512,
    slots: 1_024,
    endpoints: 64,
    maglev_blocks: 4_096,
};
/// How long to wait for what must not come.
const QUIET: Duration = Duration::from_millis(300);
/// How long to wait for what must come, on a machine that has much else to do.
const PATIENCE: Duration = Duration::from_secs(20);

struct Cluster {
    nodes: Nodes,
    a: Pod,
    b: Pod,
    far: Pod,
    cgroup: Cgroup,
}

impl Cluster {
    /// A counter of the first node.
    fn counter(&self, name: &str) -> Result<u64> {
        counter(&self.nodes.nodes[0].kernel, name)
    }

    fn node(&self) -> &File {
        &self.nodes.nodes[0].netns
    }
}

fn counter(kernel: &Kernel, name: &str) -> Result<u64> {
    let counters = kernel.counters()?;
    let found = counters.iter().find(|counter| counter.name == name);
    Ok(found.with_context(|| format!("no counter {name}"))?.packets)
}

/// Two pods on the first node and one on the second, all serving, and hooks on a cgroup that the test's thread is in.
fn cluster(test: impl FnOnce(&mut Cluster) -> Result<()> + Send + 'static) {
    if let Some(reason) = unable() {
        println!("SKIPPED: {reason}");
        return;
    }
    let run = std::thread::spawn(move || -> Result<()> {
        let nodes = Nodes::new(LIMITS)?;
        let (a, b) = (nodes.nodes[0].pod(2)?, nodes.nodes[0].pod(3)?);
        let far = nodes.nodes[1].pod(2)?;
        if let Err(error) = inside(&a.netns, || Ok(namespace_cookie()?)) {
            println!("SKIPPED: {error}");
            return Ok(());
        }
        for (pod, name) in [(&a, "a"), (&b, "b"), (&far, "far")] {
            start_servers(&pod.netns, name)?;
        }
        start_servers(&nodes.nodes[0].netns, "n1")?;
        let cgroup = Cgroup::new()?;
        nodes.attach_sockets(cgroup.path())?;
        cgroup.join()?;
        let mut cluster = Cluster {
            nodes,
            a,
            b,
            far,
            cgroup,
        };
        test(&mut cluster)
    });
    if let Err(error) = run.join().expect("the test thread panicked") {
        panic!("{error:?}");
    }
}

fn at(address: &str) -> SocketAddr {
    SocketAddr::new(address.parse().expect("an address"), 80)
}

fn any(to: SocketAddr) -> SocketAddr {
    let address = if to.is_ipv4() { "0.0.0.0" } else { "::" };
    SocketAddr::new(address.parse().expect("an address"), 0)
}

/// The name of who answered over an unconnected socket, and the address that it answered from.
fn ask(socket: &UdpSocket, to: SocketAddr) -> Result<(String, SocketAddr)> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send_to(b"who is there", to).context("send")?;
    let mut buffer = [0; 4096];
    let (length, from) = socket.recv_from(&mut buffer).context("receive")?;
    let text = String::from_utf8_lossy(&buffer[..length]);
    let name = text.split(' ').next().unwrap_or_default();
    Ok((name.to_owned(), from))
}

/// The name of who answered, the peer's name, and the client as the server saw it and as it sees itself.
fn dial(to: SocketAddr) -> Result<(String, SocketAddr, SocketAddr, SocketAddr)> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE).context("connect")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut buffer = [0; 256];
    let length = stream.read(&mut buffer)?;
    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
    let (name, seen_as) = text.trim_end().split_once(' ').context("a greeting")?;
    let own = stream.local_addr()?;
    let own = SocketAddr::new(own.ip().to_canonical(), own.port());
    Ok((name.into(), stream.peer_addr()?, seen_as.parse()?, own))
}

#[test]
fn connections_lead_to_backends_and_name_the_service() {
    cluster(|c| {
        for (name, pod) in [("b", &c.b), ("far", &c.far), ("a", &c.a)] {
            c.nodes.serve(VIPS[0], &[&pod.v4])?;
            c.nodes.serve(VIPS[1], &[&pod.v6])?;
            for from in [&c.a.netns, &c.nodes.nodes[0].netns] {
                for vip in [VIPS[0], VIPS[1], MAPPED] {
                    let packets = c.counter("translated_forward")?;
                    let calls = c.counter("connection_translated")?;
                    let (server, peer, seen_as, own) = inside(from, || dial(at(vip)))
                        .with_context(|| format!("{vip} at {name}"))?;
                    ensure!(server == name, "{server} answered for {name}");
                    ensure!(peer == at(vip), "{vip} is named {peer}");
                    // Also when it reached itself: no address had to change.
                    ensure!(seen_as == own, "{vip}: {own} was seen as {seen_as}");
                    ensure!(c.counter("connection_translated")? == calls + 1);
                    ensure!(
                        c.counter("translated_forward")? == packets,
                        "packets to {vip} were translated"
                    );
                }
            }
        }
        Ok(())
    });
}

#[test]
fn datagrams_lead_to_backends_and_come_from_the_service() {
    cluster(|c| {
        for (name, pod) in [("b", &c.b), ("far", &c.far), ("a", &c.a)] {
            c.nodes.serve(VIPS[0], &[&pod.v4])?;
            c.nodes.serve(VIPS[1], &[&pod.v6])?;
            for from in [&c.a.netns, &c.nodes.nodes[0].netns] {
                for vip in [VIPS[0], VIPS[1], MAPPED] {
                    let packets = c.counter("translated_forward")?;
                    inside(from, || {
                        let socket = UdpSocket::bind(any(at(vip)))?;
                        for _ in 0..3 {
                            let answer = ask(&socket, at(vip))
                                .with_context(|| format!("{vip} at {name}"))?;
                            ensure!(answer == (name.into(), at(vip)), "{answer:?}");
                        }
                        Ok(())
                    })?;
                    ensure!(
                        c.counter("translated_forward")? == packets,
                        "packets to {vip} were translated"
                    );
                }
            }
        }
        Ok(())
    });
}

#[test]
fn one_socket_may_speak_to_many_services() {
    const MANY: u8 = 100;
    cluster(|c| {
        let vip = |number: u8| format!("10.96.1.{number}");
        for number in 1..=MANY {
            let pod = if number % 2 == 0 { &c.b } else { &c.far };
            weir_tests::prog::world::serve(&mut c.nodes.desired, &vip(number), &[&pod.v4]);
        }
        c.nodes.apply()?;
        inside(&c.a.netns, || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            for round in 0..2 {
                for number in 1..=MANY {
                    let to = at(&vip(number));
                    let expected = if number % 2 == 0 { "b" } else { "far" };
                    let answer =
                        ask(&socket, to).with_context(|| format!("round {round}, {to}"))?;
                    ensure!(answer == (expected.into(), to), "{to}: {answer:?}");
                }
            }
            Ok(())
        })?;
        ensure!(c.counter("passed_ambiguous")? > 0);
        ensure!(c.nodes.nodes[0].kernel.socket_entries()? == 0);
        Ok(())
    });
}

#[test]
fn a_socket_may_speak_to_a_pod_and_to_its_service() {
    cluster(|c| {
        c.nodes.serve(VIPS[0], &[&c.far.v4])?;
        let pod = SocketAddr::new(c.far.v4.parse()?, weir_tests::prog::nodes::SERVER_PORT);
        inside(&c.a.netns, || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            for to in [at(VIPS[0]), pod, at(VIPS[0]), pod] {
                let answer = ask(&socket, to)?;
                ensure!(answer == ("far".into(), to), "{to}: {answer:?}");
            }
            Ok(())
        })
    });
}

#[test]
fn datagrams_follow_the_service() {
    cluster(|c| {
        inside(&c.a.netns.try_clone()?, || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            let to = at(VIPS[0]);
            for (name, pod) in [("b", c.b.v4.clone()), ("far", c.far.v4.clone())] {
                c.nodes.serve(VIPS[0], &[&pod])?;
                ensure!(ask(&socket, to)? == (name.into(), to));
            }
            // Another backend beside it is no reason to move.
            let both = [c.b.v4.clone(), c.far.v4.clone()];
            c.nodes.serve(VIPS[0], &[&both[0], &both[1]])?;
            for _ in 0..10 {
                ensure!(ask(&socket, to)? == ("far".into(), to));
            }
            for end in [false, true] {
                if end {
                    c.nodes.end(VIPS[0])?;
                } else {
                    c.nodes.serve(VIPS[0], &[])?;
                }
                socket.set_read_timeout(Some(QUIET))?;
                socket.send_to(b"anybody", to)?;
                let mut buffer = [0; 64];
                if let Ok((_, from)) = socket.recv_from(&mut buffer) {
                    bail!("{from} answered for a service that has gone");
                }
            }
            ensure!(c.counter("passed_no_backend")? > 0);
            c.nodes.serve(VIPS[0], &[&both[0]])?;
            ensure!(ask(&socket, to)? == ("b".into(), to));
            Ok(())
        })
    });
}

#[test]
fn connected_datagram_sockets_move_to_a_backend_that_lives() {
    cluster(|c| {
        inside(&c.a.netns.try_clone()?, || {
            for (vip, backends) in [
                (VIPS[0], [c.b.v4.clone(), c.far.v4.clone()]),
                (VIPS[1], [c.b.v6.clone(), c.far.v6.clone()]),
            ] {
                let socket = UdpSocket::bind(any(at(vip)))?;
                socket.connect(at(vip))?;
                for (backend, name) in backends.iter().zip(["b", "far"]) {
                    c.nodes.serve(vip, &[backend])?;
                    let answer = exchange(&socket, b"who is there")?;
                    ensure!(answer.server == name, "{answer:?}");
                    // With a destination of its own, the answer still has to come from the peer.
                    let answer = ask(&socket, at(vip))?;
                    ensure!(answer == (name.into(), at(vip)), "{answer:?}");
                }
                ensure!(socket.peer_addr()? == at(vip));
            }
            ensure!(c.counter("passed_connected_datagram")? > 0);
            Ok(())
        })
    });
}

#[test]
fn refusals_are_as_without_hooks() {
    cluster(|c| {
        for vip in VIPS {
            c.nodes.serve(vip, &[])?;
            for port in [80, 81] {
                let to = SocketAddr::new(vip.parse()?, port);
                for from in [&c.a.netns, c.node()] {
                    let error =
                        inside(from, || Ok(TcpStream::connect_timeout(&to, PATIENCE).err()))?;
                    let error = error.with_context(|| format!("{to} was connected"))?;
                    ensure!(
                        error.kind() == std::io::ErrorKind::ConnectionRefused,
                        "{to}: {error}"
                    );
                }
            }
        }
        Ok(())
    });
}

#[test]
fn hooks_and_packets_agree_on_the_backend_of_a_client() {
    cluster(|c| {
        for (vip, backends) in [
            (VIPS[0], [c.a.v4.clone(), c.b.v4.clone(), c.far.v4.clone()]),
            (VIPS[1], [c.a.v6.clone(), c.b.v6.clone(), c.far.v6.clone()]),
        ] {
            c.nodes
                .serve(vip, &[&backends[0], &backends[1], &backends[2]])?;
            for service in c.nodes.desired.services.values_mut() {
                service.client_ip_affinity_s = 600;
            }
            c.nodes.apply()?;
            for from in [&c.a.netns, &c.b.netns, c.node()] {
                let mut answered = BTreeSet::new();
                for number in 0..12 {
                    if number % 2 == 0 {
                        c.cgroup.join()?;
                    } else {
                        c.cgroup.leave()?;
                    }
                    answered.insert(tcp(from, at(vip), b"x")?.server);
                }
                ensure!(answered.len() == 1, "{vip}: {answered:?}");
            }
        }
        ensure!(c.counter("connection_translated")? > 0);
        Ok(())
    });
}

#[test]
fn hooks_outlive_their_agent_and_are_replaced_without_a_gap() {
    cluster(|c| {
        c.nodes.serve(VIPS[0], &[&c.far.v4])?;
        let to = at(VIPS[0]);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let netns = c.a.netns.try_clone()?;
        std::thread::scope(|scope| {
            let clients = scope.spawn(|| {
                inside(&netns, || {
                    let socket = UdpSocket::bind("0.0.0.0:0")?;
                    let mut count = 0u64;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let (server, peer, ..) = dial(to)?;
                        ensure!(server == "far" && peer == to, "{server} as {peer}");
                        ensure!(ask(&socket, to)? == ("far".into(), to));
                        count += 1;
                    }
                    Ok(count)
                })
            });
            let work = (|| -> Result<()> {
                let before = c.counter("passed_no_service")?;
                for _ in 0..3 {
                    let translated = c.counter("connection_translated")?;
                    c.nodes.restart()?;
                    let deadline = std::time::Instant::now() + PATIENCE;
                    while c.counter("connection_translated")? < translated + 3 {
                        ensure!(
                            std::time::Instant::now() < deadline,
                            "nothing is translated while no agent has attached"
                        );
                        std::thread::yield_now();
                    }
                    c.nodes.attach_sockets(c.cgroup.path())?;
                }
                ensure!(c.counter("passed_no_service")? == before, "there was a gap");
                Ok(())
            })();
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            let count = clients
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the clients panicked")))?;
            work?;
            ensure!(count > 0);
            Ok(())
        })
    });
}

#[test]
fn closed_sockets_leave_nothing() {
    cluster(|c| {
        c.nodes.serve(VIPS[0], &[&c.b.v4])?;
        c.nodes.serve(VIPS[1], &[&c.far.v6])?;
        let kernel = &c.nodes.nodes[0].kernel;
        inside(&c.a.netns, || {
            let streams = [VIPS[0], VIPS[1], MAPPED]
                .map(|vip| TcpStream::connect_timeout(&at(vip), PATIENCE));
            let socket = UdpSocket::bind("[::]:0")?;
            for vip in [VIPS[1], MAPPED] {
                ask(&socket, at(vip))?;
            }
            // Two flows with three entries each.
            ensure!(kernel.socket_entries()? == streams.len() + 6);
            drop(streams);
            ensure!(kernel.socket_entries()? == 6);
            drop(socket);
            ensure!(kernel.socket_entries()? == 0);
            Ok(())
        })
    });
}

#[test]
fn hooks_can_be_taken_away_and_put_back() {
    cluster(|c| {
        c.nodes.serve(VIPS[0], &[&c.b.v4])?;
        inside(&c.a.netns.try_clone()?, || {
            let held = TcpStream::connect_timeout(&at(VIPS[0]), PATIENCE)?;
            for node in &c.nodes.nodes {
                node.kernel.detach_sockets()?;
                ensure!(node.kernel.socket_entries()? == 0);
            }
            let calls = c.counter("connection_translated")?;
            ensure!(dial(at(VIPS[0]))?.0 == "b");
            ensure!(c.counter("connection_translated")? == calls);
            // What was connected to a backend still is.
            ensure!(held.peer_addr()?.ip() == c.b.v4.parse::<IpAddr>()?);
            c.nodes.attach_sockets(c.cgroup.path())?;
            ensure!(dial(at(VIPS[0]))?.0 == "b");
            ensure!(c.counter("connection_translated")? == calls + 1);
            Ok(())
        })
    });
}

#[test]
fn hooks_move_to_another_cgroup() {
    cluster(|c| {
        c.nodes.serve(VIPS[0], &[&c.b.v4])?;
        let first = c.cgroup.path().to_owned();
        let inner = first.join("inner");
        std::fs::create_dir(&inner)?;
        std::fs::write(inner.join("cgroup.type"), "threaded")?;
        c.nodes.attach_sockets(&inner)?;
        let calls = c.counter("connection_translated")?;
        ensure!(inside(&c.a.netns, || dial(at(VIPS[0])))?.0 == "b");
        ensure!(
            c.counter("connection_translated")? == calls,
            "the old hooks are left"
        );
        // A cgroup that goes takes its hooks along.
        std::fs::remove_dir(&inner)?;
        c.nodes.attach_sockets(&first)?;
        ensure!(inside(&c.a.netns, || dial(at(VIPS[0])))?.0 == "b");
        ensure!(c.counter("connection_translated")? == calls + 1);
        Ok(())
    });
}

#[test]
fn other_networks_and_bound_sockets_are_left_alone() {
    cluster(|c| {
        c.nodes.serve(VIPS[0], &[&c.b.v4])?;
        let calls = c.counter("connection_translated")?;
        // The second node's pod: its own node minds it, the first does not know it.
        let unknown = c.counter("passed_unknown_namespace")?;
        ensure!(inside(&c.far.netns, || dial(at(VIPS[0])))?.0 == "b");
        ensure!(c.counter("passed_unknown_namespace")? > unknown);
        inside(&c.a.netns, || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            setsockopt(&socket, sockopt::BindToDevice, &"eth0".into())?;
            ensure!(ask(&socket, at(VIPS[0]))? == ("b".into(), at(VIPS[0])));
            Ok(())
        })?;
        ensure!(c.counter("passed_bound_to_link")? == 1);
        // Loopback is nobody's service.
        for address in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] {
            let answer = inside(&c.a.netns, || Ok(TcpStream::connect(at(address)).err()))?;
            let error = answer.with_context(|| format!("{address} was connected"))?;
            ensure!(
                error.kind() == std::io::ErrorKind::ConnectionRefused,
                "{error}"
            );
        }
        ensure!(c.counter("connection_translated")? == calls);
        Ok(())
    });
}

#[test]
fn folders_that_are_no_cgroup_are_refused() {
    cluster(|c| {
        let kernel = &c.nodes.nodes[0].kernel;
        for path in ["/proc", "/nowhere"] {
            let error = inside(c.node(), || {
                Ok(kernel.attach_sockets(std::path::Path::new(path)).err())
            })?;
            let error = error
                .with_context(|| format!("{path} was taken"))?
                .to_string();
            ensure!(error.contains(path), "{error}");
        }
        // Nothing is left of the hooks that were there.
        c.nodes.serve(VIPS[0], &[&c.b.v4])?;
        let calls = c.counter("connection_translated")?;
        ensure!(inside(&c.a.netns, || dial(at(VIPS[0])))?.0 == "b");
        ensure!(c.counter("connection_translated")? == calls);
        Ok(())
    });
}
