//! Services and pods in, slices out.

use serde_json::json;

use super::core::{MIRRORED_BY, mirror};
use super::*;
use crate::controllers::harness::Cluster;

fn service(spec: Value) -> Value {
    json!({"metadata": {"name": "s", "namespace": "d", "uid": "u", "labels": {"a": "b"}}, "spec": spec})
}

/// A pod on a node of the same number, ready unless said otherwise.
fn pod(n: u32, ready: bool) -> Arc<Value> {
    let status = if ready { "True" } else { "False" };
    let ips = json!([{"ip": format!("10.0.{}.{}", n / 250, n % 250 + 1)}, {"ip": format!("fd00::{n:x}")}]);
    Arc::new(
        json!({"metadata": {"name": format!("p{n}"), "namespace": "d", "uid": format!("uid-{n}")},
        "spec": {"nodeName": format!("n{n}"), "containers": [{"ports": [{"name": "web", "containerPort": 8000 + (n % 2)}]}]},
        "status": {"phase": "Running", "podIPs": ips, "conditions": [{"type": "Ready", "status": status}]}}),
    )
}

fn plan_of(spec: Value, pods: &[Arc<Value>]) -> Vec<Value> {
    let zones = [("n1", "z1"), ("n2", "z2")].map(|(n, z)| (n.to_owned(), z.to_owned()));
    plan(&service(spec), pods, &zones.into(), &[]).create
}

#[test]
fn hints_follow_the_traffic_distribution() {
    let zone = |z: &str| json!([{"name": z}]);
    for (distribution, of_first, of_third) in [
        (json!(null), Value::Null, Value::Null),
        (
            json!("PreferClose"),
            json!({"forZones": zone("z1")}),
            Value::Null,
        ),
        (
            json!("PreferSameZone"),
            json!({"forZones": zone("z1")}),
            Value::Null,
        ),
        (
            json!("PreferSameNode"),
            json!({"forZones": zone("z1"), "forNodes": zone("n1")}),
            json!({"forNodes": zone("n3")}),
        ),
    ] {
        let spec = json!({"trafficDistribution": distribution, "ports": [{"port": 80}]});
        let made = plan_of(spec, &[pod(1, true), pod(2, false), pod(3, true)]);
        let endpoints = &made[0]["endpoints"];
        assert_eq!(endpoints[0]["hints"], of_first, "{distribution}");
        assert_eq!(
            endpoints[1]["hints"],
            Value::Null,
            "{distribution}: not ready"
        );
        assert_eq!(endpoints[2]["hints"], of_third, "{distribution}: no zone");
    }
}

#[test]
fn a_hundred_endpoints_in_a_slice_for_each_family_and_set_of_ports() {
    let pods: Vec<_> = (0..250).map(|n| pod(n, true)).collect();
    let both = json!(["IPv6", "IPv4"]);
    let made = plan_of(json!({"ipFamilies": both, "ports": [{"port": 80}]}), &pods);
    let mut sizes: Vec<(&str, usize)> = made
        .iter()
        .map(|s| (s.text(&["addressType"]), s.items(&["endpoints"]).len()))
        .collect();
    sizes.sort_unstable();
    let expected = [100, 100, 50];
    let mut wanted: Vec<_> = ["IPv4", "IPv6"]
        .iter()
        .flat_map(|f| expected.map(|n| (*f, n)))
        .collect();
    wanted.sort_unstable();
    assert_eq!(sizes, wanted);
    // A name that stands for two numbers makes two kinds of slices.
    let made = plan_of(json!({"ports": [{"port": 80, "targetPort": "web"}]}), &pods);
    let mut ports: Vec<_> = made
        .iter()
        .map(|s| {
            (
                s["ports"][0]["port"].as_u64().unwrap(),
                s.items(&["endpoints"]).len(),
            )
        })
        .collect();
    ports.sort_unstable();
    assert_eq!(ports, [(8000, 25), (8000, 100), (8001, 25), (8001, 100)]);
    // A change of one endpoint touches one slice.
    let existing: Vec<_> = made.into_iter().map(Arc::new).collect();
    let mut pods = pods;
    pods[7] = pod(7, false);
    let spec = json!({"ports": [{"port": 80, "targetPort": "web"}]});
    let change = plan(&service(spec), &pods, &HashMap::new(), &existing);
    assert_eq!((change.create.len(), change.delete.len()), (0, 0));
    let unready = |s: &Value| {
        let list = s.items(&["endpoints"]).iter();
        list.filter(|e| !e.flag(&["conditions", "ready"])).count()
    };
    assert_eq!(change.update.iter().map(unready).sum::<usize>(), 1);
    // The others lose their zones, which are not known any more; nothing else of them changes.
    assert!(change.update.len() <= 4);
}

