//! Smoke test of the eBPF programs for virtual machines: one static binary that builds a node out of links, loads,
//! attaches and runs every program, and says how much the verifier walked. Prints `PASS`, `FAIL` and `program` lines.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dataplane_common::layout::{DIRECTION_EGRESS, POLICY_EGRESS, POLICY_EGRESS_CLOSED};
use weir_agent::kernel::{Kernel, Limits, PodPrograms, Program, SocketError};
use weir_agent::netlink::Netlink;
use weir_tests::prog::cgroup::Cgroup;
use weir_tests::prog::nodes::{Nodes, start_servers};
use weir_tests::prog::packet::Packet;
use weir_tests::prog::policies::{Policies, Rule};
use weir_tests::prog::sctp;
use weir_tests::prog::world::{NODE_V4, NODE_V6, POD_A, POD_B, POD_FAR, PROTOCOLS, World};

const LIMITS: Limits = Limits {
    flows: 4_096,
    frontends: 256,
    slots: 1_024,
    endpoints: 64,
    maglev_blocks: 4_096,
};

/// Verdicts of the programs.
const PASS: i32 = -1;
const DROP: i32 = 2;
const REDIRECT: i32 = 7;

/// Addresses of one family: service, the pods, the node.
struct Family {
    name: &'static str,
    vip: &'static str,
    a: &'static str,
    b: &'static str,
    far: &'static str,
    node: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family {
        name: "IPv4",
        vip: "10.96.0.20",
        a: POD_A.0,
        b: POD_B.0,
        far: POD_FAR.0,
        node: NODE_V4,
    },
    Family {
        name: "IPv6",
        vip: "fd00:96::20",
        a: POD_A.1,
        b: POD_B.1,
        far: POD_FAR.1,
        node: NODE_V6,
    },
];

