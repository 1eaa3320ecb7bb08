//! What the maps hold of policies.

use std::io;
use std::path::Path;

use dataplane_common::layout::PodPolicy;

use super::KernelError;
use super::services::open;
use super::table::Table;

/// Which policy judges each pod. A pod without an entry is closed.
#[derive(Debug)]
pub(super) struct PodPolicies {
    pods: Table<u32, PodPolicy>,
}

impl PodPolicies {
    pub(super) fn open(maps: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            pods: open(maps, "pod_policies")?,
        })
    }

    /// Opens a pod of which no policy is known. One that has a policy keeps it.
    pub(super) fn open_unknown(&self, ifindex: u32) -> io::Result<()> {
        self.pods.put_new(&ifindex, &PodPolicy::default()).map(drop)
    }

    pub(super) fn forget(&self, ifindex: u32) -> io::Result<()> {
        self.pods.remove(&ifindex).map(drop)
    }
}
