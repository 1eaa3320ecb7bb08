//! The maps of policies, filled by hand: what the programs make of them is tested apart from whoever compiles them.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, RingBuf};
use dataplane_common::layout::{
    IDENTITY_ANY, NO_RULE, RULE_ALLOW, RULE_BITS_ANY_PORT, RULE_BITS_ANY_PROTOCOL,
    RULE_BITS_ONE_PORT,
};
use dataplane_common::policy::event::DropEvent;

/// A rule that is not of the tier Admin.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    pub policy_id: u32,
    /// `IDENTITY_ANY` for everybody.
    pub identity: u32,
    /// `DIRECTION_INGRESS` or `DIRECTION_EGRESS`.
    pub direction: u8,
    pub protocol: Option<u8>,
    pub port: Option<u16>,
    pub number: u32,
    /// `RULE_ALLOW` or `RULE_DENY`.
    pub action: u32,
}

impl Rule {
    /// Allows everybody and everything in one direction.
    #[must_use]
    pub fn allow(policy_id: u32, direction: u8) -> Self {
        Self {
            policy_id,
            identity: IDENTITY_ANY,
            direction,
            protocol: None,
            port: None,
            number: 0,
            action: RULE_ALLOW,
        }
    }
}

/// The pinned maps. Values are arrays of words, as the layouts are.
pub struct Policies {
    pods: HashMap<MapData, u32, [u32; 2]>,
    rules: LpmTrie<MapData, [u8; 12], [u32; 4]>,
    identities_v4: LpmTrie<MapData, [u8; 4], u32>,
    identities_v6: LpmTrie<MapData, [u8; 16], u32>,
    state: Array<MapData, u32>,
    events: RingBuf<MapData>,
}

impl std::fmt::Debug for Policies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policies").finish_non_exhaustive()
    }
}

impl Policies {
    /// Opens the maps that are pinned below a bpffs.
    ///
    /// # Errors
    /// Says which map cannot be opened.
    pub fn open(bpffs: &Path) -> Result<Self> {
        let maps = bpffs.join(format!("weir/v{}/maps", dataplane_common::ABI_VERSION));
        let pinned =
            |name: &str| MapData::from_pin(maps.join(name)).with_context(|| format!("open {name}"));
        Ok(Self {
            pods: Map::HashMap(pinned("pod_policies")?).try_into()?,
            rules: Map::LpmTrie(pinned("policy_rules")?).try_into()?,
            identities_v4: Map::LpmTrie(pinned("identities_v4")?).try_into()?,
            identities_v6: Map::LpmTrie(pinned("identities_v6")?).try_into()?,
            state: Map::Array(pinned("policy_state")?).try_into()?,
            events: Map::RingBuf(pinned("drop_events")?).try_into()?,
        })
    }

    /// Gives a pod a policy.
    ///
    /// # Errors
    /// As all of these: when the map refuses.
    pub fn set_pod(&mut self, ifindex: u32, policy_id: u32, flags: u32) -> Result<()> {
        Ok(self.pods.insert(ifindex, [policy_id, flags], 0)?)
    }

    /// Takes a pod's policy away: it is closed then.
    ///
    /// # Errors
    /// See above.
    pub fn forget_pod(&mut self, ifindex: u32) -> Result<()> {
        Ok(self.pods.remove(&ifindex)?)
    }

    /// # Errors
    /// See above.
    pub fn identify(&mut self, address: &str, identity: u32) -> Result<()> {
        match address.parse()? {
            IpAddr::V4(address) => {
                let key = Key::new(32, address.octets());
                Ok(self.identities_v4.insert(&key, identity, 0)?)
            }
            IpAddr::V6(address) => {
                let key = Key::new(128, address.octets());
                Ok(self.identities_v6.insert(&key, identity, 0)?)
            }
        }
    }

    /// # Errors
    /// See above.
    pub fn add(&mut self, rule: &Rule) -> Result<()> {
        let value = [NO_RULE, 0, rule.number, rule.action];
        Ok(self.rules.insert(&Self::key(rule), value, 0)?)
    }

    /// # Errors
    /// See above.
    pub fn remove(&mut self, rule: &Rule) -> Result<()> {
        Ok(self.rules.remove(&Self::key(rule))?)
    }

    fn key(rule: &Rule) -> Key<[u8; 12]> {
        let bits = match (rule.protocol, rule.port) {
            (None, _) => RULE_BITS_ANY_PROTOCOL,
            (Some(_), None) => RULE_BITS_ANY_PORT,
            (Some(_), Some(_)) => RULE_BITS_ONE_PORT,
        };
        let mut key = [0; 12];
        key[..4].copy_from_slice(&rule.policy_id.to_ne_bytes());
        key[4..8].copy_from_slice(&rule.identity.to_ne_bytes());
        key[8] = rule.direction;
        key[9] = rule.protocol.unwrap_or(0);
        key[10..].copy_from_slice(&rule.port.unwrap_or(0).to_be_bytes());
        Key::new(bits, key)
    }

    /// Has flows judged again.
    ///
    /// # Errors
    /// See above.
    pub fn bump(&mut self) -> Result<()> {
        let generation = self.state.get(&0, 0)?;
        Ok(self.state.set(0, generation.wrapping_add(1), 0)?)
    }

    /// What was dropped since the last call, as far as it was told.
    pub fn events(&mut self) -> Vec<DropEvent> {
        let mut events = Vec::new();
        while let Some(item) = self.events.next() {
            events.extend(DropEvent::from_bytes(&item));
        }
        events
    }
}
