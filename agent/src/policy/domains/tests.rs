//! Answers that wait.

use super::*;
use control_api::v1::{PolicyRule, PolicyRulePeer, policy_rule_peer};

fn domains() -> Arc<Domains> {
    let domains = Domains::default();
    let peer = PolicyRulePeer {
        kind: Some(policy_rule_peer::Kind::DomainName("a.example".into())),
    };
    let rule = PolicyRule {
        peers: vec![peer],
        ..PolicyRule::default()
    };
    domains.ask_for(&[Policy {
        egress: vec![rule],
        ..Policy::default()
    }]);
    Arc::new(domains)
}

fn answer(last: u8) -> Answer {
    Answer {
        name: "a.example".into(),
        addresses: vec![IpAddr::from([192, 0, 2, last])],
        ttl_s: 60,
    }
}

fn late(domains: &Domains) -> String {
    let mut registry = prometheus_client::registry::Registry::default();
    domains.stats().register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let line = text
        .lines()
        .find(|line| line.starts_with("weir_policy_domain_late_total"));
    line.unwrap().to_owned()
}

#[tokio::test]
async fn an_answer_waits_for_its_own_addresses_and_not_for_later_ones() {
    let domains = domains();
    let pending = domains.learn(&answer(1)).unwrap();
    let waiting = {
        let domains = Arc::clone(&domains);
        tokio::spawn(async move { domains.wait(pending).await })
    };
    let snapshot = domains.snapshot();
    let later = domains.learn(&answer(2)).unwrap();
    assert_ne!(pending, later);
    domains.placed(&snapshot);
    waiting.await.unwrap();
    assert_eq!(domains.learn(&answer(2)), Some(later));
    domains.placed(&domains.snapshot());
    domains.wait(later).await;
    assert_eq!(domains.learn(&answer(2)), None);
    assert_eq!(late(&domains), "weir_policy_domain_late_total 0");
}

#[tokio::test]
async fn no_answer_waits_for_ever() {
    let domains = domains();
    let pending = domains.learn(&answer(1)).unwrap();
    domains
        .wait_at_most(pending, Duration::from_millis(1))
        .await;
    assert_eq!(late(&domains), "weir_policy_domain_late_total 1");
}
