//! Objects in, messages out. What an API server refuses matches nothing.

use control_api::v1::{PolicyAction, PolicyRule, PolicyTier, policy_rule_peer};
use serde_json::{Value, json};

use super::super::peers;
use super::super::rules::{
    Translated, cluster_network_policy, network_policy, unknown_parts, unknown_staged,
};
use super::super::selector::Selector;

fn netpol(spec: Value) -> Translated {
    network_policy(
        &json!({"metadata": {"namespace": "red", "name": "p", "uid": "u"}, "spec": spec}),
    )
}

fn cnp(rule: Value) -> PolicyRule {
    let object = json!({"metadata": {"name": "c"}, "spec": {"tier": "Baseline", "priority": 7,
        "subject": {"namespaces": {}}, "egress": [rule]}});
    let translated = cluster_network_policy(&object).unwrap();
    assert_eq!(translated.message.tier(), PolicyTier::Baseline);
    assert_eq!(translated.message.priority, 7);
    translated.message.egress.into_iter().next().unwrap()
}

/// A rule as text: action, peers, ports.
fn show(rule: &PolicyRule) -> String {
    let peers: Vec<String> = rule
        .peers
        .iter()
        .map(|peer| match peer.kind.as_ref().unwrap() {
            policy_rule_peer::Kind::Set(set) => set.text.clone(),
            policy_rule_peer::Kind::IpBlock(block) => match block.except.as_slice() {
                [] => block.cidr.clone(),
                except => format!("{} but {}", block.cidr, except.join(" ")),
            },
            policy_rule_peer::Kind::DomainName(name) => name.clone(),
        })
        .collect();
    let ports: Vec<String> = rule
        .ports
        .iter()
        .map(|port| {
            let protocol = format!("{:?}", port.protocol()).to_uppercase();
            match (port.first, port.last, port.name.as_str()) {
                (0, 0, "") => protocol,
                (0, 0, name) => format!("{protocol}/{name}"),
                (first, last, "") => format!("{protocol}/{first}-{last}"),
                odd => panic!("{odd:?}"),
            }
        })
        .collect();
    let any = |any: bool, list: Vec<String>| match (any, list.is_empty()) {
        (true, true) => "any".to_owned(),
        (true, false) => panic!("any and {list:?}"),
        (false, true) => "none".to_owned(),
        (false, false) => list.join(", "),
    };
    let action = format!("{:?}", rule.action());
    let (peers, ports) = (any(rule.any_peer, peers), any(rule.any_port, ports));
    format!("{action}: {peers}: {ports}")
}

#[test]
fn types_say_which_directions_are_closed() {
    for (spec, ingress, egress) in [
        (json!({}), true, false),
        (json!({"egress": []}), true, false),
        (json!({"egress": [{}]}), true, true),
        (json!({"policyTypes": []}), true, false),
        (
            json!({"policyTypes": ["Egress"], "ingress": [{}]}),
            false,
            true,
        ),
        (
            json!({"policyTypes": ["Ingress"], "egress": [{}]}),
            true,
            false,
        ),
        (json!({"policyTypes": ["Both"]}), false, false),
    ] {
        let message = netpol(spec.clone()).message;
        let isolates = (message.isolates_ingress, message.isolates_egress);
        assert_eq!(isolates, (ingress, egress), "{spec}");
        assert!(
            message.isolates_ingress || message.ingress.is_empty(),
            "{spec}"
        );
        assert!(
            message.isolates_egress || message.egress.is_empty(),
            "{spec}"
        );
    }
}

#[test]
fn peers_and_ports_of_network_policies() {
    for (rule, wanted) in [
        (json!({}), "Allow: any: any"),
        (json!({"from": [], "ports": []}), "Allow: any: any"),
        (json!({"from": null, "ports": [{}]}), "Allow: any: TCP"),
        (json!(null), "Allow: none: none"),
        (json!({"from": [{}]}), "Allow: none: any"),
        (json!({"from": "all"}), "Allow: none: any"),
        (
            json!({"from": [{"podSelector": {}}]}),
            "Allow: pods in namespace red: any",
        ),
        (
            json!({"from": [{"namespaceSelector": {}}]}),
            "Allow: pods in all namespaces: any",
        ),
        (
            json!({"from": [{"namespaceSelector": {"matchLabels": {"t": "x"}}, "podSelector": {"matchLabels": {"a": "b"}}}]}),
            "Allow: pods [a=b] in namespaces [t=x]: any",
        ),
        (
            json!({"from": [{"ipBlock": {"cidr": "10.1.2.3/8", "except": ["10.1.0.0/16"]}}]}),
            "Allow: 10.0.0.0/8 but 10.1.0.0/16: any",
        ),
        // What should have been refused, beside what is good.
        (
            json!({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}, {"podSelector": {}}]}),
            "Allow: pods in namespace red: any",
        ),
        (
            json!({"from": [{"ipBlock": {"cidr": "10.0.0.0/16", "except": ["10.0.0.0/16"]}}]}),
            "Allow: none: any",
        ),
        (
            json!({"from": [{"ipBlock": {"cidr": "10.0.0.0/16", "except": ["fd00::/64"]}}]}),
            "Allow: none: any",
        ),
        (json!({"from": [{"ipBlock": {}}]}), "Allow: none: any"),
        (
            json!({"from": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}}]}),
            "Allow: none: any",
        ),
        (
            json!({"ports": [{"port": 80}, {"protocol": "UDP", "port": "dns"}, {"protocol": "SCTP", "port": 1, "endPort": 9}]}),
            "Allow: any: TCP/80-80, UDP/dns, SCTP/1-9",
        ),
        (json!({"ports": [{"port": 0}]}), "Allow: any: none"),
        (json!({"ports": [{"port": 65536}]}), "Allow: any: none"),
        (
            json!({"ports": [{"port": 90, "endPort": 80}]}),
            "Allow: any: none",
        ),
        (json!({"ports": [{"endPort": 80}]}), "Allow: any: none"),
        (
            json!({"ports": [{"port": "http", "endPort": 80}]}),
            "Allow: any: none",
        ),
        (
            json!({"ports": [{"port": "HTTP"}, {"protocol": "ICMP"}, {"port": true}, {"port": 1}]}),
            "Allow: any: TCP/1-1",
        ),
    ] {
        let translated = netpol(json!({"ingress": [rule.clone()]}));
        assert_eq!(show(&translated.message.ingress[0]), wanted, "{rule}");
    }
}

