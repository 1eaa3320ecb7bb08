//! Services through every change of type and policy, on a real store: what they keep, get and give back.

use serde_json::{Value, json};

use super::super::Target;
use super::super::tests::{Fixture, options, service};
use crate::apiserver::registry::SubresourceKind;
use crate::config::Network;
use crate::status::ApiError;

const IPS: &str = "networking.k8s.io/ipaddresses/";
const PORTS: &str = "weir/nodeports/";

impl Fixture {
    async fn replace(&self, spec: Value) -> Result<Value, ApiError> {
        let def = self.api.resource("", "v1", "services")?;
        let target = Target {
            def: &def,
            namespace: "default",
            name: "s",
            sub: None,
        };
        let (object, _) = self
            .api
            .update(target, service("s", spec), &options())
            .await?;
        Ok(Value::clone(&object))
    }

    async fn status(&self, ingress: Value) -> Result<Value, ApiError> {
        let def = self.api.resource("", "v1", "services")?;
        let target = Target {
            def: &def,
            namespace: "default",
            name: "s",
            sub: Some(SubresourceKind::Status),
        };
        let mut object = service("s", json!({}));
        object["status"] = json!({"loadBalancer": {"ingress": ingress}});
        let (object, _) = self.api.update(target, object, &options()).await?;
        Ok(Value::clone(&object))
    }

    /// Claims beyond those of the system's own Services.
    async fn claims(&self) -> (usize, usize) {
        let own = 3;
        (
            self.keys(IPS).await.len() - own,
            self.keys(PORTS).await.len(),
        )
    }
}

fn is_unset(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

/// Each type, what a balancer with everything that becomes one must have lost, and how many addresses and ports stay
/// claimed.
const LOST: &[(&str, &str, (usize, usize))] = &[
    (
        "NodePort",
        "healthCheckNodePort loadBalancerClass allocateLoadBalancerNodePorts",
        (1, 2),
    ),
    (
        "ClusterIP",
        "healthCheckNodePort loadBalancerClass allocateLoadBalancerNodePorts externalTrafficPolicy",
        (1, 0),
    ),
    (
        "ExternalName",
        "healthCheckNodePort loadBalancerClass allocateLoadBalancerNodePorts externalTrafficPolicy \
         internalTrafficPolicy clusterIP clusterIPs ipFamilies ipFamilyPolicy",
        (0, 0),
    ),
];

fn full_balancer() -> Value {
    json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "loadBalancerClass": "example.com/a",
        "sessionAffinity": "ClientIP", "ports": [{"name": "a", "port": 80}, {"name": "b", "port": 81}]})
}

#[tokio::test]
async fn every_change_of_type_gives_back_what_the_new_one_cannot_have() {
    for (kind, unset, claims) in LOST {
        let f = Fixture::new().await;
        let made = f
            .create("services", service("s", full_balancer()))
            .await
            .unwrap();
        assert_eq!(
            made["spec"]["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"],
            10_800
        );
        assert_eq!(
            f.claims().await,
            (1, 3),
            "an address, two node ports, a health check port"
        );
        let given = f.status(json!([{"ip": "192.0.2.7"}])).await.unwrap();
        let ingress = &given["status"]["loadBalancer"]["ingress"];
        assert_eq!(ingress, &json!([{"ip": "192.0.2.7", "ipMode": "VIP"}]));
        let mut change = json!({"spec": {"type": kind}});
        if *kind == "ExternalName" {
            change["spec"]["externalName"] = json!("a.example.com");
        }
        let now = f.merge("services", "s", change).await.unwrap();
        for field in unset.split_whitespace() {
            assert!(is_unset(&now["spec"][field]), "{kind}: {field} in {now}");
        }
        let ports = now["spec"]["ports"].as_array().unwrap();
        assert_eq!(ports.iter().all(|p| p["nodePort"].is_null()), claims.1 == 0);
        assert_eq!(
            now["status"],
            json!({"loadBalancer": {}}),
            "{kind}: balancer's addresses"
        );
        assert_eq!(f.claims().await, *claims, "{kind}");
        let refused = f.status(json!([{"ip": "192.0.2.7"}])).await.unwrap_err();
        assert_eq!(refused.code, 422, "{kind}: {refused}");
        // And back: a new address where there was none, ports again.
        let back = json!({"spec": {"type": "LoadBalancer", "externalName": null}});
        let back = f.merge("services", "s", back).await.unwrap();
        assert_eq!(
            back["spec"]["externalTrafficPolicy"],
            if *kind == "NodePort" {
                "Local"
            } else {
                "Cluster"
            }
        );
        assert_eq!(back["spec"]["allocateLoadBalancerNodePorts"], true);
        f.delete("services", "s").await.unwrap();
        assert_eq!(f.claims().await, (0, 0), "{kind}: deletion gives all back");
    }
}

