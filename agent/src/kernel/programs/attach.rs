//! Attachment to links: TCX where the kernel has it (6.6), clsact before. Both can be replaced without a gap.

use std::error::Error;
use std::io;
use std::net::IpAddr;

use aya::programs::links::{FdLink, LinkOrder};
use aya::programs::tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle};
use aya::programs::{TcAttachType, tc};
use aya::util::KernelVersion;
use dataplane_common::layout::{
    ENDPOINT_NODE, ENDPOINT_READY, Endpoint, LINK_HAS_V4, LINK_HAS_V6, LINK_HOST, LINK_POD, Link,
};
use dataplane_common::{V4, V6};

use super::pins::open_link;
use super::{Program, Programs, change, classifier};
use crate::kernel::services::Wire;
use crate::kernel::table::{Table, detach_link};
use crate::kernel::{AttachError, HostLink, KernelError, OverlayLink, PodLink};

/// Our place among the filters of a kernel without TCX: fixed, so that a restart replaces its own filter.
pub(super) const CLSACT_PRIORITY: u16 = 0x5745;
pub(super) const CLSACT_HANDLE: TcHandle = TcHandle::new(0, 1);

type Cause = Box<dyn Error + Send + Sync>;

fn failed(step: &'static str, link: &str) -> impl FnOnce(Cause) -> AttachError {
    let link = link.to_owned();
    move |source| AttachError { step, link, source }
}

impl Programs {
    pub(in crate::kernel) fn attach_pod(&mut self, link: &PodLink) -> Result<(), AttachError> {
        let attached = self.try_attach_pod(link);
        if attached.is_err() {
            // Nothing may be left behind; what cannot be removed either is found by the next call.
            let _ = self.detach_pod(link.ifindex, &link.addresses);
        }
        attached
    }

    /// The link's own entry first, so that the program knows it; the address last, so that nobody sends there before
    /// the programs are in place.
    fn try_attach_pod(&mut self, link: &PodLink) -> Result<(), AttachError> {
        let name = link.host_name.as_str();
        let mut entry = Link {
            flags: LINK_POD,
            ..Link::default()
        };
        for address in &link.addresses {
            match address {
                IpAddr::V4(v4) => {
                    (entry.v4, entry.flags) = (V4::new(v4.octets()), entry.flags | LINK_HAS_V4);
                }
                IpAddr::V6(v6) => {
                    (entry.v6, entry.flags) = (V6::new(v6.octets()), entry.flags | LINK_HAS_V6);
                }
            }
        }
        self.links
            .put(&link.ifindex, &entry)
            .map_err(Cause::from)
            .map_err(failed("enter the link", name))?;
        self.attach(Program::FromPod, link.ifindex, name)
            .map_err(failed("attach from_pod", name))?;
        self.attach(Program::ToPod, link.ifindex, name)
            .map_err(failed("attach to_pod", name))?;
        let endpoint = Endpoint {
            ifindex: link.ifindex,
            flags: ENDPOINT_READY,
            pod_mac: link.pod_mac,
            host_mac: link.host_mac,
        };
        self.sockets
            .enter_pod(link)
            .map_err(Cause::from)
            .map_err(failed("enter the network namespace", name))?;
        for address in &link.addresses {
            put_endpoint(&self.endpoints_v4, *address, &endpoint)
                .and_then(|()| put_endpoint(&self.endpoints_v6, *address, &endpoint))
                .map_err(Cause::from)
                .map_err(failed("enter the address", name))?;
        }
        Ok(())
    }

    pub(in crate::kernel) fn detach_pod(
        &mut self,
        ifindex: u32,
        addresses: &[IpAddr],
    ) -> Result<(), AttachError> {
        let name = ifindex.to_string();
        for address in addresses {
            remove_endpoint(&self.endpoints_v4, *address, ifindex)
                .and_then(|()| remove_endpoint(&self.endpoints_v6, *address, ifindex))
                .map_err(Cause::from)
                .map_err(failed("remove the address", &name))?;
        }
        self.sockets
            .forget_pod(ifindex)
            .map_err(Cause::from)
            .map_err(failed("remove the network namespace", &name))?;
        for program in [Program::FromPod, Program::ToPod] {
            let path = self.pins.link(ifindex, program);
            // A link whose interface has gone is detached already, and says so.
            let _ = detach_link(&path);
            super::remove_if_present(&path)
                .map_err(Cause::from)
                .map_err(failed("remove the pin", &name))?;
        }
        self.policies
            .forget(ifindex)
            .map_err(Cause::from)
            .map_err(failed("remove the policy", &name))?;
        // Filters go with their link; one that outlives it drops everything, for want of the entry.
        self.links
            .remove(&ifindex)
            .map(drop)
            .map_err(Cause::from)
            .map_err(failed("remove the link", &name))
    }

