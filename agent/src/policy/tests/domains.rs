//! Names of rules: from an answer to the maps, over restarts, and to their end.

use std::collections::HashSet;

use super::*;
use crate::config;
use crate::policy::domains::Answer;

const ONE: &str = "192.0.2.1";
const TWO: &str = "192.0.2.2";

/// Conversations go to these addresses.
#[derive(Default)]
struct InUse(HashSet<IpAddr>);

impl InUse {
    fn of(addresses: &[&str]) -> Self {
        Self(addresses.iter().map(|text| text.parse().unwrap()).collect())
    }
}

impl AddressesInUse for InUse {
    fn in_use(&self, among: &HashSet<IpAddr>) -> Result<HashSet<IpAddr>, KernelError> {
        Ok(self.0.intersection(among).copied().collect())
    }
}

/// The pod `a` may go out to names, and nowhere else.
fn state_with(names: &[&str]) -> DesiredState {
    let mut state = state();
    let peers = names.iter().map(|name| PolicyRulePeer {
        kind: Some(policy_rule_peer::Kind::DomainName((*name).into())),
    });
    let allow = PolicyRule {
        action: PolicyAction::Allow.into(),
        peers: peers.collect(),
        any_port: true,
        ..PolicyRule::default()
    };
    let deny = PolicyRule {
        action: PolicyAction::Deny.into(),
        any_peer: true,
        any_port: true,
        ..PolicyRule::default()
    };
    let policy = Policy {
        tier: PolicyTier::Admin.into(),
        name: "names".into(),
        egress: vec![allow, deny],
        ..Policy::default()
    };
    state.policies.insert(Name::new("", "names"), policy);
    let mut pod = state
        .policy_peers
        .get(&Name::new("ns", "a"))
        .unwrap()
        .clone();
    pod.policies.push(PolicyName {
        namespace: String::new(),
        name: "names".into(),
    });
    state.policy_peers.insert(Name::new("ns", "a"), pod);
    state
}

fn answer(name: &str, address: &str, ttl_s: u32) -> Answer {
    Answer {
        name: name.into(),
        addresses: vec![address.parse().unwrap()],
        ttl_s,
    }
}

impl Node {
    /// An agent that believes an answer for its TTL, with the pod `a`.
    fn strict_agent(&self, state: &DesiredState) -> Enforcer {
        let maps: Arc<dyn PolicyMaps> = Arc::<Fake>::clone(&self.maps);
        let domains = Arc::new(Domains::new(&config::Policy {
            min_domain_ttl_s: 0,
        }));
        let agent = Enforcer::start(maps, self.dir.path(), "n1", state, domains).unwrap();
        agent.enter(7, &pod("a", 1)).unwrap();
        agent
    }

    fn lets_out(&self, to: &str) -> bool {
        let mut maps = self.maps.maps.lock().unwrap();
        maps.allows(7, Direction::Egress, to.parse().unwrap(), (6, 443))
    }
}

#[test]
fn what_an_answer_said_is_in_the_maps_once_it_is_placed() {
    let node = Node::new();
    let agent = node.strict_agent(&state_with(&["*.example.org"]));
    let domains = agent.domains();
    assert_eq!(domains.learn(&answer("example.org", ONE, 60)), None);
    assert_eq!(domains.learn(&answer("www.example.com", ONE, 60)), None);
    let said = answer("www.example.org", ONE, 60);
    let pending = domains.learn(&said);
    assert!(pending.is_some() && !node.lets_out(ONE));
    assert_eq!(domains.learn(&said), pending, "still to be waited for");
    agent.place_domains().unwrap();
    assert!(node.lets_out(ONE) && !node.lets_out(TWO));
    assert_eq!(domains.learn(&said), None, "nothing to wait for");
    let list = agent.list();
    assert_eq!(list.names[0].name, "www.example.org");
    assert!(list.names[0].addresses[0].seconds_left > 50);
    let to = format!("{ONE}:443");
    let said = explained(&agent, &state_with(&[]), "ns/a", &to);
    assert!(said.allowed && said.names == ["www.example.org"]);
    let by_name = explained(&agent, &state_with(&[]), "ns/a", "WWW.example.org:443");
    assert_eq!(by_name.to, ONE);
    assert!(
        agent
            .explain(&state(), &Tables::default(), "ns/a", "no.example.org:443")
            .is_err()
    );
}

