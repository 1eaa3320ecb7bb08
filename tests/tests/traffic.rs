//! The `node` tier's traffic: real sockets in pods and on nodes, through services, over both families.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context, Result, ensure};
use weir_agent::kernel::Limits;
use weir_agent::kernel::PodPrograms as _;
use weir_tests::prog::nodes::{
    Answer, Nodes, Pod, SERVER_PORT, exchange, inside, start_servers, tcp, udp,
};
use weir_tests::prog::world::unable;

const VIPS: [&str; 2] = ["10.96.0.20", "fd00:96::20"];
const OTHER_VIPS: [&str; 2] = ["10.96.0.21", "fd00:96::21"];
const LIMITS: Limits = Limits {
    flows: 16_384,
    frontends: 256,
    slots: 1_024,
    endpoints: 64,
    maglev_blocks: 4_096,
};
/// Large enough for segmentation offload on every path.
const LARGE: usize = 3 << 20;

fn port_80(address: &str) -> SocketAddr {
    SocketAddr::new(address.parse().expect("an address"), 80)
}

/// Two pods on the first node, one on the second, all serving.
struct Cluster {
    nodes: Nodes,
    a: Pod,
    b: Pod,
    far: Pod,
}

fn cluster(test: impl FnOnce(&mut Cluster) -> Result<()> + Send + 'static) {
    if let Some(reason) = unable() {
        println!("SKIPPED: {reason}");
        return;
    }
    let run = std::thread::spawn(move || -> Result<()> {
        let nodes = Nodes::new(LIMITS)?;
        let (a, b) = (nodes.nodes[0].pod(2)?, nodes.nodes[0].pod(3)?);
        let far = nodes.nodes[1].pod(2)?;
        for (pod, name) in [(&a, "a"), (&b, "b"), (&far, "far")] {
            start_servers(&pod.netns, name)?;
        }
        start_servers(&nodes.nodes[0].netns, "n1")?;
        start_servers(&nodes.nodes[1].netns, "n2")?;
        test(&mut Cluster { nodes, a, b, far })
    });
    if let Err(error) = run.join().expect("the test thread panicked") {
        panic!("{error:?}");
    }
}

/// One TCP connection with much data and one datagram.
fn both(cluster: &Cluster, from: &File, vip: &str, server: &str) -> Result<Vec<Answer>> {
    let payload: Vec<u8> = (0..LARGE)
        .map(|i| u8::try_from(i % 251).unwrap_or(0))
        .collect();
    let counters = || -> Result<Vec<_>> {
        let mut all = Vec::new();
        for node in &cluster.nodes.nodes {
            let counters = node.kernel.counters()?;
            all.push(
                counters
                    .iter()
                    .filter(|c| c.packets > 0)
                    .map(|c| (c.name, c.packets))
                    .collect::<Vec<_>>(),
            );
        }
        Ok(all)
    };
    let mut answers = Vec::new();
    for (protocol, answer) in [
        ("UDP", udp(from, port_80(vip), b"datagram")),
        ("TCP", tcp(from, port_80(vip), &payload)),
    ] {
        let answer = answer.with_context(|| {
            format!("{protocol} to {vip}, expecting {server}; {:?}", counters())
        })?;
        ensure!(
            answer.server == server,
            "{protocol} to {vip}: {answer:?}, expected {server}"
        );
        answers.push(answer);
    }
    Ok(answers)
}

#[test]
fn pods_reach_backends_here_elsewhere_and_on_nodes() {
    cluster(|c| {
        let own: Vec<String> = c
            .nodes
            .nodes
            .iter()
            .flat_map(|n| &n.addresses)
            .map(ToString::to_string)
            .collect();
        for (family, vip) in VIPS.into_iter().enumerate() {
            let pick = |pod: &Pod| {
                if family == 0 {
                    pod.v4.clone()
                } else {
                    pod.v6.clone()
                }
            };
            let backends = [
                (pick(&c.b), "b"),
                (pick(&c.far), "far"),
                (own[family].clone(), "n1"),
                (own[2 + family].clone(), "n2"),
            ];
            for (backend, server) in backends {
                c.nodes.serve(vip, &[&backend])?;
                for answer in both(c, &c.a.netns, vip, server)? {
                    ensure!(
                        answer.seen_as == answer.client,
                        "{server} saw {}",
                        answer.seen_as
                    );
                }
            }
        }
        Ok(())
    });
}

