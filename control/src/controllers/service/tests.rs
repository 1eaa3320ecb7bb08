//! On a real API: from a pool to addresses, conditions and Events, and back.

use serde_json::{Value, json};

use super::*;
use crate::client::DeleteOptions;
use crate::controllers::harness::Cluster;

async fn pools(cluster: &Cluster, text: &str) {
    let map = json!({"metadata": {"name": POOLS_NAME, "namespace": POOLS_NAMESPACE}, "data": {"pools": text}});
    if cluster
        .get(resources::CONFIG_MAPS, &pools_key())
        .await
        .is_ok()
    {
        let patch = json!({"data": {"pools": text}});
        cluster
            .merge(resources::CONFIG_MAPS, &pools_key(), patch)
            .await;
        return;
    }
    let namespace = json!({"metadata": {"name": POOLS_NAMESPACE}});
    cluster.create(resources::NAMESPACES, namespace).await;
    cluster.create(resources::CONFIG_MAPS, map).await;
}

async fn balancer(cluster: &Cluster, name: &str, more: Value) -> Key {
    let mut spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    for (field, value) in more.as_object().unwrap() {
        spec[field] = value.clone();
    }
    let service = json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec});
    cluster.create(resources::SERVICES, service).await;
    Key::new("default", name)
}

/// Waits until the Service has these addresses and this reason in its condition.
async fn shows(cluster: &Cluster, key: &Key, addresses: &[&str], reason: &str) {
    let wanted: Vec<IpAddr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
    cluster
        .until(resources::SERVICES, |services| {
            services.get(key).is_some_and(|s| {
                ingress(&s) == wanted
                    && condition(&s).is_some_and(|c| c.text(&["reason"]) == reason)
                    && has_finalizer(&s) != wanted.is_empty()
            })
        })
        .await;
}

async fn event(cluster: &Cluster, name: &str, reason: &str) {
    cluster
        .until(resources::EVENTS, |events| {
            events.all().iter().any(|e| {
                e.text(&["involvedObject", "name"]) == name && e.text(&["reason"]) == reason
            })
        })
        .await;
}

#[tokio::test]
async fn addresses_come_from_pools_are_kept_and_return() {
    let cluster = Cluster::start().await;
    let a = balancer(&cluster, "a", json!({})).await;
    shows(&cluster, &a, &[], "NoPools").await;
    pools(&cluster, "[{name: p, ranges: [192.0.2.1]}]").await;
    shows(&cluster, &a, &["192.0.2.1"], "AddressesAssigned").await;
    event(&cluster, "a", "AddressesAssigned").await;
    let b = balancer(&cluster, "b", json!({})).await;
    shows(&cluster, &b, &[], "PoolExhausted").await;
    event(&cluster, "b", "PoolExhausted").await;
    let other = balancer(&cluster, "c", json!({"loadBalancerClass": "example.com/x"})).await;

    // A pool that shrinks takes nothing away.
    pools(&cluster, "[{name: p, ranges: [198.51.100.1]}]").await;
    shows(&cluster, &b, &["198.51.100.1"], "AddressesAssigned").await;
    shows(&cluster, &a, &["192.0.2.1"], "AddressesKept").await;
    // A broken list changes nothing.
    pools(&cluster, "[{name: p, rages: []}]").await;
    event(&cluster, POOLS_NAME, "InvalidPools").await;
    shows(&cluster, &b, &["198.51.100.1"], "AddressesAssigned").await;

    let d = balancer(&cluster, "d", json!({"loadBalancerIP": "198.51.100.1"})).await;
    shows(&cluster, &d, &[], "AddressInUse").await;
    let node_port = json!({"spec": {"type": "NodePort"}});
    cluster.merge(resources::SERVICES, &b, node_port).await;
    shows(&cluster, &d, &["198.51.100.1"], "AddressesAssigned").await;
    cluster
        .until(resources::SERVICES, |s| {
            s.get(&b)
                .is_some_and(|b| !is_ours(&b) && !has_finalizer(&b) && ingress(&b).is_empty())
        })
        .await;

    let deleted = cluster.client.delete(
        resources::SERVICES,
        "default",
        "d",
        DeleteOptions::default(),
    );
    deleted.await.unwrap();
    cluster
        .until(resources::SERVICES, |s| s.get(&d).is_none())
        .await;
    let left = cluster.get(resources::SERVICES, &other).await.unwrap();
    assert!(
        condition(&left).is_none() && !has_finalizer(&left),
        "of another class"
    );
}

