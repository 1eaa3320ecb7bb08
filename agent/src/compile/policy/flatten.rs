//! Rules that overlap, made into ranges of ports of which the longest match has the answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use dataplane_common::layout::{PolicyRule, RULE_ALLOW, RULE_DENY, RULE_PASS};

use super::prefix::PortPrefix;
use super::rules::{Action, Rule, Tier};

/// What rules say of a range of ports, where no longer range says something else.
pub type Entry = (PortPrefix, PolicyRule);

/// Sorted. Shared by all identities to which the same rules apply.
pub type Entries = Arc<[Entry]>;

/// A rule alone, as an entry has it.
fn alone(number: u32, rule: &Rule) -> PolicyRule {
    let action = match rule.action {
        Action::Allow => RULE_ALLOW,
        Action::Deny => RULE_DENY,
        Action::Pass => RULE_PASS,
    };
    match rule.tier {
        Tier::Admin => PolicyRule {
            admin_rule: number,
            admin_action: action,
            ..PolicyRule::NONE
        },
        // Nothing follows the last tier, so that what it passes on is allowed.
        Tier::NetworkPolicy | Tier::Baseline => PolicyRule {
            rule: number,
            action: if action == RULE_PASS {
                RULE_ALLOW
            } else {
                action
            },
            ..PolicyRule::NONE
        },
    }
}

/// Of both, what is asked first.
fn first(one: PolicyRule, other: PolicyRule) -> PolicyRule {
    let admin = if other.admin_rule < one.admin_rule {
        other
    } else {
        one
    };
    let later = if other.rule < one.rule { other } else { one };
    PolicyRule {
        admin_rule: admin.admin_rule,
        admin_action: admin.admin_action,
        rule: later.rule,
        action: later.action,
    }
}

/// Rules with their numbers and the ports that they match, resolved: each range has the first rules of all that cover it.
pub(super) fn flatten<'a>(
    rules: impl IntoIterator<Item = (u32, &'a Rule, Vec<PortPrefix>)>,
) -> Entries {
    let mut own: BTreeMap<PortPrefix, PolicyRule> = BTreeMap::new();
    for (number, rule, ports) in rules {
        let said = alone(number, rule);
        for port in ports {
            own.entry(port)
                .and_modify(|present| *present = first(*present, said))
                .or_insert(said);
        }
    }
    // A range comes after those that hold it, which are the ones on the stack.
    let mut around: Vec<Entry> = Vec::new();
    let mut entries = Vec::with_capacity(own.len());
    for (ports, said) in own {
        while around.last().is_some_and(|(outer, _)| !outer.holds(ports)) {
            around.pop();
        }
        let outer = around.last().map_or(PolicyRule::NONE, |(_, said)| *said);
        let said = first(outer, said);
        if said != outer {
            entries.push((ports, said));
        }
        around.push((ports, said));
    }
    entries.into()
}