#[test]
fn a_plan_that_breaks_off_is_waited_for() {
    let node = Node::new();
    let agent = node.strict_agent(&state_with(&["a.example"]));
    let said = answer("a.example", ONE, 60);
    node.maps.faults.store(1, Ordering::Relaxed);
    let pending = agent.domains().learn(&said);
    assert!(agent.place_domains().is_err());
    assert_eq!(agent.domains().learn(&said), pending);
    agent.place_domains().unwrap();
    assert!(node.lets_out(ONE));
    assert_eq!(agent.domains().learn(&said), None);
}

#[test]
fn the_next_agent_knows_what_was_learnt() {
    let node = Node::new();
    let first = node.strict_agent(&state_with(&["a.example"]));
    first.domains().learn(&answer("a.example", ONE, 60));
    first.place_domains().unwrap();
    let before = node.maps.maps.lock().unwrap().clone();
    drop(first);
    let second = node.strict_agent(&DesiredState::default());
    assert!(second.is_keeping());
    second.expire_domains(&InUse::default()).unwrap();
    let state = state_with(&["a.example"]);
    second.apply(&state, &Changes::everything()).unwrap();
    assert!(node.lets_out(ONE) && !node.lets_out(TWO));
    let after = node.maps.maps.lock().unwrap().clone();
    assert_eq!(after.pods, before.pods);
    drop(second);

    let path = node.dir.path().join(DOMAINS_NAME);
    std::fs::write(&path, "broken\n").unwrap();
    let third = node.strict_agent(&state);
    third.apply(&state, &Changes::everything()).unwrap();
    assert!(!node.lets_out(ONE), "nothing is known any more");
}

#[test]
fn an_address_ends_with_its_time_and_not_while_it_is_used() {
    let node = Node::new();
    let state = state_with(&["a.example", "b.example"]);
    let agent = node.strict_agent(&state);
    agent.domains().learn(&answer("a.example", ONE, 0));
    agent.domains().learn(&answer("a.example", TWO, 0));
    agent.domains().learn(&answer("b.example", FRIEND, 60));
    agent.place_domains().unwrap();
    assert!([ONE, TWO, FRIEND].iter().all(|to| node.lets_out(to)));
    agent.expire_domains(&InUse::of(&[TWO])).unwrap();
    assert!(!node.lets_out(ONE) && node.lets_out(TWO) && node.lets_out(FRIEND));
    let left = |agent: &Enforcer| -> Vec<u64> {
        let list = agent.list();
        let all = list.names.iter().flat_map(|name| &name.addresses);
        all.map(|learnt| learnt.seconds_left).collect()
    };
    assert_eq!(left(&agent)[0], 0, "in use");
    let text = std::fs::read_to_string(node.dir.path().join(DOMAINS_NAME)).unwrap();
    assert!(!text.contains(ONE) && text.contains(TWO), "{text}");
    agent.expire_domains(&InUse::default()).unwrap();
    assert!(!node.lets_out(TWO) && node.lets_out(FRIEND));

    // Nobody asks for a name that no rule speaks of: what it had ends, whoever uses it.
    agent.domains().learn(&answer("a.example", ONE, 0));
    agent.place_domains().unwrap();
    agent
        .apply(&state_with(&["b.example"]), &Changes::everything())
        .unwrap();
    assert!(!node.lets_out(ONE));
    agent.expire_domains(&InUse::of(&[ONE])).unwrap();
    assert_eq!(agent.list().names.len(), 1);
}

#[test]
fn a_policy_that_arrives_learns_what_the_server_remembers() {
    let node = Node::new();
    let agent = node.strict_agent(&state());
    let remembered = [answer("a.example", ONE, 60), answer("b.example", TWO, 60)];
    agent.domains().set_cache(move |wanted| {
        let all = remembered.iter().filter(|one| wanted.asks_for(&one.name));
        all.cloned().collect()
    });
    let state = state_with(&["a.example"]);
    agent.apply(&state, &Changes::everything()).unwrap();
    assert!(node.lets_out(ONE) && !node.lets_out(TWO));
    assert_eq!(agent.domains().learn(&answer("a.example", ONE, 60)), None);
}
