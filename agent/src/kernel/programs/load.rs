//! Loading: the object's maps in their sizes, then its programs, several at a time.

use std::net::IpAddr;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use aya::programs::SchedClassifier;
use aya::util::KernelVersion;
use aya::{Ebpf, EbpfLoader};

use super::{OBJECT, Program};
use crate::kernel::memory::give_back_file;
use crate::kernel::table::size_of_pin;
use crate::kernel::{KernelError, Limits};

/// More would wait for one another.
const MOST_THREADS: usize = 4;

/// How much each family may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    v4: Limits,
    v6: Limits,
}

impl Sizes {
    /// For a node with these addresses.
    pub(super) fn new(limits: Limits, addresses: &[IpAddr]) -> Self {
        let of_family = |is_v4| {
            if addresses.iter().any(|address| address.is_ipv4() == is_v4) {
                limits
            } else {
                limits.without_address()
            }
        };
        Self {
            v4: of_family(true),
            v6: of_family(false),
        }
    }

    /// Entries of each map whose size is not fixed.
    fn entries(&self) -> Vec<(&'static str, u32)> {
        // Of both families.
        let pods = self.v4.endpoints.max(self.v6.endpoints);
        let mut all = vec![
            ("links", pods),
            ("pod_policies", pods),
            ("socket_netns", pods),
        ];
        let mut family = |v4, v6, entries: fn(Limits) -> u32| {
            all.extend([(v4, entries(self.v4)), (v6, entries(self.v6))]);
        };
        family("endpoints_v4", "endpoints_v6", |of| of.endpoints);
        family("frontends_v4", "frontends_v6", |of| of.frontends);
        family("slots_v4", "slots_v6", Limits::slot_blocks);
        family("backends_v4", "backends_v6", |of| of.slots);
        family("states_v4", "states_v6", |of| of.slots);
        family("maglev_v4", "maglev_v6", |of| of.maglev_blocks);
        family("flows_v4", "flows_v6", |of| of.flows);
        family("replies_v4", "replies_v6", |of| of.flows);
        family("affinity_v4", "affinity_v6", |of| of.frontends);
        // Sockets for which there is no room are left to the packet path.
        family("socket_conns_v4", "socket_conns_v6", |of| of.flows / 4);
        family("socket_flows_v4", "socket_flows_v6", |of| of.flows / 16);
        family("socket_origs_v4", "socket_origs_v6", |of| of.flows / 16);
        family("socket_uses_v4", "socket_uses_v6", |of| of.flows / 16);
        all
    }
}

/// The object with its maps, which are pinned. `fresh` says that the service maps were made just now.
pub(super) struct Loaded {
    pub(super) ebpf: Ebpf,
    pub(super) fresh: bool,
}

/// Makes the maps, or takes those that an earlier agent left, and loads the programs.
pub(super) fn load(maps: &Path, sizes: &Sizes) -> Result<Loaded, KernelError> {
    let mut loader = EbpfLoader::new();
    loader.default_map_pin_directory(maps);
    let entries = sizes.entries();
    make_way(maps, &entries)?;
    for (map, entries) in &entries {
        loader.map_max_entries(map, *entries);
    }
    let coarse_clock = u32::from(has_coarse_clock());
    loader.override_global("COARSE_CLOCK", &coarse_clock, true);
    let fresh = is_fresh(maps);
    let mut ebpf = loader.load(OBJECT).map_err(|source| KernelError::Load {
        source: source.into(),
    })?;
    give_back_file(OBJECT);
    load_programs(&mut ebpf)?;
    Ok(Loaded { ebpf, fresh })
}

/// `bpf_ktime_get_coarse_ns` came with Linux 5.11.
fn has_coarse_clock() -> bool {
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(5, 11, 0))
}

/// True when no service map is there yet.
fn is_fresh(maps: &Path) -> bool {
    let names = std::fs::read_dir(maps).into_iter().flatten().flatten();
    let services = [
        "frontends_",
        "slots_",
        "backends_",
        "states_",
        "sources_",
        "maglev_",
    ];
    names
        .filter_map(|entry| entry.file_name().into_string().ok())
        .all(|name| !services.iter().any(|map| name.starts_with(map)))
}

