//! Random clusters that change: the compiled services, looked up as the programs do, against the model.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{Endpoint, LoadBalancerIngress, Service, ServiceType, TrafficPolicy};
use proptest::prelude::*;

use super::model::{Client, Fate, fate};
use super::world::{self, endpoint, slice};
use crate::compile::services::{
    Family, Frontend, FrontendOptions, Scope, ServiceKey, ServiceOptions, Wanted, WantedService,
};

/// What the maps would hold.
#[derive(Default)]
struct Compiled {
    services: BTreeMap<ServiceKey, WantedService>,
    addresses: BTreeSet<IpAddr>,
}

impl Compiled {
    fn take(&mut self, wanted: Wanted) {
        if wanted.everything {
            *self = Self::default();
        }
        for (key, service) in wanted.services {
            match service {
                Some(service) => self.services.insert(key, service),
                None => self.services.remove(&key),
            };
        }
        for (address, present) in wanted.addresses {
            if present {
                self.addresses.insert(address);
            } else {
                self.addresses.remove(&address);
            }
        }
    }

    fn find(&self, frontend: &Frontend) -> Option<(&WantedService, FrontendOptions)> {
        let mut found = None;
        for service in self.services.values() {
            for (candidate, options) in &service.frontends {
                if candidate == frontend {
                    assert!(found.is_none(), "{frontend} leads to two services");
                    found = Some((service, *options));
                }
            }
        }
        found
    }

    /// The order of look-ups of the programs.
    fn fate(&self, client: Client, address: Option<IpAddr>, port: u16) -> Fate {
        let mut frontend = Frontend {
            address: address.unwrap_or(Family::V4.wildcard()),
            port,
            protocol: 6,
            scope: Scope::All,
        };
        let Some((mut service, mut options)) = self.find(&frontend) else {
            return Fate::Unknown;
        };
        if client == Client::Outside && options.external_scope {
            frontend.scope = Scope::External;
            (service, options) = self
                .find(&frontend)
                .expect("the entry that the flag promises");
        }
        let usable: BTreeSet<String> = service
            .backends
            .iter()
            .filter(|b| !b.draining)
            .map(|b| b.address.to_string())
            .collect();
        if !usable.is_empty() {
            Fate::Answered(usable)
        } else if options.drop_empty {
            Fate::Dropped
        } else {
            Fate::Refused
        }
    }
}

const SERVICES: [&str; 3] = ["a", "b", "c"];
const NODE_PORTS: [u32; 2] = [30_080, 30_081];
const OUTER: [&str; 3] = ["203.0.113.1", "203.0.113.2", "203.0.113.3"];

fn policy(local: bool) -> i32 {
    if local {
        TrafficPolicy::Local.into()
    } else {
        TrafficPolicy::Cluster.into()
    }
}

fn any_service(name: &'static str) -> impl Strategy<Value = Service> {
    let kinds = prop::sample::select(vec![
        ServiceType::ClusterIp,
        ServiceType::NodePort,
        ServiceType::LoadBalancer,
        ServiceType::ExternalName,
    ]);
    let ingress = prop::collection::vec((prop::sample::select(&OUTER[..]), any::<bool>()), 0..2);
    let external = prop::option::of(prop::sample::select(&OUTER[..]));
    let ports = (prop::sample::select(&NODE_PORTS[..]), 0i64..3);
    let flags = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.1));
    (kinds, ingress, external, ports, flags).prop_map(
        move |(kind, ingress, external, (node_port, created), (internal, outward, headless))| {
            let at = SERVICES.iter().position(|s| *s == name).unwrap_or_default();
            let mut service = world::node_port_service(name, node_port);
            service.r#type = kind.into();
            service.headless = headless;
            service.uid = name.into();
            service.created_at_us = created;
            service.cluster_ips = vec![format!("10.96.0.{}", 100 + at)];
            service.internal_traffic_policy = policy(internal);
            service.external_traffic_policy = policy(outward);
            service.load_balancer_ingress = ingress
                .into_iter()
                .map(|(ip, proxy)| LoadBalancerIngress {
                    ip: ip.into(),
                    proxy,
                })
                .collect();
            service.external_ips = external.into_iter().map(str::to_owned).collect();
            service
        },
    )
}

