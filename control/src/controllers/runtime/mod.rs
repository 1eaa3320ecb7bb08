//! What scheduler and controllers share: the informer cache, work queues, sessions that wait for their own writes, and
//! events. No rule about any kind of object belongs here.

pub(crate) mod events;
pub(crate) mod informer;
pub(crate) mod object;
pub(crate) mod quantity;
pub(crate) mod queue;
pub(crate) mod reflect;
pub(crate) mod selector;
pub(crate) mod session;
pub(crate) mod worker;

pub use informer::Informers;
