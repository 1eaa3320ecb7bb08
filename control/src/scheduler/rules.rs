//! Rules about other pods: affinity, anti-affinity and topology spread. Read once per pod, prepared once per decision,
//! asked per node. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde_json::Value;

use super::cluster::{Cluster, Node};
use super::filters::{Cause, Refusal};
use super::pod::Pod;
use super::scores::{add_higher_is_better, add_lower_is_better};
use crate::controllers::runtime::object::Object;
use crate::controllers::runtime::selector::Selector;

const AFFINITY_WEIGHT: i64 = 2;
const SPREAD_WEIGHT: i64 = 2;

/// Pods near or away from which another wants to be.
#[derive(Clone, Debug)]
pub(super) struct PodTerm {
    selector: Selector,
    namespaces: Vec<String>,
    namespace_selector: Option<Selector>,
    key: String,
}

impl PodTerm {
    fn read(term: &Value, pod: &Value) -> Self {
        let mut selector = Selector::from_label_selector(term.at(&["labelSelector"]));
        for (field, wanted) in [("matchLabelKeys", true), ("mismatchLabelKeys", false)] {
            for key in term.items(&[field]).iter().filter_map(Value::as_str) {
                if let Some(value) = pod.label(key) {
                    selector.require(key, value, wanted);
                }
            }
        }
        let namespace_selector = term.at(&["namespaceSelector"]);
        let namespace_selector = namespace_selector
            .filter(|s| s.is_object())
            .map(|s| Selector::from_label_selector(Some(s)));
        let mut namespaces: Vec<String> = term
            .items(&["namespaces"])
            .iter()
            .filter_map(|n| n.as_str().map(str::to_owned))
            .collect();
        if namespaces.is_empty() && namespace_selector.is_none() {
            namespaces.push(pod.namespace().to_owned());
        }
        Self {
            selector,
            namespaces,
            namespace_selector,
            key: term.text(&["topologyKey"]).to_owned(),
        }
    }

    fn matches(&self, pod: &Pod, cluster: &Cluster) -> bool {
        let namespace = pod.object.namespace();
        let named = self.namespaces.iter().any(|n| n == namespace);
        let selected = || {
            self.namespace_selector.as_ref().is_some_and(|s| {
                s.is_empty() || s.matches(cluster.namespace(namespace).and_then(|n| n.labels()))
            })
        };
        (named || selected()) && self.selector.matches(pod.object.labels())
    }
}

/// One topology spread constraint.
#[derive(Clone, Debug)]
struct Spread {
    max_skew: i64,
    min_domains: i64,
    key: String,
    hard: bool,
    selector: Selector,
    honor_affinity: bool,
    honor_taints: bool,
}

/// What a pod demands of its neighbours.
#[derive(Clone, Debug, Default)]
pub(super) struct Rules {
    near: Vec<PodTerm>,
    away: Vec<PodTerm>,
    /// Weights are negative for anti-affinity.
    preferred: Vec<(i64, PodTerm)>,
    spread: Vec<Spread>,
}

impl Rules {
    pub(super) fn read(pod: &Value) -> Self {
        let terms = |kind: &str| -> Vec<PodTerm> {
            let path = [
                "spec",
                "affinity",
                kind,
                "requiredDuringSchedulingIgnoredDuringExecution",
            ];
            pod.items(&path)
                .iter()
                .map(|t| PodTerm::read(t, pod))
                .collect()
        };
        let mut preferred = Vec::new();
        for (kind, sign) in [("podAffinity", 1), ("podAntiAffinity", -1)] {
            let path = [
                "spec",
                "affinity",
                kind,
                "preferredDuringSchedulingIgnoredDuringExecution",
            ];
            for entry in pod.items(&path) {
                let weight = entry.number(&["weight"]).unwrap_or(0);
                let term = entry.at(&["podAffinityTerm"]).unwrap_or(&Value::Null);
                preferred.push((sign * weight, PodTerm::read(term, pod)));
            }
        }
        let spread = pod
            .items(&["spec", "topologySpreadConstraints"])
            .iter()
            .map(|c| {
                let mut selector = Selector::from_label_selector(c.at(&["labelSelector"]));
                for key in c
                    .items(&["matchLabelKeys"])
                    .iter()
                    .filter_map(Value::as_str)
                {
                    if let Some(value) = pod.label(key) {
                        selector.require(key, value, true);
                    }
                }
                Spread {
                    max_skew: c.number(&["maxSkew"]).unwrap_or(1),
                    min_domains: c.number(&["minDomains"]).unwrap_or(1),
                    key: c.text(&["topologyKey"]).to_owned(),
                    hard: c.text(&["whenUnsatisfiable"]) != "ScheduleAnyway",
                    selector,
                    honor_affinity: c.text(&["nodeAffinityPolicy"]) != "Ignore",
                    honor_taints: c.text(&["nodeTaintsPolicy"]) == "Honor",
                }
            });
        Self {
            near: terms("podAffinity"),
            away: terms("podAntiAffinity"),
            preferred,
            spread: spread.collect(),
        }
    }

