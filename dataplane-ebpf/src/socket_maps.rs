//! Maps that only socket hooks use, and `SocketTables` over them and those of the packet path.

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::macros::map;
use aya_ebpf::maps::{HashMap, PerCpuArray};
use dataplane_common::layout::{
    Affinity, AffinityKey, Backend, Endpoint, Frontend, FrontendKey, PodPolicy, SlotKey,
};
use dataplane_common::policy::PolicyTables;
use dataplane_common::reason::SocketEvent;
use dataplane_common::socket::{
    Connection, Cookie, DestinationKey, Namespace, Place, SocketFlow, SocketTables, SourceKey,
    UseKey,
};
use dataplane_common::tables::{Inserted, Tables};
use dataplane_common::{V4, V6};

use crate::maps::{MapTables, inserted};

/// Connections and datagram flows of sockets, per address family. Sockets beyond it are left to the packet path.
const SOCKETS: u32 = 65_536;
/// Pods of this node, and the node.
const NAMESPACES: u32 = 1_024;

#[map(name = "socket_netns")]
static NETNS: HashMap<u64, Namespace> = HashMap::pinned(NAMESPACES, BPF_F_NO_PREALLOC);
#[map(name = "socket_events")]
static EVENTS: PerCpuArray<u64> = PerCpuArray::pinned(32, 0);

#[inline(always)]
fn count(event: SocketEvent) {
    if let Some(counter) = EVENTS.get_ptr_mut(event as u32) {
        // SAFETY: this CPU's own value. A hook may be preempted by another, which costs a count at worst.
        unsafe { *counter += 1 };
    }
}