    pub(in crate::kernel) fn is_attached(&self, link: &PodLink) -> bool {
        let known = self.links.get(&link.ifindex).ok().flatten().is_some();
        let pinned = !uses_tcx()
            || [Program::FromPod, Program::ToPod]
                .iter()
                .all(|program| open_link(&self.pins.link(link.ifindex, *program)).is_some());
        let entered = link.addresses.iter().all(|address| {
            let v4 =
                V4::from_address(*address).and_then(|a| self.endpoints_v4.get(&a).ok().flatten());
            let v6 =
                V6::from_address(*address).and_then(|a| self.endpoints_v6.get(&a).ok().flatten());
            v4.or(v6)
                .is_some_and(|endpoint| endpoint.ifindex == link.ifindex)
        });
        known && pinned && entered
    }

    pub(in crate::kernel) fn attach_uplink(&mut self, name: &str) -> Result<(), AttachError> {
        let ifindex = nix::net::if_::if_nametoindex(name)
            .map_err(io::Error::from)
            .map_err(Cause::from)
            .map_err(failed("find the interface", name))?;
        self.attach(Program::FromNetwork, ifindex, name)
            .map_err(failed("attach from_network", name))?;
        self.attach(Program::ToNetwork, ifindex, name)
            .map_err(failed("attach to_network", name))?;
        let first = |present: &mut u32| {
            if *present == 0 || interface_name(*present).is_none() {
                *present = ifindex;
            }
        };
        change(&self.node_v4, |node| first(&mut node.uplink_ifindex))
            .and_then(|()| change(&self.node_v6, |node| first(&mut node.uplink_ifindex)))
            .map_err(Cause::from)
            .map_err(failed("enter the uplink", name))
    }

    pub(in crate::kernel) fn attach_park_link(&mut self, name: &str) -> Result<(), AttachError> {
        let ifindex = nix::net::if_::if_nametoindex(name)
            .map_err(io::Error::from)
            .map_err(Cause::from)
            .map_err(failed("find the interface", name))?;
        self.attach(Program::FromPark, ifindex, name)
            .map_err(failed("attach from_park", name))
    }

    /// The record last: packets are sent there once the device's programs are in place.
    pub(in crate::kernel) fn attach_overlay(
        &mut self,
        link: &OverlayLink,
    ) -> Result<(), AttachError> {
        let name = link.name.as_str();
        self.attach(Program::FromOverlay, link.ifindex, name)
            .map_err(failed("attach from_overlay", name))?;
        self.attach(Program::ToOverlay, link.ifindex, name)
            .map_err(failed("attach to_overlay", name))?;
        self.enter_overlay(link.ifindex, link.network, link.port)
            .map_err(failed("enter the overlay", name))
    }

    /// Nothing is sent through the overlay from now on.
    pub(in crate::kernel) fn leave_overlay(&mut self) -> Result<(), AttachError> {
        self.enter_overlay(0, 0, 0)
            .map_err(failed("leave the overlay", "none"))
    }

    fn enter_overlay(&self, ifindex: u32, network: u32, port: u16) -> Result<(), Cause> {
        change(&self.node_v4, |node| {
            (node.overlay_ifindex, node.overlay_network) = (ifindex, network);
            node.overlay_port = port;
        })?;
        change(&self.node_v6, |node| {
            (node.overlay_ifindex, node.overlay_network) = (ifindex, network);
            node.overlay_port = port;
        })?;
        Ok(())
    }

