use serde_json::{Value, json};

use crate::apiserver::defaults::apply_defaults;
use crate::apiserver::registry::Gvk;
use crate::apiserver::schema::{normalize, schema};
use crate::apiserver::validation::{validate_create, validate_status_update, validate_update};
use crate::status::Cause;

const NETPOL: Gvk<'_> = Gvk {
    group: "networking.k8s.io",
    version: "v1",
    kind: "NetworkPolicy",
};
const CNP: Gvk<'_> = Gvk {
    group: "policy.networking.k8s.io",
    version: "v1alpha2",
    kind: "ClusterNetworkPolicy",
};

fn object(gvk: Gvk<'_>, spec: Value) -> Value {
    let mut object = json!({"metadata": {"name": "x", "namespace": "red"}, "spec": spec});
    if gvk == CNP {
        object["metadata"] = json!({"name": "x"});
    }
    let t = schema().kind(gvk.group, gvk.version, gvk.kind).unwrap();
    // As the write path does: what the type does not know is dropped.
    normalize::normalize(t, &mut object).unwrap();
    apply_defaults(gvk, &mut object, None);
    object
}

fn show(causes: Vec<Cause>) -> Vec<String> {
    let show = |cause: Cause| format!("{}: {}", cause.field, cause.message);
    causes.into_iter().map(show).collect()
}

fn netpol(spec: Value) -> Vec<String> {
    show(validate_create(NETPOL, &object(NETPOL, spec)))
}

fn from(peer: Value) -> Vec<String> {
    netpol(json!({"ingress": [{"from": [peer]}]}))
}

fn port(port: Value) -> Vec<String> {
    netpol(json!({"egress": [{"ports": [port]}]}))
}

