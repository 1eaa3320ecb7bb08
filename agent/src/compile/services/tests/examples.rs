use std::collections::{BTreeMap, BTreeSet};

use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{
    Endpoint, LoadBalancerIngress, Protocol, Service, ServiceType, TrafficPolicy,
};

use super::world::{self, compile, endpoint, node_port_service, service, slice, state};
use crate::compile::services::{
    Catalog, FrontendOptions, HostPort, ServiceOptions, Wanted, local_ready,
};

/// What is served: frontend as text, with its flags, to usable backends in their order.
type Served = BTreeMap<String, (Vec<&'static str>, Vec<String>)>;

fn flags(options: FrontendOptions) -> Vec<&'static str> {
    [
        (options.external_scope, "external"),
        (options.keep_source, "keep"),
        (options.drop_empty, "drop"),
        (options.ranges, "ranges"),
        (options.dsr, "dsr"),
        (options.maglev, "maglev"),
    ]
    .into_iter()
    .filter_map(|(set, name)| set.then_some(name))
    .collect()
}

fn served(wanted: &Wanted) -> Served {
    let mut served = Served::new();
    for service in wanted.services.values().flatten() {
        let usable = service.backends.iter().filter(|b| !b.draining);
        let backends: Vec<String> = usable
            .map(|b| format!("{}:{}", b.address, b.port))
            .collect();
        for (frontend, options) in &service.frontends {
            let entry = (flags(*options), backends.clone());
            assert!(
                served.insert(frontend.to_string(), entry).is_none(),
                "{frontend} is there once"
            );
        }
    }
    served
}

/// Backends of the only frontend.
fn eligible(state: &DesiredState) -> Vec<String> {
    let served = served(&compile(state).1);
    assert_eq!(served.len(), 1);
    served.into_values().next().unwrap().1
}

fn refusals(catalog: &Catalog) -> Vec<String> {
    catalog.refusals().map(ToString::to_string).collect()
}

fn one_slice(endpoints: Vec<Endpoint>) -> DesiredState {
    state([service("web")], [slice("web-1", "web", endpoints)])
}

#[test]
fn ready_endpoints_count_and_without_one_those_that_terminate_and_serve() {
    let mut endpoints = vec![
        endpoint("10.244.0.1", "n1", 'r'),
        endpoint("10.244.0.2", "n1", 'u'),
        endpoint("10.244.0.3", "n1", 't'),
        endpoint("10.244.0.4", "n1", 'd'),
    ];
    assert_eq!(eligible(&one_slice(endpoints.clone())), ["10.244.0.1:8080"]);
    endpoints.remove(0);
    assert_eq!(eligible(&one_slice(endpoints.clone())), ["10.244.0.3:8080"]);
    endpoints.remove(1);
    assert!(eligible(&one_slice(endpoints)).is_empty());
}

#[test]
fn an_endpoint_in_two_slices_is_one_and_ready_wins() {
    let slices = [
        slice("web-1", "web", vec![endpoint("10.244.0.1", "n1", 'u')]),
        slice("web-2", "web", vec![endpoint("10.244.0.1", "n1", 'r')]),
    ];
    let state = state([service("web")], slices);
    assert_eq!(eligible(&state), ["10.244.0.1:8080"]);
}

#[test]
fn slices_without_the_named_port_or_of_another_service_do_not_serve() {
    let ready = || vec![endpoint("10.244.0.1", "n1", 'r')];
    let mut other = slice("web-1", "web", ready());
    other.ports[0].name = "metrics".into();
    let mut zero = slice("web-2", "web", ready());
    zero.ports[0].port = 0;
    let foreign = slice("shop-1", "shop", ready());
    let state = state([service("web")], [other, zero, foreign]);
    assert!(eligible(&state).is_empty());
}

#[test]
fn endpoints_that_only_the_node_may_reach_are_refused_by_name() {
    let addresses = [
        "127.0.0.1",
        "169.254.1.2",
        "224.0.0.1",
        "0.0.0.0",
        "255.255.255.255",
    ];
    let mut endpoints: Vec<_> = addresses
        .iter()
        .map(|address| endpoint(address, "n1", 'r'))
        .collect();
    endpoints.push(endpoint("2001:db8::1", "n1", 'r'));
    let state = one_slice(endpoints);
    let (catalog, wanted) = compile(&state);
    assert!(served(&wanted).into_values().all(|(_, b)| b.is_empty()));
    let told = refusals(&catalog);
    assert_eq!(told.len(), addresses.len(), "{told:?}");
    assert!(
        told[1].contains("127.0.0.1: it is a loopback address"),
        "{told:?}"
    );
}

