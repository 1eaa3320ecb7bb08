use std::net::{Ipv4Addr, SocketAddr};

use control_api::v1::{Endpoint, EndpointSlice};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::*;

fn service(port: u32) -> Service {
    Service {
        namespace: "default".into(),
        name: "web".into(),
        r#type: ServiceType::LoadBalancer.into(),
        external_traffic_policy: TrafficPolicy::Local.into(),
        health_check_node_port: port,
        ..Service::default()
    }
}

fn health(port: u16, local_endpoints: usize) -> BTreeMap<Name, Option<ServiceHealth>> {
    let name = Name::new("default", "web");
    let health = ServiceHealth {
        port,
        name: name.clone(),
        local_endpoints,
    };
    [(name, Some(health))].into()
}

#[test]
fn only_balancers_with_policy_local_have_a_health_check() {
    let name = Name::new("default", "web");
    let mut state = DesiredState::default();
    let slice = EndpointSlice {
        service: "web".into(),
        endpoints: vec![Endpoint {
            addresses: vec!["10.244.1.1".into()],
            ready: true,
            node_name: "n1".into(),
            ..Endpoint::default()
        }],
        ..EndpointSlice::default()
    };
    state
        .endpoint_slices
        .insert(Name::new("default", "web-1"), slice);
    let mut ask = |service: Service| {
        state.services.insert(name.clone(), service);
        wanted(&state, &Changes::everything(), "n1")
    };
    assert_eq!(ask(service(32_100)), health(32_100, 1));
    let mut cluster = service(32_100);
    cluster.external_traffic_policy = TrafficPolicy::Cluster.into();
    let mut node_port = service(32_100);
    node_port.r#type = ServiceType::NodePort.into();
    for without in [service(0), service(70_000), cluster, node_port] {
        assert_eq!(ask(without), [(name.clone(), None)].into());
    }
    state.services.remove(&name);
    let changes = Changes {
        services: [name.clone()].into(),
        ..Changes::default()
    };
    assert_eq!(wanted(&state, &changes, "n1"), [(name, None)].into());
}

/// A port of loopback that nobody has just now.
async fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    listener.local_addr().unwrap().port()
}

/// Status line, headers in lower case, and body; none when nobody listens.
async fn get(port: u16, path: &str) -> Option<(u16, String, String)> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.0\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, head.to_lowercase(), body.to_owned()))
}

#[tokio::test]
async fn a_port_answers_by_its_local_endpoints_and_closes_with_its_service() {
    let (shutdown, node) = (CancellationToken::new(), NodeHealth::default());
    let server = HealthServer::start(node, 0, shutdown.clone());
    let port = free_port().await;
    server.set_services(true, health(port, 2)).await;
    let (status, head, body) = get(port, "/").await.unwrap();
    assert_eq!(status, 200);
    assert!(
        head.contains("x-load-balancing-endpoint-weight: 2"),
        "{head}"
    );
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    let expected = json!({
        "service": {"namespace": "default", "name": "web"}, "localEndpoints": 2, "serviceProxyHealthy": true,
    });
    assert_eq!(body, expected);
    server.set_services(false, health(port, 0)).await;
    assert_eq!(get(port, "/").await.unwrap().0, 503);
    server
        .set_services(false, [(Name::new("default", "web"), None)].into())
        .await;
    assert!(get(port, "/").await.is_none());
    shutdown.cancel();
}

#[tokio::test]
async fn a_port_that_is_taken_is_told_and_served_once_it_is_free() {
    let shutdown = CancellationToken::new();
    let server = HealthServer::start(NodeHealth::default(), 0, shutdown.clone());
    let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
    let port = taken.local_addr().unwrap().port();
    server.set_services(true, health(port, 1)).await;
    let why = &server.failures()[&Name::new("default", "web")];
    assert!(why.contains(&port.to_string()), "{why}");
    drop(taken);
    server.set_services(false, BTreeMap::new()).await;
    assert_eq!(get(port, "/").await.unwrap().0, 200);
    assert!(server.failures().is_empty());
    shutdown.cancel();
}

#[tokio::test]
async fn of_two_services_with_one_port_one_has_it() {
    let shutdown = CancellationToken::new();
    let server = HealthServer::start(NodeHealth::default(), 0, shutdown.clone());
    let port = free_port().await;
    let mut services = health(port, 1);
    let other = Name::new("default", "zoo");
    let clash = ServiceHealth {
        port,
        name: other.clone(),
        local_endpoints: 0,
    };
    services.insert(other.clone(), Some(clash));
    server.set_services(true, services).await;
    assert!(get(port, "/").await.unwrap().2.contains("\"web\""));
    assert!(server.failures()[&other].contains("default/web"));
    server
        .set_services(false, [(Name::new("default", "web"), None)].into())
        .await;
    assert!(get(port, "/").await.unwrap().2.contains("\"zoo\""));
    shutdown.cancel();
}

#[tokio::test]
async fn a_node_that_is_about_to_go_fails_healthz_and_not_livez() {
    let (shutdown, node) = (CancellationToken::new(), NodeHealth::default());
    let port = free_port().await;
    let server = HealthServer::start(node.clone(), port, shutdown.clone());
    server.set_services(true, BTreeMap::new()).await;
    node.programmed();
    for (leaving, status) in [(false, 200), (true, 503)] {
        node.set_leaving(leaving);
        let (found, _, body) = get(port, "/healthz").await.unwrap();
        assert_eq!(found, status);
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["nodeEligible"], !leaving);
        assert!(body["lastUpdated"].is_string());
        assert_eq!(get(port, "/livez").await.unwrap().0, 200);
    }
    assert_eq!(get(port, "/else").await.unwrap().0, 404);
    shutdown.cancel();
}

#[test]
fn a_proxy_whose_changes_wait_too_long_is_unhealthy() {
    let node = NodeHealth::default();
    assert!(
        node.is_healthy(),
        "an agent that has just started still serves"
    );
    node.pending();
    assert!(node.is_healthy());
    let long_ago = Instant::now().checked_sub(PENDING_AT_MOST + Duration::from_secs(1));
    node.with(|state| state.pending_since = long_ago);
    assert!(!node.is_healthy());
    node.programmed();
    assert!(node.is_healthy());
}
