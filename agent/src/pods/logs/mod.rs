//! Container logs: the format that the runtime writes, reading, rotation.

pub(crate) mod line;
pub(crate) mod read;
pub(crate) mod rotate;
