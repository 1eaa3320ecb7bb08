//! Services that claim the same address, protocol and port: the older one has it, the others are told.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use super::provider::{external_ips, ingress};
use crate::client::resources;
use crate::controllers::runtime::informer::Store;
use crate::controllers::runtime::object::{Key, Object};
use crate::controllers::runtime::session::{Context, Session};
use crate::controllers::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes};
use crate::status::ApiError;

/// Address, protocol, port.
type Frontend = (IpAddr, String, i64);
/// Older Services are smaller; of two made in the same second the one whose name comes first.
type Claimant = (String, Key);

/// Who claims what. Pure.
#[derive(Debug, Default)]
struct Claims {
    by_frontend: BTreeMap<Frontend, BTreeSet<Claimant>>,
    by_service: BTreeMap<Key, (String, BTreeSet<Frontend>)>,
    /// What each Service has been told last.
    told: BTreeMap<Key, Vec<String>>,
}

impl Claims {
    /// Takes the present claims of a Service; other Services whose frontends it claims or has let go.
    fn set(&mut self, key: &Key, created: &str, frontends: BTreeSet<Frontend>) -> BTreeSet<Key> {
        let before = self.by_service.remove(key).unwrap_or_default();
        if before.0 == created && before.1 == frontends {
            if !frontends.is_empty() {
                self.by_service.insert(key.clone(), before);
            }
            return BTreeSet::new();
        }
        let mut touched = BTreeSet::new();
        for frontend in &before.1 {
            if let Some(claimants) = self.by_frontend.get_mut(frontend) {
                claimants.remove(&(before.0.clone(), key.clone()));
                touched.extend(claimants.iter().map(|(_, other)| other.clone()));
                if claimants.is_empty() {
                    self.by_frontend.remove(frontend);
                }
            }
        }
        for frontend in &frontends {
            let claimants = self.by_frontend.entry(frontend.clone()).or_default();
            touched.extend(claimants.iter().map(|(_, other)| other.clone()));
            claimants.insert((created.to_owned(), key.clone()));
        }
        if !frontends.is_empty() {
            self.by_service
                .insert(key.clone(), (created.to_owned(), frontends));
        }
        touched.remove(key);
        touched
    }

    /// What a Service has to be told and was not told last.
    fn news(&mut self, key: &Key) -> Vec<String> {
        let claimed = self.by_service.get(key).map(|(_, f)| f);
        let lost = claimed.into_iter().flatten().filter_map(|frontend| {
            let (_, first) = self.by_frontend.get(frontend)?.first()?;
            let (address, protocol, port) = frontend;
            (first != key).then(|| {
                format!("{address} {protocol} port {port} belongs to the older Service {first}")
            })
        });
        let lost: Vec<String> = lost.collect();
        let before = match lost.is_empty() {
            true => self.told.remove(key),
            false => self.told.insert(key.clone(), lost.clone()),
        }
        .unwrap_or_default();
        lost.into_iter()
            .filter(|line| !before.contains(line))
            .collect()
    }
}

/// See the module documentation.
pub(in crate::controllers) struct Frontends {
    services: Arc<Store>,
    queue: KeyQueue,
    claims: Mutex<Claims>,
}

impl Frontends {
    pub(in crate::controllers) fn new(context: &Context, queue: &KeyQueue) -> Self {
        enqueue_changes(context, resources::SERVICES, queue);
        Self {
            services: context.informers.store(resources::SERVICES),
            queue: queue.clone(),
            claims: Mutex::default(),
        }
    }
}

impl Controller for Frontends {
    const NAME: &'static str = "service-frontends";
    const WORKERS: usize = 1;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let service = self.services.get(key);
        let (created, frontends) = match service.as_deref() {
            Some(service) => (
                service.text(&["metadata", "creationTimestamp"]),
                frontends(service),
            ),
            None => ("", BTreeSet::new()),
        };
        let (touched, news) = {
            let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
            (claims.set(key, created, frontends), claims.news(key))
        };
        touched.into_iter().for_each(|other| self.queue.add(other));
        if let Some(service) = &service {
            let recorder = session.recorder().named("service-controller");
            for line in news {
                recorder.warning(
                    (service.as_ref(), "v1", "Service"),
                    "FrontendConflict",
                    line,
                );
            }
        }
        Ok(None)
    }
}

/// What a Service claims beyond what the API server gives out itself.
fn frontends(service: &Value) -> BTreeSet<Frontend> {
    if service.text(&["spec", "type"]) == "ExternalName" {
        return BTreeSet::new();
    }
    let mut addresses = external_ips(service);
    addresses.extend(ingress(service));
    let ports = service.items(&["spec", "ports"]);
    let of = |address: &IpAddr| {
        let address = *address;
        ports.iter().filter_map(move |port| {
            Some((
                address,
                port.text(&["protocol"]).to_owned(),
                port.number(&["port"])?,
            ))
        })
    };
    addresses.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(ports: &[i64]) -> BTreeSet<Frontend> {
        let address: IpAddr = [192, 0, 2, 1].into();
        ports
            .iter()
            .map(|p| (address, "TCP".to_owned(), *p))
            .collect()
    }

    #[test]
    fn the_older_one_wins_and_the_other_is_told_once() {
        let (old, new) = (Key::new("d", "z"), Key::new("d", "a"));
        let mut c = Claims::default();
        assert!(
            c.set(&new, "2024-01-02T00:00:00Z", claims(&[80, 81]))
                .is_empty()
        );
        assert!(c.news(&new).is_empty());
        assert_eq!(
            c.set(&old, "2024-01-01T00:00:00Z", claims(&[80])),
            [new.clone()].into()
        );
        assert!(c.news(&old).is_empty());
        let told = c.news(&new);
        assert_eq!(
            told,
            ["192.0.2.1 TCP port 80 belongs to the older Service d/z"]
        );
        assert!(c.news(&new).is_empty(), "once");
        assert_eq!(c.set(&old, "", BTreeSet::new()), [new.clone()].into());
        assert!(c.news(&new).is_empty());
        c.set(&old, "2024-01-01T00:00:00Z", claims(&[81]));
        assert_eq!(c.news(&new).len(), 1, "a new conflict");
        c.set(&new, "", BTreeSet::new());
        c.set(&old, "", BTreeSet::new());
        assert!(c.by_frontend.is_empty() && c.by_service.is_empty());
    }
}
