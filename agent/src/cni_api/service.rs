//! What each CNI command does on this node.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use super::attach::Wiring;
use super::bandwidth::Bandwidth;
use super::host_ports;
use super::ipam::Ipam;
use super::ranges::NoRanges;
use super::record::{Key, PodName, Record};
use super::store::{Store, StoreError};
use super::wire::{Command, Request};
use super::{CniError, Code};
use crate::compile::routes::{LocalPod, gateway_for};
use crate::kernel::PodPrograms;
use crate::netlink::link::Link;
use crate::netlink::{Netlink, base, netns};

/// How long a DEL waits for an ADD of the same attachment that is still at work.
const WAIT_FOR_OTHER: Duration = Duration::from_secs(25);

/// How long an ADD waits until it is known and in place what applies to the pod. The runtime calls again later.
const WAIT_FOR_POLICIES: Duration = Duration::from_secs(10);

/// A freed address rests this long at most.
pub const MAX_COOL_DOWN: Duration = Duration::from_secs(24 * 60 * 60);

/// Answers with this node's pod ranges: any number of either family.
pub type PodRanges = Arc<dyn Fn() -> Result<Vec<IpNetwork>, NoRanges> + Send + Sync>;

/// What attachments need to know of the node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bytes.
    pub mtu: u32,
    pub node_ips: Vec<IpAddr>,
    /// How long a freed address rests before another pod gets it; [`MAX_COOL_DOWN`] at most.
    pub cool_down: Duration,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) ipam: Ipam,
    pub(super) records: BTreeMap<Key, Record>,
    /// Interface indexes of host links: still needed when a link has gone with its container.
    pub(super) links: BTreeMap<Key, u32>,
    /// Attachments that a request is working on.
    pub(super) busy: BTreeSet<Key>,
    /// Files that say which addresses rest, and since when, the oldest first.
    pub(super) resting: VecDeque<(Duration, PathBuf)>,
}

/// The attachments of this node.
pub struct Attachments {
    pub(super) state: Mutex<State>,
    idle: Condvar,
    pub(super) store: Store,
    pub(super) wiring: Wiring,
    pod_ranges: PodRanges,
    pub(super) cool_down: Duration,
    started: Instant,
    host_ports_turn: Mutex<()>,
}

impl std::fmt::Debug for Attachments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attachments")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl From<StoreError> for CniError {
    fn from(e: StoreError) -> Self {
        Self::new(Code::Io, e.to_string())
    }
}

/// Marks an attachment as being worked on; dropped, it wakes whoever waits.
struct Busy<'a> {
    attachments: &'a Attachments,
    key: Key,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.attachments.lock().busy.remove(&self.key);
        self.attachments.idle.notify_all();
    }
}

impl Attachments {
    pub(super) fn new(
        store: Store,
        programs: Arc<dyn PodPrograms>,
        settings: Settings,
        pod_ranges: PodRanges,
    ) -> Self {
        Self {
            state: Mutex::default(),
            idle: Condvar::new(),
            store,
            wiring: Wiring {
                programs,
                mtu: AtomicU32::new(settings.mtu),
                node_ips: settings.node_ips,
            },
            pod_ranges,
            cool_down: settings.cool_down.min(MAX_COOL_DOWN),
            started: Instant::now(),
            host_ports_turn: Mutex::default(),
        }
    }

    /// Every change of the state is complete before anything can panic, so a poisoned lock is still good.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clock of addresses that rest. It starts late enough that what an earlier agent freed lies before it.
    pub(super) fn now(&self) -> Duration {
        MAX_COOL_DOWN + self.started.elapsed()
    }

