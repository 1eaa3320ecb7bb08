//! One file or folder per controller: a pure core (state in, actions out, time as a value) and a thin runtime around it.

pub(crate) mod runtime;

use std::sync::Arc;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::runtime::Informers;
use self::runtime::events::Recorder;
use self::runtime::session::Context;
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
    let mut tasks = JoinSet::new();
    let _ = (&settings, &context);
    tasks.spawn(async move { shutdown.cancelled().await });
    while tasks.join_next().await.is_some() {}
}
