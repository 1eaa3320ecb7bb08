//! Starts, restarts and failures, on maps that are ordinary collections.

mod domains;

use std::sync::atomic::{AtomicUsize, Ordering};

use control_api::v1::{
    PeerSet, PolicyAction, PolicyName, PolicyRule, PolicyRulePeer, PolicyTier, policy_rule_peer,
};
use dataplane_common::layout::PodPolicy;

use super::*;
use crate::compile::policy::Direction;
use crate::plan::policy::tests::Maps;

/// Maps that refuse their next so many writes.
#[derive(Default)]
struct Fake {
    maps: Mutex<Maps>,
    faults: AtomicUsize,
    writes: AtomicUsize,
}

impl PolicyMaps for Fake {
    fn read(&self) -> Result<Present, KernelError> {
        Ok(self.maps.lock().unwrap().read())
    }

    fn write(&self, operations: &[Operation]) -> Result<(), KernelError> {
        let mut maps = self.maps.lock().unwrap();
        for (place, operation) in operations.iter().enumerate() {
            let faulty = self.faults.load(Ordering::Relaxed) > 0 && place > operations.len() / 2;
            if faulty {
                self.faults.fetch_sub(1, Ordering::Relaxed);
                return Err(KernelError::NoObject);
            }
            self.writes.fetch_add(1, Ordering::Relaxed);
            maps.write(operation);
        }
        Ok(())
    }
}

impl Fake {
    fn pod(&self, ifindex: u32) -> Option<PodPolicy> {
        self.maps.lock().unwrap().pods.get(&ifindex).copied()
    }

    fn lets_in(&self, ifindex: u32, from: &str) -> bool {
        let mut maps = self.maps.lock().unwrap();
        maps.allows(ifindex, Direction::Ingress, from.parse().unwrap(), (6, 80))
    }
}

const FRIEND: &str = "10.1.0.2";
const STRANGER: &str = "10.1.0.3";

/// A policy that lets friends in, the pods `a` and `b` of this node that it selects, and a friend elsewhere.
fn state() -> DesiredState {
    let mut state = DesiredState::default();
    state.config.policies = true;
    let set = PeerSet {
        id: vec![1; 16],
        text: "friends".into(),
    };
    let peer = PolicyRulePeer {
        kind: Some(policy_rule_peer::Kind::Set(set)),
    };
    let rule = PolicyRule {
        action: PolicyAction::Allow.into(),
        peers: vec![peer],
        any_port: true,
        ..PolicyRule::default()
    };
    let policy = Policy {
        tier: PolicyTier::NetworkPolicy.into(),
        namespace: "ns".into(),
        name: "friends".into(),
        isolates_ingress: true,
        ingress: vec![rule],
        ..Policy::default()
    };
    let name = Name::new("ns", "friends");
    state.policies.insert(name.clone(), policy);
    for pod in ["a", "b"] {
        let peer = PolicyPeer {
            namespace: "ns".into(),
            name: pod.into(),
            uid: format!("uid-{pod}"),
            node: "n1".into(),
            policies: vec![PolicyName {
                namespace: "ns".into(),
                name: "friends".into(),
            }],
            ..PolicyPeer::default()
        };
        state.policy_peers.insert(Name::new("ns", pod), peer);
    }
    let friend = PolicyPeer {
        namespace: "ns".into(),
        name: "friend".into(),
        node: "n2".into(),
        addresses: vec![FRIEND.into()],
        sets: vec![vec![1; 16]],
        ..PolicyPeer::default()
    };
    state.policy_peers.insert(Name::new("ns", "friend"), friend);
    state
}

fn pod(name: &str, last: u8) -> LocalPod {
    LocalPod {
        name: Some(Name::new("ns", name)),
        uid: format!("uid-{name}"),
        addresses: vec![IpAddr::from([10, 0, 0, last])],
    }
}