#[test]
fn unready_pods_are_published_early_when_asked_for() {
    for (early, ready) in [(false, false), (true, true)] {
        let spec = json!({"publishNotReadyAddresses": early, "ports": [{"port": 80}]});
        let made = plan_of(spec, &[pod(1, false)]);
        let conditions = &made[0]["endpoints"][0]["conditions"];
        assert_eq!(conditions["ready"], ready);
        assert_eq!(conditions["serving"], false);
    }
}

#[test]
fn endpoints_by_hand_are_mirrored_by_family_and_ports() {
    let endpoints = json!({"metadata": {"name": "s", "namespace": "d", "uid": "e"}, "subsets": [
        {"addresses": [{"ip": "192.0.2.1", "nodeName": "n1"}, {"ip": "2001:db8::1"}],
            "notReadyAddresses": [{"ip": "192.0.2.2"}], "ports": [{"name": "a", "port": 80}]},
        {"addresses": [{"ip": "192.0.2.3"}], "ports": [{"name": "a", "port": 81, "protocol": "UDP"}]},
    ]});
    let made = mirror(&endpoints, &[]).create;
    assert_eq!(made.len(), 3);
    let first = made
        .iter()
        .find(|s| s.items(&["endpoints"]).len() == 2)
        .unwrap();
    assert_eq!(first["addressType"], "IPv4");
    assert_eq!(first["metadata"]["labels"][MANAGED_BY_LABEL], MIRRORED_BY);
    assert_eq!(first["metadata"]["ownerReferences"][0]["kind"], "Endpoints");
    let mut found: Vec<_> = first
        .items(&["endpoints"])
        .iter()
        .map(|e| {
            (
                e["addresses"][0].as_str().unwrap(),
                e.flag(&["conditions", "ready"]),
            )
        })
        .collect();
    found.sort_unstable();
    assert_eq!(found, [("192.0.2.1", true), ("192.0.2.2", false)]);
    let existing: Vec<_> = made.into_iter().map(Arc::new).collect();
    let again = mirror(&endpoints, &existing);
    assert!(again.create.is_empty() && again.update.is_empty() && again.delete.is_empty());
    let gone = mirror(&json!({"metadata": endpoints["metadata"]}), &existing);
    assert_eq!(gone.delete.len(), 3);
}

#[tokio::test]
async fn a_service_without_selector_keeps_slices_of_others_and_mirrors_endpoints() {
    let cluster = Cluster::start().await;
    let own = json!({"metadata": {"name": "own", "namespace": "default", "labels": {SERVICE_NAME_LABEL: "s"}},
        "addressType": "IPv4", "endpoints": [{"addresses": ["192.0.2.9"]}], "ports": [{"port": 80}]});
    cluster.create(resources::ENDPOINT_SLICES, own).await;
    let made = json!({"metadata": {"name": "s", "namespace": "default"}, "spec": {"ports": [{"port": 80}]}});
    cluster.create(resources::SERVICES, made).await;
    let by_hand = json!({"metadata": {"name": "s", "namespace": "default"},
        "subsets": [{"addresses": [{"ip": "192.0.2.1"}], "ports": [{"port": 80}]}]});
    cluster.create(resources::ENDPOINTS, by_hand).await;
    let mirrored = |slices: &Store| {
        let all = slices.all();
        let managed = |s: &&Arc<Value>| managed_service(s, MIRRORED_BY) == Some("s");
        all.iter().find(managed).cloned()
    };
    cluster
        .until(resources::ENDPOINT_SLICES, |s| mirrored(s).is_some())
        .await;
    let key = Key::new("default", "s");
    let skip = json!({"metadata": {"labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}}});
    cluster.merge(resources::ENDPOINTS, &key, skip).await;
    cluster
        .until(resources::ENDPOINT_SLICES, |s| {
            mirrored(s).is_none() && s.get(&Key::new("default", "own")).is_some()
        })
        .await;
}