#[test]
fn the_two_local_policies_do_not_mix() {
    let slices = |service: &str| {
        let far = vec![
            endpoint("10.244.2.1", "n2", 'r'),
            endpoint("10.244.1.1", "n1", 't'),
        ];
        [slice(&format!("{service}-1"), service, far)]
    };
    let mut inner = node_port_service("web", 30080);
    inner.internal_traffic_policy = TrafficPolicy::Local.into();
    let found = served(&compile(&state([inner], slices("web"))).1);
    let (far, near) = (
        vec!["10.244.2.1:8080".to_owned()],
        vec!["10.244.1.1:8080".to_owned()],
    );
    assert_eq!(found["10.96.0.20:80/TCP"], (vec!["drop"], near.clone()));
    assert_eq!(found["*:30080/TCP"], (vec![], far.clone()));

    let mut outer = node_port_service("web", 30080);
    outer.external_traffic_policy = TrafficPolicy::Local.into();
    let found = served(&compile(&state([outer], slices("web"))).1);
    assert_eq!(found["10.96.0.20:80/TCP"], (vec![], far.clone()));
    assert_eq!(found["*:30080/TCP"], (vec!["external"], far));
    assert_eq!(
        found["*:30080/TCP from outside"],
        (vec!["keep", "drop"], near),
        "the fallback to endpoints that terminate is judged in each view"
    );
}

#[test]
fn without_any_endpoint_local_policies_refuse() {
    let mut service = node_port_service("web", 30080);
    service.internal_traffic_policy = TrafficPolicy::Local.into();
    service.external_traffic_policy = TrafficPolicy::Local.into();
    let unready = slice("web-1", "web", vec![endpoint("10.244.1.1", "n1", 'u')]);
    let found = served(&compile(&state([service], [unready])).1);
    assert_eq!(found["10.96.0.20:80/TCP"].0, Vec::<&str>::new());
    assert_eq!(found["*:30080/TCP from outside"].0, ["keep"]);
}

#[test]
fn hints_narrow_to_the_node_then_to_the_zone() {
    let hinted = |address: &str, node: &str, zones: &[&str], nodes: &[&str]| Endpoint {
        hint_zones: zones.iter().map(|z| (*z).to_owned()).collect(),
        hint_nodes: nodes.iter().map(|n| (*n).to_owned()).collect(),
        ..endpoint(address, node, 'r')
    };
    let near = hinted("10.244.1.1", "n1", &["a"], &["n1"]);
    let zone = hinted("10.244.3.1", "n3", &["a"], &["n3"]);
    let far = hinted("10.244.2.1", "n2", &["b"], &["n2"]);
    let all = [near.clone(), zone.clone(), far.clone()];
    assert_eq!(eligible(&one_slice(all.to_vec())), ["10.244.1.1:8080"]);
    assert_eq!(
        eligible(&one_slice(vec![zone.clone(), far.clone()])),
        ["10.244.3.1:8080"]
    );
    assert_eq!(eligible(&one_slice(vec![far.clone()])), ["10.244.2.1:8080"]);
    // One ready endpoint without a hint of a kind switches that kind off; one that is not ready does not.
    let mut no_node_hint = far.clone();
    no_node_hint.hint_nodes.clear();
    assert_eq!(
        eligible(&one_slice(vec![
            near.clone(),
            zone.clone(),
            no_node_hint.clone()
        ])),
        ["10.244.1.1:8080", "10.244.3.1:8080"]
    );
    let bare = endpoint("10.244.2.9", "n2", 'r');
    assert_eq!(eligible(&one_slice(vec![near.clone(), bare])).len(), 2);
    let unready = endpoint("10.244.2.9", "n2", 'u');
    assert_eq!(
        eligible(&one_slice(vec![near, zone, unready])),
        ["10.244.1.1:8080"]
    );
}