#[test]
fn processes_of_a_node_reach_backends_here_elsewhere_and_on_nodes() {
    cluster(|c| {
        let own: Vec<String> = c
            .nodes
            .nodes
            .iter()
            .flat_map(|n| &n.addresses)
            .map(ToString::to_string)
            .collect();
        for (family, vip) in VIPS.into_iter().enumerate() {
            let pick = |pod: &Pod| {
                if family == 0 {
                    pod.v4.clone()
                } else {
                    pod.v6.clone()
                }
            };
            let backends = [
                (pick(&c.b), "b"),
                (pick(&c.far), "far"),
                (own[2 + family].clone(), "n2"),
                (own[family].clone(), "n1"),
            ];
            for (backend, server) in backends {
                c.nodes.serve(vip, &[&backend])?;
                both(c, &c.nodes.nodes[0].netns, vip, server)?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_pod_reaches_itself_through_its_service() {
    cluster(|c| {
        for (vip, own) in VIPS.into_iter().zip([c.a.v4.clone(), c.a.v6.clone()]) {
            c.nodes.serve(vip, &[&own])?;
            for answer in both(c, &c.a.netns, vip, "a")? {
                ensure!(
                    c.nodes.nodes[0].addresses.contains(&answer.seen_as.ip()),
                    "seen as {}",
                    answer.seen_as
                );
            }
        }
        Ok(())
    });
}

#[test]
fn pods_and_nodes_reach_pods_directly() {
    cluster(|c| {
        for to in [&c.b.v4, &c.b.v6, &c.far.v4, &c.far.v6] {
            let to = SocketAddr::new(to.parse()?, SERVER_PORT);
            for from in [&c.a.netns, &c.nodes.nodes[0].netns] {
                tcp(from, to, b"direct").with_context(|| format!("TCP to {to}"))?;
                udp(from, to, b"direct").with_context(|| format!("UDP to {to}"))?;
            }
        }
        Ok(())
    });
}

#[test]
fn every_backend_gets_its_share() {
    cluster(|c| {
        let backends = [c.a.v4.clone(), c.b.v4.clone(), c.far.v4.clone()];
        c.nodes
            .serve(VIPS[0], &[&backends[0], &backends[1], &backends[2]])?;
        let mut shares: BTreeMap<String, usize> = BTreeMap::new();
        for _ in 0..300 {
            let answer = tcp(&c.nodes.nodes[1].netns, port_80(VIPS[0]), b"x")?;
            *shares.entry(answer.server).or_default() += 1;
        }
        ensure!(
            shares.len() == 3 && shares.values().all(|share| *share >= 60),
            "{shares:?}"
        );
        Ok(())
    });
}

#[test]
fn a_connection_and_new_ones_outlive_a_restart() {
    cluster(|c| {
        c.nodes.serve(VIPS[0], &[&c.far.v4])?;
        c.nodes.serve(VIPS[1], &[&c.b.v6])?;
        for vip in VIPS {
            let socket = inside(&c.a.netns, || {
                let any = if vip.contains(':') {
                    "[::]:0"
                } else {
                    "0.0.0.0:0"
                };
                let socket = UdpSocket::bind(any)?;
                socket.connect(port_80(vip))?;
                Ok(socket)
            })?;
            let before = exchange(&socket, b"before")?;
            c.nodes.restart()?;
            let after = exchange(&socket, b"after")?;
            ensure!(before == after, "{before:?} became {after:?}");
            tcp(&c.a.netns, port_80(vip), b"new")?;
        }
        Ok(())
    });
}

#[test]
fn a_connected_datagram_socket_moves_to_a_backend_that_lives() {
    cluster(|c| {
        let socket = inside(&c.a.netns, || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(port_80(VIPS[0]))?;
            Ok(socket)
        })?;
        for (backend, server) in [
            (c.b.v4.clone(), "b"),
            (c.far.v4.clone(), "far"),
            (c.b.v4.clone(), "b"),
        ] {
            c.nodes.serve(VIPS[0], &[&backend])?;
            let answer = exchange(&socket, b"who is there")?;
            ensure!(answer.server == server, "{answer:?}, expected {server}");
        }
        Ok(())
    });
}

#[test]
fn two_services_with_one_backend_may_share_a_client_port() {
    cluster(|c| {
        for (vip, other) in VIPS.into_iter().zip(OTHER_VIPS) {
            let backend = if vip.contains(':') {
                c.far.v6.clone()
            } else {
                c.far.v4.clone()
            };
            c.nodes.serve(vip, &[&backend])?;
            c.nodes.serve(other, &[&backend])?;
            let (first, second) = inside(&c.a.netns, || {
                let any = if vip.contains(':') { "[::]" } else { "0.0.0.0" };
                let socket = UdpSocket::bind(format!("{any}:0"))?;
                let port = socket.local_addr()?.port();
                socket.connect(port_80(vip))?;
                let first = exchange(&socket, b"first")?;
                drop(socket);
                let socket = UdpSocket::bind(format!("{any}:{port}"))?;
                socket.connect(port_80(other))?;
                Ok((first, exchange(&socket, b"second")?))
            })?;
            ensure!(first.client.port() == second.client.port());
            ensure!(first.seen_as.port() != second.seen_as.port());
        }
        Ok(())
    });
}

#[test]
fn services_without_backends_and_unknown_ports_refuse_at_once() {
    cluster(|c| {
        let refused = |error: &anyhow::Error| {
            error
                .chain()
                .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
                .any(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
        };
        for vip in VIPS {
            c.nodes.serve(vip, &[])?;
            let unknown = SocketAddr::new(vip.parse()?, 81);
            for to in [port_80(vip), unknown] {
                for (from, name) in [(&c.a.netns, "pod"), (&c.nodes.nodes[0].netns, "node")] {
                    for (protocol, result) in
                        [("TCP", tcp(from, to, b"x")), ("UDP", udp(from, to, b"x"))]
                    {
                        let error = result.err().with_context(|| format!("{to} answered"))?;
                        ensure!(
                            refused(&error),
                            "{protocol} from a {name} to {to}: {error:#}"
                        );
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn connections_to_a_backend_that_vanished_are_reset() {
    cluster(|c| {
        use std::io::{Read, Write};
        let mut streams = Vec::new();
        for vip in VIPS {
            let backend = if vip.contains(':') {
                c.far.v6.clone()
            } else {
                c.far.v4.clone()
            };
            c.nodes.serve(vip, &[&backend])?;
            let mut stream = inside(&c.a.netns, || {
                Ok(std::net::TcpStream::connect(port_80(vip))?)
            })?;
            stream.set_read_timeout(Some(std::time::Duration::from_secs(3)))?;
            let mut greeting = [0; 1024];
            ensure!(stream.read(&mut greeting)? > 0);
            // The service may go: its connections go on.
            c.nodes.serve(vip, &[])?;
            stream.write_all(b"anybody there?")?;
            ensure!(stream.read(&mut greeting)? > 0);
            streams.push(stream);
        }
        let link = &c.far.link;
        c.nodes.nodes[1]
            .kernel
            .detach_pod(link.ifindex, &link.addresses)?;
        for mut stream in streams {
            // Any segment is answered with a reset, also an acknowledgement that was on its way.
            let error = stream
                .write_all(b"anybody there?")
                .and_then(|()| stream.read(&mut [0; 1024]))
                .err()
                .context("somebody answered")?;
            ensure!(
                error.kind() == std::io::ErrorKind::ConnectionReset,
                "{error}"
            );
        }
        Ok(())
    });
}

#[test]
fn datagrams_in_fragments_reach_backends_and_come_back() {
    cluster(|c| {
        let payload = vec![7; 3_000];
        for (family, vip) in VIPS.into_iter().enumerate() {
            for (pod, name) in [(&c.b, "b"), (&c.far, "far")] {
                let backend = if family == 0 {
                    pod.v4.clone()
                } else {
                    pod.v6.clone()
                };
                c.nodes.serve(vip, &[&backend])?;
                let answer = udp(&c.a.netns, port_80(vip), &payload)
                    .with_context(|| format!("3000 bytes to {vip}, served by {name}"))?;
                ensure!(answer.server == name, "{answer:?}");
            }
        }
        Ok(())
    });
}

/// Between veth links nobody finishes checksums, and a frame that a driver's program sent out would leave with half of
/// one: it has to leave such packets to the hook behind it.
#[test]
fn what_drivers_see_unfinished_arrives_whole() {
    cluster(|c| {
        let node = &c.nodes.nodes[0];
        let (outside, clients) = node.outsider()?;
        inside(&node.netns, || {
            for uplink in ["eth0", "eth1"] {
                node.kernel.attach_driver(uplink)?;
            }
            Ok(())
        })?;
        for (family, vip) in VIPS.into_iter().enumerate() {
            let backend = [&c.far.v4, &c.far.v6][family].clone();
            c.nodes.serve(vip, &[&backend])?;
            for answer in both(c, &outside, vip, "far")? {
                ensure!(answer.client.ip() == clients[family], "{answer:?}");
                let node = c.nodes.nodes[0].addresses[family];
                ensure!(answer.seen_as.ip() == node, "{answer:?}");
            }
        }
        Ok(())
    });
}
