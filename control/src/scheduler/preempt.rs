//! Which pods of lower priority would have to go so that a pod fits. Pure.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use super::cluster::Cluster;
use super::filters::{self, Cause, Refusal};
use super::pod::Pod;
use super::rules::Prepared;
use crate::controllers::runtime::object::Object;
use crate::controllers::runtime::selector::Selector;

/// A node and the pods that would have to leave it.
#[derive(Debug)]
pub(super) struct Preemption {
    pub(super) node: String,
    pub(super) victims: Vec<Arc<Pod>>,
}

/// The cheapest preemption that makes room, if there is one. `refusals` say why each node was refused. The cluster is
/// changed on the way and is as before at the end.
pub(super) fn find(
    pod: &Arc<Pod>,
    refusals: &[(String, Refusal)],
    cluster: &mut Cluster,
    budgets: &[Arc<Value>],
) -> Option<Preemption> {
    if pod.object.text(&["spec", "preemptionPolicy"]) == "Never" || waits_for_victims(pod, cluster)
    {
        return None;
    }
    let curable = refusals
        .iter()
        .filter(|(_, r)| matches!(r.cause, Cause::Occupied | Cause::Neighbours));
    let mut best: Option<(Cost, Preemption)> = None;
    for (node, _) in curable {
        let Some(victims) = victims(pod, node, cluster) else {
            continue;
        };
        let cost = cost(&victims, budgets);
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((
                cost,
                Preemption {
                    node: node.clone(),
                    victims,
                },
            ));
        }
    }
    best.map(|(_, preemption)| preemption)
}

/// Pods that were told to leave for this one are still on their way out.
fn waits_for_victims(pod: &Pod, cluster: &Cluster) -> bool {
    let Some(node) = cluster
        .nomination(&pod.uid)
        .and_then(|name| cluster.node(name))
    else {
        return false;
    };
    node.pods
        .values()
        .any(|p| p.object.is_deleting() && p.priority < pod.priority)
}

/// The fewest of the lower pods that must go, or none when even all of them are not enough.
fn victims(pod: &Arc<Pod>, node: &str, cluster: &mut Cluster) -> Option<Vec<Arc<Pod>>> {
    let mut lower: Vec<Arc<Pod>> = cluster
        .node(node)?
        .pods
        .values()
        .filter(|p| p.priority < pod.priority)
        .cloned()
        .collect();
    if lower.is_empty() {
        return None;
    }
    for victim in &lower {
        cluster.lift(&victim.uid);
    }
    let fits = |cluster: &Cluster| {
        let prepared = Prepared::new(pod, cluster);
        cluster.node(node).is_some_and(|n| {
            filters::check(pod, node, n, cluster).is_ok() && prepared.check(pod, n).is_ok()
        })
    };
    let mut needed = Vec::new();
    let possible = fits(cluster);
    // The most important ones come back first.
    lower.sort_by_key(|p| (Reverse(p.priority), started(p)));
    for victim in &lower {
        cluster.place(victim.clone(), node);
        if possible && !fits(cluster) {
            cluster.lift(&victim.uid);
            needed.push(victim.clone());
        }
    }
    for victim in &needed {
        cluster.place(victim.clone(), node);
    }
    (possible && !needed.is_empty()).then_some(needed)
}

fn started(pod: &Pod) -> Option<Timestamp> {
    pod.object.time(&["status", "startTime"])
}

/// Compared in this order: budgets broken, highest priority lost, sum of priorities lost, number of pods, and how
/// long the most important one has been running.
type Cost = (usize, i64, i64, usize, Reverse<Option<Timestamp>>);

fn cost(victims: &[Arc<Pod>], budgets: &[Arc<Value>]) -> Cost {
    let highest = victims.iter().map(|p| p.priority).max().unwrap_or(0);
    let important = victims.iter().filter(|p| p.priority == highest);
    // Priorities may be negative; shifted so that more pods always cost more.
    let shifted = victims
        .iter()
        .map(|p| p.priority + i64::from(i32::MAX) + 1)
        .sum();
    (
        broken_budgets(victims, budgets),
        highest,
        shifted,
        victims.len(),
        Reverse(important.filter_map(|p| started(p)).min()),
    )
}

fn broken_budgets(victims: &[Arc<Pod>], budgets: &[Arc<Value>]) -> usize {
    let mut left: HashMap<&str, i64> = HashMap::new();
    let mut broken = 0;
    for victim in victims {
        let covering = budgets.iter().filter(|b| {
            b.namespace() == victim.object.namespace()
                && Selector::from_label_selector(b.at(&["spec", "selector"]))
                    .matches(victim.object.labels())
        });
        let mut breaks = false;
        for budget in covering {
            let slot = left.entry(budget.uid()).or_insert_with(|| {
                budget
                    .number(&["status", "disruptionsAllowed"])
                    .unwrap_or(0)
            });
            *slot -= 1;
            breaks |= *slot < 0;
        }
        broken += usize::from(breaks);
    }
    broken
}
