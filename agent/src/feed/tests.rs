use control_api::v1::{Delta, KeyedData, Object, Service, object};

use super::mailbox::{Origin, Publisher};
use control_api::desired::{DesiredState, Name};

fn service(name: &str) -> Object {
    let service = Service {
        namespace: "d".into(),
        name: name.into(),
        ..Service::default()
    };
    Object {
        kind: Some(object::Kind::Service(service)),
    }
}

fn delta(revision: u64, name: &str) -> Delta {
    let committed_at_us = i64::try_from(revision).unwrap() * 10;
    Delta {
        revision,
        committed_at_us,
        upserts: vec![service(name)],
        removals: Vec::new(),
    }
}

#[tokio::test]
async fn a_slow_subscriber_gets_one_update_for_many_deltas() {
    let publisher = Publisher::default();
    let mut updates = publisher.subscribe();
    assert!(updates.try_next().is_none());
    publisher.replace(
        DesiredState {
            revision: 3,
            ..DesiredState::default()
        },
        Origin::Server,
    );
    assert!(updates.next().await.changes.everything);

    publisher.apply(delta(4, "a"));
    publisher.apply(delta(5, "b"));
    let update = updates.next().await;
    assert_eq!(update.state.revision, 5);
    assert_eq!(
        update.changes.services,
        [Name::new("d", "a"), Name::new("d", "b")].into()
    );
    assert_eq!(update.committed_at_us, Some(40));
    assert!(updates.try_next().is_none());
    assert!(publisher.subscribe().next().await.changes.everything);
}

#[test]
fn secrets_stay_off_the_disk() {
    let mut state = DesiredState {
        revision: 7,
        ..DesiredState::default()
    };
    let data = KeyedData {
        namespace: "d".into(),
        name: "s".into(),
        data: [("password".to_owned(), b"open sesame".to_vec())].into(),
    };
    state.secrets.insert(Name::new("d", "s"), data);
    state.apply(delta(8, "a"));
    let mut bytes = Vec::new();
    super::disk::encode(&state, &mut bytes).unwrap();
    assert!(!bytes.windows(11).any(|w| w == b"open sesame"));

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(super::disk::FILE_NAME);
    assert!(super::disk::load(&path).is_none());
    std::fs::write(&path, &bytes).unwrap();
    let loaded = super::disk::load(&path).unwrap();
    assert_eq!(loaded.services, state.services);
    assert!(loaded.secrets.is_empty());
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(super::disk::load(&path).is_none_or(|s| s.services.is_empty()));
}