/// A replacing write that names no allocated field keeps them all; what it names differently, it changes.
#[tokio::test]
async fn what_the_server_chose_survives_a_plain_replace() {
    let f = Fixture::new().await;
    let spec = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ipFamilyPolicy": "PreferDualStack",
        "ports": [{"name": "a", "port": 80}, {"name": "b", "port": 81}]});
    let made = f.create("services", service("s", spec)).await.unwrap();
    let spec = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local",
        "ports": [{"name": "b", "port": 8081}, {"name": "c", "port": 83}]});
    let now = f.replace(spec).await.unwrap();
    for field in [
        "clusterIP",
        "clusterIPs",
        "ipFamilies",
        "ipFamilyPolicy",
        "healthCheckNodePort",
    ] {
        assert_eq!(now["spec"][field], made["spec"][field], "{field}");
    }
    // Node ports follow the name of their port.
    assert_eq!(
        now["spec"]["ports"][0]["nodePort"],
        made["spec"]["ports"][1]["nodePort"]
    );
    assert_ne!(
        now["spec"]["ports"][1]["nodePort"],
        made["spec"]["ports"][0]["nodePort"]
    );
    assert_eq!(f.claims().await, (2, 3));
}

#[tokio::test]
async fn node_ports_of_a_balancer_may_be_left_out_and_removed() {
    let f = Fixture::new().await;
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    f.create("services", service("s", spec)).await.unwrap();
    let off = json!({"spec": {"allocateLoadBalancerNodePorts": false}});
    let kept = f.merge("services", "s", off).await.unwrap();
    assert!(
        kept["spec"]["ports"][0]["nodePort"].is_u64(),
        "not by itself"
    );
    let spec = json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": [{"port": 80}]});
    let gone = f.replace(spec).await.unwrap();
    assert!(gone["spec"]["ports"][0]["nodePort"].is_null());
    assert_eq!(f.claims().await, (1, 0));
}

#[tokio::test]
async fn one_number_serves_two_protocols_and_two_services() {
    let f = Fixture::new().await;
    let dns = json!({"type": "NodePort", "ports": [{"name": "u", "port": 53, "protocol": "UDP"}, {"name": "t", "port": 53}]});
    let made = f.create("services", service("s", dns)).await.unwrap();
    let (udp, tcp) = (
        &made["spec"]["ports"][0]["nodePort"],
        &made["spec"]["ports"][1]["nodePort"],
    );
    assert_eq!(udp, tcp, "one number for one port");
    let sctp =
        json!({"type": "NodePort", "ports": [{"port": 53, "protocol": "SCTP", "nodePort": udp}]});
    f.create("services", service("t", sctp)).await.unwrap();
    let taken = json!({"type": "NodePort", "ports": [{"port": 53, "nodePort": udp}]});
    let refused = f.create("services", service("u", taken)).await.unwrap_err();
    assert_eq!(refused.code, 422);
    let cause = &refused.details.causes[0];
    assert_eq!(cause.field, "spec.ports[0].nodePort");
    assert_eq!(
        cause.message,
        format!("Invalid value: {udp}: provided port is already allocated")
    );
    // The owner may move the number between its ports.
    let swap = json!({"type": "NodePort", "ports": [{"name": "x", "port": 99, "nodePort": tcp}]});
    f.replace(swap).await.unwrap();
    assert_eq!(f.keys(PORTS).await.len(), 2);
}

#[tokio::test]
async fn the_range_of_node_ports_is_configured_and_ends() {
    let network = Network {
        node_port_first: 31000,
        node_port_last: 31001,
        ..Network::default()
    };
    let f = Fixture::with(network).await;
    let node_port = |port: Value| json!({"type": "NodePort", "ports": [port]});
    let below = f.create(
        "services",
        service("s", node_port(json!({"port": 80, "nodePort": 30000}))),
    );
    let refused = below.await.unwrap_err();
    assert!(
        refused
            .message
            .contains("not in the valid range. The range of valid ports is 31000-31001"),
        "{refused}"
    );
    for name in ["s", "t"] {
        let made = f.create("services", service(name, node_port(json!({"port": 80}))));
        made.await.unwrap();
    }
    let full = f.create("services", service("u", node_port(json!({"port": 80}))));
    assert_eq!(full.await.unwrap_err().code, 500);
    let other = node_port(json!({"port": 80, "protocol": "UDP"}));
    f.create("services", service("u", other)).await.unwrap();
}