#[test]
fn hints_do_not_touch_the_local_view_nor_endpoints_that_terminate() {
    let mut service = node_port_service("web", 30080);
    service.external_traffic_policy = TrafficPolicy::Local.into();
    let hinted = |address: &str, condition, zone: &str| Endpoint {
        hint_zones: vec![zone.into()],
        ..endpoint(address, "n1", condition)
    };
    let ready = vec![
        hinted("10.244.1.1", 'r', "a"),
        hinted("10.244.1.2", 'r', "b"),
    ];
    let found = served(&compile(&state([service], [slice("web-1", "web", ready)])).1);
    assert_eq!(found["*:30080/TCP"].1, ["10.244.1.1:8080"]);
    assert_eq!(found["*:30080/TCP from outside"].1.len(), 2);
    let leaving = vec![
        hinted("10.244.1.1", 't', "a"),
        hinted("10.244.1.2", 't', "b"),
    ];
    assert_eq!(eligible(&one_slice(leaving)).len(), 2);
}

fn balancer(name: &str, ips: &[(&str, bool)]) -> Service {
    let mut service = node_port_service(name, 30080);
    service.r#type = ServiceType::LoadBalancer.into();
    service.load_balancer_ingress = ips
        .iter()
        .map(|(ip, proxy)| LoadBalancerIngress {
            ip: (*ip).into(),
            proxy: *proxy,
        })
        .collect();
    service
}

#[test]
fn balancer_addresses_are_served_unless_they_are_a_proxys() {
    let mut web = balancer("web", &[("203.0.113.10", false), ("203.0.113.11", true)]);
    web.load_balancer_source_ranges = vec!["198.51.100.0/24".into(), " 192.0.2.7/24".into()];
    let state = state([web], []);
    let (catalog, wanted) = compile(&state);
    let found = served(&wanted);
    assert_eq!(found["203.0.113.10:80/TCP"].0, ["ranges"]);
    assert!(!found.contains_key("203.0.113.11:80/TCP"));
    assert_eq!(
        found["*:30080/TCP"].0,
        Vec::<&str>::new(),
        "node ports have no ranges"
    );
    let ranges = &wanted.services.values().flatten().next().unwrap().ranges;
    let texts: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["192.0.2.0/24", "198.51.100.0/24"]);
    let whole: Vec<String> = catalog.service_addresses().map(|a| a.to_string()).collect();
    assert_eq!(whole, ["10.96.0.20", "203.0.113.10"]);
}

#[test]
fn source_ranges_restrict_the_family_that_they_are_of() {
    let open = Vec::<&str>::new();
    for (ranges, v4, v6) in [
        (vec!["198.51.100.0/24"], vec!["ranges"], open.clone()),
        (vec!["2001:db8::/32"], open.clone(), vec!["ranges"]),
        (
            vec!["198.51.100.0/24", "2001:db8::/32"],
            vec!["ranges"],
            vec!["ranges"],
        ),
        // What cannot be read is not taken for nothing.
        (vec!["198.51.100.0/240"], vec!["ranges"], open.clone()),
    ] {
        let mut web = balancer("web", &[("203.0.113.10", false), ("2001:db8:5::10", false)]);
        web.load_balancer_source_ranges = ranges.iter().map(|range| (*range).into()).collect();
        let found = served(&compile(&state([web], [])).1);
        assert_eq!(found["203.0.113.10:80/TCP"].0, v4, "{ranges:?}");
        assert_eq!(found["[2001:db8:5::10]:80/TCP"].0, v6, "{ranges:?}");
    }
}

#[test]
fn a_balancer_address_that_is_a_nodes_is_not_the_services_as_a_whole() {
    let state = state([balancer("web", &[(world::NODE_IP, false)])], []);
    let (catalog, wanted) = compile(&state);
    assert!(served(&wanted).contains_key("192.0.2.11:80/TCP"));
    let whole: Vec<_> = catalog.service_addresses().map(|a| a.to_string()).collect();
    assert_eq!(
        whole,
        ["10.96.0.20"],
        "other ports of the node still answer"
    );
}

#[test]
fn a_status_that_outlived_its_type_is_not_served() {
    let mut web = balancer("web", &[("203.0.113.10", false)]);
    web.r#type = ServiceType::ClusterIp.into();
    let found = served(&compile(&state([web], [])).1);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["10.96.0.20:80/TCP"]);
}

