//! The start of the CNI API: what an earlier agent left is adopted, finished or removed.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::CniError;
use super::attach::local_pod;
use super::ipam::Ipam;
use super::record::{Record, is_host_name};
use super::service::{Attachments, PodRanges, Settings};
use super::store::{Loaded, Store};
use crate::kernel::PodPrograms;
use crate::netlink::link::Link;
use crate::netlink::{Netlink, absent_is_done};

impl Attachments {
    /// Loads the records and compares them with the links that live: pods get their programs again, containers that
    /// went meanwhile give back their addresses, links without a record are removed, queued DELs are done.
    ///
    /// # Errors
    /// [`CniError`] when records or links cannot be read. One pod that cannot be repaired is logged and kept.
    pub fn start(
        store: Store,
        programs: Arc<dyn PodPrograms>,
        settings: Settings,
        pod_ranges: PodRanges,
    ) -> Result<Self, CniError> {
        let loaded = store.load()?;
        for path in &loaded.unreadable {
            tracing::error!(path = %path.display(), "not a record of an attachment; it is left alone");
        }
        let attachments = Self::new(store, programs, settings, pod_ranges);
        attachments.adopt(loaded)?;
        attachments.replay_deletes()?;
        attachments.publish_host_ports()?;
        Ok(attachments)
    }

    fn adopt(&self, loaded: Loaded) -> Result<(), CniError> {
        let mut netlink = Netlink::open()?;
        let links = netlink.links()?;
        let mut ours: BTreeMap<&str, &Link> = links
            .iter()
            .filter(|l| l.veth && is_host_name(&l.name))
            .map(|l| (l.name.as_str(), l))
            .collect();
        // Policies first, of all pods at once: whatever programs the links have, they find them.
        let pods = loaded.records.iter().filter_map(|record| {
            let link = ours.get(record.key.host_name().as_str())?;
            Some((link.index, local_pod(record)))
        });
        self.wiring.adopt(pods.collect())?;
        let mut live = Vec::new();
        let mut indexes = BTreeMap::new();
        for record in loaded.records {
            match ours.remove(record.key.host_name().as_str()) {
                Some(link) => {
                    self.repair(&mut netlink, &record, link);
                    indexes.insert(record.key.clone(), link.index);
                    live.push(record);
                }
                None => self.drop_dead(&record)?,
            }
        }
        // A link whose record cannot be read may belong to a living pod.
        if loaded.unreadable.is_empty() {
            for name in ours.into_keys() {
                tracing::warn!(link = name, "removing a pod link that no record knows");
                absent_is_done(netlink.delete_link(name))?;
            }
        }
        // Some went since the programs were loaded, and nobody knows the index of their links any more.
        self.wiring.programs.forget_absent();
        let mut ipam = Ipam::from_records(self.cool_down, &live);
        let resting = self.resume_rests(&mut ipam)?;
        let mut state = self.lock();
        state.ipam = ipam;
        state.resting = resting;
        state.links = indexes;
        state.records = live.into_iter().map(|r| (r.key.clone(), r)).collect();
        Ok(())
    }

    /// Lets addresses rest that earlier agents freed.
    fn resume_rests(&self, ipam: &mut Ipam) -> Result<VecDeque<(Duration, PathBuf)>, CniError> {
        let (now, clock) = (self.now(), SystemTime::now());
        let mut resting = VecDeque::new();
        for gone in self.store.resting()? {
            // A clock that was set back must not make a rest longer than it is.
            let ago = clock.duration_since(gone.since).unwrap_or_default();
            if ago >= self.cool_down {
                self.store.done(&gone.path)?;
                continue;
            }
            ipam.rest(&gone.addresses, ago, now);
            resting.push_back((now.saturating_sub(ago), gone.path));
        }
        Ok(resting)
    }

    fn repair(&self, netlink: &mut Netlink, record: &Record, link: &Link) {
        let up = if link.up {
            Ok(())
        } else {
            netlink.set_link_up(link.index, true)
        };
        let result = self
            .wiring
            .attach(record, link)
            .and_then(|()| up.map_err(CniError::from))
            .and_then(|()| self.wiring.route_to_pod(netlink, record, link));
        if let Err(e) = result {
            tracing::error!(link = %link.name, addresses = ?record.addresses, error = %e, details = %e.details,
                "a running pod could not be adopted completely");
        }
    }

    fn drop_dead(&self, record: &Record) -> Result<(), CniError> {
        tracing::info!(container = %record.key.container_id, addresses = ?record.addresses,
            "container went while no agent ran; its addresses are free again");
        // The kernel room has forgotten interfaces that went while no agent ran.
        self.wiring.tear_down(&record.key, Some(record), 0)?;
        self.retire(&record.key)?;
        Ok(())
    }

    fn replay_deletes(&self) -> Result<(), CniError> {
        for (path, key) in self.store.queued_deletes()? {
            match key {
                Some(key) => {
                    if let Err(e) = self.delete(&key) {
                        tracing::error!(%key, error = %e, "a queued DEL failed; it stays queued");
                        continue;
                    }
                }
                None => tracing::error!(path = %path.display(), "not a queued DEL; dropped"),
            }
            self.store.done(&path)?;
        }
        Ok(())
    }
}