    /// All attachments.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.lock().records.values().cloned().collect()
    }

    /// Addresses that rest after their pod has gone, and for how long.
    #[must_use]
    pub fn resting(&self) -> Vec<(IpAddr, Duration)> {
        let now = self.now();
        self.lock().ipam.resting(now)
    }

    /// The ranges that addresses come from, or why there are none.
    ///
    /// # Errors
    /// What ADD would say.
    pub fn pod_ranges(&self) -> Result<Vec<IpNetwork>, CniError> {
        self.ranges()
    }

    /// Addresses of this node's pods whose host link is up, for their routes.
    #[must_use]
    pub fn local_pods(&self, links: &[Link]) -> Vec<LocalPod> {
        let up: BTreeMap<&str, u32> = links
            .iter()
            .filter(|l| l.up)
            .map(|l| (l.name.as_str(), l.index))
            .collect();
        let state = self.lock();
        state
            .records
            .values()
            .filter_map(|r| up.get(r.key.host_name().as_str()).map(|link| (r, *link)))
            .flat_map(|(r, link)| {
                r.addresses
                    .iter()
                    .map(move |a| LocalPod { address: *a, link })
            })
            .collect()
    }

    /// Sets the MTU (bytes) of new pods and of those that live. `links` are the links of the node. Returns how many
    /// changed; one that cannot be changed is logged, keeps its MTU, and learns of narrow paths from ICMP.
    pub fn set_mtu(&self, netlink: &mut Netlink, links: &[Link], mtu: u32) -> usize {
        self.wiring.mtu.store(mtu, Ordering::Relaxed);
        let by_name: BTreeMap<&str, &Link> = links.iter().map(|l| (l.name.as_str(), l)).collect();
        let mut changed = 0;
        for record in self.records() {
            let Some(host) = by_name
                .get(record.key.host_name().as_str())
                .filter(|l| l.mtu != mtu)
            else {
                continue;
            };
            match self.wiring.adapt_mtu(netlink, &record, host) {
                Ok(()) => changed += 1,
                Err(e) if e.is_absent() => {}
                Err(e) => {
                    tracing::warn!(link = %host.name, error = %e, "a pod keeps its old MTU");
                }
            }
        }
        changed
    }

    pub(super) fn handle(
        &self,
        request: &Request,
        netns: Option<&File>,
    ) -> Result<Value, CniError> {
        match request.command {
            Command::Add => self.add(request, netns),
            Command::Del => self.delete(&request.key()?).map(|()| json!({})),
            Command::Check => self.check(request, netns).map(|()| json!({})),
            Command::Status if request.delegates => Ok(json!({})),
            Command::Status => self.status().map(|()| json!({})),
            Command::Gc => self.gc(request).map(|()| json!({})),
        }
    }

    fn add(&self, request: &Request, netns: Option<&File>) -> Result<Value, CniError> {
        let key = request.key()?;
        let netns = need_netns(netns)?;
        // Addresses of an IPAM plugin need no range of this node.
        let ranges = match self.ranges() {
            Err(e) if request.delegated.is_empty() => return Err(e),
            ranges => ranges.unwrap_or_default(),
        };
        let _busy = self.claim(&key, Duration::ZERO)?;
        if self.lock().records.contains_key(&key) {
            self.forget_if_dead(&key)?;
        }
        self.store.cancel_delete(&key)?;
        let record = self.reserve(&key, request, &ranges, netns)?;
        if let Err(e) = self.connect(&record, netns) {
            match self.wiring.undo(&record) {
                Ok(()) => self.forget(&record)?,
                // The addresses stay reserved until a DEL or a new agent has removed the rest.
                Err(undo) => {
                    tracing::error!(%key, error = %undo, details = %undo.details, "undo of a failed ADD is incomplete");
                }
            }
            return Err(e);
        }
        tracing::info!(
            container = %key.container_id, interface = %key.if_name, addresses = ?record.addresses,
            pod = %format!("{}/{}", record.pod.namespace, record.pod.name), "pod connected"
        );
        Ok(result(&record, self.wiring.mtu()))
    }

    /// From the durable record to a pod that can talk and be talked to, within its policies.
    fn connect(&self, record: &Record, netns: &File) -> Result<(), CniError> {
        let index = self.wiring.set_up(record, netns)?;
        self.lock().links.insert(record.key.clone(), index);
        self.wiring
            .programs
            .wait_for_policies(index, WAIT_FOR_POLICIES)
            .map_err(|why| unpoliced(record, &why))?;
        if !record.port_mappings.is_empty() {
            self.publish_host_ports()?;
        }
        Ok(())
    }

    /// Chooses addresses and makes the choice durable before anything uses them.
    fn reserve(
        &self,
        key: &Key,
        request: &Request,
        ranges: &[IpNetwork],
        netns: &File,
    ) -> Result<Record, CniError> {
        let port_mappings = host_ports::check(&request.port_mappings)?;
        let bandwidth = request.bandwidth.map(Bandwidth::check).transpose()?;
        let (wanted, delegated) = (request.wanted_addresses()?, request.delegated_addresses()?);
        let mac = request.mac()?;
        let allocate = || {
            let ipam = &mut self.lock().ipam;
            let (wanted, sequence) = if !delegated.is_empty() {
                (&delegated, ipam.adopt(&delegated, key))
            } else if !wanted.is_empty() {
                (&wanted, ipam.allocate_wanted(&wanted, ranges, key))
            } else {
                let found = ipam.allocate(ranges, key, self.now());
                return found.map_err(|e| e.to_string());
            };
            sequence
                .map(|sequence| (wanted.clone(), sequence))
                .map_err(|e| e.to_string())
        };
        let (addresses, sequence) = match allocate() {
            Ok(found) => found,
            Err(_) => {
                // Namespaces that went without a DEL may still hold addresses.
                self.reclaim()?;
                allocate().map_err(|e| CniError::new(Code::TryAgain, e))?
            }
        };
        let record = Record {
            key: key.clone(),
            network: request.network.clone(),
            addresses,
            netns: request.netns.clone(),
            netns_cookie: super::attach::netns_cookie(netns),
            sequence,
            pod: PodName {
                namespace: request.arg("K8S_POD_NAMESPACE"),
                name: request.arg("K8S_POD_NAME"),
                uid: request.arg("K8S_POD_UID"),
            },
            port_mappings,
            mac,
            bandwidth,
            delegated: !request.delegated.is_empty(),
        };
        if let Err(e) = self.store.put(&record) {
            self.lock().ipam.give_back(key, &record.addresses);
            return Err(e.into());
        }
        self.lock().records.insert(key.clone(), record.clone());
        Ok(record)
    }

    /// Removes everything of an attachment. Succeeds when there is nothing.
    pub(super) fn delete(&self, key: &Key) -> Result<(), CniError> {
        let _busy = self.claim(key, WAIT_FOR_OTHER)?;
        let (record, index) = self.known(key);
        self.wiring.tear_down(key, record.as_ref(), index)?;
        self.store.cancel_delete(key)?;
        if let Some(record) = record {
            self.forget(&record)?;
            tracing::info!(
                container = %key.container_id, interface = %key.if_name, addresses = ?record.addresses,
                "pod disconnected"
            );
        }
        Ok(())
    }

    fn check(&self, request: &Request, netns: Option<&File>) -> Result<(), CniError> {
        let key = request.key()?;
        let netns = need_netns(netns)?;
        let _busy = self.claim(&key, WAIT_FOR_OTHER)?;
        let record = self.lock().records.get(&key).cloned();
        let Some(record) = record else {
            return Err(CniError::new(
                Code::Broken,
                format!("{key} is not known on this node"),
            ));
        };
        for text in &request.addresses {
            let address = text.parse::<IpNetwork>().ok().map(|n| n.ip());
            if !address.is_some_and(|a| record.addresses.contains(&a)) {
                let message = format!("prevResult has {text}, which {key} was not given");
                return Err(CniError::new(Code::Broken, message));
            }
        }
        self.wiring.verify(&record, netns)
    }

    fn status(&self) -> Result<(), CniError> {
        let unavailable =
            |e: &dyn std::fmt::Display| CniError::new(Code::NotAvailable, e.to_string());
        let ranges = self.ranges().map_err(|e| unavailable(&e))?;
        let room = self.lock().ipam.has_room(&ranges, self.now());
        room.map_err(|e| unavailable(&e))
    }

    /// Removes every attachment of the network that the runtime does not name.
    fn gc(&self, request: &Request) -> Result<(), CniError> {
        let valid: BTreeSet<&Key> = request.valid_attachments.iter().collect();
        let stale: Vec<Key> = {
            let state = self.lock();
            let ours = state
                .records
                .values()
                .filter(|r| r.network == request.network);
            let idle = ours.filter(|r| !state.busy.contains(&r.key));
            idle.map(|r| r.key.clone())
                .filter(|key| !valid.contains(key))
                .collect()
        };
        let mut failed = None;
        for key in stale {
            if let Err(e) = self.delete(&key) {
                failed = Some(e);
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// The ranges that pods of this node get addresses from.
    fn ranges(&self) -> Result<Vec<IpNetwork>, CniError> {
        let mut ranges = (self.pod_ranges)().map_err(|e| {
            let code = match e {
                NoRanges::Unknown => Code::TryAgain,
                NoRanges::Overlap { .. } => Code::InvalidConfig,
            };
            CniError::new(code, e.to_string())
        })?;
        if !base::ipv6_is_on() {
            ranges.retain(IpNetwork::is_ipv4);
        }
        if ranges.is_empty() {
            let message = "this node has pod ranges of IPv6 alone and its kernel has no IPv6; \
                           give it a range of IPv4 or switch IPv6 on";
            return Err(CniError::new(Code::InvalidConfig, message));
        }
        Ok(ranges)
    }

    /// Waits until no other request works on the attachment.
    fn claim(&self, key: &Key, patience: Duration) -> Result<Busy<'_>, CniError> {
        let guard = self.lock();
        let (mut guard, _) = self
            .idle
            .wait_timeout_while(guard, patience, |state| state.busy.contains(key))
            .unwrap_or_else(PoisonError::into_inner);
        if !guard.busy.insert(key.clone()) {
            let message = format!("another request for {key} is still at work; try again");
            return Err(CniError::new(Code::TryAgain, message));
        }
        Ok(Busy {
            attachments: self,
            key: key.clone(),
        })
    }

    /// An attachment's record, and the interface index of its host link or zero.
    fn known(&self, key: &Key) -> (Option<Record>, u32) {
        let state = self.lock();
        (
            state.records.get(key).cloned(),
            state.links.get(key).copied().unwrap_or(0),
        )
    }

    /// Gives addresses back, after everything that used them is gone.
    fn forget(&self, record: &Record) -> Result<(), CniError> {
        let resting = self.retire(&record.key)?;
        let now = self.now();
        let mut state = self.lock();
        state.records.remove(&record.key);
        state.links.remove(&record.key);
        state.ipam.release(&record.key, &record.addresses, now);
        state.resting.extend(resting.map(|path| (now, path)));
        drop(state);
        self.end_rests();
        if !record.port_mappings.is_empty()
            && let Err(e) = self.publish_host_ports()
        {
            // The pod is gone all the same; the next change of host ports takes these away.
            tracing::error!(key = %record.key, error = %e, details = %e.details, "host ports of a pod that went are still there");
        }
        Ok(())
    }

    /// Removes a record; the file that remembers how long its addresses rest, if they do.
    pub(super) fn retire(&self, key: &Key) -> Result<Option<PathBuf>, StoreError> {
        if self.cool_down.is_zero() {
            return self.store.remove(key).map(|()| None);
        }
        self.store.rest(key, SystemTime::now())
    }

    /// Removes the files of addresses that have rested. One that stays is removed at the next start.
    pub(super) fn end_rests(&self) {
        let now = self.now();
        let mut over = Vec::new();
        let mut state = self.lock();
        while let Some((since, path)) = state.resting.pop_front() {
            if now.saturating_sub(since) < self.cool_down {
                state.resting.push_front((since, path));
                break;
            }
            over.push(path);
        }
        drop(state);
        for path in over {
            if let Err(e) = self.store.done(&path) {
                tracing::warn!(error = %e, "the file of addresses that have rested stays");
            }
        }
    }

    /// Hands the host ports of all attachments to the dataplane. One at a time, so that the last list wins.
    pub(super) fn publish_host_ports(&self) -> Result<(), CniError> {
        let _turn = self
            .host_ports_turn
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let list = {
            let state = self.lock();
            let records = state.records.values();
            records.flat_map(host_ports::of_record).collect()
        };
        self.wiring.programs.set_host_ports(list).map_err(|e| {
            let source = std::error::Error::source(&e).map(ToString::to_string);
            CniError::new(Code::Setup, e.to_string()).with_details(source.unwrap_or_default())
        })
    }

    /// A second ADD is refused while the first one's link lives.
    fn forget_if_dead(&self, key: &Key) -> Result<(), CniError> {
        let alive = Netlink::open()?.link(&key.host_name())?.is_some();
        if alive {
            let message = format!("{key} is connected already; call DEL first");
            return Err(CniError::new(Code::Exists, message));
        }
        self.release_dead(key)
    }

    fn release_dead(&self, key: &Key) -> Result<(), CniError> {
        let (record, index) = self.known(key);
        if let Some(record) = record {
            self.wiring.tear_down(key, Some(&record), index)?;
            self.forget(&record)?;
            tracing::info!(container = %key.container_id, addresses = ?record.addresses,
                "released the addresses of a container that went without a DEL");
        }
        Ok(())
    }

    /// Releases attachments whose link is gone: the kernel removes it with the container's namespace.
    fn reclaim(&self) -> Result<(), CniError> {
        let links = Netlink::open()?.links()?;
        let names: BTreeSet<&str> = links.iter().map(|l| l.name.as_str()).collect();
        let dead: Vec<Key> = {
            let state = self.lock();
            let idle = state.records.keys().filter(|k| !state.busy.contains(k));
            idle.filter(|k| !names.contains(k.host_name().as_str()))
                .cloned()
                .collect()
        };
        for key in dead {
            let Ok(_busy) = self.claim(&key, Duration::ZERO) else {
                continue;
            };
            self.release_dead(&key)?;
        }
        Ok(())
    }
}

fn unpoliced(record: &Record, why: &str) -> CniError {
    let pod = &record.pod;
    let message = format!(
        "the network policies of pod {}/{} are not in place: {why}; try again later",
        pod.namespace, pod.name
    );
    CniError::new(Code::TryAgain, message)
}

fn need_netns(netns: Option<&File>) -> Result<&File, CniError> {
    let netns = netns.ok_or_else(|| {
        CniError::new(
            Code::InvalidEnvironment,
            "the request came without the namespace CNI_NETNS",
        )
    })?;
    if netns::is_own(netns)? {
        return Err(CniError::new(
            Code::OwnNamespace,
            "CNI_NETNS is the node's own network namespace",
        ));
    }
    Ok(netns)
}

/// The result of ADD in the shape of the newest CNI version.
fn result(record: &Record, mtu: u32) -> Value {
    let (host_mac, pod_mac) = record.macs();
    let text = |mac: [u8; 6]| {
        mac.iter()
            .map(|b| format!("{b:02x}"))
            .collect::<Vec<_>>()
            .join(":")
    };
    let ips: Vec<Value> = record
        .addresses
        .iter()
        .map(|a| {
            json!({
                "address": IpNetwork::from(*a).to_string(),
                "gateway": gateway_for(*a),
                "interface": 1,
            })
        })
        .collect();
    let routes: Vec<Value> = record
        .addresses
        .iter()
        .map(|a| {
            let dst = if a.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
            json!({ "dst": dst, "gw": gateway_for(*a) })
        })
        .collect();
    json!({
        "interfaces": [
            { "name": record.key.host_name(), "mac": text(host_mac), "mtu": mtu },
            { "name": record.key.if_name, "mac": text(pod_mac), "mtu": mtu, "sandbox": record.netns },
        ],
        "ips": ips,
        "routes": routes,
    })
}
