//! The maps of policies: read as a whole, written by plans.

#[allow(unsafe_code, reason = "waiting for the ring of events")]
mod events;
mod flows;

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use dataplane_common::layout::{
    DIRECTION_EGRESS, DIRECTION_INGRESS, PodPolicy, PolicyRule, PolicyRuleKey, PolicyState,
    RULE_BITS_ANY_PROTOCOL, RangeKey,
};
use dataplane_common::{Port, V4, V6};

use super::KernelError;
use super::services::{Wire, entries, failed, open};
use super::table::Table;
use crate::compile::policy::{PortPrefix, Prefix};
use crate::plan::policy::{Operation, Present, RuleKey};

pub use events::DropEvents;
pub use flows::ObservedFlow;

use flows::FlowTables;

/// What the maps hold of policies.
#[derive(Debug)]
pub(super) struct PolicyTables {
    maps: PathBuf,
    pods: Table<u32, PodPolicy>,
    rules: Table<PolicyRuleKey, PolicyRule>,
    identities_v4: Table<RangeKey<V4>, u32>,
    identities_v6: Table<RangeKey<V6>, u32>,
    state: Table<u32, PolicyState>,
}

impl PolicyTables {
    pub(super) fn open(maps: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            maps: maps.to_owned(),
            pods: open(maps, "pod_policies")?,
            rules: open(maps, "policy_rules")?,
            identities_v4: open(maps, "identities_v4")?,
            identities_v6: open(maps, "identities_v6")?,
            state: open(maps, "policy_state")?,
        })
    }

    pub(super) fn forget(&self, ifindex: u32) -> io::Result<()> {
        self.pods.remove(&ifindex).map(drop)
    }

    /// A new reader of the ring; there should be one.
    pub(super) fn drop_events(&self) -> Result<DropEvents, KernelError> {
        DropEvents::open(&self.maps)
    }

    /// Some of the flows, about `most` of each family.
    pub(super) fn some_flows(&self, most: usize) -> Result<Vec<ObservedFlow>, KernelError> {
        FlowTables::open(&self.maps)?.some(most)
    }

    /// Those among some addresses to which a conversation goes that policies allow.
    pub(super) fn destinations_in_use(
        &self,
        among: &HashSet<IpAddr>,
        now_s: u32,
    ) -> Result<HashSet<IpAddr>, KernelError> {
        FlowTables::open(&self.maps)?.destinations(among, now_s)
    }

    pub(super) fn read(&self) -> Result<Present, KernelError> {
        let rules = entries(&self.rules)?
            .into_iter()
            .map(|(key, rule)| (read_key(&key), rule));
        let v4 = entries(&self.identities_v4)?.into_iter();
        let v6 = entries(&self.identities_v6)?.into_iter();
        let identities = v4
            .map(|(range, identity)| (read_range(&range), identity))
            .chain(v6.map(|(range, identity)| (read_range(&range), identity)));
        Ok(Present::new(entries(&self.pods)?, rules, identities))
    }

    /// Carries operations out in their order. Rules that are put one after the other go in together: nobody looks at any
    /// of them before the step that follows.
    pub(super) fn carry_out(&self, operations: &[Operation]) -> Result<(), KernelError> {
        let puts = |operation: &Operation| matches!(operation, Operation::PutRule(..));
        for step in operations.chunk_by(|one, other| puts(one) && puts(other)) {
            match step {
                [one] => self.write(one)?,
                many => self.put_rules(many)?,
            }
        }
        Ok(())
    }

    fn put_rules(&self, operations: &[Operation]) -> Result<(), KernelError> {
        let (keys, rules): (Vec<PolicyRuleKey>, Vec<PolicyRule>) = operations
            .iter()
            .filter_map(|operation| match operation {
                Operation::PutRule(key, rule) => Some((wire_key(key), *rule)),
                _ => None,
            })
            .unzip();
        self.rules
            .put_all_or_each(&keys, &rules)
            .map_err(failed("add to", self.rules.name))
    }

    fn write(&self, operation: &Operation) -> Result<(), KernelError> {
        match operation {
            Operation::PutRule(key, rule) => self
                .rules
                .put(&wire_key(key), rule)
                .map_err(failed("add to", self.rules.name)),
            Operation::RemoveRule(key) => self
                .rules
                .remove(&wire_key(key))
                .map(drop)
                .map_err(failed("remove from", self.rules.name)),
            Operation::PutIdentity(range, identity) => self.put_identity(*range, *identity),
            Operation::RemoveIdentity(range) => self.remove_identity(*range),
            Operation::PutPod(ifindex, pod) => self
                .pods
                .put(ifindex, pod)
                .map_err(failed("add to", self.pods.name)),
            Operation::RemovePod(ifindex) => self
                .pods
                .remove(ifindex)
                .map(drop)
                .map_err(failed("remove from", self.pods.name)),
            Operation::NextGeneration => self.next_generation(),
        }
    }

    fn put_identity(&self, range: Prefix, identity: u32) -> Result<(), KernelError> {
        if let Some(key) = wire_range(range) {
            let table = &self.identities_v4;
            return table
                .put(&key, &identity)
                .map_err(failed("add to", table.name));
        }
        let table = &self.identities_v6;
        wire_range(range).map_or(Ok(()), |key| {
            table
                .put(&key, &identity)
                .map_err(failed("add to", table.name))
        })
    }

    fn remove_identity(&self, range: Prefix) -> Result<(), KernelError> {
        if let Some(key) = wire_range(range) {
            let table = &self.identities_v4;
            return table
                .remove(&key)
                .map(drop)
                .map_err(failed("remove from", table.name));
        }
        let table = &self.identities_v6;
        wire_range(range).map_or(Ok(()), |key| {
            table
                .remove(&key)
                .map(drop)
                .map_err(failed("remove from", table.name))
        })
    }

    /// Flows that were judged before are judged again.
    fn next_generation(&self) -> Result<(), KernelError> {
        let name = self.state.name;
        let state = self.state.get(&0).map_err(failed("read", name))?;
        let next = PolicyState {
            generation: state.unwrap_or_default().generation.wrapping_add(1),
        };
        self.state.put(&0, &next).map_err(failed("change", name))
    }

    pub(super) fn generation(&self) -> Result<u32, KernelError> {
        let state = self
            .state
            .get(&0)
            .map_err(failed("read", self.state.name))?;
        Ok(state.unwrap_or_default().generation)
    }
}