#[test]
fn what_a_network_policy_may_say() {
    for spec in [
        json!({}),
        json!({"ingress": [{"ports": [{"protocol": "TCP", "port": 80, "endPort": 80}, {}]}]}),
        json!({"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}, {"podSelector": {}}]}]}),
        json!({"ingress": [{"ports": [{"port": "a23456789012345"}]}]}),
        json!({"policyTypes": ["Egress", "Ingress"]}),
    ] {
        assert_eq!(netpol(spec.clone()), [""; 0], "{spec}");
    }
}

#[test]
fn peers_are_refused_with_the_words_of_kubernetes() {
    let at = "spec.ingress[0].from[0]";
    for (peer, wanted) in [
        (
            json!({}),
            format!("{at}: Required value: must specify a peer"),
        ),
        (
            json!({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}),
            format!("{at}: Forbidden: may not specify both ipBlock and another peer"),
        ),
        (
            json!({"ipBlock": {}}),
            format!("{at}.ipBlock.cidr: Required value"),
        ),
        (
            json!({"ipBlock": {"cidr": "10.0.0.1"}}),
            format!(
                "{at}.ipBlock.cidr: Invalid value: \"10.0.0.1\": must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
            ),
        ),
        (
            json!({"ipBlock": {"cidr": "10.0.0.1/8"}}),
            format!(
                "{at}.ipBlock.cidr: Invalid value: \"10.0.0.1/8\": must not have bits set beyond the prefix length"
            ),
        ),
        (
            json!({"ipBlock": {"cidr": "010.0.0.0/8"}}),
            format!(
                "{at}.ipBlock.cidr: Invalid value: \"010.0.0.0/8\": must not have leading 0s in IP or prefix length"
            ),
        ),
        (
            json!({"ipBlock": {"cidr": "::ffff:10.0.0.0/104"}}),
            format!(
                "{at}.ipBlock.cidr: Invalid value: \"::ffff:10.0.0.0/104\": must not have an IPv4-mapped IPv6 address"
            ),
        ),
        (
            json!({"ipBlock": {"cidr": "10.0.0.0/16", "except": ["10.1.0.0/24"]}}),
            format!(
                "{at}.ipBlock.except[0]: Invalid value: \"10.1.0.0/24\": must be a strict subset of `cidr`"
            ),
        ),
        (
            json!({"ipBlock": {"cidr": "10.0.0.0/16", "except": ["10.0.0.0/24", "10.0.0.0/16"]}}),
            format!(
                "{at}.ipBlock.except[1]: Invalid value: \"10.0.0.0/16\": must be a strict subset of `cidr`"
            ),
        ),
        (
            json!({"ipBlock": {"cidr": "10.0.0.0/16", "except": ["fd00::/64"]}}),
            format!(
                "{at}.ipBlock.except[0]: Invalid value: \"fd00::/64\": must be a strict subset of `cidr`"
            ),
        ),
    ] {
        assert_eq!(from(peer.clone()), [wanted], "{peer}");
    }
}

#[test]
fn selectors_are_refused_with_the_words_of_kubernetes() {
    let at = "spec.ingress[0].from[0]";
    for (peer, wanted) in [
        (
            json!({"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}),
            format!(
                "{at}.podSelector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'"
            ),
        ),
        (
            json!({"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["x"]}]}}),
            format!(
                "{at}.namespaceSelector.matchExpressions[0].values: Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'"
            ),
        ),
        (
            json!({"podSelector": {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}}),
            format!(
                "{at}.podSelector.matchExpressions[0].operator: Invalid value: \"Gt\": not a valid selector operator"
            ),
        ),
    ] {
        assert_eq!(from(peer.clone()), [wanted], "{peer}");
    }
}

#[test]
fn ports_are_refused_with_the_words_of_kubernetes() {
    let at = "spec.egress[0].ports[0]";
    for (item, wanted) in [
        (
            json!({"endPort": 90}),
            format!(
                "{at}.endPort: Invalid value: 90: may not be specified when `port` is not specified"
            ),
        ),
        (
            json!({"port": 90, "endPort": 80}),
            format!("{at}.endPort: Invalid value: 80: must be greater than or equal to `port`"),
        ),
        (
            json!({"port": "http", "endPort": 90}),
            format!(
                "{at}.endPort: Invalid value: 90: may not be specified when `port` is non-numeric"
            ),
        ),
        (
            json!({"port": 0}),
            format!("{at}.port: Invalid value: 0: must be between 1 and 65535, inclusive"),
        ),
        (
            json!({"port": 65536}),
            format!("{at}.port: Invalid value: 65536: must be between 1 and 65535, inclusive"),
        ),
        (
            json!({"port": 1, "endPort": 65536}),
            format!("{at}.endPort: Invalid value: 65536: must be between 1 and 65535, inclusive"),
        ),
        (
            json!({"protocol": "ICMP", "port": 1}),
            format!(
                "{at}.protocol: Unsupported value: \"ICMP\": supported values: \"TCP\", \"UDP\", \"SCTP\""
            ),
        ),
    ] {
        assert_eq!(port(item.clone()), [wanted], "{item}");
    }
    for name in ["HTTP", "", "80", "a23456789012345x"] {
        let found = port(json!({"port": name}));
        let all_at_port = |f: &String| f.starts_with(&format!("{at}.port: Invalid value"));
        assert!(
            !found.is_empty() && found.iter().all(all_at_port),
            "{found:?}"
        );
    }
}

#[test]
fn types_are_refused_with_the_words_of_kubernetes() {
    assert_eq!(
        netpol(json!({"policyTypes": ["Ingress", "Both"]})),
        [
            "spec.policyTypes[1]: Unsupported value: \"Both\": supported values: \"Ingress\", \"Egress\""
        ]
    );
    assert_eq!(
        netpol(json!({"policyTypes": ["Ingress", "Egress", "Ingress"]})),
        [
            "spec.policyTypes: Invalid value: [\"Ingress\",\"Egress\",\"Ingress\"]: may not specify more than two policyTypes"
        ]
    );
}

#[test]
fn a_block_that_was_there_before_may_stay() {
    let with = |cidrs: &[&str]| {
        let blocks: Vec<Value> = cidrs
            .iter()
            .map(|c| json!({"ipBlock": {"cidr": c}}))
            .collect();
        object(NETPOL, json!({"ingress": [{"from": blocks}]}))
    };
    let old = with(&["10.0.0.1/8"]);
    assert_eq!(validate_create(NETPOL, &old).len(), 1);
    assert_eq!(
        validate_update(NETPOL, &with(&["11.0.0.0/8", "10.0.0.1/8"]), &old),
        []
    );
    assert_eq!(
        validate_update(NETPOL, &with(&["10.0.0.2/8"]), &old).len(),
        1
    );
}

fn cnp(change: Value) -> Vec<String> {
    let mut spec = json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": {}}});
    crate::apiserver::patch::apply_merge_patch(&mut spec, &change);
    show(validate_create(CNP, &object(CNP, spec)))
}

fn to(action: &str, peer: Value) -> Vec<String> {
    cnp(json!({"egress": [{"action": action, "to": [peer]}]}))
}

fn protocol(protocol: Value) -> Vec<String> {
    cnp(
        json!({"ingress": [{"action": "Pass", "from": [{"namespaces": {}}], "protocols": [protocol]}]}),
    )
}

#[test]
fn what_a_cluster_network_policy_may_say() {
    for change in [
        json!({"tier": "Baseline", "priority": 1000}),
        json!({"subject": {"namespaces": null, "pods": {"podSelector": {}}}}),
        json!({"ingress": [{"name": "n", "action": "Deny", "from": [{"namespaces": {}}, {"pods": {"namespaceSelector": {}, "podSelector": {}}}],
            "protocols": [{"tcp": {"destinationPort": {"number": 80}}}, {"destinationNamedPort": "http"},
                {"sctp": {"destinationPort": {"range": {"start": 1, "end": 65535}}}}]}]}),
        json!({"egress": [{"action": "Accept", "to": [{"nodes": {}}, {"networks": ["10.0.0.1/8", "::/0"]},
            {"domainNames": ["a.b", "*.Kubernetes.io."]}], "protocols": [{"udp": {"destinationPort": {"number": 53}}}]}]}),
    ] {
        assert_eq!(cnp(change.clone()), [""; 0], "{change}");
    }
}

#[test]
fn cluster_network_policies_are_refused_with_the_words_of_their_schema() {
    for (change, wanted) in [
        (
            json!({"tier": "Middle"}),
            "spec.tier: Unsupported value: \"Middle\": supported values: \"Admin\", \"Baseline\"",
        ),
        (json!({"tier": null}), "spec.tier: Required value"),
        (json!({"priority": null}), "spec.priority: Required value"),
        (
            json!({"priority": -1}),
            "spec.priority: Invalid value: -1: spec.priority in body should be greater than or equal to 0",
        ),
        (
            json!({"priority": 1001}),
            "spec.priority: Invalid value: 1001: spec.priority in body should be less than or equal to 1000",
        ),
        (json!({"subject": null}), "spec.subject: Required value"),
        (
            json!({"subject": {"namespaces": null}}),
            "spec.subject: Invalid value: 0: spec.subject in body should have at least 1 properties",
        ),
        (
            json!({"subject": {"pods": {"podSelector": {}}}}),
            "spec.subject: Too many: 2: must have at most 1 item",
        ),
        (
            json!({"subject": {"namespaces": null, "pods": {}}}),
            "spec.subject.pods.podSelector: Required value",
        ),
        (
            json!({"ingress": [{"action": "Deny"}]}),
            "spec.ingress[0].from: Required value",
        ),
        (
            json!({"ingress": [{"action": "Deny", "from": []}]}),
            "spec.ingress[0].from: Invalid value: 0: spec.ingress[0].from in body should have at least 1 items",
        ),
        (
            json!({"ingress": [{"action": "Drop", "from": [{"namespaces": {}}]}]}),
            "spec.ingress[0].action: Unsupported value: \"Drop\": supported values: \"Accept\", \"Deny\", \"Pass\"",
        ),
        // Sources are pods: other kinds of peers are unknown here.
        (
            json!({"ingress": [{"action": "Deny", "from": [{"nodes": {}}]}]}),
            "spec.ingress[0].from[0]: Invalid value: 0: spec.ingress[0].from[0] in body should have at least 1 properties",
        ),
    ] {
        assert_eq!(cnp(change.clone()), [wanted], "{change}");
    }
}

#[test]
fn peers_of_cluster_network_policies_have_limits() {
    let peers = vec![json!({"namespaces": {}}); 26];
    let rule = json!({"action": "Deny", "from": peers});
    assert_eq!(
        cnp(json!({"ingress": [rule]})),
        ["spec.ingress[0].from: Too many: 26: must have at most 25 items"]
    );
    let rules = vec![json!({"action": "Deny", "to": [{"namespaces": {}}]}); 26];
    assert_eq!(
        cnp(json!({"egress": rules})),
        ["spec.egress: Too many: 26: must have at most 25 items"]
    );
    let at = "spec.egress[0].to[0]";
    for (action, peer, wanted) in [
        (
            "Deny",
            json!({"networks": ["10.0.0.1"]}),
            format!("{at}.networks[0]: Invalid value: \"10.0.0.1\": Invalid CIDR format provided"),
        ),
        (
            "Deny",
            json!({"networks": ["::/0", "::/0"]}),
            format!("{at}.networks[1]: Duplicate value: \"::/0\""),
        ),
        (
            "Deny",
            json!({"domainNames": ["a.b"]}),
            format!(
                "{at}.domainNames: Forbidden: may only be used in rules with the action Accept"
            ),
        ),
        (
            "Deny",
            json!({"namespaces": {}, "nodes": {}}),
            format!("{at}: Too many: 2: must have at most 1 item"),
        ),
    ] {
        assert_eq!(to(action, peer.clone()), [wanted], "{peer}");
    }
    for name in ["com", "*", "a.*.b", "-a.b", "a..b"] {
        let found = to("Accept", json!({"domainNames": [name]}));
        assert!(
            found[0].contains("in body should match"),
            "{name}: {found:?}"
        );
    }
}

#[test]
fn protocols_of_cluster_network_policies_have_limits() {
    let at = "spec.ingress[0].protocols[0]";
    for (item, wanted) in [
        (
            json!({"icmp": {}}),
            format!("{at}: Invalid value: 0: {at} in body should have at least 1 properties"),
        ),
        (
            json!({"tcp": {}}),
            format!(
                "{at}.tcp: Invalid value: 0: {at}.tcp in body should have at least 1 properties"
            ),
        ),
        (
            json!({"tcp": {"destinationPort": {"number": 65536}}}),
            format!(
                "{at}.tcp.destinationPort.number: Invalid value: 65536: {at}.tcp.destinationPort.number in body should be less than or equal to 65535"
            ),
        ),
        (
            json!({"udp": {"destinationPort": {"range": {"start": 9, "end": 9}}}}),
            format!(
                "{at}.udp.destinationPort.range: Invalid value: {{\"start\":9,\"end\":9}}: Start port must be less than End port"
            ),
        ),
        (
            json!({"udp": {"destinationPort": {"range": {"start": 9}}}}),
            format!("{at}.udp.destinationPort.range.end: Required value"),
        ),
    ] {
        assert_eq!(protocol(item.clone()), [wanted], "{item}");
    }
    let named = json!({"egress": [{"action": "Deny", "to": [{"nodes": {}}], "protocols": [{"destinationNamedPort": "a"}]}]});
    assert!(cnp(named)[0].ends_with("there are no namedPorts for networks/nodes/domainNames"));
}

#[test]
fn conditions_say_something() {
    let mut new = object(
        CNP,
        json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": {}}}),
    );
    let old = new.clone();
    new["status"]["conditions"] = json!([{"type": "Enforced", "status": "True", "reason": "Applied", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
    assert_eq!(validate_status_update(CNP, &new, &old), []);
    new["status"]["conditions"][0]["status"] = json!("Maybe");
    assert_eq!(validate_status_update(CNP, &new, &old).len(), 1);
}

#[test]
fn a_policy_is_staged_by_one_word_only() {
    for gvk in [NETPOL, CNP] {
        let spec = if gvk == CNP {
            json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}})
        } else {
            json!({})
        };
        let policy = |value: Option<&str>| {
            let mut policy = object(gvk, spec.clone());
            policy["metadata"]["resourceVersion"] = json!("1");
            if let Some(value) = value {
                policy["metadata"]["annotations"] = json!({"weir.dev/staged": value});
            }
            policy
        };
        for good in [None, Some("true"), Some("false")] {
            assert_eq!(show(validate_create(gvk, &policy(good))), [""; 0]);
        }
        for bad in ["True", "yes", "1", ""] {
            let said = format!(
                "metadata.annotations[weir.dev/staged]: Unsupported value: {bad:?}: supported values: \"true\", \"false\""
            );
            let created = show(validate_create(gvk, &policy(Some(bad))));
            assert_eq!(created.concat(), said);
            let update =
                |old: Option<&str>| show(validate_update(gvk, &policy(Some(bad)), &policy(old)));
            assert_eq!(update(Some("true")), [said]);
            assert_eq!(update(Some(bad)), [""; 0], "it stands there already");
        }
    }
}
