//! One node of a large cluster: how long its agent takes to compile and program its share of the policies, and a change of
//! one pod's labels; what it holds in memory; a pod with very many rules. Beside the programs that load rule sets.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use control_api::desired::Name;
use control_api::v1::Object;
use control_feed::Kind;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::Options;
use super::cluster::{self, Cluster, node_name};
use super::large::{self, Size};
use super::ruleset;
use super::traffic::{load_iptables, load_nftables};
use crate::agents::{self, Agent, Programs};
use crate::feed::Feed;
use crate::lab::{self, Namespace, Underlay};
use crate::program::Memory;
use weir_bench::report::{Bar, Report, Row, Skipped, Unit, quantile};

const NODE: &str = "n1";
const NODE_NUMBER: usize = 1;
/// How long the agent may take to apply anything.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two changes: longer than applying one takes, so that they are not merged.
const PAUSE: Duration = Duration::from_millis(10);
/// A packet that gets no answer within this time was dropped.
const SILENCE: Duration = Duration::from_millis(200);
const MANY_RULES: usize = 12_500;
const PROBE_PORT: u16 = 8_080;

const COMPILE_LIMIT_S: f64 = 0.5;
const CHANGE_LIMIT_S: f64 = 0.05;

/// Pods that are asked whether what was acknowledged is enforced.
const PROBE: &str = "probe";
const ANSWERER: &str = "answerer";
const ASKER: &str = "asker";
const STRANGER: &str = "stranger";

/// A node of a large cluster, with its agent and its pods.
struct World {
    cluster: Cluster,
    pods: Vec<large::Pod>,
    policies: Vec<Value>,
    underlay: Underlay,
    feed: Feed,
    agent: Agent,
    /// Of the cluster, and of probes: address by name.
    wired: Vec<lab::Pod>,
    probes: Option<Probes>,
}

struct Probes {
    answerer: lab::Pod,
    asker: lab::Pod,
    stranger: lab::Pod,
    _listener: TcpListener,
}

/// Measures, and adds rows and bars.
pub(super) fn run(
    options: &Options,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    report: &mut Report,
) -> Result<()> {
    let size = if options.quick {
        Size::QUICK
    } else {
        Size::FULL
    };
    eprintln!(
        "setting up {} policies, {} pods, {} namespaces, {} nodes",
        size.policies(),
        size.pods,
        size.namespaces,
        size.nodes()
    );
    let mut world = World::new(size, programs, runtime)?;
    eprintln!("wiring {} pods", size.pods_of_node);
    world.wire(programs)?;
    world.compile(options, report)?;
    world.change(options, report)?;
    world.many_rules(report)?;
    if !options.only_weir {
        world.rule_sets(options, report);
    }
    Ok(())
}

impl World {
    fn new(size: Size, programs: &Programs, runtime: &Arc<Runtime>) -> Result<Self> {
        let (pods, policies) = (large::pods(size), large::policies(size));
        let bare = Cluster::new(size.nodes());
        let feed = Feed::new(Arc::clone(runtime), bare.snapshot(NODE)?)?;
        let underlay = Underlay::new()?;
        let agent = Agent::start(programs, &underlay.nodes[0], 0, &feed, agents::PER_PACKET)?;
        let cluster = large::build(size, &pods, &policies);
        feed.applied(&[NODE], 1, PATIENCE)
            .with_context(|| agent.log())?;
        Ok(Self {
            cluster,
            pods,
            policies,
            underlay,
            feed,
            agent,
            wired: Vec::new(),
            probes: None,
        })
    }