/// Unpins maps of an earlier agent that hold less than is asked for, if nothing is in them: the node has got an address of
/// the family, or the operator has chosen another algorithm. Those in use keep their size. Programs of the earlier agent go
/// on with theirs until they are replaced, and find nothing in them.
fn make_way(maps: &Path, sizes: &[(&'static str, u32)]) -> Result<(), KernelError> {
    let pinned = |name: &str| size_of_pin(&maps.join(name)).ok();
    let is_empty = |name: &str| pinned(name).is_none_or(|(_, holds)| !holds);
    for (name, wanted) in sizes {
        let Some((present, _)) = pinned(name).filter(|(present, _)| present < wanted) else {
            continue;
        };
        // Backends and their states are arrays, which slots lead into.
        let unused = match name.split_once('_') {
            Some(("backends" | "states", family)) => {
                is_empty(&format!("slots_{family}")) && is_empty(&format!("frontends_{family}"))
            }
            _ => is_empty(name),
        };
        if unused {
            super::remove_if_present(&maps.join(name))?;
        } else {
            tracing::warn!(map = name, present, wanted, "a table in use keeps its size");
        }
    }
    Ok(())
}

/// Nearly all of an agent's start is the kernel looking at its programs, one program at a time on each CPU.
fn load_programs(ebpf: &mut Ebpf) -> Result<(), KernelError> {
    let failed = |program: Program, source| KernelError::Program {
        program: program.name(),
        source,
    };
    let mut waiting: Vec<(Program, &mut SchedClassifier)> = Vec::new();
    for (name, loaded) in ebpf.programs_mut() {
        if let Some(program) = Program::from_name(name) {
            let classifier = loaded.try_into();
            waiting.push((
                program,
                classifier.map_err(|source: aya::programs::ProgramError| {
                    failed(program, source.into())
                })?,
            ));
        }
    }
    for program in Program::ALL {
        if !waiting.iter().any(|(present, _)| *present == program) {
            return Err(failed(program, "the object has no such program".into()));
        }
    }
    // Taken from the end: the largest first, so that none of them is the last one.
    waiting.sort_by_key(|(program, _)| matches!(program, Program::OpenV4 | Program::OpenV6));
    let threads =
        std::thread::available_parallelism().map_or(1, |cpus| cpus.get().min(MOST_THREADS));
    let waiting = Mutex::new(waiting);
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let work = || {
        while let Some((program, classifier)) = next() {
            classifier
                .load()
                .map_err(|source| failed(program, source.into()))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut result = work();
        for other in others {
            let theirs = other
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(theirs);
        }
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(addresses: &[&str]) -> std::collections::BTreeMap<&'static str, u32> {
        let addresses: Vec<IpAddr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
        let sizes = Sizes::new(Limits::default(), &addresses);
        sizes.entries().into_iter().collect()
    }

    #[test]
    fn a_family_without_an_address_gets_small_tables() {
        let limits = Limits::default();
        let both = sizes(&["192.0.2.1", "2001:db8::1"]);
        assert_eq!(both["flows_v4"], limits.flows);
        assert_eq!(both["flows_v6"], limits.flows);
        for (addresses, present, absent) in
            [(["192.0.2.1"], "v4", "v6"), (["2001:db8::1"], "v6", "v4")]
        {
            let one = sizes(&addresses);
            for map in [
                "flows",
                "replies",
                "frontends",
                "slots",
                "backends",
                "states",
                "affinity",
            ] {
                let (present, absent) = (format!("{map}_{present}"), format!("{map}_{absent}"));
                assert_eq!(one[&*present], both[&*present]);
                assert!(one[&*absent] * 8 <= both[&*absent], "{absent}");
            }
            // Pods have addresses of the family all the same.
            assert_eq!(one["endpoints_v4"], one["endpoints_v6"]);
        }
        let small = sizes(&[]);
        assert!(small.values().all(|entries| *entries > 0));
    }
}
