//! `weir_packets`: what a packet costs on each path, by `BPF_PROG_TEST_RUN`, beside what the kernel's own lookup costs.
//! People use `cargo xtask bench packet`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use weir_agent::compile::routes::Path as RoutePath;
use weir_agent::kernel::{Limits, Program, TestRun, Yardstick};
use weir_agent::netlink::Netlink;
use weir_bench::report::{Machine, Report, Row, Unit, median};
use weir_tests::prog::packet::{ACK, Packet, SYN, TCP};
use weir_tests::prog::world::{
    NODE_V4, NODE_V6, PEER_V4, PEER_V6, POD_A, POD_B, POD_FAR, UPLINK_MAC, World, unable,
};

/// Runs every path again and again, one packet a run, the paths in turn.
#[derive(Debug, Parser)]
#[command(name = "weir_packets", disable_version_flag = true)]
struct Options {
    /// Runs of each path.
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u16).range(1..=20_000))]
    runs: u16,
    /// Few runs: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Write the report as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Room for all first packets of all paths.
const LIMITS: Limits = Limits {
    flows: 262_144,
    frontends: 64,
    slots: 256,
    endpoints: 64,
    maglev_blocks: 4_096,
};
/// Runs of a path that is measured in a loop.
const LOOP: u32 = 200;
const NODE_PORT: u16 = 30_080;
/// First source port of packets that open flows; that of known flows is the one before.
const FIRST_PORT: u16 = 10_000;
const KNOWN_PORT: u16 = FIRST_PORT - 1;

/// Verdicts.
const PASS: i32 = -1;
const DROP: i32 = 2;
const XDP_PASS: i32 = 2;
const XDP_TX: i32 = 3;
const REDIRECT: i32 = 7;

/// The addresses of one family.
#[derive(Clone, Copy)]
struct Family {
    name: &'static str,
    /// A service with its backend on this node, one on the other, one with a NodePort there, and one without any.
    services: [&'static str; 4],
    a: &'static str,
    b: &'static str,
    far: &'static str,
    node: &'static str,
    peer: &'static str,
    outsider: (&'static str, &'static str),
    read: Yardstick,
    find: Yardstick,
}

const FAMILIES: [Family; 2] = [
    Family {
        name: "ipv4",
        services: ["10.96.0.20", "10.96.0.21", "10.96.0.22", "10.96.0.23"],
        a: POD_A.0,
        b: POD_B.0,
        far: POD_FAR.0,
        node: NODE_V4,
        peer: PEER_V4,
        outsider: ("198.51.100.9", "198.51.100.0/24"),
        read: Yardstick::ReadV4,
        find: Yardstick::FindV4,
    },
    Family {
        name: "ipv6",
        services: ["fd00:96::20", "fd00:96::21", "fd00:96::22", "fd00:96::23"],
        a: POD_A.1,
        b: POD_B.1,
        far: POD_FAR.1,
        node: NODE_V6,
        peer: PEER_V6,
        outsider: ("2001:db8:51::9", "2001:db8:51::/64"),
        read: Yardstick::ReadV6,
        find: Yardstick::FindV6,
    },
];

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[allow(clippy::print_stdout, reason = "the report goes to standard output")]
fn run(options: Options) -> Result<()> {
    if let Some(reason) = unable() {
        anyhow::bail!(reason);
    }
    let runs = if options.quick {
        options.runs.min(100)
    } else {
        options.runs
    };
    let mut report = Report::new("packet", Machine::describe());
    for family in FAMILIES {
        // Namespaces belong to a thread.
        let thread = std::thread::spawn(move || measure(family, runs));
        let rows = thread
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")))
            .with_context(|| family.name)?;
        report.rows.extend(rows);
    }
    print!("{}", report.table());
    if let Some(path) = &options.json {
        report.write(path)?;
    }
    Ok(())
}

/// What is run.
#[derive(Clone, Copy)]
enum What {
    Yardstick(Yardstick),
    Hook(Program),
    Driver,
}

/// One path: a packet that is the same in every run, or opens a flow in each.
struct Case {
    name: &'static str,
    what: What,
    packet: Packet,
    link: u32,
    opens: bool,
    /// Runs without a pause between them, where the packet stays fit for more.
    repeat: u32,
    verdict: i32,
}

impl Case {
    fn run(&self, world: &World, number: u16) -> Result<TestRun> {
        let mut packet = self.packet.clone();
        if self.opens {
            packet.source.set_port(FIRST_PORT + number);
        }
        let mut bytes = packet.to_bytes();
        if matches!(self.what, What::Driver) {
            bytes[..6].copy_from_slice(&UPLINK_MAC);
        }
        let result = match self.what {
            What::Yardstick(which) => world.kernel.test_run_yardstick(which, &bytes, self.link)?,
            What::Hook(program) => world.test_run(program, &bytes, self.link, self.repeat)?,
            What::Driver => world.kernel.test_run_driver(&bytes, self.link, 1)?,
        };
        ensure!(
            result.verdict == self.verdict,
            "{}: verdict {} in place of {}",
            self.name,
            result.verdict,
            self.verdict
        );
        Ok(result)
    }
}

fn measure(family: Family, runs: u16) -> Result<Vec<Row>> {
    stay_on_one_cpu()?;
    let mut world = World::new(LIMITS)?;
    let cases = cases(&mut world, family)?;
    let mut samples = vec![Vec::with_capacity(usize::from(runs)); cases.len()];
    for number in 0..runs {
        for (case, samples) in cases.iter().zip(&mut samples) {
            samples.push(case.run(&world, number)?.duration.as_secs_f64());
        }
    }
    let middle = |name: &str| -> Result<f64> {
        let place = cases.iter().position(|case| case.name == name);
        let samples = place.and_then(|place| samples.get(place));
        samples
            .and_then(|samples| median(samples))
            .with_context(|| format!("no samples of {name}"))
    };
    let lookup = middle("read_and_find")? - middle("read")?;
    let mut rows = vec![
        Row::new(
            format!("{}/one_lookup", family.name),
            Unit::Seconds,
            &[lookup],
        )
        .context("one sample")?,
    ];
    for (case, samples) in cases.iter().zip(&samples) {
        let name = format!("{}/{}", family.name, case.name);
        let mut row = Row::new(name, Unit::Seconds, samples).context("samples of a path")?;
        if !matches!(case.what, What::Yardstick(_)) {
            row.vs.insert("none".into(), middle("nothing")? / row.value);
            row.vs.insert("one_lookup".into(), lookup / row.value);
        }
        rows.push(row);
    }
    Ok(rows)
}

fn stay_on_one_cpu() -> Result<()> {
    let mut set = CpuSet::new();
    set.set(0)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set))
        .context("stay on one CPU")
}