#[test]
fn a_policy_whose_own_selector_is_bad_applies_to_nobody() {
    assert!(
        netpol(json!({"podSelector": {"matchLabels": {"a": 1}}}))
            .subject
            .is_none()
    );
    let all = netpol(json!({})).subject.unwrap();
    assert_eq!(all.to_string(), "pods in namespace red");
    let object = json!({"metadata": {"name": "c"}, "spec": {"tier": "Admin", "priority": 1,
        "subject": {"namespaces": {}, "pods": {"podSelector": {}}}}});
    assert!(cluster_network_policy(&object).unwrap().subject.is_none());
}

#[test]
fn rules_of_cluster_network_policies() {
    for (rule, wanted) in [
        (
            json!({"action": "Accept", "to": [{"namespaces": {}}, {"nodes": {"matchLabels": {"a": "b"}}},
                {"networks": ["10.1.0.0/8", "::/0"]}, {"domainNames": ["*.Example.org."]}]}),
            "Allow: pods in all namespaces, nodes [a=b], 10.0.0.0/8, ::/0, *.example.org: any",
        ),
        (
            json!({"action": "Pass", "to": [{"pods": {"podSelector": {"matchLabels": {"a": "b"}}}}], "protocols": [
                {"tcp": {"destinationPort": {"number": 80}}}, {"udp": {"destinationPort": {"range": {"start": 1, "end": 9}}}},
                {"destinationNamedPort": "http"}]}),
            "Pass: pods [a=b] in all namespaces: TCP/80-80, UDP/1-9, UNSPECIFIED/http",
        ),
        // Kinds of peers and protocols that nobody here knows.
        (
            json!({"action": "Accept", "to": [{"namespaces": {}}, {"planets": {}}]}),
            "Allow: none: none",
        ),
        (
            json!({"action": "Deny", "to": [{"namespaces": {}}, {}]}),
            "Deny: any: any",
        ),
        (
            json!({"action": "Pass", "to": [{"planets": {}}], "protocols": [{"tcp": {"destinationPort": {"number": 80}}}]}),
            "Deny: any: any",
        ),
        (
            json!({"action": "Accept", "to": [{"namespaces": {}}], "protocols": [{"icmp": {}}]}),
            "Allow: none: none",
        ),
        (
            json!({"action": "Deny", "to": [{"namespaces": {}}], "protocols": [{"tcp": {}}]}),
            "Deny: any: any",
        ),
        (
            json!({"action": "Deny", "to": [{"domainNames": ["example.org"]}]}),
            "Deny: any: any",
        ),
        (
            json!({"action": "Deny", "to": [{"networks": ["10.0.0.1"]}]}),
            "Deny: any: any",
        ),
        (json!({"action": "Accept"}), "Allow: none: any"),
        (
            json!({"action": "Shrug", "to": [{"namespaces": {}}]}),
            "Unspecified: none: none",
        ),
    ] {
        assert_eq!(show(&cnp(rule.clone())), wanted, "{rule}");
    }
}

#[test]
fn nodes_are_no_source_in_cluster_network_policies() {
    let object = json!({"metadata": {"name": "c"}, "spec": {"tier": "Admin", "priority": 1,
        "subject": {"namespaces": {}}, "ingress": [{"action": "Deny", "name": "n", "from": [{"nodes": {}}]}]}});
    let message = cluster_network_policy(&object).unwrap().message;
    assert_eq!(show(&message.ingress[0]), "Deny: any: any");
    assert_eq!(message.ingress[0].name, "n");
    let unordered = json!({"metadata": {"name": "c"}, "spec": {"tier": "Middle", "priority": 1}});
    assert!(cluster_network_policy(&unordered).is_none());
}

