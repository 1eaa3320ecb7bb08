use std::sync::Arc;
use std::time::Duration;

use control_api::desired::{DesiredState, Name};
use control_api::v1;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use super::report::service_report;
use super::{Checks, Dataplane, Observe, StatusReport, http};
use crate::kernel::{
    CollectReport, Counter, CounterKind, FlowTableStatus, ServiceDetails, ServiceTotals,
};

#[derive(Debug)]
struct Counters;

impl Dataplane for Counters {
    fn counters(&self) -> Vec<Counter> {
        vec![
            Counter {
                kind: CounterKind::Drop,
                name: "no_backend",
                packets: 3,
            },
            Counter {
                kind: CounterKind::Forward,
                name: "to_pod",
                packets: 9,
            },
        ]
    }

    fn service_totals(&self) -> ServiceTotals {
        ServiceTotals {
            frontends: 2,
            endpoints: 3,
            refused: 1,
        }
    }

    fn service_details(&self) -> (Vec<ServiceDetails>, Vec<(String, String)>) {
        (Vec::new(), Vec::new())
    }

    fn flow_table(&self) -> FlowTableStatus {
        FlowTableStatus {
            flows: [3, 2],
            capacity: [1_024, 2_048],
            pressure: [false, true],
            total: CollectReport {
                walked: 70,
                removed: 9,
                ..CollectReport::default()
            },
            busy: Duration::from_millis(1_500),
        }
    }
}

async fn get(socket: &std::path::Path, path: &str) -> (String, String) {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

#[tokio::test]
async fn readiness_names_what_is_missing_and_reports_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("agent.sock");
    let checks = Checks::new(&[("programs", "not attached yet"), ("cni", "no socket yet")]);
    let observe = Observe::new("n1", checks);
    http::serve_unix(observe.clone(), socket.clone(), CancellationToken::new()).unwrap();

    observe.checks().pass("cni");
    let (head, body) = get(&socket, "/readyz").await;
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    assert_eq!(
        body,
        "[-]programs failed: not attached yet\n[+]cni ok\nnot ready\n"
    );
    observe.checks().pass("programs");
    assert!(get(&socket, "/readyz").await.0.starts_with("HTTP/1.1 200"));

    observe.set_dataplane(Arc::new(Counters));
    observe.applied(Some(0), Duration::from_millis(2), 7);
    let (_, metrics) = get(&socket, "/metrics").await;
    for line in [
        "weir_dropped_packets_total{reason=\"no_backend\"} 3",
        "weir_flows 5",
        "weir_flow_table_entries{family=\"ipv6\"} 2",
        "weir_flow_table_capacity{family=\"ipv4\"} 1024",
        "weir_flow_table_pressure{family=\"ipv6\"} 1",
        "weir_flows_collected_total 9",
        "weir_flow_collector_seconds_total 1.5",
        "weir_apply_operations_total 7",
        "weir_commit_to_kernel_seconds_count 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    let (_, body) = get(&socket, "/v1/status").await;
    let status: StatusReport = serde_json::from_str(&body).unwrap();
    assert_eq!((status.node.as_str(), status.ready), ("n1", true));
    assert_eq!(status.flows.unwrap().flows, 5);
    assert_eq!(status.latency.unwrap().changes, 1);
    assert!(get(&socket, "/nothing").await.0.starts_with("HTTP/1.1 404"));
}

#[test]
fn services_show_their_backends() {
    let mut state = DesiredState::default();
    let name = Name::new("d", "web");
    let port = |port, name: &str| v1::ServicePort {
        name: name.into(),
        protocol: v1::Protocol::Tcp.into(),
        port,
        node_port: 0,
    };
    let service = v1::Service {
        ports: vec![port(80, "http")],
        ..v1::Service::default()
    };
    let endpoint = |address: &str, ready| v1::Endpoint {
        addresses: vec![address.into()],
        ready,
        ..v1::Endpoint::default()
    };
    let slice = v1::EndpointSlice {
        namespace: "d".into(),
        name: "web-1".into(),
        service: "web".into(),
        ports: vec![v1::EndpointPort {
            name: "http".into(),
            protocol: v1::Protocol::Tcp.into(),
            port: 8080,
        }],
        endpoints: vec![endpoint("fd00::1", true), endpoint("10.0.0.2", false)],
        ..v1::EndpointSlice::default()
    };
    state.endpoint_slices.insert(Name::new("d", "web-1"), slice);
    let report = service_report(&state, &name, &service);
    assert_eq!(report.ports[0].backends, ["[fd00::1]:8080"]);
    assert_eq!(report.ports[0].not_ready, 1);
}
