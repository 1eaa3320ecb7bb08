//! What packets pay for policies: the same workloads with no rule on the pods, with some and with many, through Weir and
//! through rule sets of the same policies.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use control_api::desired::Name;
use control_feed::Kind as ObjectKind;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::Options;
use super::cluster::{self, Cluster, node_name, pod_address};
use super::ruleset::{self, Ruleset};
use crate::agents::{self, Agents, NAMES, Programs};
use crate::fleet::{Place, SERVER_PORT};
use crate::lab::{self, Lab, Length, Namespace, SERVER_PORTS, Underlay};
use crate::load::client::{Seen, Workload};
use crate::service::iptables_restore;
use crate::turns::{self, Samples};
use weir_bench::report::{Bar, Report, Row, Skipped, Unit, paired_ratio};

const NAMESPACE: &str = "bench";
/// Rules of one policy at most.
const RULES_OF_POLICY: usize = 10;
/// Pods that one rule speaks of.
const PEERS_OF_RULE: usize = 10;
/// Short connections are at least so fast as without rules, and kept ones.
const SHORT_LIMIT: f64 = 0.95;
const KEPT_LIMIT: f64 = 0.98;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Direct,
    Weir,
    Iptables,
    Nftables,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Weir => "weir",
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }
}

/// Who judges, and how many rules each pod has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Peer {
    kind: Kind,
    rules: usize,
}

const DIRECT: Peer = Peer {
    kind: Kind::Direct,
    rules: 0,
};

/// Weir without any policy.
const NONE: Peer = Peer {
    kind: Kind::Weir,
    rules: 0,
};