#[test]
fn selectors_match_as_kubernetes_has_it() {
    let labels = [
        ("a".to_owned(), "x".to_owned()),
        ("e".to_owned(), String::new()),
    ]
    .into();
    let expression = |key: &str, operator: &str, values: Value| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
    for (selector, wanted) in [
        (json!({}), Some(true)),
        (json!({"matchLabels": {"a": "x", "e": ""}}), Some(true)),
        (json!({"matchLabels": {"a": "y"}}), Some(false)),
        (expression("a", "In", json!(["y", "x"])), Some(true)),
        (expression("b", "In", json!(["x"])), Some(false)),
        (expression("a", "NotIn", json!(["x"])), Some(false)),
        (expression("b", "NotIn", json!(["x"])), Some(true)),
        (expression("e", "Exists", json!(null)), Some(true)),
        (expression("b", "Exists", json!([])), Some(false)),
        (expression("b", "DoesNotExist", json!(null)), Some(true)),
        (expression("a", "In", json!([])), None),
        (expression("a", "Exists", json!(["x"])), None),
        (expression("a", "Gt", json!(["1"])), None),
        (expression("a/b/c", "Exists", json!(null)), None),
        (json!({"matchLabels": {"a": "x,b=y"}}), None),
        (json!([]), None),
    ] {
        let parsed = Selector::parse(&selector);
        assert_eq!(parsed.map(|s| s.matches(&labels)), wanted, "{selector}");
    }
}

#[test]
fn pods_as_peers() {
    let mut object = json!({"metadata": {"namespace": "d", "name": "p", "deletionTimestamp": "2026-01-01T00:00:01Z"},
        "spec": {"nodeName": "n", "containers": [
                {"ports": [{"name": "web", "containerPort": 80}, {"containerPort": 81}]},
                {"ports": [{"name": "web", "containerPort": 82, "protocol": "UDP"}, {"name": "web", "containerPort": 83}]}],
            "initContainers": [{"restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 90}]},
                {"ports": [{"name": "init", "containerPort": 91}]}]},
        "status": {"phase": "Pending", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "FD00::1"}]}});
    let message = peers::pod(&object).unwrap().message;
    assert_eq!(message.addresses, ["10.0.0.1", "fd00::1"]);
    let ports: Vec<(&str, u32)> = message
        .named_ports
        .iter()
        .map(|p| (&*p.name, p.port))
        .collect();
    assert_eq!(ports, [("web", 80), ("web", 82), ("side", 90)]);
    object["metadata"]["uid"] = json!("of the object");
    assert_eq!(peers::pod(&object).unwrap().message.uid, "of the object");
    object["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "of the pod"});
    assert_eq!(peers::pod(&object).unwrap().message.uid, "of the pod");
    object["status"]["phase"] = json!("Succeeded");
    assert!(peers::pod(&object).unwrap().message.addresses.is_empty());
    object["spec"]["hostNetwork"] = json!(true);
    assert!(peers::pod(&object).is_none());
}

#[test]
fn an_annotation_stages_a_policy() {
    let staged = |value: &str| {
        let object = json!({"metadata": {"namespace": "d", "name": "p",
            "annotations": {"weir.dev/staged": value}}, "spec": {}});
        network_policy(&object).message.staged
    };
    assert!(staged("true") && !staged("false"));
    // What an API server has let through all the same is enforced, and named.
    for unknown in ["", "True", "yes", "1"] {
        assert!(!staged(unknown), "{unknown}");
        let object = json!({"metadata": {"annotations": {"weir.dev/staged": unknown}}});
        assert_eq!(unknown_staged(&object), Some(unknown));
    }
    for known in [
        json!({}),
        json!({"weir.dev/staged": "false"}),
        json!({"weir.dev/staged": "true"}),
    ] {
        assert_eq!(
            unknown_staged(&json!({"metadata": {"annotations": known}})),
            None
        );
    }
    assert_eq!(
        netpol(json!({"ingress": [{}]})).message.ingress[0].action(),
        PolicyAction::Allow
    );
}

#[test]
fn parts_of_unknown_kinds_are_named() {
    let policy = json!({"spec": {
        "tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
        "ingress": [{"action": "Pass", "from": [{"pods": {"podSelector": {}}}, {"clouds": {}}]}],
        "egress": [
            {"action": "Accept", "to": [{"domainNames": ["a.example"]}, {"networks": ["10.0.0.0/8"]}]},
            {"action": "Deny", "to": [{"domainNames": ["a.example"]}, {}], "protocols": [{"quic": {}}]},
            {"action": "Log", "to": [{"nodes": {}}]},
        ],
    }});
    assert_eq!(
        unknown_parts(&policy),
        [
            "spec.ingress[0].from[1]",
            "spec.egress[1].to[0]",
            "spec.egress[1].to[1]",
            "spec.egress[1].protocols[0]",
            "spec.egress[2].action",
        ]
    );
    let known = json!({"spec": {"subject": {"pods": {"podSelector": {}}}}});
    assert!(unknown_parts(&known).is_empty());
    let nobody = json!({"spec": {"subject": {"machines": {}}}});
    assert_eq!(unknown_parts(&nobody), ["spec.subject"]);
}
