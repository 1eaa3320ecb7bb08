use super::*;
use proptest::prelude::*;

fn frontend(number: u8) -> Frontend {
    Frontend {
        address: IpAddr::from([10, 96, 0, number]),
        port: 80,
        protocol: 6,
    }
}

fn backend(number: u8, draining: bool) -> WantedBackend {
    WantedBackend {
        address: IpAddr::from([10, 244, 0, number]),
        port: 8080,
        local: number.is_multiple_of(2),
        draining,
    }
}

fn service(numbers: &[u8]) -> Option<WantedService> {
    Some(WantedService {
        backends: numbers.iter().map(|n| backend(*n, false)).collect(),
        affinity_s: 0,
    })
}

const ROOM: Room = Room {
    frontends: 8,
    backends: 40,
};

/// The maps, applied one operation at a time; every state between two operations must be safe for a reader.
#[derive(Clone, Debug, Default)]
struct Maps {
    frontends: BTreeMap<Frontend, (u32, u32, u32)>,
    slots: BTreeMap<(Family, u32, u32), u32>,
    backends: BTreeMap<(Family, u32), PresentBackend>,
}

impl Maps {
    fn apply(&mut self, operation: &Operation) {
        match operation.clone() {
            Operation::PutBackend {
                family,
                id,
                address,
                port,
                local,
                service_id,
            } => {
                let usage = self
                    .backends
                    .get(&(family, id))
                    .map_or(BackendUse::Draining, |b| b.usage);
                let backend = PresentBackend {
                    address,
                    port,
                    local,
                    service_id,
                    usage,
                };
                self.backends.insert((family, id), backend);
            }
            Operation::SetUse { family, id, usage } => {
                self.backends
                    .get_mut(&(family, id))
                    .expect("a use is set on what is there")
                    .usage = usage;
            }
            Operation::PutSlot {
                family,
                service_id,
                index,
                backend_id,
            } => {
                self.slots.insert((family, service_id, index), backend_id);
            }
            Operation::PutFrontend {
                frontend,
                service_id,
                backends,
                local_backends,
                ..
            } => {
                self.frontends
                    .insert(frontend, (service_id, backends, local_backends));
            }
            Operation::RemoveFrontend { frontend } => {
                assert!(self.frontends.remove(&frontend).is_some());
            }
            Operation::RemoveSlot {
                family,
                service_id,
                index,
            } => {
                assert!(self.slots.remove(&(family, service_id, index)).is_some());
            }
            Operation::EndBackend { family, id } => {
                assert!(self.backends.remove(&(family, id)).is_some());
            }
        }
        self.assert_no_dangling();
    }

    fn assert_no_dangling(&self) {
        for (frontend, (service_id, backends, local)) in &self.frontends {
            assert!(local <= backends);
            for index in 0..*backends {
                let family = Family::of(frontend.address);
                let id = self
                    .slots
                    .get(&(family, *service_id, index))
                    .expect("a counted slot exists");
                let backend = self
                    .backends
                    .get(&(family, *id))
                    .expect("a slot leads to a backend");
                assert_eq!(backend.service_id, *service_id);
                assert_eq!(
                    backend.usage,
                    BackendUse::Active,
                    "a slot leads to a usable backend"
                );
            }
        }
    }

    fn present(&self) -> Present {
        let services = self
            .frontends
            .iter()
            .map(|(frontend, (service_id, backends, local_backends))| {
                let family = Family::of(frontend.address);
                let slots = (0..*backends)
                    .map(|i| self.slots[&(family, *service_id, i)])
                    .collect();
                let service = PresentService {
                    service_id: *service_id,
                    slots,
                    local_backends: *local_backends,
                    affinity_s: 0,
                };
                (*frontend, service)
            })
            .collect();
        Present {
            services,
            backends: self.backends.clone(),
            stray_slots: Vec::new(),
        }
    }

    /// Active backends' last octets of a service port.
    fn serves(&self, frontend: &Frontend) -> Option<BTreeSet<u8>> {
        let (service_id, backends, _) = self.frontends.get(frontend)?;
        let octet = |index| {
            let id = self.slots[&(Family::V4, *service_id, index)];
            match self.backends[&(Family::V4, id)].address {
                IpAddr::V4(v4) => v4.octets()[3],
                IpAddr::V6(_) => unreachable!("only IPv4 here"),
            }
        };
        Some((0..*backends).map(octet).collect())
    }
}

#[test]
fn ids_stay_over_a_restart() {
    let mut maps = Maps::default();
    let mut planner = Planner::new(Present::default(), ROOM);
    let changes = BTreeMap::from([
        (frontend(1), service(&[1, 2])),
        (frontend(2), service(&[3])),
    ]);
    for operation in &planner.plan(&changes).operations {
        maps.apply(operation);
    }
    let mut restarted = Planner::new(maps.present(), ROOM);
    assert!(restarted.take_strays().is_empty());
    assert_eq!(restarted.plan(&changes), Plan::default());
}