type Check = (&'static str, fn(&mut World, &Family, u8) -> Result<()>);

const CHECKS: [Check; 7] = [
    ("same node", same_node),
    ("other node", other_node),
    ("backend on the node", node_backend),
    ("hairpin", hairpin),
    ("host process", host_process),
    ("spoofed source", spoofed),
    ("policy", policy),
];

fn main() -> ExitCode {
    let mut failures = 0;
    let mut report = |name: &str, result: Result<()>| {
        let mut out = std::io::stdout().lock();
        let written = match result {
            Ok(()) => writeln!(out, "PASS {name}"),
            Err(error) => {
                failures += 1;
                writeln!(out, "FAIL {name}: {error:#}")
            }
        };
        // A console that is gone leaves the exit code.
        drop(written);
    };
    match World::new(LIMITS) {
        Ok(mut world) => {
            report("load and attach", Ok(()));
            report("sockets", sockets(&mut world));
            report("driver", driver(&world));
            programs(&world);
            report("cheap to verify", world.check_verified());
            for (name, check) in CHECKS {
                for family in &FAMILIES {
                    for protocol in PROTOCOLS {
                        let label = format!("{name}, {} protocol {protocol}", family.name);
                        report(&label, check(&mut world, family, protocol));
                    }
                }
            }
            report("collect flows", collect(&world));
            report("restart", restart(&mut world));
            report("detach and clean up", clean(world));
            for (name, result) in sctp_sockets() {
                report(&name, result);
            }
        }
        Err(error) => report("load and attach", Err(error)),
    }
    if failures == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn programs(world: &World) {
    let mut out = std::io::stdout().lock();
    for (program, size) in world.kernel.program_sizes() {
        // Kernels before 5.16 do not tell what the verifier walked.
        let verified = size
            .verified
            .map_or_else(|| "untold".to_owned(), |n| n.to_string());
        let _ = writeln!(
            out,
            "program {program} insns={} verified_insns={verified}",
            size.loaded
        );
    }
}

fn at(address: &str, port: u16) -> String {
    if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    }
}

fn request(family: &Family, protocol: u8, source: &str) -> Packet {
    Packet::new(protocol, &at(source, 40_000), &at(family.vip, 80))
}

/// Runs a program and checks the verdict and, through the parser, every checksum.
fn run(
    world: &World,
    program: Program,
    packet: &Packet,
    ifindex: u32,
    verdict: i32,
) -> Result<Packet> {
    let result = world.test_run(program, &packet.to_bytes(), ifindex, 1)?;
    ensure!(
        result.verdict == verdict,
        "{program}: verdict {}, expected {verdict}",
        result.verdict
    );
    Packet::from_bytes(&result.packet).with_context(|| format!("the packet after {program}"))
}

fn is_from_service(packet: &Packet, family: &Family) -> Result<()> {
    ensure!(
        packet.source.to_string() == at(family.vip, 80),
        "answered as {}",
        packet.source
    );
    ensure!(
        packet.destination.port() == 40_000,
        "to port {}",
        packet.destination.port()
    );
    Ok(())
}

fn same_node(world: &mut World, family: &Family, protocol: u8) -> Result<()> {
    world.serve(family.vip, &[family.b])?;
    let a = world.a.link.ifindex;
    let sent = run(
        world,
        Program::FromPod,
        &request(family, protocol, family.a),
        a,
        REDIRECT,
    )?;
    ensure!(
        sent.destination.to_string() == at(family.b, 8080),
        "sent to {}",
        sent.destination
    );
    let b = world.b.link.ifindex;
    is_from_service(
        &run(world, Program::FromPod, &sent.answer(), b, REDIRECT)?,
        family,
    )
}

fn other_node(world: &mut World, family: &Family, protocol: u8) -> Result<()> {
    world.serve(family.vip, &[family.far])?;
    let a = world.a.link.ifindex;
    let sent = run(
        world,
        Program::FromPod,
        &request(family, protocol, family.a),
        a,
        REDIRECT,
    )?;
    ensure!(
        sent.destination.to_string() == at(family.far, 8080),
        "sent to {}",
        sent.destination
    );
    let back = run(
        world,
        Program::FromNetwork,
        &sent.answer(),
        world.uplink,
        REDIRECT,
    )?;
    is_from_service(&back, family)
}

fn node_backend(world: &mut World, family: &Family, protocol: u8) -> Result<()> {
    world.serve(family.vip, &[family.node])?;
    let a = world.a.link.ifindex;
    let sent = run(
        world,
        Program::FromPod,
        &request(family, protocol, family.a),
        a,
        PASS,
    )?;
    is_from_service(
        &run(world, Program::ToPod, &sent.answer(), a, PASS)?,
        family,
    )
}

fn hairpin(world: &mut World, family: &Family, protocol: u8) -> Result<()> {
    world.serve(family.vip, &[family.a])?;
    let a = world.a.link.ifindex;
    let sent = run(
        world,
        Program::FromPod,
        &request(family, protocol, family.a),
        a,
        REDIRECT,
    )?;
    is_from_service(
        &run(world, Program::FromPod, &sent.answer(), a, REDIRECT)?,
        family,
    )
}

fn host_process(world: &mut World, family: &Family, protocol: u8) -> Result<()> {
    let peer = world.host.peer_ifindex;
    for backend in [family.b, family.far, family.node] {
        world.serve(family.vip, &[backend])?;
        run(
            world,
            Program::FromPod,
            &request(family, protocol, family.node),
            peer,
            REDIRECT,
        )?;
    }
    Ok(())
}

fn spoofed(world: &mut World, family: &Family, protocol: u8) -> Result<()> {
    let a = world.a.link.ifindex;
    run(
        world,
        Program::FromPod,
        &request(family, protocol, family.b),
        a,
        DROP,
    )
    .map(drop)
}

/// A connection that a rule allows is cut when the rule goes, both ways, and the drop is told.
fn policy(world: &mut World, family: &Family, protocol: u8) -> Result<()> {
    const POLICY: u32 = 9;
    world.serve(family.vip, &[family.far])?;
    let a = world.a.link.ifindex;
    let mut policies = Policies::open(&world.bpffs)?;
    policies.set_pod(a, POLICY, POLICY_EGRESS | POLICY_EGRESS_CLOSED)?;
    let mut rule = Rule::allow(POLICY, DIRECTION_EGRESS);
    (rule.protocol, rule.port) = (Some(protocol), Some(8080));
    let request = Packet::new(protocol, &at(family.a, 41_000), &at(family.vip, 80));
    run(world, Program::FromPod, &request, a, DROP)?;
    policies.add(&rule)?;
    let sent = run(world, Program::FromPod, &request, a, REDIRECT)?;
    let (uplink, answer) = (world.uplink, sent.answer());
    run(world, Program::FromNetwork, &answer, uplink, REDIRECT)?;
    policies.remove(&rule)?;
    policies.bump()?;
    run(world, Program::FromNetwork, &answer, uplink, DROP)?;
    run(world, Program::FromPod, &request, a, DROP)?;
    let told = policies.events().len();
    policies.set_pod(a, 0, 0)?;
    policies.bump()?;
    ensure!(told == 3, "{told} events");
    run(world, Program::FromPod, &request, a, REDIRECT).map(drop)
}

/// Processes of the node through a service that the node itself serves. Kernels that do not number network namespaces
/// still load the programs.
fn sockets(world: &mut World) -> Result<()> {
    let netns = File::open("/proc/thread-self/ns/net")?;
    let mut netlink = Netlink::open()?;
    let lo = netlink.link("lo")?.context("the loopback link")?;
    netlink.set_link_up(lo.index, true)?;
    start_servers(&netns, "node")?;
    let cgroup = Cgroup::new()?;
    match world.kernel.attach_sockets(cgroup.path()) {
        Err(SocketError::Namespace(error)) if error.kind() == ErrorKind::Unsupported => {
            return Ok(());
        }
        other => other?,
    }
    cgroup.join()?;
    for family in &FAMILIES {
        world.serve(family.vip, &[family.node])?;
        let mut names = vec![at(family.vip, 80)];
        if !family.vip.contains(':') {
            names.push(at(&format!("::ffff:{}", family.vip), 80));
        }
        for name in names {
            let to: SocketAddr = name.parse()?;
            let stream = TcpStream::connect(to).with_context(|| format!("connect to {to}"))?;
            ensure!(stream.peer_addr()? == to, "{to} is {}", stream.peer_addr()?);
            let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any)?;
            socket.set_read_timeout(Some(Duration::from_secs(5)))?;
            socket.send_to(b"x", to)?;
            let (_, from) = socket
                .recv_from(&mut [0; 256])
                .with_context(|| format!("from {to}"))?;
            ensure!(from == to, "{from} answered for {to}");
        }
    }
    ensure!(world.counter("connection_translated")? == 3);
    ensure!(world.counter("datagram_translated")? == 3);
    ensure!(
        world.kernel.socket_entries()? == 0,
        "closed sockets left entries"
    );
    world.kernel.detach_sockets()?;
    Ok(())
}