fn at(address: &str, port: u16) -> String {
    if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    }
}

/// Sends a first packet and its answer, so that both directions are known. The packet as it left, as an answer to it.
fn open(
    world: &World,
    program: Program,
    packet: &Packet,
    link: u32,
    back: (Program, u32),
) -> Result<Packet> {
    let first = world.test_run(program, &packet.clone().with_flags(SYN).to_bytes(), link, 1)?;
    ensure!(first.verdict == REDIRECT, "verdict {}", first.verdict);
    let answer = Packet::from_bytes(&first.packet)?.answer();
    world.test_run(back.0, &answer.to_bytes(), back.1, 1)?;
    Ok(answer.with_flags(ACK))
}

#[allow(clippy::too_many_lines, reason = "one entry for each path")]
fn cases(world: &mut World, f: Family) -> Result<Vec<Case>> {
    let [near, away, node_port, empty] = f.services;
    world.serve(near, &[f.b])?;
    world.serve(away, &[f.far])?;
    world.serve(empty, &[])?;
    world.serve_node_port(node_port, NODE_PORT, &[f.far])?;
    let (outsider, behind) = f.outsider;
    Netlink::open()?.add_route(
        behind.parse()?,
        RoutePath::Via {
            gateway: f.peer.parse()?,
            link: world.uplink,
            source: None,
        },
    )?;
    let (a, b, uplink) = (world.a.link.ifindex, world.b.link.ifindex, world.uplink);
    let packet = |from: &str, to: &str, port| {
        Packet::new(TCP, &at(from, KNOWN_PORT), &at(to, port)).with_flags(ACK)
    };
    let (to_near, to_away) = (packet(f.a, near, 80), packet(f.a, away, 80));
    let (direct, to_empty) = (packet(f.a, f.b, 8080), packet(f.a, empty, 80));
    let to_node = packet(outsider, f.node, NODE_PORT);
    let (from_pod, from_network) = (Program::FromPod, Program::FromNetwork);
    let near_answer = open(world, from_pod, &to_near, a, (from_pod, b))?;
    let away_answer = open(world, from_pod, &to_away, a, (from_network, uplink))?;
    let direct_answer = open(world, from_pod, &direct, a, (from_pod, b))?;
    let node_answer = open(
        world,
        from_network,
        &to_node,
        uplink,
        (from_network, uplink),
    )?;
    let known = |name, program, packet: &Packet, link| Case {
        name,
        what: What::Hook(program),
        packet: packet.clone(),
        link,
        opens: false,
        repeat: 1,
        verdict: REDIRECT,
    };
    let first = |name, program, packet: &Packet, link| Case {
        packet: packet.clone().with_flags(SYN),
        opens: true,
        ..known(name, program, packet, link)
    };
    let yardstick = |name, which| Case {
        what: What::Yardstick(which),
        verdict: PASS,
        ..known(name, from_pod, &to_near, a)
    };
    let driver = |name, packet: &Packet, verdict| Case {
        what: What::Driver,
        verdict,
        ..known(name, from_pod, packet, uplink)
    };
    Ok(vec![
        yardstick("nothing", Yardstick::Nothing),
        yardstick("read", f.read),
        yardstick("read_and_find", f.find),
        known("known/direct", from_pod, &direct, a),
        // The packet keeps its tuple, so that the kernel may run it over and over: nothing has to be fetched anew.
        Case {
            repeat: LOOP,
            ..known("known/direct_in_a_loop", from_pod, &direct, a)
        },
        known("known/direct_answer", from_pod, &direct_answer, b),
        known("known/service_same_node", from_pod, &to_near, a),
        known("known/service_same_node_answer", from_pod, &near_answer, b),
        known("known/service_cross_node", from_pod, &to_away, a),
        known(
            "known/service_cross_node_answer",
            from_network,
            &away_answer,
            uplink,
        ),
        known("known/node_port", from_network, &to_node, uplink),
        known("known/node_port_answer", from_network, &node_answer, uplink),
        driver("known/node_port_at_driver", &to_node, XDP_TX),
        driver("known/node_port_answer_at_driver", &node_answer, XDP_TX),
        driver("left_by_driver", &away_answer, XDP_PASS),
        first("first/direct", from_pod, &direct, a),
        first("first/service_same_node", from_pod, &to_near, a),
        first("first/service_cross_node", from_pod, &to_away, a),
        first("first/node_port", from_network, &to_node, uplink),
        // The answer that refuses goes back out of the link.
        first("refused", from_pod, &to_empty, a),
        Case {
            verdict: DROP,
            ..known(
                "dropped/spoofed_source",
                from_pod,
                &packet(f.b, near, 80),
                a,
            )
        },
    ])
}