    /// Such a pod keeps others away from where it is.
    pub(super) fn guards(&self) -> bool {
        !self.away.is_empty()
    }

    /// Whether a pod that comes somewhere can make a difference.
    pub(super) fn look_at_others(&self) -> bool {
        !(self.near.is_empty() && self.away.is_empty() && self.spread.is_empty())
    }
}

/// Pods by the value of a topology key.
type Domains = HashMap<String, i64>;

/// The rules of one pod, counted over the cluster.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    near: Vec<Domains>,
    /// No pod anywhere matches, and the pod would match its own terms: it may be the first.
    may_be_first: bool,
    away: Vec<Domains>,
    /// Topology key and value where a guarding pod does not want this one.
    forbidden: HashSet<(String, String)>,
    spread: Vec<(Domains, i64)>,
    preferred: Vec<Domains>,
}

fn domain<'a>(node: &'a Node, key: &str) -> Option<&'a str> {
    node.object.label(key)
}

fn count(cluster: &Cluster, key: &str, matches: impl Fn(&Pod) -> bool) -> Domains {
    let mut domains = Domains::new();
    for (node, pod) in cluster.pods() {
        if let Some(value) = domain(node, key).filter(|_| matches(pod)) {
            *domains.entry(value.to_owned()).or_insert(0) += 1;
        }
    }
    domains
}

impl Prepared {
    pub(super) fn new(pod: &Pod, cluster: &Cluster) -> Self {
        let rules = &pod.rules;
        let by_term = |term: &PodTerm| count(cluster, &term.key, |p| term.matches(p, cluster));
        let near: Vec<Domains> = rules.near.iter().map(by_term).collect();
        let may_be_first = near.iter().all(HashMap::is_empty)
            && rules.near.iter().all(|term| term.matches(pod, cluster));
        let mut forbidden = HashSet::new();
        for (node, guard) in cluster.guards() {
            for term in guard.rules.away.iter().filter(|t| t.matches(pod, cluster)) {
                if let Some(value) = domain(node, &term.key) {
                    forbidden.insert((term.key.clone(), value.to_owned()));
                }
            }
        }
        Self {
            near,
            may_be_first,
            away: rules.away.iter().map(by_term).collect(),
            forbidden,
            spread: rules
                .spread
                .iter()
                .map(|s| spread_counts(s, pod, cluster))
                .collect(),
            preferred: rules
                .preferred
                .iter()
                .map(|(_, term)| by_term(term))
                .collect(),
        }
    }

    pub(super) fn check(&self, pod: &Pod, node: &Node) -> Result<(), Refusal> {
        self.check_spread(pod, node)?;
        let has = |domains: &Domains, key: &str| {
            domain(node, key).is_some_and(|v| domains.get(v).copied().unwrap_or(0) > 0)
        };
        let terms = || pod.rules.near.iter().zip(&self.near);
        let near = terms().all(|(term, domains)| has(domains, &term.key));
        let first =
            || self.may_be_first && terms().all(|(term, _)| domain(node, &term.key).is_some());
        if !near && !first() {
            return refuse(Cause::Missing, "node(s) didn't match pod affinity rules");
        }
        if pod
            .rules
            .away
            .iter()
            .zip(&self.away)
            .any(|(term, domains)| has(domains, &term.key))
        {
            return refuse(
                Cause::Neighbours,
                "node(s) didn't match pod anti-affinity rules",
            );
        }
        let unwanted = |(key, value): &(String, String)| domain(node, key) == Some(value.as_str());
        if self.forbidden.iter().any(unwanted) {
            let reason = "node(s) didn't satisfy existing pods anti-affinity rules";
            return refuse(Cause::Neighbours, reason);
        }
        Ok(())
    }

