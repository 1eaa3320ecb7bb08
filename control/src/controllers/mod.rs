//! One file or folder per controller: a pure core (state in, actions out, time as a value) and a thin runtime around it.

mod batch;
mod cluster_network_policy;
mod cronjob;
mod daemonset;
mod deployment;
mod disruption;
mod endpointslice;
#[cfg(test)]
mod faulty;
mod gc;
#[cfg(test)]
pub(crate) mod harness;
mod history;
mod job;
mod namespace;
mod node;
mod pod_gc;
pub(crate) mod pods;
mod quota;
mod replicaset;
pub(crate) mod runtime;
mod service;
mod staged_policy;
mod statefulset;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod workload_tests;

use std::sync::Arc;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::runtime::Informers;
use self::runtime::events::Recorder;
use self::runtime::queue::Queue;
use self::runtime::session::Context;
use self::runtime::worker::{self, Controller, KeyQueue};
use crate::client::ObjectClient;
use crate::config::Network;

/// What the controllers need to know about the cluster.
#[derive(Clone, Debug)]
pub struct Settings {
    pub network: Network,
    /// Published in every namespace as the ConfigMap `kube-root-ca.crt`.
    pub ca_certificate_pem: String,
}

/// Runs every controller until shutdown.
pub async fn run(
    client: Arc<dyn ObjectClient>,
    informers: Informers,
    settings: Settings,
    shutdown: CancellationToken,
) {
    let recorder = Recorder::start(client.clone(), shutdown.clone());
    let context = Context {
        client,
        informers,
        recorder,
    };
    let mut all = Starter {
        context: &context,
        shutdown: &shutdown,
        tasks: JoinSet::new(),
    };
    let Settings {
        network,
        ca_certificate_pem,
    } = settings;
    all.start(deployment::Deployments::new);
    all.start(replicaset::ReplicaSets::new);
    all.start(endpointslice::EndpointSlices::new);
    all.start(endpointslice::Mirrors::new);
    all.start(|context, queue| service::Services::new(context, queue, &network));
    all.start(service::Frontends::new);
    all.start(|context, queue| node::Nodes::new(context, queue, network));
    all.start(node::eviction::TaintEviction::new);
    all.start(pod_gc::PodGc::new);
    all.start(statefulset::StatefulSets::new);
    all.start(daemonset::DaemonSets::new);
    all.start(job::Jobs::new);
    all.start(cronjob::CronJobs::new);
    all.start(disruption::Budgets::new);
    all.start(cluster_network_policy::ClusterNetworkPolicies::new);
    all.start(staged_policy::StagedPolicies::new);
    let quotas = all.start(quota::Quotas::new);
    let content_changed = quota::notifier(&context, &quotas);
    let namespaces =
        all.start(|context, queue| namespace::Namespaces::new(context, queue, ca_certificate_pem));
    let mut tasks = all.tasks;
    tasks.spawn(gc::run(
        context.clone(),
        namespaces,
        content_changed,
        shutdown.clone(),
    ));
    while tasks.join_next().await.is_some() {}
}

struct Starter<'a> {
    context: &'a Context,
    shutdown: &'a CancellationToken,
    tasks: JoinSet<()>,
}

impl Starter<'_> {
    /// Makes a controller with its queue and starts its workers.
    fn start<C: Controller>(&mut self, make: impl FnOnce(&Context, &KeyQueue) -> C) -> KeyQueue {
        let queue: KeyQueue = Arc::new(Queue::new());
        let controller = make(self.context, &queue);
        let (context, shutdown) = (self.context.clone(), self.shutdown.clone());
        self.tasks
            .spawn(worker::run(controller, context, queue.clone(), shutdown));
        queue
    }
}
