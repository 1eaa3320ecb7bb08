//! Where the stages of a packet without a flow keep their values.

use core::hint::black_box;

use crate::address::Family;
use crate::layout::{Flow, FlowKey, FrontendKey};
use crate::open::{Plan, Served};
use crate::path::{Hook, Translated};
use crate::policy::Verdict;
use crate::service::Choice;
use crate::tables::Inserted;

/// Room for the values of [`open`](crate::path::open) and [`settle`](crate::path::settle), which are more than the stack
/// of a program holds.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Scratch<A> {
    /// The flow in the making, and its key.
    pub(crate) key: FlowKey<A>,
    pub(crate) flow: Flow<A>,
    pub(crate) reply: FlowKey<A>,
    pub(crate) other: FlowKey<A>,
    /// What was found out on the way.
    pub(crate) frontend: FrontendKey<A>,
    pub(crate) served: Served,
    pub(crate) plan: Plan,
    pub(crate) choice: Choice<A>,
    pub(crate) verdict: Verdict,
    pub(crate) translated: Translated<A>,
    /// Of the hook where the packet was met.
    pub(crate) hook: u32,
    /// Not zero for a flow that can do without a record.
    pub(crate) plain: u32,
    /// Number of the cursor among the ports, where it was, and the first port of its block.
    pub(crate) cursor_index: u32,
    pub(crate) cursor: u32,
    pub(crate) first_port: u32,
    pub(crate) inserted: Inserted,
    /// Among the recent flows.
    pub(crate) place: u32,
}

impl<A: Family> Scratch<A> {
    /// Names the flow that an ICMP error is about.
    #[inline(always)]
    pub fn set_flow(&mut self, key: &FlowKey<A>) {
        self.key = *key;
    }

    #[inline(always)]
    pub(crate) fn hook(&self) -> Hook {
        Hook::from_number(self.hook)
    }
}

/// Between two steps. The kernel's verifier walks what follows once for every set of values that it has seen on the ways
/// that lead there, and it knows nothing of values in a map: what a step leaves in the scratch it walks once. The compiler
/// must not carry values over either. `values` are references to what the next step reads.
#[inline(always)]
pub fn step<T>(values: T) -> T {
    black_box(values)
}