impl Peer {
    fn name(self) -> String {
        if self == DIRECT {
            self.kind.name().into()
        } else {
            format!("{}/{}", self.kind.name(), self.rules)
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Measurement {
    workload: Workload,
    place: Place,
}

impl Measurement {
    const ALL: [Self; 4] = [
        Self::new(Workload::ShortTcp, Place::SameNode),
        Self::new(Workload::ShortTcp, Place::CrossNode),
        Self::new(Workload::Request, Place::SameNode),
        Self::new(Workload::Request, Place::CrossNode),
    ];

    const fn new(workload: Workload, place: Place) -> Self {
        Self { workload, place }
    }

    fn is_short(self) -> bool {
        self.workload == Workload::ShortTcp
    }

    fn name(self) -> &'static str {
        match (self.is_short(), self.place) {
            (true, Place::SameNode) => "short_tcp/same_node",
            (true, Place::CrossNode) => "short_tcp/cross_node",
            (false, Place::SameNode) => "request/same_node",
            (false, Place::CrossNode) => "request/cross_node",
        }
    }

    /// Short connections are counted; of kept ones the median answer counts.
    fn figure(self) -> (&'static str, Unit, fn(&Seen) -> f64) {
        if self.is_short() {
            ("rate", Unit::PerSecond, |seen| seen.rate)
        } else {
            ("p50", Unit::Seconds, |seen| seen.p50_s)
        }
    }
}

/// A peer that is set up.
struct Stage {
    lab: Lab,
    _agents: Option<Agents>,
}

/// Measures, and adds rows and bars.
pub(super) fn run(
    options: &Options,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    report: &mut Report,
) -> Result<()> {
    let weir = options.rules.iter().map(|rules| Peer {
        kind: Kind::Weir,
        rules: *rules,
    });
    let mut peers: Vec<Peer> = [DIRECT, NONE].into_iter().chain(weir).collect();
    for kind in [Kind::Iptables, Kind::Nftables] {
        let of_kind = options.rules.iter().map(|rules| Peer {
            kind,
            rules: *rules,
        });
        peers.extend(of_kind.filter(|_| !options.only_weir));
    }
    let mut stages = BTreeMap::new();
    for peer in peers {
        eprintln!("setting up {}", peer.name());
        match stage(peer, programs, runtime, options) {
            Ok(stage) => {
                stages.insert(peer, stage);
            }
            // There is nothing to compare with, or nothing to compare.
            Err(error) if matches!(peer.kind, Kind::Direct | Kind::Weir) => return Err(error),
            Err(error) => report.skipped.push(Skipped {
                name: peer.name(),
                reason: format!("{error:#}"),
            }),
        }
    }
    let measure = |measurement: Measurement, peer: Peer, length: Length| {
        let lab = &stages[&peer].lab;
        let targets = lab.server_ports(measurement.place);
        lab::drive(
            &lab.client.namespace,
            None,
            measurement.workload,
            &targets,
            length,
        )
    };
    let all = |_| stages.keys().copied().collect();
    let title =
        |measurement: Measurement, peer: Peer| format!("{} {}", measurement.name(), peer.name());
    let samples = options
        .turns
        .measure(&Measurement::ALL, all, measure, title, report);
    tabulate(options, &samples, report);
    Ok(())
}

fn stage(
    peer: Peer,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    options: &Options,
) -> Result<Stage> {
    let realtime = options.turns.realtime;
    let (lab, agents) = match peer.kind {
        Kind::Weir => {
            let (lab, agents) = weir(peer.rules, programs, runtime, realtime)?;
            (lab, Some(agents))
        }
        Kind::Direct => (Lab::plain(realtime)?, None),
        Kind::Iptables | Kind::Nftables => {
            let lab = Lab::plain(realtime)?;
            let pods = [&lab.client, &lab.same, &lab.far];
            let cluster = cluster(peer.rules, pods.map(|pod| pod.address));
            for (namespace, node) in lab.underlay.nodes.iter().zip(NAMES) {
                let rules = ruleset::of(&cluster.state(node), node);
                match peer.kind {
                    Kind::Nftables => load_nftables(namespace, &rules)?,
                    _ => load_iptables(namespace, &rules)?,
                }
            }
            (lab, None)
        }
    };
    Ok(Stage {
        lab,
        _agents: agents,
    })
}

pub(super) fn load_iptables(namespace: &Namespace, rules: &Ruleset) -> Result<()> {
    namespace
        .feed(Command::new("ipset").arg("restore"), &rules.ipset)
        .context("load the sets (Debian package ipset)")?;
    namespace.feed(&mut Command::new(iptables_restore()?), &rules.iptables)
}

pub(super) fn load_nftables(namespace: &Namespace, rules: &Ruleset) -> Result<()> {
    namespace
        .feed(Command::new("nft").args(["-f", "-"]), &rules.nftables)
        .context("load the rules (Debian package nftables)")
}

/// The lab's pods: name, number of the node, role.
type OwnPod = (&'static str, usize, &'static str);

const PODS: [OwnPod; 3] = [
    ("client", 1, "client"),
    ("same", 1, "server"),
    ("far", 2, "server"),
];

fn own_pod((name, node, role): OwnPod, address: Option<Ipv4Addr>) -> Value {
    let labels = json!({"role": role});
    cluster::pod(
        &Name::new(NAMESPACE, name),
        &node_name(node),
        &labels,
        address,
    )
}

/// The cluster of a lab whose pods have these addresses.
pub(super) fn cluster(rules: usize, addresses: [Ipv4Addr; 3]) -> Cluster {
    let mut cluster = Cluster::new(NAMES.len());
    fill(&mut cluster, rules);
    for (pod, address) in PODS.into_iter().zip(addresses) {
        cluster.put(ObjectKind::Pod, &own_pod(pod, Some(address)));
    }
    cluster
}

/// Pods on other nodes and policies about them: every server has so many rules for what comes in, every client for what
/// goes out, each about other pods. The one that traffic needs stands in the middle.
fn fill(cluster: &mut Cluster, rules: usize) {
    cluster.put(
        ObjectKind::Namespace,
        &cluster::namespace(NAMESPACE, &json!({})),
    );
    for rule in 0..rules {
        for peer in 0..PEERS_OF_RULE {
            let place = rule * PEERS_OF_RULE + peer;
            let (node, place) = (place / cluster::PODS_OF_NODE, place % cluster::PODS_OF_NODE);
            let node = node + NAMES.len() + 1;
            let name = Name::new(NAMESPACE, format!("peer-{rule}-{peer}"));
            let labels = json!({"group": format!("g{rule}")});
            let address = Some(pod_address(node, place));
            let pod = cluster::pod(&name, &node_name(node), &labels, address);
            cluster.put(ObjectKind::Pod, &pod);
        }
    }
    let last = SERVER_PORT + SERVER_PORTS - 1;
    for (role, other, kind, list, ends) in [
        ("server", "client", "Ingress", "ingress", "from"),
        ("client", "server", "Egress", "egress", "to"),
    ] {
        let rule = |number: usize| {
            let labels = if number == rules / 2 {
                json!({"role": other})
            } else {
                json!({"group": format!("g{number}")})
            };
            let mut rule = json!({"ports": [{"port": SERVER_PORT, "endPort": last}]});
            rule[ends] = json!([{"podSelector": {"matchLabels": labels}}]);
            rule
        };
        let all: Vec<Value> = (0..rules).map(rule).collect();
        for (number, rules) in all.chunks(RULES_OF_POLICY).enumerate() {
            let mut spec =
                json!({"podSelector": {"matchLabels": {"role": role}}, "policyTypes": [kind]});
            spec[list] = json!(rules);
            let name = Name::new(NAMESPACE, format!("{role}-{number:03}"));
            cluster.put(ObjectKind::NetworkPolicy, &cluster::policy(&name, &spec));
        }
    }
}

/// Real agents, and pods that have their policies before they are wired.
fn weir(
    rules: usize,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    realtime: bool,
) -> Result<(Lab, Agents)> {
    let underlay = Underlay::new()?;
    let mut cluster = Cluster::new(NAMES.len());
    let first = cluster.snapshot(NAMES[0])?;
    let agents = Agents::start(programs, &underlay, runtime, first, agents::PER_PACKET)?;
    fill(&mut cluster, rules);
    for pod in PODS {
        cluster.put(ObjectKind::Pod, &own_pod(pod, None));
    }
    for node in NAMES {
        let revision = agents.feed.renew(node, &cluster.snapshot(node)?).0;
        agents.applied(&[node], revision)?;
    }
    cluster.listen();
    let mut pods = Vec::new();
    for pod in PODS {
        let name = Name::new(NAMESPACE, pod.0);
        let wired = agents.pod(programs, pod.1 - 1, pod.0, Some(&name))?;
        let object = own_pod(pod, Some(wired.address));
        let effects = cluster.put(ObjectKind::Pod, &object);
        for node in NAMES {
            let revision = cluster.told(node, &effects)?.send(&agents.feed, node);
            agents.applied(&[node], revision)?;
        }
        pods.push(wired);
    }
    let pods = pods.try_into().ok().context("three pods")?;
    Ok((Lab::with_pods(underlay, pods, realtime)?, agents))
}

fn tabulate(options: &Options, samples: &Samples<Measurement, Peer>, report: &mut Report) {
    for measurement in Measurement::ALL {
        let (figure, unit, of) = measurement.figure();
        let values = |peer| turns::values(samples, measurement, peer, of);
        let ratio = |ours: Peer, theirs: Peer| paired_ratio(unit, &values(ours)?, &values(theirs)?);
        let peers = samples.keys().filter(|(m, _)| *m == measurement);
        for peer in peers.map(|(_, peer)| *peer) {
            let title = format!("{}/{figure} {}", measurement.name(), peer.name());
            let own = values(peer).unwrap_or_default();
            let Some(mut row) = Row::new(title, unit, &own) else {
                continue;
            };
            if peer.kind == Kind::Weir {
                let same = |kind| Peer {
                    kind,
                    rules: peer.rules,
                };
                let others = [
                    ("direct", DIRECT),
                    ("none", NONE),
                    ("iptables", same(Kind::Iptables)),
                    ("nftables", same(Kind::Nftables)),
                ];
                for (name, other) in others.into_iter().filter(|(_, other)| *other != peer) {
                    let ratio = ratio(peer, other);
                    row.vs.extend(ratio.map(|ratio| (name.to_owned(), ratio)));
                }
            }
            report.rows.push(row);
        }
        let limit = if measurement.is_short() {
            SHORT_LIMIT
        } else {
            KEPT_LIMIT
        };
        for rules in &options.rules {
            let weir = Peer {
                kind: Kind::Weir,
                rules: *rules,
            };
            if let Some(measured) = ratio(weir, NONE) {
                let name = format!("{} with {rules} rules against none", measurement.name());
                report.bars.push(Bar::at_least(name, limit, measured));
            }
        }
    }
}
