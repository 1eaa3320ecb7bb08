//! Pod programs that come with policies: what the CNI room gets.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::{Enforcer, PolicyError};
use crate::compile::policy::LocalPod;
use crate::kernel::{AttachError, HostPort, Kernel, PodLink, PodPrograms};

/// The dataplane, and who enforces policies in it.
#[derive(Debug)]
pub struct Enforced {
    pub kernel: Arc<Kernel>,
    pub enforcer: Arc<Enforcer>,
}

fn failed(step: &'static str, ifindex: u32) -> impl FnOnce(PolicyError) -> AttachError {
    move |source| AttachError {
        step,
        link: ifindex.to_string(),
        source: source.into(),
    }
}

impl PodPrograms for Enforced {
    fn attach_pod(&self, link: &PodLink) -> Result<(), AttachError> {
        let attached = self.kernel.attach_pod(link);
        if attached.is_err() {
            // Its entry went with the rest of it: whoever tries again enters it again.
            let _ = self.enforcer.leave(link.ifindex);
        }
        attached
    }

    fn detach_pod(&self, ifindex: u32, addresses: &[IpAddr]) -> Result<(), AttachError> {
        self.kernel.detach_pod(ifindex, addresses)?;
        self.enforcer
            .leave(ifindex)
            .map_err(failed("remove the policies", ifindex))
    }

    fn forget_absent(&self) {
        self.kernel.forget_absent();
    }

    fn enter_pod(&self, ifindex: u32, pod: &LocalPod) -> Result<(), AttachError> {
        self.enforcer
            .enter(ifindex, pod)
            .map_err(failed("put policies in place", ifindex))
    }

    fn adopt_pods(&self, pods: Vec<(u32, LocalPod)>) -> Result<(), AttachError> {
        self.enforcer
            .adopt(pods)
            .map_err(failed("put policies in place", 0))
    }

    fn wait_for_policies(&self, ifindex: u32, patience: Duration) -> Result<(), String> {
        self.enforcer.wait(ifindex, patience)?;
        if self.kernel.is_taking_over() {
            return Err("the programs of another version are in place until the control plane has told the state".into());
        }
        Ok(())
    }

    fn set_host_ports(&self, host_ports: Vec<HostPort>) -> Result<(), AttachError> {
        self.kernel.set_host_ports(host_ports)
    }

    fn is_attached(&self, link: &PodLink) -> bool {
        self.kernel.is_attached(link)
    }
}
