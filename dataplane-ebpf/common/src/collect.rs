//! What user space may take out of the flow tables, entry by entry.
//!
//! Entries are judged with the code of the packet path, for which a flow past its time is no flow. What was read is
//! some packets old when it is judged, so everything is looked at again, and an entry that a packet revived in the very
//! moment of its removal is put back. The writers of these tables: packets (flows, replies, affinities), and this.

use crate::address::Family;
use crate::layout::{Affinity, AffinityKey, Flow, FlowKey, backend_state};

/// The tables as user space reaches them. `take` removes and tells what was there, in one step where the kernel can;
/// `put_back` never replaces.
pub trait Store<A> {
    type Error;

    /// The present word of a backend id, see [`backend_state`].
    ///
    /// # Errors
    /// As all of these: when the table cannot be used.
    fn backend_state(&mut self, id: u32) -> Result<u32, Self::Error>;

    /// # Errors
    /// See above.
    fn flow(&mut self, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Self::Error>;
    /// # Errors
    /// See above.
    fn take_flow(&mut self, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Self::Error>;
    /// # Errors
    /// See above.
    fn put_back_flow(&mut self, key: &FlowKey<A>, flow: &Flow<A>) -> Result<(), Self::Error>;

    /// # Errors
    /// See above.
    fn reply(&mut self, key: &FlowKey<A>) -> Result<Option<FlowKey<A>>, Self::Error>;
    /// # Errors
    /// See above.
    fn take_reply(&mut self, key: &FlowKey<A>) -> Result<Option<FlowKey<A>>, Self::Error>;
    /// # Errors
    /// See above.
    fn put_back_reply(&mut self, key: &FlowKey<A>, owner: &FlowKey<A>) -> Result<(), Self::Error>;

    /// # Errors
    /// See above.
    fn affinity(&mut self, key: &AffinityKey<A>) -> Result<Option<Affinity>, Self::Error>;
    /// # Errors
    /// See above.
    fn take_affinity(&mut self, key: &AffinityKey<A>) -> Result<Option<Affinity>, Self::Error>;
    /// # Errors
    /// See above.
    fn put_back_affinity(
        &mut self,
        key: &AffinityKey<A>,
        affinity: &Affinity,
    ) -> Result<(), Self::Error>;
}

/// What became of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Kept,
    Removed,
    /// Somebody else removed it.
    Gone,
}

/// A flow that looked over when it was read. Removes it with its reply entry if it still is.
///
/// # Errors
/// When a table cannot be used.
pub fn collect_flow<A: Family, S: Store<A>>(
    store: &mut S,
    key: &FlowKey<A>,
    now_s: u32,
    pressure: bool,
) -> Result<Outcome, S::Error> {
    let Some(flow) = store.flow(key)? else {
        return Ok(Outcome::Gone);
    };
    if !flow.is_over(store.backend_state(flow.backend_id)?, now_s, pressure) {
        return Ok(Outcome::Kept);
    }
    let Some(flow) = store.take_flow(key)? else {
        return Ok(Outcome::Gone);
    };
    if !flow.is_over(store.backend_state(flow.backend_id)?, now_s, pressure) {
        store.put_back_flow(key, &flow)?;
        return Ok(Outcome::Kept);
    }
    // The record first: a reply without its record is found by the walk of the replies, should this end in between.
    let reply = flow.reply_key();
    if store.reply(&reply)? == Some(*key)
        && let Some(owner) = store.take_reply(&reply)?
        && owner != *key
    {
        store.put_back_reply(&reply, &owner)?;
    }
    Ok(Outcome::Removed)
}

/// A reply entry as it was read. Removes it when its record is missing or answers to another tuple. A flow in the
/// making looks like this for a moment, between its two insertions; what is not settled by the second look completes
/// itself with the client's next packet.
///
/// # Errors
/// When a table cannot be used.
pub fn collect_reply<A: Family, S: Store<A>>(
    store: &mut S,
    key: &FlowKey<A>,
    owner: &FlowKey<A>,
) -> Result<Outcome, S::Error> {
    if !is_half(store, key, owner)? {
        return Ok(Outcome::Kept);
    }
    let Some(owner) = store.take_reply(key)? else {
        return Ok(Outcome::Gone);
    };
    if !is_half(store, key, &owner)? {
        store.put_back_reply(key, &owner)?;
        return Ok(Outcome::Kept);
    }
    Ok(Outcome::Removed)
}

fn is_half<A: Family, S: Store<A>>(
    store: &mut S,
    key: &FlowKey<A>,
    owner: &FlowKey<A>,
) -> Result<bool, S::Error> {
    Ok(match store.flow(owner)? {
        Some(flow) => flow.reply_key() != *key,
        None => true,
    })
}

/// An affinity that looked over when it was read.
///
/// # Errors
/// When a table cannot be used.
pub fn collect_affinity<A: Family, S: Store<A>>(
    store: &mut S,
    key: &AffinityKey<A>,
    now_s: u32,
) -> Result<Outcome, S::Error> {
    let Some(affinity) = store.affinity(key)? else {
        return Ok(Outcome::Gone);
    };
    if !is_affinity_over(&affinity, store.backend_state(affinity.backend_id)?, now_s) {
        return Ok(Outcome::Kept);
    }
    let Some(affinity) = store.take_affinity(key)? else {
        return Ok(Outcome::Gone);
    };
    if !is_affinity_over(&affinity, store.backend_state(affinity.backend_id)?, now_s) {
        store.put_back_affinity(key, &affinity)?;
        return Ok(Outcome::Kept);
    }
    Ok(Outcome::Removed)
}

/// True for an affinity that chooses nothing any more: its time or its backend's life is over. `state` is the present
/// word of its backend id.
#[must_use]
pub fn is_affinity_over(affinity: &Affinity, state: u32, now_s: u32) -> bool {
    now_s > affinity.expires_s || !backend_state::same_life(state, affinity.backend_state)
}
