//! Pod runner: CRI client, probes, status.
pub(crate) mod cri;