fn wire_key(key: &RuleKey) -> PolicyRuleKey {
    PolicyRuleKey {
        prefix_bits: RULE_BITS_ANY_PROTOCOL + u32::from(key.ports.bits),
        policy_id: key.policy_id,
        identity: key.identity,
        direction: key.direction,
        protocol: key.ports.protocol,
        port: Port::new(key.ports.port),
    }
}

fn read_key(key: &PolicyRuleKey) -> RuleKey {
    let bits = key.prefix_bits.saturating_sub(RULE_BITS_ANY_PROTOCOL);
    RuleKey {
        policy_id: key.policy_id,
        identity: key.identity,
        direction: if key.direction == DIRECTION_EGRESS {
            DIRECTION_EGRESS
        } else {
            DIRECTION_INGRESS
        },
        ports: PortPrefix {
            protocol: key.protocol,
            port: key.port.number(),
            bits: u8::try_from(bits).unwrap_or(PortPrefix::ONE_PORT),
        },
    }
}

fn wire_range<A: Wire>(range: Prefix) -> Option<RangeKey<A>> {
    Some(RangeKey {
        prefix_bits: u32::from(range.len),
        address: A::from_address(range.address())?,
    })
}

fn read_range<A: Wire>(range: &RangeKey<A>) -> Prefix {
    let bits = u8::try_from(range.prefix_bits).unwrap_or(u8::MAX);
    Prefix::new(range.address.to_address(), bits)
}

#[cfg(test)]
mod tests {
    use dataplane_common::layout::{RULE_BITS_ANY_PORT, RULE_BITS_ONE_PORT};

    use super::*;

    #[test]
    fn keys_come_back_from_the_map_as_they_went_in() {
        for (ports, bits) in [
            (PortPrefix::EVERYTHING, RULE_BITS_ANY_PROTOCOL),
            (PortPrefix::protocol(17), RULE_BITS_ANY_PORT),
            (PortPrefix::of_range(6, 443, 443)[0], RULE_BITS_ONE_PORT),
            (PortPrefix::of_range(6, 1024, 2047)[0], 86),
        ] {
            let key = RuleKey {
                policy_id: 3,
                identity: 9,
                direction: DIRECTION_EGRESS,
                ports,
            };
            let wire = wire_key(&key);
            assert_eq!(wire.prefix_bits, bits);
            assert_eq!(read_key(&wire), key);
        }
        for text in ["0.0.0.0/0", "10.0.0.0/13"] {
            let range = Prefix::parse(text).unwrap();
            let key: RangeKey<V4> = wire_range(range).unwrap();
            assert_eq!(read_range(&key), range);
            assert!(wire_range::<V6>(range).is_none());
        }
        let range = Prefix::parse("fd00::/8").unwrap();
        let key: RangeKey<V6> = wire_range(range).unwrap();
        assert_eq!(read_range(&key), range);
    }
}
