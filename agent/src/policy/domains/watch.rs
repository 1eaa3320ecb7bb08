//! Puts in place what is learnt, and takes away what is over.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::kernel::{Kernel, KernelError};
use crate::policy::{Enforcer, PolicyError};

/// How often addresses end. Flows are looked at when one might.
const PERIOD: Duration = Duration::from_secs(5);
/// Pause after a failure.
const RETRY: Duration = Duration::from_millis(250);

/// Who knows which addresses conversations use.
pub trait AddressesInUse: Send + Sync {
    /// Those among some to which a conversation goes that policies allow.
    ///
    /// # Errors
    /// [`KernelError`] when flows cannot be read.
    fn in_use(&self, among: &HashSet<IpAddr>) -> Result<HashSet<IpAddr>, KernelError>;
}

impl AddressesInUse for Kernel {
    fn in_use(&self, among: &HashSet<IpAddr>) -> Result<HashSet<IpAddr>, KernelError> {
        self.destinations_in_use(among)
    }
}

/// Runs until shutdown.
pub async fn watch(
    enforcer: Arc<Enforcer>,
    flows: Arc<dyn AddressesInUse>,
    shutdown: CancellationToken,
) {
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        let ends = tokio::select! {
            () = shutdown.cancelled() => return,
            () = enforcer.domains().work.notified() => false,
            _ = period.tick() => true,
        };
        let (worker, flows) = (Arc::clone(&enforcer), Arc::clone(&flows));
        let work = move || match ends {
            true => worker.expire_domains(flows.as_ref()),
            false => worker.place_domains(),
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(Ok(())) => failing = false,
            Ok(Err(error)) => {
                tell(&error, &mut failing);
                tokio::time::sleep(RETRY).await;
                enforcer.domains().work.notify_one();
            }
            Err(_) => return,
        }
    }
}

fn tell(error: &PolicyError, failing: &mut bool) {
    if !std::mem::replace(failing, true) {
        tracing::error!(%error, "addresses of domain names cannot be put in place; trying again");
    }
}
