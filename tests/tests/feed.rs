//! The node feed from end to end without root: real store and API, real server, real client over mutual TLS.
#![allow(clippy::unwrap_used, reason = "a test may stop at any surprise")]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use control_api::desired::Name;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use weir_agent::config::Config;
use weir_agent::feed::{self, FeedHandle, Origin, Update, Updates};
use weir_control::apiserver::api::Api;
use weir_control::apiserver::local::LocalClient;
use weir_control::client::{ObjectClient, resources};
use weir_control::config::Network;
use weir_control::pki::{self, Authority, Pki, SERVER_NAME};
use weir_control::serve::{Feed, FeedStatus, FeedTls};
use weir_control::store::{EmbeddedStore, OpenOptions};

const PATIENCE: Duration = Duration::from_secs(20);

/// The control plane's store, API and certificates; feed servers come and go over them.
struct Control {
    client: Arc<dyn ObjectClient>,
    tls: FeedTls,
    directory: tempfile::TempDir,
}

async fn control() -> Control {
    let directory = tempfile::tempdir().unwrap();
    let pki = Pki::open(directory.path(), &[SERVER_NAME.into()], &[]).unwrap();
    let node = Authority::load(directory.path())
        .unwrap()
        .issue_node("n1", &[])
        .unwrap();
    pki::write_pair(directory.path(), "node", &node).unwrap();
    std::fs::write(directory.path().join("ca.crt"), &pki.ca_pem).unwrap();
    let now_us = || jiff::Timestamp::now().as_microsecond();
    let path = directory.path().join("store.redb");
    let store = Arc::new(EmbeddedStore::open(&OpenOptions { path, now_us }).unwrap());
    let api = Arc::new(Api::new(store, Network::default()));
    api.bootstrap("192.0.2.1:6443".parse().unwrap())
        .await
        .unwrap();
    let client: Arc<dyn ObjectClient> = Arc::new(LocalClient::new(api, "test"));
    Control {
        client,
        tls: FeedTls {
            ca_pem: pki.ca_pem,
            server: pki.server,
        },
        directory,
    }
}

/// A feed server; dropping the token's guard kills it.
struct Serving {
    status: FeedStatus,
    address: SocketAddr,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Serving {
    async fn kill(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

impl Control {
    async fn serve(&self, address: SocketAddr) -> Serving {
        let feed = Feed::new(Arc::clone(&self.client), &self.tls, &Network::default());
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (status, stop, tls) = (feed.status(), CancellationToken::new(), self.tls.clone());
        let token = stop.clone();
        let task = tokio::spawn(async move { feed.serve(&tls, listener, token).await.unwrap() });
        Serving {
            status,
            address,
            stop,
            task,
        }
    }

    fn agent(&self, server: SocketAddr, stop: &CancellationToken) -> FeedHandle {
        feed::start(&config(self.directory.path(), server), stop.clone()).unwrap()
    }

    async fn service(&self, name: &str) -> u64 {
        let object = json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}]}});
        let made = self
            .client
            .create(resources::SERVICES, "default", object)
            .await
            .unwrap();
        revision(&made)
    }
}

fn revision(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap()
}

fn config(directory: &Path, server: SocketAddr) -> Config {
    let path = |name: &str| directory.join(name).display().to_string();
    let text = format!(
        "node_name = \"n1\"\nnode_ips = [\"127.0.0.1\"]\nuplinks = []\nstate_dir = \"{}\"\n\
         [feed]\nservers = [\"https://{server}\"]\nca = \"{}\"\ncert = \"{}\"\nkey = \"{}\"\n",
        path("state"),
        path("ca.crt"),
        path("node.crt"),
        path("node.key"),
    );
    let file = directory.join("agent.toml");
    std::fs::write(&file, text).unwrap();
    Config::load(&file).unwrap()
}

async fn until(updates: &mut Updates, done: impl Fn(&Update) -> bool) -> Update {
    let wait = async {
        loop {
            let update = updates.next().await;
            if done(&update) {
                return update;
            }
        }
    };
    tokio::time::timeout(PATIENCE, wait)
        .await
        .expect("the update in time")
}

fn has(update: &Update, service: &str) -> bool {
    update
        .state
        .services
        .contains_key(&Name::new("default", service))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_follows_through_the_death_of_its_server() {
    let control = control().await;
    let stop = CancellationToken::new();
    let serving = control.serve("127.0.0.1:0".parse().unwrap()).await;
    let address = serving.address;
    let agent = control.agent(address, &stop);
    let mut updates = agent.updates();
    until(&mut updates, |u| has(u, "kubernetes")).await;

    let revision = control.service("first").await;
    let update = until(&mut updates, |u| has(u, "first")).await;
    assert_eq!(update.origin, Origin::Server);
    assert!(update.committed_at_us.is_some() && !update.changes.everything);
    assert!(!serving.status.all_applied(revision));
    agent.ack(update.state.revision, None);
    tokio::time::timeout(PATIENCE, serving.status.wait_all_applied(revision))
        .await
        .unwrap();

    serving.kill().await;
    let second = control.service("second").await;
    assert!(
        agent
            .state()
            .services
            .contains_key(&Name::new("default", "first"))
    );

    let serving = control.serve(address).await;
    let update = until(&mut updates, |u| has(u, "second")).await;
    assert!(
        update.changes.everything,
        "another instance sends a snapshot"
    );
    agent.ack(update.state.revision, None);
    tokio::time::timeout(PATIENCE, serving.status.wait_all_applied(second))
        .await
        .unwrap();
    assert!(agent.status().disconnects >= 1);
    stop.cancel();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_boots_into_what_it_knew() {
    let control = control().await;
    let stop = CancellationToken::new();
    let serving = control.serve("127.0.0.1:0".parse().unwrap()).await;
    let address = serving.address;
    control.service("known").await;
    let agent = control.agent(address, &stop);
    until(&mut agent.updates(), |u| has(u, "known")).await;
    let file = control.directory.path().join("state/feed.snapshot");
    let written = async {
        while !file.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, written)
        .await
        .expect("the state on disk");
    stop.cancel();
    serving.kill().await;

    let stop = CancellationToken::new();
    let agent = control.agent(address, &stop);
    let mut updates = agent.updates();
    let update = until(&mut updates, |u| has(u, "known")).await;
    assert_eq!(update.origin, Origin::Disk);
    drop(update);
    let _serving = control.serve(address).await;
    until(&mut updates, |u| {
        u.origin == Origin::Server && has(u, "known")
    })
    .await;
    stop.cancel();
}

/// What concerns no node counts as applied by all of them: whoever waits for a revision need not know what it was.
#[tokio::test(flavor = "multi_thread")]
async fn revisions_that_concern_nobody_are_applied_as_well() {
    let control = control().await;
    let stop = CancellationToken::new();
    let serving = control.serve("127.0.0.1:0".parse().unwrap()).await;
    let agent = control.agent(serving.address, &stop);
    let update = until(&mut agent.updates(), |u| has(u, "kubernetes")).await;
    agent.ack(update.state.revision, None);
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "some", "namespace": "default"}, "spec": {}});
    let made = control
        .client
        .create(resources::LEASES, "default", lease)
        .await
        .unwrap();
    let wait = serving.status.wait_all_applied(revision(&made));
    tokio::time::timeout(PATIENCE, wait).await.unwrap();
    stop.cancel();
}
