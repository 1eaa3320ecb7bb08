//! What `weirctl policy` shows.

use std::collections::BTreeMap;
use std::net::IpAddr;

use control_api::desired::{Changes, DesiredState, Name};
use control_api::name_map::NameMap;
use control_api::v1::{Policy, PolicyPeer, PolicyTier};
use serde::{Deserialize, Serialize};

use super::domains;
use super::drops::Drops;
use super::ends;
use super::explain::{self, Explanation, port_text};
use super::{ServiceTables, View};
use crate::compile::policy::{
    Compiler, DomainAnswers, Input, Judgement, Limits, Locals, Mode, Packet, Verdict, verdict,
};

/// More flows that a staged policy would treat otherwise are counted, not listed.
const MAX_LISTED: usize = 200;

/// Policies of this node's pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyList {
    pub policies: Vec<PolicyReport>,
    /// Pods that nothing may pass to or from.
    pub shut: Vec<ShutReport>,
    /// Names that rules ask for, and the addresses that DNS answers gave them.
    #[serde(default)]
    pub names: Vec<NameReport>,
    /// The last packets that policies dropped, the newest last.
    pub drops: Vec<Drops>,
    /// Packets that policies dropped since the agent's start and that the kernel did not tell of one by one.
    #[serde(default)]
    pub untold_drops: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyReport {
    pub tier: String,
    /// Empty for a ClusterNetworkPolicy.
    pub namespace: String,
    pub name: String,
    pub priority: i32,
    pub staged: bool,
    pub isolates_ingress: bool,
    pub isolates_egress: bool,
    pub ingress_rules: usize,
    pub egress_rules: usize,
    /// Of this node.
    pub pods: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShutReport {
    pub pod: String,
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameReport {
    pub name: String,
    pub addresses: Vec<LearntReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearntReport {
    pub address: IpAddr,
    /// Until it ends, unless an answer says it again. Zero: conversations still use it.
    pub seconds_left: u64,
}

/// What staged policies would change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffReport {
    /// Names of the staged policies.
    pub staged: Vec<String>,
    /// Different flows and drops that were looked at.
    pub looked_at: usize,
    pub changes: Vec<DiffEntry>,
    /// Changes beyond those listed.
    pub more: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffEntry {
    pub from: String,
    pub to: String,
    pub port: String,
    pub enforced: String,
    pub staged: String,
    /// What decides with the staged policies.
    pub why: String,
}

/// Lists policies, without drops.
#[must_use]
pub(super) fn list(view: &View<'_>) -> PolicyList {
    let mut pods: BTreeMap<Name, Vec<String>> = BTreeMap::new();
    for pod in view.locals.pods.values() {
        let known = pod.name.as_ref().and_then(|name| view.peers.get(name));
        let (Some(name), Some(peer)) = (&pod.name, known) else {
            continue;
        };
        for policy in &peer.policies {
            let policy = Name::new(&policy.namespace, &policy.name);
            pods.entry(policy).or_default().push(name.to_string());
        }
    }
    let policies = view.policies.iter().map(|(name, policy)| PolicyReport {
        tier: match policy.tier() {
            PolicyTier::Admin => "Admin",
            PolicyTier::Baseline => "Baseline",
            PolicyTier::NetworkPolicy | PolicyTier::Unspecified => "NetworkPolicy",
        }
        .into(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        priority: policy.priority,
        staged: policy.staged,
        isolates_ingress: policy.isolates_ingress,
        isolates_egress: policy.isolates_egress,
        ingress_rules: policy.ingress.len(),
        egress_rules: policy.egress.len(),
        pods: pods.remove(name).unwrap_or_default(),
    });
    let policies = policies.collect();
    let shut = view.locals.pods.iter().filter_map(|(ifindex, pod)| {
        let why = view.compiled.why_shut(*ifindex)?;
        Some(ShutReport {
            pod: pod.name.as_ref()?.to_string(),
            why: why.to_string(),
        })
    });
    PolicyList {
        policies,
        shut: shut.collect(),
        names: learnt_names(view, domains::now_us()),
        drops: Vec::new(),
        untold_drops: 0,
    }
}

fn learnt_names(view: &View<'_>, now_us: i64) -> Vec<NameReport> {
    let names = view.domains.iter();
    names
        .map(|(name, addresses)| NameReport {
            name: name.to_owned(),
            addresses: addresses
                .map(|(address, until_us)| LearntReport {
                    address,
                    seconds_left: u64::try_from((until_us - now_us) / 1_000_000).unwrap_or(0),
                })
                .collect(),
        })
        .collect()
}

/// Explains every packet that a question means: one for each pair of addresses of a family, and for each backend where a
/// Service leads it on.
///
/// # Errors
/// What in the question is not known here.
pub(super) fn explain_all(
    view: &View<'_>,
    state: &DesiredState,
    services: &dyn ServiceTables,
    from: &str,
    to: &str,
) -> Result<Vec<Explanation>, String> {
    let asked = ends::cut(to)?;
    let mut all = Vec::new();
    let mut refused = None;
    for source in &ends::find(view, state, from)? {
        let v4 = source.address.is_ipv4();
        let protocol = asked.protocol(v4);
        let targets = ends::targets(view, state, services, source, &asked);
        let targets = targets.unwrap_or_else(|why| {
            refused = Some(why);
            Vec::new()
        });
        let same = targets
            .iter()
            .filter(|target| target.end.address.is_ipv4() == v4);
        all.extend(same.map(|target| {
            let port = (protocol, target.port);
            let through = target.through.clone();
            explain::explain(view, source, &target.end, port, through)
        }));
    }
    match refused {
        _ if !all.is_empty() => Ok(all),
        Some(why) => Err(why),
        None => Err(format!("{from} and {to} have no addresses of one family")),
    }
}

/// Packets, what is enforced of them, and what it takes to compile staged policies: a copy that shares what it can.
#[derive(Clone, Debug)]
pub(super) struct Question {
    packets: Vec<(Packet, Verdict)>,
    policies: NameMap<Policy>,
    peers: NameMap<PolicyPeer>,
    locals: Locals,
    domains: DomainAnswers,
}

impl Question {
    pub(super) fn new(view: &View<'_>, packets: Vec<Packet>) -> Self {
        let judge = |packet: Packet| (packet, verdict(view.compiled, view.locals, &packet));
        Self {
            packets: packets.into_iter().map(judge).collect(),
            policies: view.policies.clone(),
            peers: view.peers.clone(),
            locals: view.locals.clone(),
            domains: view.domains.clone(),
        }
    }
}

/// Compares what is enforced with what would be, were staged policies not staged.
#[must_use]
pub(super) fn diff(question: &Question, state: &DesiredState) -> DiffReport {
    let staged = question.policies.iter();
    let staged = staged.filter(|(_, policy)| policy.staged);
    let staged: Vec<String> = staged.map(|(name, _)| explain::policy_name(name)).collect();
    let mut report = DiffReport {
        staged,
        looked_at: question.packets.len(),
        ..DiffReport::default()
    };
    if report.staged.is_empty() {
        return report;
    }
    let mut compiler = Compiler::new(Mode::Staged, Limits::default(), &[]);
    let input = Input {
        policies: &question.policies,
        peers: &question.peers,
        locals: &question.locals,
        domains: &question.domains,
    };
    compiler.update(&input, &Changes::everything());
    let with_staged = View {
        compiled: compiler.compiled(),
        planner: None,
        policies: &question.policies,
        peers: &question.peers,
        locals: &question.locals,
        domains: &question.domains,
    };
    for (packet, now) in &question.packets {
        let then = verdict(with_staged.compiled, &question.locals, packet);
        if now.allows() == then.allows() {
            continue;
        }
        if report.changes.len() >= MAX_LISTED {
            report.more += 1;
            continue;
        }
        let from = ends::at(&with_staged, state, packet.source);
        let to = ends::at(&with_staged, state, packet.destination);
        let asked = (packet.protocol, packet.port);
        let said = explain::explain(&with_staged, &from, &to, asked, Some(String::new()));
        report.changes.push(DiffEntry {
            from: from.to_string(),
            to: to.to_string(),
            port: port_text(packet.protocol, packet.port),
            enforced: word(*now).into(),
            staged: word(then).into(),
            why: decisive(&said, then),
        });
    }
    report
}

fn word(verdict: Verdict) -> &'static str {
    if verdict.allows() {
        "allowed"
    } else {
        "denied"
    }
}

/// The direction that refuses, or both.
fn decisive(said: &Explanation, verdict: Verdict) -> String {
    let refuses = |judgement: Option<Judgement>| judgement.is_some_and(|one| !one.allows());
    let wanted = [refuses(verdict.egress), refuses(verdict.ingress)];
    let all = verdict.allows();
    let lines = said
        .directions
        .iter()
        .zip(wanted)
        .filter(|(_, refuses)| all || *refuses);
    let lines = lines.map(|(one, _)| {
        let reason = one.rule.as_ref().unwrap_or(&one.reason);
        format!("{}: {reason}", one.direction)
    });
    lines.collect::<Vec<_>>().join("; ")
}
