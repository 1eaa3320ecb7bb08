//! Which of the nodes that fit suits best. Every score is 0 to 100 before its weight. Pure.

use super::cluster::Node;
use super::filters::tolerates;
use super::pod::Pod;
use crate::controllers::runtime::object::Object;

const BEST: i64 = 100;
const LEAST_ALLOCATED_WEIGHT: i64 = 1;
const BALANCE_WEIGHT: i64 = 1;
const NODE_AFFINITY_WEIGHT: i64 = 2;
const TAINT_WEIGHT: i64 = 3;
const SPREAD_WEIGHT: i64 = 2;

/// Weighted sums in the order of `nodes`.
pub(super) fn scores(pod: &Pod, nodes: &[(&String, &Node)]) -> Vec<i64> {
    let mut totals: Vec<i64> = nodes
        .iter()
        .map(|(_, node)| {
            LEAST_ALLOCATED_WEIGHT * least_allocated(pod, node)
                + BALANCE_WEIGHT * balance(pod, node)
        })
        .collect();
    let affinity: Vec<i64> = nodes
        .iter()
        .map(|(_, node)| {
            let matching = pod
                .preferred
                .iter()
                .filter(|(_, term)| term.matches(&node.object));
            matching.map(|(weight, _)| *weight).sum()
        })
        .collect();
    add_higher_is_better(&mut totals, &affinity, NODE_AFFINITY_WEIGHT);
    let taints: Vec<i64> = nodes
        .iter()
        .map(|(_, node)| disliked_taints(pod, node))
        .collect();
    add_lower_is_better(&mut totals, &taints, TAINT_WEIGHT);
    if !pod.owner.is_empty() {
        let siblings: Vec<i64> = nodes
            .iter()
            .map(|(_, node)| i64::try_from(node.of_owner(&pod.owner)).unwrap_or(i64::MAX))
            .collect();
        add_lower_is_better(&mut totals, &siblings, SPREAD_WEIGHT);
    }
    totals
}

/// The best node; `turn` picks among equals so that they take turns.
pub(super) fn best<'a>(
    pod: &Pod,
    nodes: &[(&'a String, &'a Node)],
    extra: &[i64],
    turn: usize,
) -> Option<&'a String> {
    let mut totals = scores(pod, nodes);
    for (total, more) in totals.iter_mut().zip(extra) {
        *total += more;
    }
    let most = totals.iter().max()?;
    let equals: Vec<&'a String> = nodes
        .iter()
        .zip(&totals)
        .filter(|(_, t)| *t == most)
        .map(|((name, _), _)| *name)
        .collect();
    equals.get(turn % equals.len().max(1)).copied()
}

/// The mean share of cpu and memory that is left when the pod is there.
fn least_allocated(pod: &Pod, node: &Node) -> i64 {
    let left = |allocatable: i64, used: i64| {
        if allocatable <= 0 {
            0
        } else {
            (allocatable - used).max(0) * BEST / allocatable
        }
    };
    let cpu = left(
        node.allocatable.get("cpu"),
        node.weight_cpu_milli + pod.weight_cpu_milli,
    );
    let memory = node.weight_memory.saturating_add(pod.weight_memory) >> 20;
    let memory = left(node.allocatable.get("memory") >> 20, memory);
    i64::midpoint(cpu, memory)
}

/// High when cpu and memory are used in like shares.
fn balance(pod: &Pod, node: &Node) -> i64 {
    let share = |allocatable: i64, used: i64| {
        if allocatable <= 0 {
            BEST
        } else {
            (used * BEST / allocatable).min(BEST)
        }
    };
    let cpu = share(
        node.allocatable.get("cpu"),
        node.weight_cpu_milli + pod.weight_cpu_milli,
    );
    let memory = node.weight_memory.saturating_add(pod.weight_memory) >> 20;
    let memory = share(node.allocatable.get("memory") >> 20, memory);
    // Half the difference is the standard deviation of two values.
    BEST - (cpu - memory).abs() / 2
}

fn disliked_taints(pod: &Pod, node: &Node) -> i64 {
    let taints = node.object.items(&["spec", "taints"]).iter();
    let disliked = taints.filter(|t| {
        let effect = t.text(&["effect"]);
        effect == "PreferNoSchedule"
            && !tolerates(
                pod.tolerations(),
                t.text(&["key"]),
                t.text(&["value"]),
                effect,
            )
    });
    i64::try_from(disliked.count()).unwrap_or(i64::MAX)
}

/// Scales raw values so that the highest becomes 100, and adds them.
pub(super) fn add_higher_is_better(totals: &mut [i64], raw: &[i64], weight: i64) {
    let most = raw.iter().copied().max().unwrap_or(0);
    if most > 0 {
        for (total, value) in totals.iter_mut().zip(raw) {
            *total += weight * (value * BEST / most);
        }
    }
}

/// Scales raw values so that the highest becomes 0 and none 100, and adds them.
pub(super) fn add_lower_is_better(totals: &mut [i64], raw: &[i64], weight: i64) {
    let most = raw.iter().copied().max().unwrap_or(0);
    if most > 0 {
        for (total, value) in totals.iter_mut().zip(raw) {
            *total += weight * (BEST - value * BEST / most);
        }
    }
}