#[test]
fn external_ips_must_be_allowed_and_foreign() {
    let mut web = service("web");
    let good = "203.0.113.50";
    let bad = [
        "192.0.2.12",
        "10.244.3.3",
        "10.96.0.99",
        "10.96.0.10",
        "127.0.0.1",
        "169.254.0.1",
    ];
    web.external_ips = bad
        .iter()
        .chain(&[good])
        .map(|ip| (*ip).to_owned())
        .collect();
    let mut state = state([web], []);
    let (catalog, wanted) = compile(&state);
    assert_eq!(served(&wanted).len(), 2);
    assert!(served(&wanted).contains_key("203.0.113.50:80/TCP"));
    assert_eq!(refusals(&catalog).len(), bad.len());
    let whole: Vec<_> = catalog.service_addresses().map(|a| a.to_string()).collect();
    assert_eq!(
        whole,
        ["10.96.0.20"],
        "only the ports of an external IP are taken"
    );
    state.config.external_ips = false;
    let (catalog, wanted) = compile(&state);
    assert_eq!(served(&wanted).len(), 1);
    assert!(refusals(&catalog)[0].contains("network.allow_external_ips"));
    let allowed = ServiceOptions {
        external_ips: Some(true),
        ..ServiceOptions::default()
    };
    let mut catalog = world::catalog(&state, allowed);
    assert_eq!(
        served(&catalog.compile(&state, &Changes::everything())).len(),
        2
    );
}

#[test]
fn an_external_ip_that_becomes_a_nodes_is_given_up() {
    let mut web = service("web");
    web.external_ips = vec!["203.0.113.50".into()];
    let state = state([web], []);
    let (mut catalog, _) = compile(&state);
    assert!(catalog.set_addresses(world::addresses(&state.nodes, &["203.0.113.50"])));
    let wanted = catalog.compile(&state, &Changes::default());
    assert_eq!(served(&wanted).len(), 1);
    assert_eq!(refusals(&catalog).len(), 1);
}

#[test]
fn ports_that_are_none_are_refused_and_the_others_served() {
    let mut web = node_port_service("web", 70_000);
    let mut zero = web.ports[0].clone();
    (zero.name, zero.port, zero.node_port) = ("zero".into(), 0, 30_081);
    let mut sctp = web.ports[0].clone();
    (sctp.name, sctp.node_port) = ("sctp".into(), 0);
    sctp.protocol = Protocol::Sctp.into();
    web.ports.extend([zero, sctp]);
    let (catalog, wanted) = compile(&state([web], []));
    let found = served(&wanted);
    let names: Vec<&String> = found.keys().collect();
    assert_eq!(
        names,
        ["*:30081/TCP", "10.96.0.20:80/SCTP", "10.96.0.20:80/TCP"]
    );
    assert_eq!(refusals(&catalog).len(), 2);
}

#[test]
fn the_older_of_two_services_has_a_frontend_and_the_other_inherits_it() {
    let mut old = node_port_service("old", 30080);
    let mut young = node_port_service("young", 30080);
    (old.created_at_us, young.created_at_us) = (1, 2);
    young.cluster_ips = vec!["10.96.0.21".into()];
    let slices = [
        slice("old-1", "old", vec![endpoint("10.244.0.1", "n1", 'r')]),
        slice("young-1", "young", vec![endpoint("10.244.0.2", "n1", 'r')]),
    ];
    let mut state = state([young, old], slices);
    let (mut catalog, wanted) = compile(&state);
    assert_eq!(served(&wanted)["*:30080/TCP"].1, ["10.244.0.1:8080"]);
    let told = refusals(&catalog);
    assert_eq!(told.len(), 1);
    assert!(
        told[0].contains("default/young") && told[0].contains("service default/old"),
        "{told:?}"
    );
    state.services.remove(&Name::new("default", "old"));
    let changes = Changes {
        services: BTreeSet::from([Name::new("default", "old")]),
        ..Changes::default()
    };
    let wanted = catalog.compile(&state, &changes);
    assert_eq!(served(&wanted)["*:30080/TCP"].1, ["10.244.0.2:8080"]);
    assert!(refusals(&catalog).is_empty());
}

#[test]
fn cluster_dns_is_led_to_this_node() {
    let mut dns = service("kube-dns");
    dns.cluster_ips = vec!["10.96.0.10".into()];
    dns.ports[0].port = 53;
    let pods = slice(
        "kube-dns-1",
        "kube-dns",
        vec![endpoint("10.244.0.1", "n1", 'r')],
    );
    assert_eq!(eligible(&state([dns], [pods])), ["192.0.2.11:10053"]);
}

