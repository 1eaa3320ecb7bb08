//! Pod runner: CRI client, probes, status.