/// Changes of that balancer that are refused, and the field that is named.
const REFUSED: &str = "
{loadBalancerClass: example.com/b} | spec.loadBalancerClass
{loadBalancerClass: null} | spec.loadBalancerClass
{healthCheckNodePort: 30001} | spec.healthCheckNodePort
{externalTrafficPolicy: Near} | spec.externalTrafficPolicy
{internalTrafficPolicy: Near} | spec.internalTrafficPolicy
{trafficDistribution: PreferFar} | spec.trafficDistribution
{loadBalancerSourceRanges: [192.0.2.1]} | spec.loadBalancerSourceRanges[0]
{type: NodePort, loadBalancerSourceRanges: [192.0.2.0/24]} | spec.loadBalancerSourceRanges
{type: ClusterIP, externalTrafficPolicy: Cluster} | spec.externalTrafficPolicy
{type: ClusterIP, loadBalancerClass: example.com/b} | spec.loadBalancerClass
{type: ClusterIP, allocateLoadBalancerNodePorts: false} | spec.allocateLoadBalancerNodePorts
{clusterIP: None, clusterIPs: [None]} | spec.clusterIPs[0]
{ipFamilies: [IPv6], clusterIP: null, clusterIPs: null} | spec.ipFamilies[0]
{sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}} | spec.sessionAffinityConfig.clientIP.timeoutSeconds
{externalIPs: [127.0.0.1]} | spec.externalIPs[0]
{ports: [{port: 10250}]} | spec.ports[0]
";

#[tokio::test]
async fn refused_changes_name_their_field() {
    let f = Fixture::with(Network {
        allow_external_ips: true,
        ..Network::default()
    })
    .await;
    f.create("services", service("s", full_balancer()))
        .await
        .unwrap();
    for line in REFUSED.trim().lines() {
        let (change, field) = line.split_once('|').unwrap();
        let (change, field) = (change.trim(), field.trim());
        let spec: Value = serde_yaml_ng::from_str(change).unwrap();
        let refused = f.merge("services", "s", json!({"spec": spec})).await;
        let refused = refused.expect_err(change);
        assert_eq!(refused.code, 422, "{change}: {refused}");
        let fields: Vec<_> = refused.details.causes.iter().map(|c| &c.field).collect();
        assert!(fields.iter().any(|f| *f == field), "{change}: {fields:?}");
    }
}

#[tokio::test]
async fn external_addresses_are_off_unless_allowed_and_never_the_clusters_own() {
    let f = Fixture::new().await;
    let with = |ip: &str| json!({"externalIPs": [ip], "ports": [{"port": 80}]});
    let denied = f
        .create("services", service("s", with("198.51.100.7")))
        .await
        .unwrap_err();
    assert_eq!(denied.code, 403);
    assert!(
        denied.message.contains("denied by admission control"),
        "{denied}"
    );

    let network = Network {
        allow_external_ips: true,
        ..Network::default()
    };
    let f = Fixture::with(network).await;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"},
        "spec": {"podCIDRs": ["10.9.1.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.11"}]}});
    f.create("nodes", node).await.unwrap();
    for ip in [
        "192.0.2.11",
        "192.0.2.1",
        "10.244.3.4",
        "10.9.1.4",
        "10.96.0.10",
        "10.96.7.7",
        "fd00:10:96::a",
    ] {
        let refused = f
            .create("services", service("s", with(ip)))
            .await
            .unwrap_err();
        assert_eq!(refused.code, 422, "{ip}");
        assert_eq!(refused.details.causes[0].field, "spec.externalIPs[0]");
    }
    let made = f
        .create("services", service("s", with("198.51.100.7")))
        .await
        .unwrap();
    assert_eq!(made["spec"]["externalTrafficPolicy"], "Cluster");
    let local = json!({"spec": {"type": "NodePort", "externalTrafficPolicy": "Local"}});
    f.merge("services", "s", local).await.unwrap();
    let back = json!({"spec": {"type": "ClusterIP"}});
    let back = f.merge("services", "s", back).await.unwrap();
    assert_eq!(
        back["spec"]["externalTrafficPolicy"], "Local",
        "it still has a meaning"
    );
}

#[tokio::test]
async fn claims_and_services_are_brought_into_agreement() {
    let f = Fixture::new().await;
    let spec = json!({"type": "NodePort", "ports": [{"port": 80}]});
    let made = f.create("services", service("s", spec)).await.unwrap();
    let ip = made["spec"]["clusterIP"].as_str().unwrap();
    let port = &made["spec"]["ports"][0]["nodePort"];
    assert_eq!(f.api.repair_services().await.unwrap(), 0);
    let lost = [
        crate::store::Op::Delete {
            key: format!("{IPS}{ip}"),
            expect: crate::store::Expect::Any,
        },
        crate::store::Op::Put {
            key: format!("{PORTS}TCP/30777"),
            value: "default/gone".into(),
            expect: crate::store::Expect::Absent,
        },
        crate::store::Op::Delete {
            key: format!("{PORTS}TCP/{port}"),
            expect: crate::store::Expect::Any,
        },
    ];
    f.api.store().commit(lost.into()).await.unwrap();
    assert_eq!(f.api.repair_services().await.unwrap(), 3);
    assert_eq!(f.claims().await, (1, 1));
    assert_eq!(f.keys(PORTS).await, [format!("{PORTS}TCP/{port}")]);
    assert_eq!(f.api.repair_services().await.unwrap(), 0);
}