    /// Attaches the node's pods, and those that probe.
    fn wire(&mut self, programs: &Programs) -> Result<()> {
        self.cluster
            .put(Kind::Namespace, &cluster::namespace(PROBE, &json!({})));
        for name in [ANSWERER, ASKER, STRANGER] {
            self.cluster.put(Kind::Pod, &probe(name, false, None));
        }
        let all = self.bare()?;
        self.renew(&all)?;
        let own = self.pods.iter().filter(|pod| pod.node == NODE_NUMBER);
        for pod in own {
            let container = pod.name.to_string().replace('/', "-");
            self.wired
                .push(self.agent.pod(programs, &container, Some(&pod.name))?);
        }
        let mut wire = |name: &str| -> Result<lab::Pod> {
            let wired = self
                .agent
                .pod(programs, name, Some(&Name::new(PROBE, name)))?;
            let object = probe(name, false, Some(wired.address));
            self.cluster.put(Kind::Pod, &object);
            Ok(wired)
        };
        let (answerer, asker, stranger) = (wire(ANSWERER)?, wire(ASKER)?, wire(STRANGER)?);
        let listener = answerer
            .namespace
            .enter(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, PROBE_PORT))?))?;
        self.probes = Some(Probes {
            answerer,
            asker,
            stranger,
            _listener: listener,
        });
        self.policies.push(cluster::policy(
            &Name::new(PROBE, "answerer"),
            &json!({"podSelector": {"matchLabels": {"app": ANSWERER}},
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"may": "ask"}}}],
                    "ports": [{"port": PROBE_PORT}]}]}),
        ));
        Ok(())
    }

    /// The node's share without any policy.
    fn bare(&mut self) -> Result<Vec<Object>> {
        self.cluster.replace(Kind::NetworkPolicy, &[]);
        self.cluster.snapshot(NODE)
    }

    fn renew(&self, objects: &[Object]) -> Result<Duration> {
        let (revision, sent) = self.feed.renew(NODE, objects);
        Ok(self.applied(revision)? - sent)
    }

    fn applied(&self, revision: u64) -> Result<Instant> {
        self.feed
            .applied(&[NODE], revision, PATIENCE)
            .with_context(|| self.agent.log())
    }

    /// All policies at once, after none.
    fn compile(&mut self, options: &Options, report: &mut Report) -> Result<()> {
        let bare = self.bare()?;
        let policies = std::mem::take(&mut self.policies);
        self.cluster.replace(Kind::NetworkPolicy, &policies);
        self.policies = policies;
        let all = self.cluster.snapshot(NODE)?;
        let state = self.cluster.state(NODE);
        let (mut compile, mut program) = (Vec::new(), Vec::new());
        for round in 0..options.turns.rounds {
            eprintln!("compile, round {} of {}", round + 1, options.turns.rounds);
            self.renew(&bare)?;
            if round == 0 {
                std::thread::sleep(options.settle());
                memory(report, "without policies", self.agent.pid())?;
            }
            let before = self.metric("weir_policy_compile_duration_seconds_sum")?;
            program.push(self.renew(&all)?.as_secs_f64());
            compile.push(self.metric("weir_policy_compile_duration_seconds_sum")? - before);
        }
        std::thread::sleep(options.settle());
        memory(report, "with policies", self.agent.pid())?;
        eprintln!(
            "the node's share: {} pods, {} policies, {} peers; {} identities, {} entries of rules",
            self.wired.len(),
            state.policies.len(),
            state.policy_peers.len(),
            self.metric("weir_policy_identities")?,
            self.metric("weir_policy_rules")?,
        );
        for (name, values, bar) in [
            ("full_compile", compile, true),
            ("full_program", program, false),
        ] {
            let Some(row) = Row::new(format!("{name} weir"), Unit::Seconds, &values) else {
                continue;
            };
            if bar {
                let title = "compile of a node's share (s)";
                report
                    .bars
                    .push(Bar::at_most(title, COMPILE_LIMIT_S, row.value));
            }
            report.rows.push(row);
        }
        Ok(())
    }

    /// Labels of single pods, from the object that changes to the acknowledgement.
    fn change(&mut self, options: &Options, report: &mut Report) -> Result<()> {
        eprintln!("{} changes of labels", options.changes);
        let (mut index, mut whole) = (Vec::new(), Vec::new());
        let mut pods = std::mem::take(&mut self.pods);
        let count = pods.len();
        let mut tries = 0;
        while whole.len() < options.changes {
            tries += 1;
            ensure!(
                tries < 100 * options.changes + count,
                "too few pods concern the node"
            );
            let pod = &mut pods[tries * 7_919 % count];
            // Every third pod gets other policies, if it has any.
            if tries % 3 == 0 {
                pod.rededicate();
            } else {
                pod.recolour();
            }
            if let Some((worked_out, taken)) = self.change_one(&pod.object())? {
                index.push(worked_out.as_secs_f64());
                whole.push(taken.as_secs_f64());
                std::thread::sleep(PAUSE);
            }
        }
        self.pods = pods;
        for number in 0..options.probes() {
            let may = number % 2 == 0;
            let probes = self.probes.as_ref().context("pods that probe")?;
            let object = probe(ASKER, may, Some(probes.asker.address));
            let taken = self
                .change_one(&object)?
                .context("a change of the node's own pod")?;
            index.push(taken.0.as_secs_f64());
            whole.push(taken.1.as_secs_f64());
            let probes = self.probes.as_ref().context("pods that probe")?;
            ensure!(
                probes.passes(&probes.asker)? == may,
                "a change that was acknowledged is not enforced: {may}"
            );
        }
        for (name, values) in [("label_change_index", &index), ("label_change", &whole)] {
            for (figure, share) in [("p50", 0.5), ("p99", 0.99)] {
                let value = quantile(values, share).unwrap_or_default();
                let mut row = Row::new(format!("{name}/{figure} weir"), Unit::Seconds, values);
                if let Some(row) = &mut row {
                    row.value = value;
                }
                report.rows.extend(row);
            }
        }
        let p99 = quantile(&whole, 0.99).unwrap_or_default();
        let title = "change of one pod's labels, p99 (s)";
        report.bars.push(Bar::at_most(title, CHANGE_LIMIT_S, p99));
        Ok(())
    }

    /// How long the index took, and all of it; `None` where the node is not told.
    fn change_one(&mut self, object: &Value) -> Result<Option<(Duration, Duration)>> {
        let started = Instant::now();
        let effects = self.cluster.put(Kind::Pod, object);
        let worked_out = started.elapsed();
        if !cluster::concerned(&effects).contains(NODE) {
            return Ok(None);
        }
        let revision = self.cluster.told(NODE, &effects)?.send(&self.feed, NODE);
        let done = self.applied(revision)?;
        Ok(Some((worked_out, done - started)))
    }

    /// One more policy of one pod: very many rules, of which the last lets the asker in.
    fn many_rules(&mut self, report: &mut Report) -> Result<()> {
        eprintln!("{MANY_RULES} rules on one pod");
        let policy = many_rules();
        let started = Instant::now();
        let effects = self.cluster.put(Kind::NetworkPolicy, &policy);
        let revision = self.cluster.told(NODE, &effects)?.send(&self.feed, NODE);
        let taken = self.applied(revision)? - started;
        let row = Row::new(
            format!("{MANY_RULES}_rules weir"),
            Unit::Seconds,
            &[taken.as_secs_f64()],
        );
        report.rows.extend(row);
        let probes = self.probes.as_ref().context("pods that probe")?;
        ensure!(
            probes.passes(&probes.asker)?,
            "the last of {MANY_RULES} rules does not let in whom it names"
        );
        ensure!(
            !probes.passes(&probes.stranger)?,
            "{MANY_RULES} rules let in somebody whom none names"
        );
        Ok(())
    }

    /// The same share in the kernel by other programs.
    fn rule_sets(&mut self, options: &Options, report: &mut Report) {
        let rules = ruleset::of(&self.cluster.state(NODE), NODE);
        type Load = fn(&Namespace, &ruleset::Ruleset) -> Result<()>;
        let peers: [(&str, Load); 2] = [("iptables", load_iptables), ("nftables", load_nftables)];
        for (name, load) in peers {
            let round = |number: usize| -> Result<f64> {
                eprintln!("{name}, round {} of {}", number + 1, options.turns.rounds);
                let namespace = Namespace::new()?;
                let started = Instant::now();
                load(&namespace, &rules)?;
                Ok(started.elapsed().as_secs_f64())
            };
            let values: Result<Vec<f64>> = (0..options.turns.rounds).map(round).collect();
            match values {
                Ok(values) => {
                    let row = Row::new(format!("full_program {name}"), Unit::Seconds, &values);
                    report.rows.extend(row);
                }
                Err(error) => report.skipped.push(Skipped {
                    name: format!("full_program {name}"),
                    reason: format!("{error:#}"),
                }),
            }
        }
    }

    /// A number of the agent's `/metrics`.
    fn metric(&self, name: &str) -> Result<f64> {
        let text = self.underlay.nodes[0].enter(agents::metrics)?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = line.with_context(|| format!("no {name} in the agent's metrics"))?;
        value.trim().parse().context("read a metric")
    }
}