    fn check_spread(&self, pod: &Pod, node: &Node) -> Result<(), Refusal> {
        for (rule, (domains, least)) in pod.rules.spread.iter().zip(&self.spread) {
            if !rule.hard {
                continue;
            }
            let Some(value) = domain(node, &rule.key) else {
                let reason =
                    "node(s) didn't match pod topology spread constraints (missing required label)";
                return refuse(Cause::Node, reason);
            };
            let itself = i64::from(rule.selector.matches(pod.object.labels()));
            let there = domains.get(value).copied().unwrap_or(0);
            if there + itself - least > rule.max_skew {
                let reason = "node(s) didn't match pod topology spread constraints";
                return refuse(Cause::Neighbours, reason);
            }
        }
        Ok(())
    }

    /// Weighted scores in the order of `nodes`.
    pub(super) fn scores(&self, pod: &Pod, nodes: &[(&String, &Node)]) -> Vec<i64> {
        let mut totals = vec![0; nodes.len()];
        let on = |node: &Node, domains: &Domains, key: &str| {
            domain(node, key)
                .and_then(|v| domains.get(v).copied())
                .unwrap_or(0)
        };
        if !self.preferred.is_empty() {
            let terms = || pod.rules.preferred.iter().zip(&self.preferred);
            let raw: Vec<i64> = nodes
                .iter()
                .map(|(_, node)| {
                    terms()
                        .map(|((weight, t), domains)| weight * on(node, domains, &t.key))
                        .sum()
                })
                .collect();
            let least = raw.iter().copied().min().unwrap_or(0);
            let raw: Vec<i64> = raw.into_iter().map(|value| value - least).collect();
            add_higher_is_better(&mut totals, &raw, AFFINITY_WEIGHT);
        }
        let soft = || {
            pod.rules
                .spread
                .iter()
                .zip(&self.spread)
                .filter(|(rule, _)| !rule.hard)
        };
        if soft().next().is_some() {
            let raw: Vec<i64> = nodes
                .iter()
                .map(|(_, node)| {
                    soft()
                        .map(|(r, (domains, _))| on(node, domains, &r.key))
                        .sum()
                })
                .collect();
            add_lower_is_better(&mut totals, &raw, SPREAD_WEIGHT);
        }
        totals
    }
}

/// Matching pods per domain, and the smallest number that a domain has.
fn spread_counts(rule: &Spread, pod: &Pod, cluster: &Cluster) -> (Domains, i64) {
    let mut domains: BTreeMap<&str, i64> = BTreeMap::new();
    let counts = |other: &&Arc<Pod>| {
        other.object.namespace() == pod.object.namespace()
            && !other.object.is_deleting()
            && rule.selector.matches(other.object.labels())
    };
    for (_, node) in cluster.nodes() {
        let Some(value) = domain(node, &rule.key) else {
            continue;
        };
        let eligible = (!rule.honor_affinity || pod.accepts(&node.object))
            && (!rule.honor_taints || super::filters::tolerates_node(pod, &node.object));
        if eligible {
            let here = node.pods.values().filter(counts).count();
            *domains.entry(value).or_insert(0) += i64::try_from(here).unwrap_or(i64::MAX);
        }
    }
    let few = i64::try_from(domains.len()).unwrap_or(i64::MAX) < rule.min_domains;
    let least = if few {
        0
    } else {
        domains.values().copied().min().unwrap_or(0)
    };
    (
        domains
            .into_iter()
            .map(|(value, n)| (value.to_owned(), n))
            .collect(),
        least,
    )
}

fn refuse(cause: Cause, reason: &str) -> Result<(), Refusal> {
    Err(Refusal {
        reasons: vec![reason.to_owned()],
        cause,
    })
}