    pub(in crate::kernel) fn attach_host_link(
        &mut self,
        link: &HostLink,
    ) -> Result<(), AttachError> {
        const LOOPBACK: &str = "lo";
        let loopback = nix::net::if_::if_nametoindex(LOOPBACK)
            .map_err(io::Error::from)
            .map_err(Cause::from)
            .map_err(failed("find the interface", LOOPBACK))?;
        self.attach(Program::FromSelf, loopback, LOOPBACK)
            .map_err(failed("attach from_self", LOOPBACK))?;
        let name = link.peer_name.as_str();
        let entry = Link {
            flags: LINK_HOST,
            ..Link::default()
        };
        self.links
            .put(&link.peer_ifindex, &entry)
            .map_err(Cause::from)
            .map_err(failed("enter the link", name))?;
        self.attach(Program::FromPod, link.peer_ifindex, name)
            .map_err(failed("attach from_pod", name))?;
        change(&self.node_v4, |node| {
            node.host_peer_ifindex = link.peer_ifindex;
            node.host_ifindex = link.host_ifindex;
            (node.host_mac, node.peer_mac) = (link.host_mac, link.peer_mac);
        })
        .and_then(|()| {
            change(&self.node_v6, |node| {
                node.host_peer_ifindex = link.peer_ifindex;
                node.host_ifindex = link.host_ifindex;
                (node.host_mac, node.peer_mac) = (link.host_mac, link.peer_mac);
            })
        })
        .map_err(Cause::from)
        .map_err(failed("enter the host link", name))
    }

    /// True while programs of another version handle what they are attached to, since this agent's tables are not filled
    /// yet. Until then nothing that they are attached to gets programs of this agent.
    pub(in crate::kernel) fn is_taking_over(&self) -> bool {
        self.pins.has_others()
    }

    /// Leads what programs of another version are attached to to this agent's, each without a gap. Links of the node
    /// itself, sockets and drivers are to be attached again after it.
    pub(in crate::kernel) fn take_over(&mut self) -> Result<(), KernelError> {
        self.pins.take_links()?;
        self.pins.forget_others()?;
        self.adopt_links();
        Ok(())
    }

    /// Leads pinned links to this agent's programs. Links whose interface has gone are forgotten.
    pub(super) fn adopt_links(&mut self) {
        for (ifindex, program) in self.pins.links().unwrap_or_default() {
            if self.update_link(ifindex, program).is_err() {
                self.forget_link(ifindex, program);
            }
        }
        for (ifindex, _) in self.links.entries().unwrap_or_default() {
            match interface_name(ifindex) {
                None => self.forget_interface(ifindex),
                Some(name) if !uses_tcx() => self.replace_filters(ifindex, &name),
                Some(_) => {}
            }
        }
    }

    /// Forgets interfaces that have gone.
    pub(in crate::kernel) fn forget_absent(&mut self) {
        for (ifindex, program) in self.pins.links().unwrap_or_default() {
            if interface_name(ifindex).is_none() {
                self.forget_link(ifindex, program);
            }
        }
        for (ifindex, _) in self.links.entries().unwrap_or_default() {
            if interface_name(ifindex).is_none() {
                self.forget_interface(ifindex);
            }
        }
    }

    fn forget_link(&mut self, ifindex: u32, program: Program) {
        let path = self.pins.link(ifindex, program);
        tracing::info!(ifindex, %program, "the link of a pinned program has gone: removing its pin");
        if let Err(error) = super::remove_if_present(&path) {
            tracing::warn!(%error, "a stale pin stays");
        }
    }

    fn forget_interface(&mut self, ifindex: u32) {
        let _ = self.links.remove(&ifindex);
        let _ = self.sockets.forget_pod(ifindex);
        forget_endpoints(&self.endpoints_v4, ifindex);
        forget_endpoints(&self.endpoints_v6, ifindex);
    }

    fn replace_filters(&mut self, ifindex: u32, name: &str) {
        let host = self
            .links
            .get(&ifindex)
            .ok()
            .flatten()
            .is_some_and(|l| l.flags & LINK_HOST != 0);
        let programs: &[_] = if host {
            &[Program::FromPod]
        } else {
            &[Program::FromPod, Program::ToPod]
        };
        for program in programs {
            if let Err(error) = self.attach(*program, ifindex, name) {
                tracing::warn!(link = name, %program, %error, "the program of an earlier agent stays");
            }
        }
    }

