//! Where configurations come from: the cluster, what is built in, a file.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use control_api::desired::Changes;
use hickory_proto::op::ResponseCode;
use tokio_util::sync::CancellationToken;

use super::live::{PATIENCE, ask};
use super::state;
use super::upstreams::{Says, upstream};
use crate::dns::alone::{self, AloneError};
use crate::dns::corefile::{CorefileError, Mounted};
use crate::dns::runtime::Runtime;
use crate::dns::upstream::Surroundings;
use crate::dns::{Configuration, DnsHandle, Options, built_in, from_cluster, server};

fn mounted(files: &[(&str, &str)]) -> Mounted {
    let own = |(path, text): &(&str, &str)| (format!("/etc/coredns/{path}"), (*text).to_owned());
    Mounted(files.iter().map(own).collect())
}

#[tokio::test]
async fn the_clusters_corefile_serves_until_it_is_gone_and_not_while_it_is_wrong() {
    let surroundings = Surroundings {
        resolv_conf: Some("/nowhere".into()),
        ..Surroundings::default()
    };
    let runtime = Arc::new(Runtime::new(
        surroundings,
        Options::default(),
        Arc::default(),
    ));
    let handle = DnsHandle {
        runtime: Arc::clone(&runtime),
        addresses: Vec::new(),
        configuration: Arc::default(),
    };
    let config = crate::config::Dns::default();
    let server = runtime.server(53);
    let (udp, _tcp) = server::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = udp.local_addr().unwrap();
    tokio::spawn(server.udp(udp));
    {
        let mut zone = runtime.zone.write().unwrap();
        zone.update(&state(), &Changes::everything());
        zone.set_synced();
    }
    let configure = |files: &[(&str, &str)]| {
        handle.configure(&mounted(files), &config, &state());
        handle.configuration()
    };
    let ttl = async || ask(address, "cart.shop.svc.cluster.local.").await.answers[0].ttl;

    assert_eq!(configure(&[]), Configuration::default());
    assert_eq!(ttl().await, 30);
    let own = ".:53 {\n kubernetes cluster.local in-addr.arpa {\n ttl 7\n }\n import custom/*.override\n}\nimport custom/*.server\n";
    let custom = (
        "custom/a.override",
        "hosts {\n 192.0.2.9 a.example\n fallthrough\n}\n",
    );
    let taken = configure(&[("Corefile", own), custom]);
    assert_eq!(
        taken,
        Configuration {
            from_cluster: true,
            error: None
        }
    );
    assert_eq!(ttl().await, 7);
    assert_eq!(ask(address, "a.example.").await.answers.len(), 1);

    let wrong = configure(&[
        ("Corefile", own),
        ("custom/b.server", "b.example {\n\n chaos\n}"),
    ]);
    let error = wrong.error.unwrap();
    assert!(
        error.starts_with("/etc/coredns/custom/b.server:3: the directive chaos"),
        "{error}"
    );
    assert_eq!(ttl().await, 7);
    assert_eq!(ask(address, "a.example.").await.answers.len(), 1);

    assert_eq!(configure(&[]), Configuration::default());
    assert_eq!(ttl().await, 30);
    assert_eq!(
        ask(address, "a.example.").await.response_code,
        ResponseCode::Refused
    );
}

#[test]
fn what_a_node_cannot_do_is_refused() {
    for (text, wanted) in [
        (
            ". {\n}\nx.example:5353 {\n}",
            "/etc/coredns/Corefile:3: nodes serve DNS on the cluster's address alone",
        ),
        (
            ". {\n bind 192.0.2.1\n}",
            "/etc/coredns/Corefile:1: nodes serve DNS on the cluster's address: bind",
        ),
        (
            ". {\n forward . {$UPSTREAM}\n}",
            "/etc/coredns/Corefile:2: there is no environment variable UPSTREAM",
        ),
        (
            ". {\n import /etc/passwd\n}",
            "/etc/coredns/Corefile:2: import /etc/passwd: there is no /etc/passwd among",
        ),
    ] {
        let error: CorefileError = from_cluster(&mounted(&[("Corefile", text)]))
            .unwrap()
            .unwrap_err();
        assert!(error.to_string().starts_with(wanted), "{error}");
    }
    assert!(from_cluster(&mounted(&[("NodeHosts", "")])).is_none());
    assert!(built_in(&crate::config::Dns::default()).is_ok());
}

#[tokio::test]
async fn a_program_without_a_node_follows_its_file() {
    let world = upstream(Says::addresses(1)).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("Corefile");
    let write = |path: &Path, rest: &str| {
        let text = format!(
            ".:0 {{\n bind 127.0.0.1\n reload 2s 0s\n forward . {}\n import more*\n {rest}\n}}",
            world.address
        );
        std::fs::write(path, text).unwrap();
    };
    write(&path, "");
    assert_eq!(alone::check(&path).unwrap(), 1);
    let shutdown = CancellationToken::new();
    let (tell, told) = tokio::sync::oneshot::channel();
    let program = tokio::spawn({
        let (path, shutdown) = (path.clone(), shutdown.clone());
        async move {
            let listening = |addresses: &[std::net::SocketAddr]| tell.send(addresses[0]).unwrap();
            alone::run(&path, None, shutdown, listening).await
        }
    });
    let address = told.await.unwrap();
    let answers = async || {
        ask(address, "www.example.")
            .await
            .answers
            .remove(0)
            .data
            .to_string()
    };
    assert_eq!(answers().await, "198.51.100.1");
    // An import that appears is a change as well; a broken file is none.
    std::fs::write(
        folder.path().join("more"),
        "hosts {\n192.0.2.9 www.example\n}\n",
    )
    .unwrap();
    let deadline = Instant::now() + PATIENCE;
    while answers().await != "192.0.2.9" {
        assert!(Instant::now() < deadline, "the file is not read again");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    write(&path, "nonsense");
    let error = alone::check(&path).unwrap_err();
    assert!(
        matches!(&error, AloneError::Corefile(error) if error.place.line == 6),
        "{error}"
    );
    assert_eq!(answers().await, "192.0.2.9");
    shutdown.cancel();
    program.await.unwrap().unwrap();
    write(&path, "kubernetes cluster.local");
    let error = alone::run(&path, None, shutdown, |_| {}).await.unwrap_err();
    assert!(error.to_string().contains("--feed"), "{error}");
}
