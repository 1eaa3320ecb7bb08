//! The life of a flow: what its TCP flags say, how long it may be idle, and whether it may be used again.

use crate::address::{Family, TCP};
use crate::layout::{Flow, FlowKey, backend_state};
use crate::packet::{Packet, tcp};

/// Idle seconds after which a flow is over.
pub mod timeout {
    /// TCP before both sides have acknowledged.
    pub const TCP_OPENING_S: u32 = 30;
    /// RFC 5382, REQ-5: at least 2 hours and 4 minutes.
    pub const TCP_ESTABLISHED_S: u32 = 7_500;
    /// One side has closed. The other may go on sending for long.
    pub const TCP_HALF_CLOSED_S: u32 = 900;
    /// Both sides have closed: time for stray segments.
    pub const TCP_CLOSED_S: u32 = 30;
    pub const TCP_RESET_S: u32 = 10;
    /// No answer was seen.
    pub const UDP_ONE_WAY_S: u32 = 30;
    /// RFC 4787, REQ-5: at least 2 minutes.
    pub const UDP_ANSWERED_S: u32 = 180;
    /// For TCP that has not been established, while the table is nearly full: a flood of half-open connections makes
    /// room for others, and never at the cost of established ones.
    pub const TCP_OPENING_UNDER_PRESSURE_S: u32 = 3;
    pub const UDP_ONE_WAY_UNDER_PRESSURE_S: u32 = 5;
}

/// Whether a flow that was found may carry the packet at hand.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fitness {
    Usable,
    /// Its backend is gone, or its connection is over and the packet opens another: make it anew.
    Renew,
}

impl<A: Family> Flow<A> {
    /// The tuple of the backend's answers, as they come off the wire.
    #[inline(always)]
    #[must_use]
    pub fn reply_key(&self) -> FlowKey<A> {
        FlowKey {
            source: self.backend,
            destination: self.source,
            source_port: self.backend_port,
            destination_port: self.source_port,
            protocol: self.protocol,
        }
    }

    /// Both sides have acknowledged, and neither has closed.
    #[inline(always)]
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.protocol == TCP as u32
            && self.both(tcp::ACK)
            && !self.either(tcp::FIN)
            && !self.either(tcp::RST)
    }

    /// Nothing more will come but stray segments.
    #[inline(always)]
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.either(tcp::RST) || self.both(tcp::FIN)
    }

    /// Idle seconds that this flow may have. `pressure` shortens those of flows that never were established.
    #[inline(always)]
    #[must_use]
    pub fn timeout_s(&self, pressure: bool) -> u32 {
        if self.protocol != TCP as u32 {
            return if self.server_seen_s != 0 {
                timeout::UDP_ANSWERED_S
            } else if pressure {
                timeout::UDP_ONE_WAY_UNDER_PRESSURE_S
            } else {
                timeout::UDP_ONE_WAY_S
            };
        }
        if self.either(tcp::RST) {
            timeout::TCP_RESET_S
        } else if self.both(tcp::FIN) {
            timeout::TCP_CLOSED_S
        } else if !self.both(tcp::ACK) {
            if pressure {
                timeout::TCP_OPENING_UNDER_PRESSURE_S
            } else {
                timeout::TCP_OPENING_S
            }
        } else if self.either(tcp::FIN) {
            timeout::TCP_HALF_CLOSED_S
        } else {
            timeout::TCP_ESTABLISHED_S
        }
    }

    /// True when the flow has been idle for too long at `now_s`.
    #[inline(always)]
    #[must_use]
    pub fn is_expired(&self, now_s: u32, pressure: bool) -> bool {
        let seen_s = if self.client_seen_s > self.server_seen_s {
            self.client_seen_s
        } else {
            self.server_seen_s
        };
        // A clock read on another CPU may lag behind the one that stamped the flow.
        now_s.saturating_sub(seen_s) > self.timeout_s(pressure)
    }

    /// True when the backend that this flow leads to is no more. `state` is the present word of the flow's backend id.
    #[inline(always)]
    #[must_use]
    pub fn is_orphaned(&self, state: u32) -> bool {
        !backend_state::same_life(state, self.backend_state)
            || backend_state::kind(state) == backend_state::ABSENT
    }

    /// Whether a client's packet may use this flow. `backend_state` is the present word of the flow's backend id.
    #[inline(always)]
    #[must_use]
    pub fn fitness(&self, packet: &Packet<A>, state: u32, now_s: u32) -> Fitness {
        let kind = backend_state::kind(state);
        let gone = self.is_orphaned(state);
        // A draining backend keeps its connections, and gets neither new ones nor datagrams.
        let retiring = kind == backend_state::DRAINING && (!packet.is_tcp() || packet.opens());
        let over = packet.opens() && self.is_closed();
        if gone || retiring || over || self.is_expired(now_s, false) {
            Fitness::Renew
        } else {
            Fitness::Usable
        }
    }

    /// Notes a packet of the client. True when this is the first in its second.
    #[inline(always)]
    pub fn note_client(&mut self, flags: u8, now_s: u32) -> bool {
        let first = self.client_seen_s != now_s;
        // Written only when they change: the record is shared between CPUs.
        if first {
            self.client_seen_s = now_s;
        }
        if self.client_flags & flags as u32 != flags as u32 {
            self.client_flags |= flags as u32;
        }
        first
    }

    /// Notes a packet of the backend.
    #[inline(always)]
    pub fn note_server(&mut self, flags: u8, now_s: u32) {
        if self.server_seen_s != now_s {
            self.server_seen_s = now_s;
        }
        if self.server_flags & flags as u32 != flags as u32 {
            self.server_flags |= flags as u32;
        }
    }

    #[inline(always)]
    fn both(&self, flag: u8) -> bool {
        self.client_flags & self.server_flags & flag as u32 != 0
    }

    #[inline(always)]
    fn either(&self, flag: u8) -> bool {
        (self.client_flags | self.server_flags) & flag as u32 != 0
    }
}