#[tokio::test]
async fn both_families_and_two_services_on_one_frontend() {
    let cluster = Cluster::start().await;
    pools(
        &cluster,
        "[{name: p, ranges: [192.0.2.0/30, '2001:db8::10-2001:db8::11'], avoidBuggyIPs: true}]",
    )
    .await;
    let a = balancer(&cluster, "a", json!({"ipFamilyPolicy": "RequireDualStack"})).await;
    shows(
        &cluster,
        &a,
        &["192.0.2.1", "2001:db8::10"],
        "AddressesAssigned",
    )
    .await;
    // Somebody else's balancer gives the same address by hand.
    let b = balancer(&cluster, "b", json!({"loadBalancerClass": "example.com/x"})).await;
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}});
    let patched = cluster.client.patch(
        resources::SERVICES,
        "default",
        &b.name,
        "status",
        crate::client::PatchKind::Merge,
        status,
    );
    patched.await.unwrap();
    event(&cluster, "b", "FrontendConflict").await;
}

/// What a cloud's controller does to a Service: its finalizer, and an address in the status.
async fn cloud_serves(cluster: &Cluster, key: &Key, ip: &str) {
    let finalizer = json!({"metadata": {"finalizers": [FINALIZER]}});
    cluster.merge(resources::SERVICES, key, finalizer).await;
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": ip, "ipMode": "Proxy"}]}}});
    let patched = cluster.client.patch(
        resources::SERVICES,
        "default",
        &key.name,
        "status",
        crate::client::PatchKind::Merge,
        status,
    );
    patched.await.unwrap();
}

/// Waits until the cloud's balancer is all that a Service has.
async fn is_the_clouds(cluster: &Cluster, key: &Key, ip: &str) {
    let wanted: Vec<IpAddr> = vec![ip.parse().unwrap()];
    cluster
        .until(resources::SERVICES, |services| {
            services
                .get(key)
                .is_some_and(|s| ingress(&s) == wanted && has_finalizer(&s) && !is_ours(&s))
        })
        .await;
}

#[tokio::test]
async fn what_a_clouds_controller_gives_is_left_alone() {
    let cluster = Cluster::start().await;
    // It may take Services of no class where no pool serves them: our word about that goes.
    let a = balancer(&cluster, "a", json!({})).await;
    shows(&cluster, &a, &[], "NoPools").await;
    cloud_serves(&cluster, &a, "203.0.113.1").await;
    is_the_clouds(&cluster, &a, "203.0.113.1").await;
    // Pools that come later take nothing away from it, and nothing is done for a class that is not ours.
    pools(&cluster, "[{name: p, ranges: [192.0.2.1]}]").await;
    let b = balancer(&cluster, "b", json!({"loadBalancerClass": "example.com/x"})).await;
    cloud_serves(&cluster, &b, "203.0.113.2").await;
    let c = balancer(&cluster, "c", json!({"loadBalancerClass": "weir.dev/l2"})).await;
    shows(&cluster, &c, &["192.0.2.1"], "AddressesAssigned").await;
    is_the_clouds(&cluster, &a, "203.0.113.1").await;
    is_the_clouds(&cluster, &b, "203.0.113.2").await;
    // Its finalizer is its own to take away.
    cluster.delete(resources::SERVICES, &b).await;
    cluster
        .until(resources::SERVICES, |s| {
            s.get(&b)
                .is_some_and(|b| b.is_deleting() && has_finalizer(&b))
        })
        .await;
    let freed = json!({"metadata": {"finalizers": null}});
    let patched = cluster.client.patch(
        resources::SERVICES,
        "default",
        "b",
        "",
        crate::client::PatchKind::Merge,
        freed,
    );
    patched.await.unwrap();
    cluster
        .until(resources::SERVICES, |s| s.get(&b).is_none())
        .await;
}