#[test]
fn a_shared_service_id_is_not_adopted() {
    let slot = PresentService {
        service_id: 1,
        ..PresentService::default()
    };
    let services = BTreeMap::from([(frontend(1), slot.clone()), (frontend(2), slot)]);
    let mut planner = Planner::new(
        Present {
            services,
            ..Present::default()
        },
        ROOM,
    );
    assert_eq!(
        planner.take_strays(),
        [Operation::RemoveFrontend {
            frontend: frontend(2)
        }]
    );
    let plan = planner.plan(&BTreeMap::from([(frontend(2), service(&[]))]));
    assert!(matches!(
        plan.operations[..],
        [Operation::PutFrontend { service_id: 2, .. }]
    ));
}

#[test]
fn what_does_not_fit_is_refused_by_name_and_the_rest_goes_on() {
    let mut planner = Planner::new(
        Present::default(),
        Room {
            frontends: 8,
            backends: 3,
        },
    );
    let plan = planner.plan(&BTreeMap::from([
        (frontend(1), service(&[1, 2, 3])),
        (frontend(2), service(&[4])),
    ]));
    assert_eq!(plan.refused.len(), 1);
    assert_eq!(plan.refused[0].0, frontend(1));
    assert!(
        plan.refused[0].1.contains("full (3)"),
        "{}",
        plan.refused[0].1
    );
    assert!(
        plan.operations
            .iter()
            .any(|o| matches!(o, Operation::PutFrontend { frontend: f, .. } if *f == frontend(2)))
    );
}

#[test]
fn a_backend_that_drains_leaves_its_slot_and_keeps_its_id() {
    let mut planner = Planner::new(Present::default(), ROOM);
    planner.plan(&BTreeMap::from([(frontend(1), service(&[1, 3]))]));
    let drained = WantedService {
        backends: vec![backend(1, true), backend(3, false)],
        affinity_s: 0,
    };
    let plan = planner.plan(&BTreeMap::from([(frontend(1), Some(drained))]));
    let last = plan.operations.last().expect("operations");
    assert!(
        matches!(
            last,
            Operation::SetUse {
                usage: BackendUse::Draining,
                id: 1,
                ..
            }
        ),
        "{plan:?}"
    );
    assert!(
        !plan
            .operations
            .iter()
            .any(|o| matches!(o, Operation::EndBackend { .. }))
    );
}

fn wanted() -> impl Strategy<Value = Option<WantedService>> {
    let backends = prop::collection::btree_map(0u8..12, any::<bool>(), 0..8);
    prop::option::weighted(
        0.8,
        backends.prop_map(|backends| WantedService {
            backends: backends
                .into_iter()
                .map(|(n, draining)| backend(n, draining))
                .collect(),
            affinity_s: 0,
        }),
    )
}

proptest! {
    /// After any history: the maps hold exactly what is wanted, no state on the way dangles, and a restart at any
    /// point changes nothing.
    #[test]
    fn maps_follow_any_history(
        history in prop::collection::vec(
            (prop::collection::btree_map(0u8..5, wanted(), 1..4), any::<bool>()),
            1..24,
        )
    ) {
        let mut maps = Maps::default();
        let mut planner = Planner::new(Present::default(), ROOM);
        let mut state: BTreeMap<Frontend, WantedService> = BTreeMap::new();
        for (changes, restart) in history {
            let changes: BTreeMap<_, _> =
                changes.into_iter().map(|(n, wanted)| (frontend(n), wanted)).collect();
            let plan = planner.plan(&changes);
            prop_assert!(plan.refused.is_empty());
            for operation in &plan.operations {
                maps.apply(operation);
            }
            for (frontend, wanted) in changes {
                match wanted {
                    Some(wanted) => { state.insert(frontend, wanted); }
                    None => { state.remove(&frontend); }
                }
            }
            for frontend in (0..5).map(frontend) {
                let expected = state.get(&frontend).map(|service| {
                    let octet = |b: &WantedBackend| match b.address {
                        IpAddr::V4(v4) => v4.octets()[3],
                        IpAddr::V6(_) => 0,
                    };
                    service.backends.iter().filter(|b| !b.draining).map(octet).collect::<BTreeSet<_>>()
                });
                prop_assert_eq!(maps.serves(&frontend), expected);
            }
            let live: usize = state.values().map(|s| s.backends.len()).sum();
            prop_assert!(maps.backends.len() <= live, "no backend outlives its service");
            if restart {
                planner = Planner::new(maps.present(), ROOM);
                prop_assert!(planner.take_strays().is_empty());
            }
        }
    }
}
