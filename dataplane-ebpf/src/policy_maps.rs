//! Maps of policies, the tables that judgements read in them, and the ring of drop events.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::macros::map;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, PerCpuArray, RingBuf};
use dataplane_common::layout::{
    Endpoint, IDENTITY_ANY, PodPolicy, PolicyRule, PolicyRuleKey, PolicyState, RULE_BITS_ONE_PORT,
};
use dataplane_common::policy::event::{DropEvent, RING_BYTES, Sampler, Told};
use dataplane_common::policy::{Ends, PolicyRules, PolicyTables, Verdict};
use dataplane_common::{Port, V4, V6};

use crate::maps::{MapTables, Opening, v4, v6};

const PODS: u32 = 16_384;
/// Address prefixes with an identity of their own, per family.
const IDENTITIES: u32 = 1_000_000;
/// Of all policies together: twice what user space compiles at most, since an update has old and new in place at once.
/// Those of one are bounded by whoever writes them.
const RULES: u32 = 2_000_000;

#[map(name = "pod_policies")]
static POD_POLICIES: HashMap<u32, PodPolicy> = HashMap::pinned(PODS, BPF_F_NO_PREALLOC);
#[map(name = "policy_rules")]
static POLICY_RULES: LpmTrie<RuleMatch, PolicyRule> = LpmTrie::pinned(RULES, BPF_F_NO_PREALLOC);
#[map(name = "policy_state")]
static POLICY_STATE: Array<PolicyState> = Array::pinned(1, 0);
#[map(name = "identities_v4")]
static IDENTITIES_V4: LpmTrie<V4, u32> = LpmTrie::pinned(IDENTITIES, BPF_F_NO_PREALLOC);
#[map(name = "identities_v6")]
static IDENTITIES_V6: LpmTrie<V6, u32> = LpmTrie::pinned(IDENTITIES, BPF_F_NO_PREALLOC);

/// Some of the packets that policies drop.
#[map(name = "drop_events")]
static DROP_EVENTS: RingBuf = RingBuf::pinned(RING_BYTES, 0);
#[map(name = "drop_sampler")]
static SAMPLER: PerCpuArray<Sampler> = PerCpuArray::pinned(1, 0);

/// What [`LpmTrie`] holds of a [`PolicyRuleKey`], after the prefix length.
#[repr(C)]
#[derive(Clone, Copy)]
struct RuleMatch {
    policy_id: u32,
    identity: u32,
    direction: u8,
    protocol: u8,
    port: Port,
}

#[inline(always)]
fn rule(key: &PolicyRuleKey) -> Option<&'static PolicyRule> {
    let sought = RuleMatch {
        policy_id: key.policy_id,
        identity: key.identity,
        direction: key.direction,
        protocol: key.protocol,
        port: key.port,
    };
    POLICY_RULES.get(&Key::new(RULE_BITS_ONE_PORT, sought))
}

#[inline(always)]
fn pod(ifindex: u32) -> Option<&'static PodPolicy> {
    // SAFETY: entries are freed after their readers (`BPF_F_NO_PREALLOC`), and never written in place.
    unsafe { POD_POLICIES.get(&ifindex) }
}

#[inline(always)]
fn generation() -> u32 {
    match POLICY_STATE.get(0) {
        Some(state) => state.generation,
        None => 0,
    }
}

/// Tells user space of a dropped packet, unless it was told of enough.
#[inline(always)]
fn tell<A: Told>(ends: &Ends<A>, source_port: Port, verdict: &Verdict) {
    let Some(sampler) = SAMPLER.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: this CPU's own value; programs of one hook do not interrupt one another.
    let sampler = unsafe { &mut *sampler };
    // SAFETY: the helper takes nothing and cannot fail.
    let now_ms = (unsafe { bpf_ktime_get_ns() } / 1_000_000) as u32;
    if !sampler.take(now_ms) {
        return;
    }
    let Some(mut entry) = DROP_EVENTS.reserve::<DropEvent>(0) else {
        sampler.lost();
        return;
    };
    entry.write(DropEvent::new(
        ends,
        source_port,
        verdict,
        generation(),
        sampler.report_missed(),
    ));
    entry.submit(0);
}

macro_rules! policy_tables {
    ($tables:ty) => {
        impl PolicyRules for $tables {
            #[inline(always)]
            fn policy_rule(&mut self, key: &PolicyRuleKey) -> Option<&PolicyRule> {
                rule(key)
            }
        }

        policy_tables!(@family $tables, V4, v4, IDENTITIES_V4);
        policy_tables!(@family $tables, V6, v6, IDENTITIES_V6);
    };
    (@family $tables:ty, $family:ty, $module:ident, $identities:ident) => {
        impl PolicyTables<$family> for $tables {
            #[inline(always)]
            fn endpoint(&mut self, address: &$family) -> Option<&Endpoint> {
                // SAFETY: as for `pod`.
                unsafe { $module::ENDPOINT.get(address) }
            }

            #[inline(always)]
            fn pod_policy(&mut self, ifindex: u32) -> Option<&PodPolicy> {
                pod(ifindex)
            }

            #[inline(always)]
            fn identity(&mut self, address: &$family) -> u32 {
                let bits = 8 * size_of::<$family>() as u32;
                match $identities.get(&Key::new(bits, *address)) {
                    Some(identity) => *identity,
                    None => IDENTITY_ANY,
                }
            }

            #[inline(always)]
            fn policy_generation(&mut self) -> u32 {
                generation()
            }

            #[inline(always)]
            fn denied(&mut self, ends: &Ends<$family>, source_port: Port, verdict: &Verdict) {
                tell(ends, source_port, verdict);
            }
        }
    };
}

policy_tables!(MapTables);
policy_tables!(Opening<'_>);
