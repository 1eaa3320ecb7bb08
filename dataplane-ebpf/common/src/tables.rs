//! What decisions read and write. Three occupants: maps in the kernel, ordinary collections in tests, and the replay
//! of a packet for an operator.

use crate::layout::{
    Affinity, AffinityKey, Backend, Datagram, Flow, FlowKey, FragmentKey, Frontend, FrontendKey,
    Node, Park, Range, SlotKey,
};
use crate::policy::PolicyTables;
use crate::reason::Event;

/// Result of an insertion that must not replace.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Inserted {
    #[default]
    Done,
    /// The key is taken; nothing changed.
    Exists,
    /// The table has no room; nothing changed.
    Full,
}

/// The tables of one address family.
pub trait Tables<A>: PolicyTables<A> {
    /// Seconds of the monotonic clock.
    fn now_s(&mut self) -> u32;
    fn random(&mut self) -> u32;
    fn count(&mut self, event: Event);

    fn node(&mut self) -> Option<&Node<A>>;
    fn frontend(&mut self, key: &FrontendKey<A>) -> Option<&Frontend>;
    fn slot(&mut self, key: &SlotKey) -> Option<&u32>;
    fn backend(&mut self, id: u32) -> Option<&Backend<A>>;
    /// See [`crate::layout::backend_state`]. Zero for ids out of range.
    fn backend_state(&mut self, id: u32) -> u32;

    /// Id of the backend at a place of a service's Maglev table; zero when there is none.
    fn maglev(&mut self, service_id: u32, place: u32) -> u32;
    /// True when one of the service's source ranges holds the address.
    fn source_allowed(&mut self, service_id: u32, source: &A) -> bool;
    /// The narrowest range that holds the address.
    fn range(&mut self, address: &A) -> Option<&Range>;

    fn affinity(&mut self, key: &AffinityKey<A>) -> Option<&Affinity>;
    /// Adds or replaces. A full table forgets it: the client's next flow chooses freely.
    fn set_affinity(&mut self, key: &AffinityKey<A>, affinity: &Affinity);

    fn datagram(&mut self, key: &FragmentKey<A>) -> Option<&mut Datagram>;
    /// Adds or replaces, at the cost of the oldest.
    fn set_datagram(&mut self, key: &FragmentKey<A>, datagram: &Datagram);
    /// See [`Park`].
    fn park(&mut self) -> Park;

    fn flow(&mut self, key: &FlowKey<A>) -> Option<&mut Flow<A>>;
    fn insert_flow(&mut self, key: &FlowKey<A>, flow: &Flow<A>) -> Inserted;
    fn remove_flow(&mut self, key: &FlowKey<A>);

    /// From a reply as it comes off the wire to the key of its flow.
    fn reply(&mut self, key: &FlowKey<A>) -> Option<&FlowKey<A>>;
    fn insert_reply(&mut self, key: &FlowKey<A>, flow: &FlowKey<A>) -> Inserted;
    fn remove_reply(&mut self, key: &FlowKey<A>);

    /// A flow that was new not long ago; the key may be of one that is no more.
    fn recent(&mut self, place: u32) -> Option<&FlowKey<A>>;
    fn set_recent(&mut self, place: u32, key: &FlowKey<A>);

    /// Where the search for a source port goes on; zero where none has begun.
    fn port_cursor(&mut self, index: u32) -> u32;
    fn set_port_cursor(&mut self, index: u32, cursor: u32);

    /// True when a socket of this node takes packets with this tuple. Asked where a port is chosen for the node's
    /// address; programs that never do need no answer.
    fn is_bound(&mut self, _reply: &FlowKey<A>) -> bool {
        false
    }
}