impl Probes {
    /// Whether a connection of this pod to the answerer comes about.
    fn passes(&self, from: &lab::Pod) -> Result<bool> {
        let address = SocketAddr::from((self.answerer.address, PROBE_PORT));
        from.namespace
            .enter(|| Ok(TcpStream::connect_timeout(&address, SILENCE).is_ok()))
    }
}

fn probe(name: &str, may: bool, address: Option<Ipv4Addr>) -> Value {
    let labels = json!({"app": name, "may": if may { "ask" } else { "not" }});
    cluster::pod(
        &Name::new(PROBE, name),
        &node_name(NODE_NUMBER),
        &labels,
        address,
    )
}

/// Every rule about another address, and the last one about the asker.
fn many_rules() -> Value {
    let rules = (1..=MANY_RULES).map(|number| {
        let peer = if number == MANY_RULES {
            json!({"podSelector": {"matchLabels": {"app": ASKER}}})
        } else {
            let [_, _, high, low] = u32::try_from(number).unwrap_or_default().to_be_bytes();
            json!({"ipBlock": {"cidr": format!("198.18.{high}.{low}/32")}})
        };
        json!({"from": [peer], "ports": [{"port": PROBE_PORT}]})
    });
    let rules: Vec<Value> = rules.collect();
    let spec = json!({"podSelector": {"matchLabels": {"app": ANSWERER}}, "ingress": rules});
    cluster::policy(&Name::new(PROBE, "many"), &spec)
}

fn memory(report: &mut Report, when: &str, pid: u32) -> Result<()> {
    let memory = Memory::of(pid)?;
    for (name, bytes) in [
        ("resident", memory.resident_bytes),
        ("maps", memory.map_bytes),
    ] {
        let row = Row::new(format!("{name} {when}"), Unit::Bytes, &[bytes]);
        report.rows.extend(row);
    }
    Ok(())
}