/// Real associations through a service whose port is not the server's, on one node and between two. Kernels without SCTP
/// have nothing to show.
fn sctp_sockets() -> Vec<(String, Result<()>)> {
    if sctp::unable().is_some() {
        return Vec::new();
    }
    let node = || -> Result<Vec<(String, Result<()>)>> {
        let mut nodes = Nodes::new(LIMITS)?;
        let (client, near) = (nodes.nodes[0].pod(2)?, nodes.nodes[0].pod(3)?);
        let far = nodes.nodes[1].pod(2)?;
        for pod in [&near, &far] {
            sctp::start_server(&pod.netns)?;
        }
        let mut results = Vec::new();
        for family in &FAMILIES {
            for (place, pod) in [("same node", &near), ("other node", &far)] {
                let backend = if family.name == "IPv4" {
                    &pod.v4
                } else {
                    &pod.v6
                };
                nodes.serve(family.vip, &[backend])?;
                let to = at(family.vip, 80).parse()?;
                let result = sctp::exchange(&client.netns, to, &[0x5a; 4_000]);
                results.push((format!("SCTP sockets, {place}, {}", family.name), result));
            }
        }
        Ok(results)
    };
    // Namespaces belong to a thread.
    let made = std::thread::scope(|scope| scope.spawn(node).join());
    match made {
        Ok(Ok(results)) => results,
        Ok(Err(error)) => vec![("SCTP sockets".into(), Err(error))],
        Err(_) => vec![(
            "SCTP sockets".into(),
            Err(anyhow::anyhow!("the thread panicked")),
        )],
    }
}

/// The uplink's driver takes its program and gives it back.
fn driver(world: &World) -> Result<()> {
    world.kernel.attach_driver("uplink")?;
    world.kernel.keep_drivers(&[world.uplink])?;
    world.kernel.attach_driver("uplink")?;
    Ok(world.kernel.keep_drivers(&[])?)
}

fn collect(world: &World) -> Result<()> {
    let report = world.kernel.collect_flows()?;
    ensure!(report.walked > 0, "no flow was walked");
    ensure!(report.repaired == 0, "{} half pairs", report.repaired);
    Ok(())
}

fn restart(world: &mut World) -> Result<()> {
    world.restart(LIMITS)?;
    world.apply()?;
    ensure!(
        world.kernel.is_attached(&world.a.link),
        "pod a lost its programs"
    );
    Ok(())
}

fn clean(world: World) -> Result<()> {
    world
        .kernel
        .detach_pod(world.a.link.ifindex, &world.a.link.addresses)?;
    ensure!(
        !world.kernel.is_attached(&world.a.link),
        "pod a is still attached"
    );
    let World { kernel, bpffs, .. } = world;
    drop(kernel);
    let removed = Kernel::cleanup(&bpffs)?;
    ensure!(!removed.is_empty(), "nothing was removed");
    ensure!(!bpffs.join("weir").exists(), "pins are left");
    Ok(())
}