#[test]
fn services_of_dns_or_of_another_proxy_have_no_frontend() {
    let mut headless = service("headless");
    headless.headless = true;
    headless.external_ips = vec!["203.0.113.50".into()];
    let mut external = service("external");
    external.r#type = ServiceType::ExternalName.into();
    let mut foreign = service("foreign");
    foreign.foreign_proxy = true;
    let (_, wanted) = compile(&state([headless, external, foreign], []));
    assert!(wanted.services.is_empty() && wanted.addresses.is_empty());
}

#[test]
fn a_part_of_the_state_means_nothing_before_the_whole() {
    let state = one_slice(vec![]);
    let mut catalog = world::catalog(&state, ServiceOptions::default());
    let changes = Changes {
        services: BTreeSet::from([Name::new("default", "web")]),
        ..Changes::default()
    };
    assert_eq!(catalog.compile(&state, &changes), Wanted::default());
}

#[test]
fn maglev_and_direct_answers_are_for_outward_frontends() {
    let options = ServiceOptions {
        maglev: true,
        dsr: true,
        external_ips: None,
    };
    let state = state([node_port_service("web", 30080)], []);
    let wanted = world::catalog(&state, options).compile(&state, &Changes::everything());
    let found = served(&wanted);
    assert_eq!(found["*:30080/TCP"].0, ["dsr", "maglev"]);
    assert_eq!(found["10.96.0.20:80/TCP"].0, Vec::<&str>::new());
}

fn host_port(pod: &str, sequence: u64, host_address: Option<&str>, number: u16) -> HostPort {
    HostPort {
        sequence,
        pod: pod.into(),
        addresses: vec![
            "10.244.1.9".parse().unwrap(),
            "fd00:244:1::9".parse().unwrap(),
        ],
        host_address: host_address.map(|a| a.parse().unwrap()),
        host_port: number,
        port: 8080,
        protocol: 6,
    }
}

#[test]
fn host_ports_are_on_every_address_of_this_node_or_on_the_one_they_name() {
    let state = state([node_port_service("web", 30080)], []);
    let (mut catalog, _) = compile(&state);
    catalog.set_addresses(world::addresses(&state.nodes, &["192.0.2.201"]));
    let wanted = catalog.set_host_ports(vec![
        host_port("default/a", 1, None, 8000),
        host_port("default/b", 2, Some("192.0.2.201"), 8001),
        host_port("default/c", 3, Some("0.0.0.0"), 8002),
        host_port("default/d", 4, Some("198.51.100.9"), 8003),
    ]);
    let found = served(&wanted);
    let names: Vec<&String> = found.keys().collect();
    assert_eq!(
        names,
        [
            "192.0.2.11:8000/TCP",
            "192.0.2.11:8002/TCP",
            "192.0.2.201:8000/TCP",
            "192.0.2.201:8001/TCP",
            "192.0.2.201:8002/TCP"
        ]
    );
    assert!(found.values().all(|(flags, _)| flags == &["keep"]));
}

#[test]
fn a_host_port_that_is_taken_is_refused() {
    let state = state([node_port_service("web", 30080)], []);
    let (mut catalog, _) = compile(&state);
    let wanted = catalog.set_host_ports(vec![
        host_port("default/a", 2, None, 8000),
        host_port("default/b", 1, None, 8000),
        host_port("default/c", 3, None, 30080),
    ]);
    assert_eq!(served(&wanted).len(), 1);
    let told = refusals(&catalog);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].contains("default/a") && told[0].contains("default/b has it"));
    assert!(told[1].contains("service default/web has it"));
    let wanted = catalog.set_host_ports(vec![host_port("default/a", 2, None, 8000)]);
    assert_eq!(wanted.services.values().flatten().count(), 1);
    assert_eq!(wanted.services.values().filter(|s| s.is_none()).count(), 1);
    assert!(refusals(&catalog).is_empty());
}

#[test]
fn balancers_are_told_of_ready_endpoints_of_this_node() {
    let slices = [
        slice(
            "web-1",
            "web",
            vec![
                endpoint("10.244.1.1", "n1", 'r'),
                endpoint("10.244.1.2", "n1", 't'),
                endpoint("10.244.2.1", "n2", 'r'),
            ],
        ),
        slice("web-2", "web", vec![endpoint("10.244.1.1", "n1", 'r')]),
    ]
    .map(control_api::slice::Slice::from);
    assert_eq!(local_ready(slices.iter(), "n1"), 1);
    assert_eq!(local_ready(slices.iter(), "n3"), 0);
}