    fn update_link(&mut self, ifindex: u32, program: Program) -> Result<(), Cause> {
        let path = self.pins.link(ifindex, program);
        let pinned = open_link(&path).ok_or("the pin cannot be opened")?;
        let link = SchedClassifierLink::try_from(FdLink::from(pinned))?;
        let classifier = classifier(&mut self.ebpf, program)?;
        let id = classifier.attach_to_link(link)?;
        // The pin holds the link; our descriptor of it may go.
        drop(classifier.take_link(id)?);
        Ok(())
    }

    fn attach(&mut self, program: Program, ifindex: u32, name: &str) -> Result<(), Cause> {
        let path = self.pins.link(ifindex, program);
        // Filters are not pinned: any link may have one of the other version.
        if self.pins.is_others(&path) || (self.pins.has_others() && !uses_tcx()) {
            return Ok(());
        }
        if path.exists() {
            if self.update_link(ifindex, program).is_ok() {
                return Ok(());
            }
            self.forget_link(ifindex, program);
        }
        let direction = direction(program);
        if !uses_tcx() {
            return self.attach_filter(program, name);
        }
        let classifier = classifier(&mut self.ebpf, program)?;
        let order = TcAttachOptions::TcxOrder(LinkOrder::default());
        let id = classifier.attach_with_options(name, direction, order)?;
        let link: FdLink = classifier.take_link(id)?.try_into()?;
        link.pin(&path)?;
        Ok(())
    }

    /// Replaces our own filter, or adds it where there is none.
    fn attach_filter(&mut self, program: Program, name: &str) -> Result<(), Cause> {
        match tc::qdisc_add_clsact(name) {
            Ok(()) | Err(tc::TcError::AlreadyAttached) => {}
            Err(tc::TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {
            }
            Err(error) => return Err(error.into()),
        }
        let direction = direction(program);
        let classifier = classifier(&mut self.ebpf, program)?;
        let present =
            SchedClassifierLink::attached(name, direction, CLSACT_PRIORITY, CLSACT_HANDLE, None)?;
        let id = match classifier.attach_to_link(present) {
            Ok(id) => id,
            Err(_) => {
                let options = NlOptions {
                    priority: CLSACT_PRIORITY,
                    handle: CLSACT_HANDLE,
                    classid: None,
                };
                classifier.attach_with_options(
                    name,
                    direction,
                    TcAttachOptions::Netlink(options),
                )?
            }
        };
        // Dropping it would take the filter away; it is to outlive this agent.
        std::mem::forget(classifier.take_link(id)?);
        Ok(())
    }
}

fn direction(program: Program) -> TcAttachType {
    match program {
        Program::ToPod | Program::ToNetwork | Program::ToOverlay | Program::FromSelf => {
            TcAttachType::Egress
        }
        _ => TcAttachType::Ingress,
    }
}

fn uses_tcx() -> bool {
    KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0))
}

fn put_endpoint<A>(
    table: &Table<A, Endpoint>,
    address: IpAddr,
    endpoint: &Endpoint,
) -> io::Result<()>
where
    A: Wire + crate::kernel::table::Plain,
{
    A::from_address(address).map_or(Ok(()), |address| table.put(&address, endpoint))
}

/// Removes the address unless another link has it by now.
fn remove_endpoint<A>(table: &Table<A, Endpoint>, address: IpAddr, ifindex: u32) -> io::Result<()>
where
    A: Wire + crate::kernel::table::Plain,
{
    let Some(address) = A::from_address(address) else {
        return Ok(());
    };
    match table.get(&address)? {
        Some(endpoint) if endpoint.ifindex == ifindex => table.remove(&address).map(drop),
        _ => Ok(()),
    }
}

/// The name of an interface; none when it is not there (for which nix answers an empty name).
fn interface_name(ifindex: u32) -> Option<String> {
    let name = nix::net::if_::if_indextoname(ifindex).ok()?;
    let name = name.to_string_lossy();
    (!name.is_empty()).then(|| name.into_owned())
}

fn forget_endpoints<A>(table: &Table<A, Endpoint>, ifindex: u32)
where
    A: Wire + crate::kernel::table::Plain,
{
    for (address, endpoint) in table.entries().unwrap_or_default() {
        if endpoint.ifindex == ifindex && endpoint.flags & ENDPOINT_NODE == 0 {
            let _ = table.remove(&address);
        }
    }
}