fn any_endpoint(number: u8) -> impl Strategy<Value = Endpoint> {
    let nodes = prop::sample::select(&["n1", "n2", "ghost", ""][..]);
    let conditions = prop::sample::select(vec!['r', 'r', 'u', 't', 'd']);
    let zones = prop::option::weighted(0.8, prop::sample::select(&["a", "b"][..]));
    let hints = prop::option::weighted(0.5, prop::sample::select(&["n1", "n2"][..]));
    (nodes, conditions, zones, hints).prop_map(move |(node, condition, zone, hint)| Endpoint {
        hint_zones: zone.into_iter().map(str::to_owned).collect(),
        hint_nodes: hint.into_iter().map(str::to_owned).collect(),
        ..endpoint(&format!("10.244.0.{number}"), node, condition)
    })
}

#[derive(Clone, Debug)]
enum Change {
    Service(&'static str, Option<Box<Service>>),
    Slice(&'static str, Option<Vec<Endpoint>>),
    Zone(&'static str),
}

fn change() -> impl Strategy<Value = Change> {
    let name = prop::sample::select(&SERVICES[..]);
    let endpoints: Vec<_> = (1..5u8)
        .map(|n| prop::option::of(any_endpoint(n)))
        .collect();
    prop_oneof![
        name.clone()
            .prop_flat_map(|name| prop::option::weighted(0.85, any_service(name))
                .prop_map(move |service| Change::Service(name, service.map(Box::new)))),
        (name, prop::option::weighted(0.9, endpoints)).prop_map(|(name, endpoints)| {
            Change::Slice(
                name,
                endpoints.map(|list| list.into_iter().flatten().collect()),
            )
        }),
        prop::sample::select(&["a", "b", ""][..]).prop_map(Change::Zone),
    ]
}

fn carry_out(state: &mut DesiredState, change: Change) -> Changes {
    let mut changes = Changes::default();
    match change {
        Change::Service(name, service) => {
            let name = Name::new("default", name);
            match service {
                Some(service) => state.services.insert(name.clone(), *service),
                None => state.services.remove(&name),
            };
            changes.services.insert(name);
        }
        Change::Slice(service, endpoints) => {
            let name = Name::new("default", format!("{service}-1"));
            match endpoints {
                Some(endpoints) => state
                    .endpoint_slices
                    .insert(name, slice(&format!("{service}-1"), service, endpoints)),
                None => state.endpoint_slices.remove(&name),
            };
            changes.services.insert(Name::new("default", service));
        }
        Change::Zone(zone) => {
            if let Some(node) = state.nodes.get_mut(world::NODE) {
                node.zone = zone.into();
            }
            changes.nodes.insert(world::NODE.into());
        }
    }
    changes
}

fn compare(state: &DesiredState, compiled: &Compiled) -> Result<(), TestCaseError> {
    let cluster: Vec<String> = (100..103).map(|n| format!("10.96.0.{n}")).collect();
    let named = OUTER
        .iter()
        .copied()
        .chain(cluster.iter().map(String::as_str));
    let mut packets: Vec<(Option<IpAddr>, u16)> =
        named.map(|address| (address.parse().ok(), 80)).collect();
    packets.extend([(None, 30_080), (None, 30_081), (None, 80)]);
    for (address, port) in packets {
        for client in [Client::Inside, Client::Outside] {
            prop_assert_eq!(
                compiled.fate(client, address, port),
                fate(state, client, address, port.into()),
                "{:?} to {:?}:{}",
                client,
                address,
                port
            );
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// After any history of changes, told one by one, every packet meets the fate that the model gives it, and a
    /// catalog that is told the whole state at once comes to the same result.
    #[test]
    fn changes_told_one_by_one_agree_with_the_model(history in prop::collection::vec(change(), 1..14)) {
        let mut state = world::state([], []);
        let mut catalog = world::catalog(&state, ServiceOptions::default());
        let mut compiled = Compiled::default();
        compiled.take(catalog.compile(&state, &Changes::everything()));
        for change in history {
            let changes = carry_out(&mut state, change);
            compiled.take(catalog.compile(&state, &changes));
            compare(&state, &compiled)?;
        }
        let mut whole = Compiled::default();
        let mut fresh = world::catalog(&state, ServiceOptions::default());
        whole.take(fresh.compile(&state, &Changes::everything()));
        prop_assert_eq!(&whole.services, &compiled.services);
        prop_assert_eq!(&whole.addresses, &compiled.addresses);
        prop_assert_eq!(
            fresh.refusals().collect::<Vec<_>>(),
            catalog.refusals().collect::<Vec<_>>()
        );
    }
}