struct Node {
    maps: Arc<Fake>,
    dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        Self {
            maps: Arc::default(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn agent(&self, state: &DesiredState) -> Enforcer {
        let maps: Arc<dyn PolicyMaps> = Arc::<Fake>::clone(&self.maps);
        Enforcer::start(maps, self.dir.path(), "n1", state, Arc::default()).unwrap()
    }
}

#[test]
fn a_machine_that_starts_alone_knows_what_it_was_told() {
    let node = Node::new();
    let agent = node.agent(&state());
    agent.enter(7, &pod("a", 1)).unwrap();
    assert!(node.maps.lets_in(7, FRIEND) && !node.maps.lets_in(7, STRANGER));
    assert_eq!(agent.wait(7, Duration::ZERO), Ok(()));
    agent.enter(8, &pod("new", 2)).unwrap();
    assert!(!node.maps.lets_in(8, FRIEND), "nobody has told of it");
    let missing = agent.wait(8, Duration::ZERO).unwrap_err();
    assert!(missing.contains("control plane"), "{missing}");
    let other = LocalPod {
        name: None,
        ..pod("x", 3)
    };
    agent.enter(9, &other).unwrap();
    assert!(node.maps.lets_in(9, STRANGER), "no pod of the cluster");
    agent.leave(7).unwrap();
    assert_eq!(node.maps.pod(7), None);
}

#[test]
fn an_agent_that_starts_again_keeps_what_is_there_until_it_is_told() {
    let node = Node::new();
    let pods = vec![(7, pod("a", 1))];
    let first = node.agent(&DesiredState::default());
    first.enter(7, &pods[0].1).unwrap();
    first.apply(&state(), &Changes::everything()).unwrap();
    assert!(node.maps.lets_in(7, FRIEND));
    let (before, writes) = (
        node.maps.maps.lock().unwrap().clone(),
        node.maps.writes.load(Ordering::Relaxed),
    );
    drop(first);

    // What lies on disk is older than what is in the maps.
    let second = node.agent(&DesiredState::default());
    assert!(second.is_keeping());
    second.adopt(pods).unwrap();
    second.enter(7, &pod("a", 1)).unwrap();
    assert_eq!(*node.maps.maps.lock().unwrap(), before);
    second.enter(8, &pod("b", 2)).unwrap();
    assert!(!node.maps.lets_in(8, FRIEND), "shut until it is known");
    assert!(second.wait(8, Duration::ZERO).is_err());
    second.apply(&state(), &Changes::everything()).unwrap();
    assert!(node.maps.lets_in(8, FRIEND) && !node.maps.lets_in(8, STRANGER));
    assert_eq!(
        node.maps.pod(7),
        before.pods.get(&7).copied(),
        "its rules are where they were"
    );
    let written = node.maps.writes.load(Ordering::Relaxed) - writes;
    // Its entry, once shut and once with the rules that the other pod has; its address; and the generation.
    assert!(written <= 4, "{written} writes");
}

/// Pods that ran before anybody enforced policies lose nothing until the first word of them.
#[test]
fn pods_of_an_agent_without_policies_go_on() {
    let node = Node::new();
    let agent = node.agent(&DesiredState::default());
    agent.adopt(vec![(7, pod("a", 1))]).unwrap();
    agent.enter(7, &pod("a", 1)).unwrap();
    assert!(node.maps.lets_in(7, STRANGER));
    agent.enter(8, &pod("b", 2)).unwrap();
    assert!(!node.maps.lets_in(8, STRANGER), "this one is new");
    agent.apply(&state(), &Changes::everything()).unwrap();
    for pod in [7, 8] {
        assert!(node.maps.lets_in(pod, FRIEND) && !node.maps.lets_in(pod, STRANGER));
    }
}

/// What could not be attached is entered again by whoever tries again: nothing is left open, nothing shut for ever.
#[test]
fn a_pod_that_was_not_attached_is_entered_anew() {
    let node = Node::new();
    let agent = node.agent(&DesiredState::default());
    agent.apply(&state(), &Changes::everything()).unwrap();
    agent.enter(7, &pod("a", 1)).unwrap();
    // As the programs do when one of their steps fails.
    agent.leave(7).unwrap();
    assert_eq!(node.maps.pod(7), None);
    agent.enter(7, &pod("a", 1)).unwrap();
    assert!(node.maps.lets_in(7, FRIEND) && !node.maps.lets_in(7, STRANGER));
}

/// Agents may be upgraded before their control plane: nothing that ran or starts breaks, and nothing that was judged opens.
#[test]
fn a_control_plane_without_policies_opens_what_it_never_spoke_of() {
    let silent = DesiredState::default();
    let everything = Changes::everything();
    let node = Node::new();
    let agent = node.agent(&silent);
    agent.adopt(vec![(7, pod("a", 1))]).unwrap();
    agent.enter(8, &pod("b", 2)).unwrap();
    assert!(agent.wait(8, Duration::ZERO).is_err(), "nobody has spoken");
    agent.apply(&silent, &everything).unwrap();
    assert_eq!(agent.wait(8, Duration::ZERO), Ok(()));
    for pod in [7, 8] {
        assert!(node.maps.lets_in(pod, STRANGER));
    }
    // A restart changes nothing, also for pods that come before the server speaks.
    let agent = node.agent(&silent);
    agent
        .adopt(vec![(7, pod("a", 1)), (8, pod("b", 2))])
        .unwrap();
    agent.enter(9, &pod("c", 3)).unwrap();
    assert!(node.maps.lets_in(8, STRANGER) && !node.maps.lets_in(9, STRANGER));
    agent.apply(&silent, &everything).unwrap();
    agent.enter(10, &pod("d", 4)).unwrap();
    for pod in [9, 10] {
        assert_eq!(agent.wait(pod, Duration::ZERO), Ok(()));
        assert!(node.maps.lets_in(pod, STRANGER));
    }
    // Then the control plane is upgraded.
    agent.apply(&state(), &everything).unwrap();
    for pod in [7, 8] {
        assert!(node.maps.lets_in(pod, FRIEND) && !node.maps.lets_in(pod, STRANGER));
    }
    assert!(!node.maps.lets_in(9, STRANGER), "it is known to nobody");
    // And taken back: what is known is enforced, and what comes now is open.
    agent.apply(&silent, &everything).unwrap();
    assert!(node.maps.lets_in(7, FRIEND) && !node.maps.lets_in(7, STRANGER));
    agent.enter(11, &pod("e", 5)).unwrap();
    assert_eq!(agent.wait(11, Duration::ZERO), Ok(()));
    assert!(node.maps.lets_in(11, STRANGER) && !node.maps.lets_in(8, STRANGER));
}

#[test]
fn an_add_goes_on_when_its_pod_becomes_known() {
    let node = Node::new();
    let agent = Arc::new(node.agent(&DesiredState::default()));
    agent.enter(7, &pod("a", 1)).unwrap();
    let waiting = {
        let agent = Arc::clone(&agent);
        std::thread::spawn(move || agent.wait(7, Duration::from_secs(60)))
    };
    agent.apply(&state(), &Changes::everything()).unwrap();
    assert_eq!(waiting.join().unwrap(), Ok(()));
    assert!(node.maps.lets_in(7, FRIEND));
}

#[test]
fn a_plan_that_breaks_off_is_mended_from_the_maps() {
    let node = Node::new();
    let agent = node.agent(&DesiredState::default());
    agent.enter(7, &pod("a", 1)).unwrap();
    node.maps.faults.store(1, Ordering::Relaxed);
    let everything = Changes::everything();
    assert!(agent.apply(&state(), &everything).is_err());
    assert!(agent.wait(7, Duration::ZERO).is_err(), "not in place yet");
    let generation = node.maps.maps.lock().unwrap().generation;
    agent.apply(&state(), &Changes::default()).unwrap();
    assert!(node.maps.lets_in(7, FRIEND) && !node.maps.lets_in(7, STRANGER));
    assert_ne!(node.maps.maps.lock().unwrap().generation, generation);
}

fn explained(agent: &Enforcer, state: &DesiredState, from: &str, to: &str) -> Explanation {
    let mut all = agent.explain(state, &Tables::default(), from, to).unwrap();
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

/// Service tables: where clients of the cluster are led, and those from outside.
#[derive(Default)]
struct Tables(BTreeMap<(SocketAddr, u8), [Led; 2]>);

impl ServiceTables for Tables {
    fn lead(&self, destination: SocketAddr, protocol: u8, outside: bool) -> Result<Led, String> {
        let led = self.0.get(&(destination, protocol));
        Ok(led.map_or(Led::Direct, |led| led[usize::from(outside)].clone()))
    }
}

/// The Service `ns/web`, whose port 80 is the port 8080 of the pod `a`.
fn add_web_service(state: &mut DesiredState) {
    let service = control_api::v1::Service {
        namespace: "ns".into(),
        name: "web".into(),
        ports: vec![control_api::v1::ServicePort {
            name: "http".into(),
            protocol: control_api::v1::Protocol::Tcp.into(),
            port: 80,
            node_port: 0,
        }],
        ..Default::default()
    };
    let slice = control_api::v1::EndpointSlice {
        namespace: "ns".into(),
        name: "web-1".into(),
        service: "web".into(),
        ports: vec![control_api::v1::EndpointPort {
            name: "http".into(),
            protocol: control_api::v1::Protocol::Tcp.into(),
            port: 8080,
        }],
        endpoints: vec![control_api::v1::Endpoint {
            addresses: vec!["10.0.0.1".into()],
            ready: true,
            serving: true,
            ..Default::default()
        }],
        ..Default::default()
    };
    state.services.insert(Name::new("ns", "web"), service);
    state
        .endpoint_slices
        .insert(Name::new("ns", "web-1"), slice);
}

#[test]
fn an_explanation_names_the_rule_or_what_every_rule_lacked() {
    let node = Node::new();
    let mut state = state();
    let agent = node.agent(&DesiredState::default());
    agent.enter(7, &pod("a", 1)).unwrap();
    agent.apply(&state, &Changes::everything()).unwrap();

    let said = explained(&agent, &state, "ns/friend", "ns/a:80");
    assert!(said.allowed);
    assert_eq!(
        (said.from.as_str(), said.port.as_str()),
        ("ns/friend (10.1.0.2)", "80/TCP")
    );
    let [egress, ingress] = &said.directions[..] else {
        panic!("{said:?}");
    };
    assert_eq!(egress.verdict, "judged elsewhere");
    assert!(egress.reason.contains("n2"), "{}", egress.reason);
    assert_eq!(ingress.verdict, "allowed");
    let rule =
        "NetworkPolicy ns/friends ingress rule 1: allow from friends on every port and protocol";
    assert_eq!(ingress.rule.as_deref(), Some(rule));
    assert_eq!(ingress.isolated_by, ["NetworkPolicy ns/friends"]);

    let said = explained(&agent, &state, STRANGER, "ns/a:53/udp");
    assert!(!said.allowed);
    let [stranger, ingress] = &said.directions[..] else {
        panic!("{said:?}");
    };
    assert_eq!(stranger.verdict, "not judged");
    assert_eq!((ingress.verdict.as_str(), &ingress.rule), ("denied", &None));
    assert_eq!(ingress.lacking.len(), 1);
    assert!(ingress.lacking[0].ends_with("the other end is not among its peers"));

    let said = explained(&agent, &state, "ns/a", "10.1.0.3:80");
    assert_eq!(said.directions[0].reason, "no policy judges its egress");
    add_web_service(&mut state);
    let said = explained(&agent, &state, FRIEND, "svc/ns/web:80");
    assert_eq!(
        (said.to.as_str(), said.port.as_str()),
        ("ns/a (10.0.0.1)", "8080/TCP")
    );

    for (from, to) in [
        ("ns/nobody", "ns/a:80"),
        ("ns/a", "ns/a"),
        ("ns/a", "svc/ns/web:81"),
        ("friend", "ns/a:80"),
        ("ns/a", "ns/friend:80/carrier"),
    ] {
        let said = agent.explain(&state, &Tables::default(), from, to);
        assert!(said.is_err(), "{from} to {to}");
    }
}

/// Tables that lead to `ns/web`, of which clients from outside have one backend, and to the node's DNS server.
fn web_and_dns() -> Tables {
    let led = |owner: &str, backends: &[&str]| Led::Service {
        owner: owner.into(),
        backends: backends.iter().map(|text| text.parse().unwrap()).collect(),
    };
    let inside = led("service ns/web", &["10.0.0.1:8080", "10.2.0.7:8080"]);
    let outside = led("service ns/web", &["10.0.0.1:8080"]);
    let dns = led("service kube-system/kube-dns", &["192.0.2.11:10053"]);
    let mut tables = Tables::default();
    for at in ["10.96.0.9:80", "192.0.2.11:30080"] {
        let both = [inside.clone(), outside.clone()];
        tables.0.insert((at.parse().unwrap(), 6), both);
    }
    let at = "10.96.0.10:53".parse().unwrap();
    tables.0.insert((at, 17), [dns.clone(), dns]);
    let at = "10.96.0.9:81".parse().unwrap();
    tables.0.insert((at, 6), [Led::Refused, Led::Refused]);
    tables
}

/// What the service tables of the node lead on is explained for every backend, whatever it was called.
#[test]
fn an_explanation_follows_the_service_tables() {
    let node = Node::new();
    let mut state = state();
    add_web_service(&mut state);
    let name = Name::new("ns", "web");
    let mut service = state.services.get(&name).unwrap().clone();
    service.cluster_ips = vec!["10.96.0.9".into()];
    state.services.insert(name, service);
    let other = control_api::v1::Node {
        name: "n2".into(),
        internal_ips: vec!["192.0.2.12".into()],
        pod_cidrs: vec!["10.2.0.0/24".into(), "fd00:2::/64".into()],
        ..Default::default()
    };
    state.nodes.insert("n2".into(), other);
    let agent = node.agent(&DesiredState::default());
    agent.enter(7, &pod("a", 1)).unwrap();
    agent.enter(8, &pod("b", 2)).unwrap();
    agent.set_node_addresses(["192.0.2.11".parse().unwrap()].into());
    agent.apply(&state, &Changes::everything()).unwrap();

    let tables = web_and_dns();
    let explain = |from: &str, to: &str| agent.explain(&state, &tables, from, to);

    for to in ["10.96.0.9:80", "192.0.2.11:30080", "svc/ns/web:80"] {
        let said = explain("ns/b", to).unwrap();
        let [local, far] = &said[..] else {
            panic!("{to}: {said:?}");
        };
        // The friend's policy keeps `b` from `a`; the pod elsewhere is another node's to judge.
        assert!(
            !local.allowed && local.undecided.is_empty(),
            "{to}: {local:?}"
        );
        assert_eq!((&*local.to, &*local.port), ("ns/a (10.0.0.1)", "8080/TCP"));
        let through = local.through.as_deref().unwrap();
        assert!(
            through.starts_with("service ns/web, asked at "),
            "{through}"
        );
        assert!(far.allowed, "{to}: {far:?}");
        assert_eq!(far.undecided, ["node n2 decides ingress"]);
        assert_eq!(far.directions[1].verdict, "judged elsewhere");
        assert_eq!(
            explain("198.51.100.9", to).unwrap().len(),
            1,
            "one from outside"
        );
    }
    // Cluster DNS is the node's own.
    let said = explain("ns/a", "10.96.0.10:53/udp").unwrap();
    assert!(said[0].allowed && said[0].undecided.is_empty());
    assert_eq!(
        said[0].directions[0].reason,
        "a pod and its own node always reach one another"
    );
    let refused = explain("ns/a", "10.96.0.9:81").unwrap_err();
    assert!(refused.contains("none has 81/TCP"), "{refused}");
    assert!(
        explain("svc/ns/web", "ns/a:80")
            .unwrap_err()
            .contains("sends nothing")
    );
    for unreadable in ["a/b/c:80", "svc/a/b/c:80", "ns/a/tcp", "ns/icmp"] {
        let why = explain("ns/a", unreadable).unwrap_err();
        assert!(why.contains("namespace/"), "{unreadable}: {why}");
    }
}

#[test]
fn protocols_without_ports_need_none_and_follow_the_family() {
    let asked = |text: &str| ends::cut(text).map(|asked| (asked.to.to_owned(), asked.port));
    let whole = |to: &str| Ok((to.to_owned(), 0));
    assert_eq!(asked("shop/db/icmp"), whole("shop/db"));
    assert_eq!(asked("svc/shop/db/icmp"), whole("svc/shop/db"));
    assert_eq!(asked("10.0.0.1/icmp"), whole("10.0.0.1"));
    assert_eq!(asked("fd00::1/ICMPv6"), whole("fd00::1"));
    assert_eq!(asked("[fd00::1]/50"), whole("fd00::1"));
    assert_eq!(asked("shop/db:0/icmp"), whole("shop/db"));
    assert_eq!(asked("a.example/icmp"), whole("a.example"));
    assert_eq!(asked("shop/db:80/sctp"), Ok(("shop/db".into(), 80)));
    assert_eq!(asked("[fd00::1]:80"), Ok(("fd00::1".into(), 80)));
    for text in ["shop/icmp", "shop/db/udp", "shop/db", "shop/db:http", ""] {
        assert!(asked(text).is_err(), "{text}");
    }
    let icmp = ends::cut("shop/db/icmp").unwrap();
    assert_eq!((icmp.protocol(true), icmp.protocol(false)), (1, 58));
}

#[test]
fn staged_policies_change_nothing_and_say_what_they_would() {
    let node = Node::new();
    let mut state = state();
    let name = Name::new("ns", "friends");
    let mut policy = state.policies.get(&name).unwrap().clone();
    policy.staged = true;
    state.policies.insert(name, policy);
    let agent = node.agent(&DesiredState::default());
    agent.enter(7, &pod("a", 1)).unwrap();
    agent.apply(&state, &Changes::everything()).unwrap();
    assert!(node.maps.lets_in(7, STRANGER));
    let flow = |from: &str| ObservedFlow {
        source: from.parse().unwrap(),
        destination: "10.0.0.1".parse().unwrap(),
        protocol: 6,
        port: 80,
    };
    let diff = agent.diff(&state, &[flow(FRIEND), flow(STRANGER), flow(FRIEND)]);
    assert_eq!((diff.looked_at, diff.staged.len()), (2, 1));
    let [change] = &diff.changes[..] else {
        panic!("{diff:?}");
    };
    assert_eq!(change.from, STRANGER);
    assert_eq!(
        (change.enforced.as_str(), change.staged.as_str()),
        ("allowed", "denied")
    );
    let list = agent.list();
    assert!(list.policies[0].staged && list.policies[0].pods == ["ns/a"]);
}

#[test]
fn a_drop_names_what_isolates_or_the_rule_that_denies() {
    use dataplane_common::policy::event::DropEvent;
    use dataplane_common::policy::verdict;
    let node = Node::new();
    let agent = node.agent(&DesiredState::default());
    agent.enter(7, &pod("a", 1)).unwrap();
    agent.apply(&state(), &Changes::everything()).unwrap();
    let mut event = DropEvent {
        verdict: verdict::DENIED | verdict::INGRESS,
        ifindex: 7,
        source: [u32::from_ne_bytes([10, 1, 0, 3]), 0, 0, 0],
        destination: [u32::from_ne_bytes([10, 0, 0, 1]), 0, 0, 0],
        destination_port: dataplane_common::Port::new(80),
        protocol: 6,
        family: 4,
        ..DropEvent::default()
    };
    let (packet, said) = agent.with(|view| drops::describe(view, &event));
    assert_eq!(
        (packet.source.to_string().as_str(), packet.port),
        (STRANGER, 80)
    );
    assert_eq!(
        (said.pod.as_str(), said.direction.as_str()),
        ("ns/a", "ingress")
    );
    assert_eq!(
        said.why,
        "no rule allows it; isolated by NetworkPolicy ns/friends"
    );
    // A packet of a flow that was denied before.
    event.ifindex = 0;
    let (_, later) = agent.with(|view| drops::describe(view, &event));
    assert_eq!(later, said);
    event.verdict |= 1;
    let (_, said) = agent.with(|view| drops::describe(view, &event));
    assert!(
        said.why
            .starts_with("NetworkPolicy ns/friends ingress rule 1")
    );
    event.verdict |= verdict::PENDING;
    let (_, said) = agent.with(|view| drops::describe(view, &event));
    assert_eq!(said.why, "its policies were not known");
    assert_eq!(said.pod, "ns/a");
    // Of a pod that has left meanwhile no more is known than its address.
    agent.leave(7).unwrap();
    let (_, said) = agent.with(|view| drops::describe(view, &event));
    assert_eq!(said.pod, "the pod at 10.0.0.1");
}

#[test]
fn drops_of_one_kind_are_counted_with_the_time_of_the_last() {
    let packet = Packet {
        source: STRANGER.parse().unwrap(),
        destination: "10.0.0.1".parse().unwrap(),
        protocol: 6,
        port: 80,
    };
    let drop = |source_port: u16, why: &str| Drop {
        pod: "ns/a".into(),
        direction: "ingress".into(),
        from: STRANGER.into(),
        source_port,
        to: "10.0.0.1".into(),
        port: "80/TCP".into(),
        why: why.into(),
    };
    let at = |second: i64| jiff::Timestamp::from_second(second).unwrap();
    let mut recent = Recent::default();
    recent.add(packet, drop(40_000, "isolated"), 0, at(0));
    recent.add(packet, drop(40_000, "a rule"), 3, at(1));
    recent.add(packet, drop(40_001, "isolated"), 4, at(86_400));
    let listed: Vec<_> = recent.iter().map(|(_, drops)| drops).collect();
    let told = |drops: &Drops| {
        let (why, port) = (drops.drop.why.clone(), drops.drop.source_port);
        (why, port, drops.count, drops.last.clone())
    };
    assert_eq!(
        listed.into_iter().map(told).collect::<Vec<_>>(),
        [
            ("a rule".into(), 40_000, 1, "1970-01-01T00:00:01Z".into()),
            ("isolated".into(), 40_001, 2, "1970-01-02T00:00:00Z".into()),
        ]
    );
    assert_eq!(recent.untold(), 7);
    for other in 0..2_000 {
        recent.add(packet, drop(1, &format!("{other}")), 0, at(90_000));
    }
    assert_eq!(recent.iter().count(), 1_000);
}