macro_rules! socket_maps {
    ($family:ty, $module:ident, $connection:literal, $flow:literal, $origin:literal, $usage:literal) => {
        mod $module {
            use super::*;
            #[map(name = $connection)]
            pub(super) static CONNECTION: HashMap<Cookie, Connection<$family>> =
                HashMap::pinned(SOCKETS, BPF_F_NO_PREALLOC);
            #[map(name = $flow)]
            pub(super) static FLOW: HashMap<DestinationKey<$family>, SocketFlow<$family>> =
                HashMap::pinned(SOCKETS, BPF_F_NO_PREALLOC);
            #[map(name = $origin)]
            pub(super) static ORIGIN: HashMap<SourceKey<$family>, Place<$family>> =
                HashMap::pinned(SOCKETS, BPF_F_NO_PREALLOC);
            #[map(name = $usage)]
            pub(super) static USAGE: HashMap<UseKey, Place<$family>> =
                HashMap::pinned(SOCKETS, BPF_F_NO_PREALLOC);
        }

        impl SocketTables<$family> for MapTables {
            #[inline(always)]
            fn now_s(&mut self) -> u32 {
                Tables::<$family>::now_s(self)
            }

            #[inline(always)]
            fn random(&mut self) -> u32 {
                Tables::<$family>::random(self)
            }

            #[inline(always)]
            fn count(&mut self, event: SocketEvent) {
                count(event);
            }

            #[inline(always)]
            fn namespace(&mut self, cookie: u64) -> Option<&Namespace> {
                // SAFETY: entries are freed after their readers (`BPF_F_NO_PREALLOC`), and never written in place.
                unsafe { NETNS.get(&cookie) }
            }

            #[inline(always)]
            fn endpoint(&mut self, address: &$family) -> Option<&Endpoint> {
                PolicyTables::<$family>::endpoint(self, address)
            }

            #[inline(always)]
            fn pod_policy(&mut self, ifindex: u32) -> Option<&PodPolicy> {
                PolicyTables::<$family>::pod_policy(self, ifindex)
            }

            #[inline(always)]
            fn frontend(&mut self, key: &FrontendKey<$family>) -> Option<&Frontend> {
                Tables::<$family>::frontend(self, key)
            }

            #[inline(always)]
            fn slot(&mut self, key: &SlotKey) -> Option<&u32> {
                Tables::<$family>::slot(self, key)
            }

            #[inline(always)]
            fn backend(&mut self, id: u32) -> Option<&Backend<$family>> {
                Tables::<$family>::backend(self, id)
            }

            #[inline(always)]
            fn backend_state(&mut self, id: u32) -> u32 {
                Tables::<$family>::backend_state(self, id)
            }

            #[inline(always)]
            fn affinity(&mut self, key: &AffinityKey<$family>) -> Option<&Affinity> {
                Tables::<$family>::affinity(self, key)
            }

            #[inline(always)]
            fn set_affinity(&mut self, key: &AffinityKey<$family>, affinity: &Affinity) {
                Tables::<$family>::set_affinity(self, key, affinity);
            }

            #[inline(always)]
            fn connection(&mut self, cookie: &Cookie) -> Option<&Connection<$family>> {
                // SAFETY: as for `namespace`.
                unsafe { $module::CONNECTION.get(cookie) }
            }

            #[inline(always)]
            fn set_connection(
                &mut self,
                cookie: &Cookie,
                connection: &Connection<$family>,
            ) -> bool {
                $module::CONNECTION.insert(cookie, connection, 0).is_ok()
            }

            #[inline(always)]
            fn remove_connection(&mut self, cookie: &Cookie) {
                let _ = $module::CONNECTION.remove(cookie);
            }

            #[inline(always)]
            fn socket_flow(
                &mut self,
                key: &DestinationKey<$family>,
            ) -> Option<&mut SocketFlow<$family>> {
                // SAFETY: the entry outlives its readers. CPUs may write one record at the same time; what they write
                // in place are words that are right whichever comes last.
                $module::FLOW
                    .get_ptr_mut(key)
                    .map(|flow| unsafe { &mut *flow })
            }

            #[inline(always)]
            fn set_socket_flow(
                &mut self,
                key: &DestinationKey<$family>,
                flow: &SocketFlow<$family>,
            ) -> bool {
                $module::FLOW.insert(key, flow, 0).is_ok()
            }

            #[inline(always)]
            fn remove_socket_flow(&mut self, key: &DestinationKey<$family>) {
                let _ = $module::FLOW.remove(key);
            }

            #[inline(always)]
            fn origin(&mut self, key: &SourceKey<$family>) -> Option<&Place<$family>> {
                // SAFETY: as for `namespace`.
                unsafe { $module::ORIGIN.get(key) }
            }

            #[inline(always)]
            fn insert_origin(
                &mut self,
                key: &SourceKey<$family>,
                place: &Place<$family>,
            ) -> Inserted {
                inserted($module::ORIGIN.insert(key, place, BPF_NOEXIST.into()))
            }

            #[inline(always)]
            fn set_origin(&mut self, key: &SourceKey<$family>, place: &Place<$family>) {
                // It replaces an entry, for which there is room.
                let _ = $module::ORIGIN.insert(key, place, 0);
            }

            #[inline(always)]
            fn remove_origin(&mut self, key: &SourceKey<$family>) {
                let _ = $module::ORIGIN.remove(key);
            }

            #[inline(always)]
            fn usage(&mut self, key: &UseKey) -> Option<&Place<$family>> {
                // SAFETY: as for `namespace`.
                unsafe { $module::USAGE.get(key) }
            }

            #[inline(always)]
            fn insert_usage(&mut self, key: &UseKey, place: &Place<$family>) -> Inserted {
                inserted($module::USAGE.insert(key, place, BPF_NOEXIST.into()))
            }

            #[inline(always)]
            fn remove_usage(&mut self, key: &UseKey) {
                let _ = $module::USAGE.remove(key);
            }
        }
    };
}

socket_maps!(
    V4,
    v4,
    "socket_conns_v4",
    "socket_flows_v4",
    "socket_origs_v4",
    "socket_uses_v4"
);
socket_maps!(
    V6,
    v6,
    "socket_conns_v6",
    "socket_flows_v6",
    "socket_origs_v6",
    "socket_uses_v6"
);
