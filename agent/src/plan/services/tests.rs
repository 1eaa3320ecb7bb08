use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::compile::services::{FrontendOptions, Owner, View, WantedBackend};
use control_api::desired::Name;
use ipnetwork::IpNetwork;

const MAGLEV_SIZE: u32 = 251;

const ROOM: Room = Room {
    frontends: 64,
    backends: 400,
    sources: 64,
    blocks: 64,
};

fn both(room: Room) -> BTreeMap<Family, Room> {
    Family::ALL.map(|family| (family, room)).into()
}

fn frontend(number: u8, scope: Scope) -> Frontend {
    Frontend {
        address: IpAddr::from([10, 96, 0, number]),
        port: 80,
        protocol: 6,
        scope,
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

fn key(number: u8) -> ServiceKey {
    ServiceKey {
        owner: Owner::Service(Name::new("default", format!("s{number}"))),
        family: Family::V4,
        port: "http".into(),
        protocol: 6,
        host_port: 0,
        view: View::Cluster,
    }
}

/// A service with these frontends and backends.
fn service(frontends: &[u8], backends: &[u8]) -> Option<WantedService> {
    Some(WantedService {
        frontends: frontends
            .iter()
            .map(|n| (frontend(*n, Scope::All), FrontendOptions::default()))
            .collect(),
        backends: backends.iter().map(|n| backend(*n, false)).collect(),
        ..WantedService::default()
    })
}

fn wanted<const N: usize>(services: [(u8, Option<WantedService>); N]) -> Wanted {
    Wanted {
        services: services.into_iter().map(|(n, s)| (key(n), s)).collect(),
        ..Wanted::default()
    }
}

fn planner(present: Present) -> Planner {
    Planner::new(present, both(ROOM), MAGLEV_SIZE)
}

/// The maps, applied one operation at a time; every state between two operations must be safe for a reader.
#[derive(Clone, Debug, Default)]
struct Maps {
    present: Present,
    tables: BTreeMap<(Family, u32, u32), Vec<u32>>,
}

impl Maps {
    fn carry_out(&mut self, plan: &Plan) {
        for operation in &plan.operations {
            self.apply(operation);
            self.assert_no_dangling();
        }
    }

    fn apply(&mut self, operation: &Operation) {
        let maps = &mut self.present;
        match operation.clone() {
            Operation::PutBackend {
                family,
                id,
                address,
                port,
                local,
                service_id,
            } => {
                let before = maps.backends.get(&(family, id));
                assert!(
                    before.is_none_or(
                        |b| (b.address, b.port, b.service_id) == (address, port, service_id)
                    ),
                    "a living id is given to nobody else"
                );
                let backend = PresentBackend {
                    address,
                    port,
                    local,
                    service_id,
                    usage: before.map_or(BackendUse::Draining, |b| b.usage),
                };
                maps.backends.insert((family, id), backend);
            }
            Operation::SetUse { family, id, usage } => {
                maps.backends
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
                maps.slots.insert((family, service_id, index), backend_id);
            }
            Operation::PutBlock {
                family,
                service_id,
                block,
                backend_ids,
            } => {
                assert_eq!(backend_ids.len(), BLOCK_SLOTS);
                maps.blocks.insert((family, service_id, block));
                self.tables.insert((family, service_id, block), backend_ids);
            }
            Operation::PutSource {
                service_id,
                network,
            } => {
                maps.sources
                    .insert((operation.family(), service_id, network));
            }
            _ => self.apply_other(operation),
        }
    }

    fn apply_other(&mut self, operation: &Operation) {
        let maps = &mut self.present;
        match operation.clone() {
            Operation::PutFrontend { frontend, entry } => {
                maps.frontends.insert(frontend, entry);
            }
            Operation::RemoveFrontend { frontend } => {
                assert!(maps.frontends.remove(&frontend).is_some());
            }
            Operation::RemoveSource {
                service_id,
                network,
            } => {
                assert!(
                    maps.sources
                        .remove(&(operation.family(), service_id, network))
                );
            }
            Operation::RemoveBlock {
                family,
                service_id,
                block,
            } => {
                assert!(maps.blocks.remove(&(family, service_id, block)));
                self.tables.remove(&(family, service_id, block));
            }
            Operation::RemoveSlot {
                family,
                service_id,
                index,
            } => {
                assert!(maps.slots.remove(&(family, service_id, index)).is_some());
            }
            Operation::EndBackend { family, id } => {
                assert!(maps.backends.remove(&(family, id)).is_some());
            }
            other => unreachable!("an addition: {other:?}"),
        }
    }

    /// What a reader may follow from any frontend: slots, and the table where one is used.
    fn assert_no_dangling(&self) {
        let maps = &self.present;
        for (frontend, entry) in &maps.frontends {
            let family = Family::of(frontend.address);
            assert!(entry.local_backends <= entry.backends);
            let usable = |id: u32| {
                let backend = maps
                    .backends
                    .get(&(family, id))
                    .expect("leads to a backend");
                assert_eq!(backend.service_id, entry.service_id);
                assert_eq!(backend.usage, BackendUse::Active, "of use");
            };
            for index in 0..entry.backends {
                let slot = maps.slots.get(&(family, entry.service_id, index));
                usable(*slot.expect("a counted slot exists"));
            }
            if entry.options.maglev && entry.backends > 0 {
                for place in 0..MAGLEV_SIZE as usize {
                    let block = u32::try_from(place / BLOCK_SLOTS).unwrap();
                    let table = &self.tables[&(family, entry.service_id, block)];
                    usable(table[place % BLOCK_SLOTS]);
                }
            }
        }
    }

    /// Last octets of the usable backends behind a frontend.
    fn serves(&self, frontend: &Frontend) -> Option<BTreeSet<u8>> {
        let entry = self.present.frontends.get(frontend)?;
        let octet = |index| {
            let id = self.present.slots[&(Family::V4, entry.service_id, index)];
            last_octet(self.present.backends[&(Family::V4, id)].address)
        };
        Some((0..entry.backends).map(octet).collect())
    }
}

fn last_octet(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(v4) => v4.octets()[3],
        IpAddr::V6(v6) => v6.octets()[15],
    }
}

fn whole(mut wanted: Wanted) -> Wanted {
    wanted.everything = true;
    wanted
}

#[test]
fn ids_stay_over_a_restart() {
    let mut maps = Maps::default();
    let changes = wanted([(1, service(&[1, 4, 5], &[1, 2])), (2, service(&[2], &[3]))]);
    maps.carry_out(&planner(Present::default()).plan(&changes));
    let mut restarted = planner(maps.present.clone());
    assert_eq!(restarted.plan(&whole(changes)), Plan::default());
}

#[test]
fn frontends_of_a_service_share_its_id_and_follow_its_changes() {
    let mut maps = Maps::default();
    let mut planner = planner(Present::default());
    maps.carry_out(&planner.plan(&wanted([(1, service(&[1, 2], &[1, 2]))])));
    let ids = |maps: &Maps| -> BTreeSet<u32> {
        let entries = maps.present.frontends.values();
        entries.map(|entry| entry.service_id).collect()
    };
    assert_eq!(ids(&maps).len(), 1);
    assert_eq!(maps.present.backends.len(), 2);
    maps.carry_out(&planner.plan(&wanted([(1, service(&[1, 2], &[3]))])));
    assert_eq!(maps.serves(&frontend(1, Scope::All)), Some([3].into()));
    assert_eq!(maps.serves(&frontend(2, Scope::All)), Some([3].into()));
}

#[test]
fn a_frontend_passes_from_one_service_to_another_without_a_gap() {
    let mut maps = Maps::default();
    let mut planner = planner(Present::default());
    maps.carry_out(&planner.plan(&wanted([
        (1, service(&[1, 2], &[1])),
        (2, service(&[3], &[2])),
    ])));
    for (first, second) in [(&[1][..], &[2, 3][..]), (&[1, 2], &[3])] {
        let plan = planner.plan(&wanted([
            (1, service(first, &[1])),
            (2, service(second, &[2])),
        ]));
        assert!(
            !plan
                .operations
                .iter()
                .any(|o| matches!(o, Operation::RemoveFrontend { .. })),
            "{plan:?}"
        );
        maps.carry_out(&plan);
        let holder = if second.contains(&2) { 2 } else { 1 };
        assert_eq!(maps.serves(&frontend(2, Scope::All)), Some([holder].into()));
    }
}

#[test]
fn a_service_whose_port_has_another_name_keeps_its_id() {
    let mut planner = planner(Present::default());
    planner.plan(&wanted([(1, service(&[1], &[1]))]));
    let plan = planner.plan(&wanted([(1, None), (2, service(&[1], &[1]))]));
    assert_eq!(plan, Plan::default());
}

/// Two services were found under one id: an agent was cut off, or somebody wrote to the maps.
#[test]
fn an_id_that_two_services_have_is_given_to_one() {
    let mut maps = Maps::default();
    for number in [1, 2] {
        let entry = FrontendEntry {
            service_id: 1,
            ..FrontendEntry::default()
        };
        maps.present
            .frontends
            .insert(frontend(number, Scope::All), entry);
    }
    let mut planner = planner(maps.present.clone());
    maps.carry_out(&planner.plan(&whole(wanted([
        (1, service(&[1], &[1])),
        (2, service(&[2], &[2])),
    ]))));
    assert_eq!(maps.serves(&frontend(1, Scope::All)), Some([1].into()));
    assert_eq!(maps.serves(&frontend(2, Scope::All)), Some([2].into()));
}

#[test]
fn what_belongs_to_nothing_goes_with_the_first_whole_state_only() {
    let mut maps = Maps::default();
    let network: IpNetwork = "192.0.2.0/24".parse().unwrap();
    maps.present.sources.insert((Family::V4, 9, network));
    maps.present.blocks.insert((Family::V4, 9, 0));
    maps.present.slots.insert((Family::V4, 9, 3), 7);
    maps.present.slots.insert((Family::V4, 1, u32::MAX), 7);
    let stray = PresentBackend {
        address: IpAddr::from([10, 244, 0, 9]),
        port: 1,
        local: false,
        service_id: 9,
        usage: BackendUse::Active,
    };
    maps.present.backends.insert((Family::V4, 7), stray);
    let entry = |service_id| FrontendEntry {
        service_id,
        ..FrontendEntry::default()
    };
    for (number, id) in [(1, 1), (2, 0)] {
        maps.present
            .frontends
            .insert(frontend(number, Scope::All), entry(id));
    }
    let mut planner = planner(maps.present.clone());
    maps.carry_out(&planner.plan(&wanted([(3, service(&[3], &[1]))])));
    assert_eq!(maps.present.frontends.len(), 3, "nothing was removed");
    maps.carry_out(&planner.plan(&whole(wanted([(3, service(&[3], &[1]))]))));
    assert_eq!(maps.present.frontends.len(), 1);
    assert_eq!(maps.present.slots.len(), 1);
    assert_eq!(maps.present.backends.len(), 1);
    assert!(maps.present.sources.is_empty() && maps.present.blocks.is_empty());
}

#[test]
fn backends_that_do_not_fit_are_told_and_the_others_serve() {
    let room = Room {
        backends: 4,
        ..ROOM
    };
    let mut maps = Maps::default();
    let mut planner = Planner::new(Present::default(), both(room), MAGLEV_SIZE);
    let both = || wanted([(1, service(&[1], &[1, 2])), (2, service(&[2], &[3, 4, 5]))]);
    let plan = planner.plan(&both());
    maps.carry_out(&plan);
    assert_eq!(plan.refused.len(), 1);
    assert!(plan.refused[0].0.contains("default/s2"), "{plan:?}");
    assert!(plan.refused[0].1.contains("1 of 3"), "{plan:?}");
    assert_eq!(maps.serves(&frontend(2, Scope::All)), Some([3].into()));
    // What is given back serves in the plan after the next: its end comes last in the one that gives it back.
    maps.carry_out(&planner.plan(&wanted([(1, service(&[1], &[]))])));
    let plan = planner.plan(&both());
    maps.carry_out(&plan);
    assert_eq!(plan.refused.len(), 1, "{plan:?}");
    assert_eq!(maps.serves(&frontend(1, Scope::All)), Some([1, 2].into()));
}

#[test]
fn frontends_ranges_and_tables_beyond_the_room_are_told() {
    let room = Room {
        frontends: 2,
        sources: 1,
        blocks: 4,
        ..ROOM
    };
    let mut maps = Maps::default();
    let mut planner = Planner::new(Present::default(), both(room), MAGLEV_SIZE);
    let mut services = [
        service(&[1], &[1, 2]),
        service(&[2], &[3, 4]),
        service(&[3], &[5]),
    ];
    for service in services.iter_mut().flatten() {
        service.frontends[0].1.maglev = true;
        service.frontends[0].1.ranges = true;
        service.ranges = vec!["192.0.2.0/24".parse().unwrap()];
    }
    let [one, two, three] = services;
    let plan = planner.plan(&wanted([(1, one), (2, two), (3, three)]));
    maps.carry_out(&plan);
    let told = |what: &str| {
        plan.refused
            .iter()
            .filter(|(_, why)| why.contains(what))
            .count()
    };
    assert_eq!(told("Maglev"), 1, "{plan:?}");
    assert_eq!(told("source ranges"), 2, "{plan:?}");
    assert_eq!(
        maps.present.frontends.len(),
        1,
        "no frontend is open to all instead"
    );
}

#[test]
fn a_backend_that_drains_leaves_its_slot_and_keeps_its_id() {
    let mut planner = planner(Present::default());
    planner.plan(&wanted([(1, service(&[1], &[1, 3]))]));
    let drained = WantedService {
        backends: vec![backend(1, true), backend(3, false)],
        ..service(&[1], &[]).unwrap()
    };
    let plan = planner.plan(&wanted([(1, Some(drained))]));
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
}

#[test]
fn a_service_of_a_hundred_thousand_endpoints_is_programmed_and_one_more_costs_one() {
    let address = |n: u32| IpAddr::from((0x0a00_0000 + n).to_be_bytes());
    let service = |count: u32| WantedService {
        backends: (0..count)
            .map(|n| WantedBackend {
                address: address(n),
                port: 80,
                local: false,
                draining: false,
            })
            .collect(),
        ..self::service(&[1], &[]).unwrap()
    };
    let room = Room {
        backends: 262_144,
        ..ROOM
    };
    let mut planner = Planner::new(Present::default(), both(room), MAGLEV_SIZE);
    let plan = planner.plan(&wanted([(1, Some(service(100_000)))]));
    assert_eq!(plan.refused, []);
    assert_eq!(plan.operations.len(), 300_001);
    let more = planner.plan(&wanted([(1, Some(service(100_001)))]));
    assert_eq!(more.operations.len(), 4);
}

#[test]
fn a_whole_address_comes_and_goes_with_its_services() {
    let address = IpAddr::from([10, 96, 0, 1]);
    let addresses = |present| Wanted {
        addresses: [(address, present)].into(),
        ..Wanted::default()
    };
    let mut maps = Maps::default();
    let mut planner = planner(Present::default());
    maps.carry_out(&planner.plan(&addresses(true)));
    assert_eq!(maps.present.frontends.len(), 1);
    assert_eq!(planner.plan(&addresses(true)), Plan::default());
    let mut restarted = self::planner(maps.present.clone());
    assert_eq!(restarted.plan(&whole(addresses(true))), Plan::default());
    maps.carry_out(&restarted.plan(&whole(Wanted::default())));
    assert!(maps.present.frontends.is_empty());
}

/// Frontend numbers below this are all that a history uses.
const FRONTENDS: u8 = 8;

#[test]
fn a_new_flow_is_led_as_the_programs_lead_it() {
    let mut planner = planner(Present::default());
    let mut maps = Maps::default();
    let mut inside = service(&[1], &[1, 2]).unwrap();
    let node_port = Frontend {
        address: Family::V4.wildcard(),
        port: 30_080,
        ..frontend(1, Scope::All)
    };
    let split = FrontendOptions {
        external_scope: true,
        ..FrontendOptions::default()
    };
    inside.frontends.push((node_port, split));
    inside.backends.push(backend(5, true));
    let mut outside = service(&[], &[2]).unwrap();
    let external = Frontend {
        scope: Scope::External,
        ..node_port
    };
    outside.frontends = vec![(external, FrontendOptions::default())];
    let mut all = whole(wanted([(1, Some(inside)), (2, Some(outside))]));
    all.addresses.insert(IpAddr::from([10, 96, 0, 1]), true);
    maps.carry_out(&planner.plan(&all));

    let lead = |to: &str, protocol, node_ports, outside| {
        planner.lead(to.parse().unwrap(), protocol, node_ports, outside)
    };
    let led = |number: u8, backends: &[u8]| Led::Service {
        owner: format!("service default/s{number}"),
        backends: backends
            .iter()
            .map(|n| ([10, 244, 0, *n], 8080).into())
            .collect(),
    };
    assert_eq!(lead("10.96.0.1:80", 6, false, false), led(1, &[1, 2]));
    assert_eq!(lead("10.96.0.1:80", 6, false, true), led(1, &[1, 2]));
    assert_eq!(lead("192.0.2.1:30080", 6, true, false), led(1, &[1, 2]));
    assert_eq!(lead("192.0.2.1:30080", 6, true, true), led(2, &[2]));
    assert_eq!(lead("192.0.2.1:30080", 6, false, false), Led::Direct);
    assert_eq!(lead("10.96.0.1:81", 6, false, false), Led::Refused);
    assert_eq!(lead("10.96.0.1:80", 17, false, false), Led::Refused);
    assert_eq!(lead("10.96.0.1:0", 1, false, false), Led::Refused);
    assert_eq!(lead("10.244.0.1:8080", 6, false, false), Led::Direct);
}

fn options() -> impl Strategy<Value = FrontendOptions> {
    (any::<bool>(), any::<bool>()).prop_map(|(maglev, ranges)| FrontendOptions {
        maglev,
        ranges,
        ..FrontendOptions::default()
    })
}

fn any_service() -> impl Strategy<Value = WantedService> {
    let frontends = prop::collection::btree_map(0..FRONTENDS, options(), 1..4);
    let backends = prop::collection::btree_map(0u8..12, any::<bool>(), 0..8);
    let ranges = prop::collection::btree_set(0u8..4, 0..3);
    (frontends, backends, ranges).prop_map(|(frontends, backends, ranges)| WantedService {
        frontends: frontends
            .into_iter()
            .map(|(n, options)| (frontend(n, Scope::All), options))
            .collect(),
        backends: backends
            .into_iter()
            .map(|(n, draining)| backend(n, draining))
            .collect(),
        affinity_s: 0,
        ranges: ranges
            .into_iter()
            .map(|n| IpNetwork::new(IpAddr::from([192, 0, n, 0]), 24).unwrap())
            .collect(),
    })
}

#[derive(Clone, Debug)]
struct Change {
    services: BTreeMap<u8, Option<WantedService>>,
    restart: bool,
}

fn change() -> impl Strategy<Value = Change> {
    let service = prop::option::weighted(0.8, any_service());
    let services = prop::collection::btree_map(0u8..5, service, 1..4);
    (services, any::<bool>()).prop_map(|(services, restart)| Change { services, restart })
}

/// A frontend has one service: the changed ones give way to those that stay, then to those with lower numbers.
fn without_clashes(state: &mut BTreeMap<u8, WantedService>) {
    let mut taken = BTreeSet::new();
    state.retain(|_, service| {
        service
            .frontends
            .retain(|(frontend, _)| taken.insert(*frontend));
        !service.frontends.is_empty()
    });
}

proptest! {
    /// After any history: the maps hold exactly what is wanted, no state on the way dangles, and a restart at any
    /// point changes nothing but tables, which are written again.
    #[test]
    fn maps_follow_any_history(history in prop::collection::vec(change(), 1..16)) {
        let mut maps = Maps::default();
        let mut planner = planner(Present::default());
        let mut state: BTreeMap<u8, WantedService> = BTreeMap::new();
        for change in history {
            let before = state.clone();
            for (number, service) in change.services {
                match service {
                    Some(service) => { state.insert(number, service); }
                    None => { state.remove(&number); }
                }
            }
            without_clashes(&mut state);
            let differs = |n: &u8| state.get(n) != before.get(n);
            let services = (0..5).filter(differs).map(|n| (key(n), state.get(&n).cloned()));
            let plan = planner.plan(&Wanted { services: services.collect(), ..Wanted::default() });
            prop_assert!(plan.refused.is_empty());
            maps.carry_out(&plan);
            let all: BTreeMap<_, _> = state.iter().map(|(n, s)| (key(*n), Some(s.clone()))).collect();
            if change.restart {
                planner = self::planner(maps.present.clone());
                let plan = planner.plan(&Wanted { everything: true, services: all, ..Wanted::default() });
                let only_tables = plan.operations.iter().all(|o| matches!(o, Operation::PutBlock { .. }));
                prop_assert!(only_tables, "{:?}", plan);
                maps.carry_out(&plan);
            }
            compare(&maps, &state)?;
        }
    }
}

fn compare(maps: &Maps, state: &BTreeMap<u8, WantedService>) -> Result<(), TestCaseError> {
    let mut frontends = 0;
    let mut sources = BTreeSet::new();
    for service in state.values() {
        let usable = service.backends.iter().filter(|b| !b.draining);
        let expected: BTreeSet<u8> = usable.map(|b| last_octet(b.address)).collect();
        for (frontend, options) in &service.frontends {
            frontends += 1;
            prop_assert_eq!(maps.serves(frontend), Some(expected.clone()));
            let entry = maps.present.frontends[frontend];
            prop_assert_eq!(entry.options.ranges, options.ranges);
            prop_assert_eq!(entry.options.maglev, options.maglev && expected.len() > 1);
            let id = entry.service_id;
            sources.extend(service.ranges.iter().map(|range| (Family::V4, id, *range)));
        }
    }
    prop_assert_eq!(maps.present.frontends.len(), frontends);
    prop_assert_eq!(&maps.present.sources, &sources);
    let live: usize = state.values().map(|s| s.backends.len()).sum();
    prop_assert!(
        maps.present.backends.len() <= live,
        "no backend outlives its service"
    );
    Ok(())
}
