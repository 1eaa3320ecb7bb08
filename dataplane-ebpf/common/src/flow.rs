//! The life of a flow: what its TCP flags say, how long it may be idle, and whether it may be used again.

use crate::address::{Family, SCTP, TCP};
use crate::layout::{FLOW_DSR, FLOW_SERVICE, Flow, FlowKey, backend_state};
use crate::packet::{Packet, tcp};
use crate::policy::verdict;

/// Idle seconds after which a flow is over.
pub mod timeout {
    /// TCP before both sides have acknowledged.
    pub const TCP_OPENING_S: u32 = 30;
    /// What kube-proxy asks of the kernel (`conntrackTCPEstablishedTimeout`).
    pub const TCP_ESTABLISHED_S: u32 = 86_400;
    /// One side has closed, and the other may go on sending for long: kube-proxy's `conntrackTCPCloseWaitTimeout`.
    pub const TCP_HALF_CLOSED_S: u32 = 3_600;
    /// Both sides have closed: time for stray segments.
    pub const TCP_CLOSED_S: u32 = 30;
    pub const TCP_RESET_S: u32 = 10;
    /// No answer was seen.
    pub const UDP_ONE_WAY_S: u32 = 30;
    pub const UDP_ANSWERED_S: u32 = 180;

    /// The same while the table is nearly full. A flood of half-open connections makes room for others; established
    /// ones keep what the RFCs ask for at least.
    pub mod pressure {
        pub const TCP_OPENING_S: u32 = 3;
        /// RFC 5382, REQ-5: at least 2 hours and 4 minutes.
        pub const TCP_ESTABLISHED_S: u32 = 7_500;
        /// RFC 5382, REQ-5: at least 4 minutes for what is neither established nor reset.
        pub const TCP_HALF_CLOSED_S: u32 = 300;
        pub const TCP_CLOSED_S: u32 = 3;
        pub const TCP_RESET_S: u32 = 3;
        pub const UDP_ONE_WAY_S: u32 = 5;
        /// RFC 4787, REQ-5: at least 2 minutes.
        pub const UDP_ANSWERED_S: u32 = 125;
    }
}

/// Where a word of TCP flags holds the second, modulo 2^16, of the last reset that its side sent.
const RESET_SECOND_SHIFT: u32 = 16;
const RESET_SECOND_MASK: u32 = 0xffff;
/// A side that was seen so many seconds after a reset, without another one, did not end by it.
const RESET_ECHO_S: u32 = 1;

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

    /// Has a beginning and an end that can be seen: TCP and SCTP.
    #[inline(always)]
    #[must_use]
    pub fn is_connection(&self) -> bool {
        self.protocol == TCP as u32 || self.protocol == SCTP as u32
    }

    /// True when [`Self::reply_key`] is this key.
    #[inline(always)]
    #[must_use]
    pub fn is_answered_by(&self, reply: &FlowKey<A>) -> bool {
        self.backend == reply.source
            && self.source == reply.destination
            && self.backend_port == reply.source_port
            && self.source_port == reply.destination_port
            && self.protocol == reply.protocol
    }

    /// Both sides have acknowledged, and neither has closed.
    #[inline(always)]
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.is_connection() && self.both(tcp::ACK) && !self.either(tcp::FIN) && !self.is_reset()
    }

    /// Nothing more will come but stray segments.
    #[inline(always)]
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_reset() || self.both(tcp::FIN)
    }

    /// One side has said that it ends: a further SYN from the client's port is another connection.
    #[inline(always)]
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.is_reset() || self.either(tcp::FIN)
    }

    /// No conversation is lost with this flow: none has begun, or it is over.
    #[inline(always)]
    #[must_use]
    pub fn is_disposable(&self) -> bool {
        if !self.is_connection() {
            return self.server_seen_s == 0;
        }
        !self.both(tcp::ACK) || self.is_closed()
    }

    /// A side has reset the connection, and it did end: a reset outside the window is ignored by its receiver
    /// (RFC 9293, section 3.10.7.4; RFC 5961), and both sides go on.
    #[inline(always)]
    #[must_use]
    pub fn is_reset(&self) -> bool {
        self.is_reset_by(self.client_flags) || self.is_reset_by(self.server_flags)
    }

    #[inline(always)]
    fn is_reset_by(&self, flags: u32) -> bool {
        let at = flags >> RESET_SECOND_SHIFT;
        flags & tcp::RST as u32 != 0
            && !(seen_after(self.client_seen_s, at) && seen_after(self.server_seen_s, at))
    }

    /// Idle seconds that this flow may have. `pressure` shortens them, most for flows that never were established.
    #[inline(always)]
    #[must_use]
    pub fn timeout_s(&self, pressure: bool) -> u32 {
        let (relaxed, pressed) = if !self.is_connection() {
            if self.is_answered() {
                (timeout::UDP_ANSWERED_S, timeout::pressure::UDP_ANSWERED_S)
            } else {
                (timeout::UDP_ONE_WAY_S, timeout::pressure::UDP_ONE_WAY_S)
            }
        } else if self.is_reset() {
            (timeout::TCP_RESET_S, timeout::pressure::TCP_RESET_S)
        } else if self.both(tcp::FIN) {
            (timeout::TCP_CLOSED_S, timeout::pressure::TCP_CLOSED_S)
        } else if !self.both(tcp::ACK) {
            (timeout::TCP_OPENING_S, timeout::pressure::TCP_OPENING_S)
        } else if self.either(tcp::FIN) {
            (
                timeout::TCP_HALF_CLOSED_S,
                timeout::pressure::TCP_HALF_CLOSED_S,
            )
        } else {
            (
                timeout::TCP_ESTABLISHED_S,
                timeout::pressure::TCP_ESTABLISHED_S,
            )
        };
        if pressure { pressed } else { relaxed }
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

    /// True when no packet will use this flow again, so that its memory may go: its time is over, or its service led it to
    /// a backend that is no more, and it is no connection, which would go on. `state` as for [`Flow::is_orphaned`].
    #[inline(always)]
    #[must_use]
    pub fn is_over(&self, state: u32, now_s: u32, pressure: bool) -> bool {
        let abandoned =
            self.flags & FLOW_SERVICE != 0 && !self.is_connection() && self.is_orphaned(state);
        abandoned || self.is_expired(now_s, pressure)
    }

    /// The policies allow it, as they are at this generation: its packets need not ask again.
    #[inline(always)]
    #[must_use]
    pub fn is_settled(&self, generation: u32) -> bool {
        let policy = self.policy;
        policy.generation() == generation && policy.verdict() & verdict::DENIED == 0
    }

    /// Whether a client's packet may use this flow. `state` is the present word of the flow's backend id.
    ///
    /// A backend that drains keeps the flows it has and gets no new connections; a client's datagrams stay with it. One that
    /// has left its service keeps the connections it has, as with kube-proxy, and gets nothing else. Connections to a
    /// pod that has gone are reset by the node that had it.
    #[inline(always)]
    #[must_use]
    pub fn fitness(&self, packet: &Packet<A>, state: u32, now_s: u32) -> Fitness {
        let opens = packet.opens();
        let connected = packet.is_connected() && !opens;
        let left = self.flags & FLOW_SERVICE != 0
            && ((self.is_orphaned(state) && !connected)
                || (backend_state::kind(state) == backend_state::DRAINING && opens));
        let over = opens && self.is_closing();
        if left || over || self.is_expired(now_s, false) {
            Fitness::Renew
        } else {
            Fitness::Usable
        }
    }

    /// True when [`Self::note_client`] would write.
    #[inline(always)]
    #[must_use]
    pub fn is_news_of_client(&self, flags: u8, now_s: u32) -> bool {
        self.client_seen_s != now_s || self.client_flags != noted(self.client_flags, flags, now_s)
    }

    /// Notes a packet of the client. True when this is the first in its second.
    #[inline(always)]
    pub fn note_client(&mut self, flags: u8, now_s: u32) -> bool {
        let first = self.client_seen_s != now_s;
        // Written only when they change: the record is shared between CPUs.
        if first {
            self.client_seen_s = now_s;
        }
        let word = noted(self.client_flags, flags, now_s);
        if self.client_flags != word {
            self.client_flags = word;
        }
        first
    }

    /// Notes a packet of the backend.
    #[inline(always)]
    pub fn note_server(&mut self, flags: u8, now_s: u32) {
        if self.server_seen_s != now_s {
            self.server_seen_s = now_s;
        }
        let word = noted(self.server_flags, flags, now_s);
        if self.server_flags != word {
            self.server_flags = word;
        }
    }

    /// The backend has sent something. Where it answers elsewhere, the client's going on says as much.
    #[inline(always)]
    fn is_answered(&self) -> bool {
        let goes_on = self.flags & FLOW_DSR != 0 && self.client_seen_s != self.created_s;
        self.server_seen_s != 0 || goes_on
    }

    /// The backend's side of a flow that answers elsewhere is never seen: the client's has to do.
    #[inline(always)]
    fn both(&self, flag: u8) -> bool {
        let server = if self.flags & FLOW_DSR != 0 {
            self.client_flags
        } else {
            self.server_flags
        };
        self.client_flags & server & flag as u32 != 0
    }

    #[inline(always)]
    fn either(&self, flag: u8) -> bool {
        (self.client_flags | self.server_flags) & flag as u32 != 0
    }
}

/// A side's word of flags after a packet with `flags`.
#[inline(always)]
pub(crate) const fn noted(word: u32, flags: u8, now_s: u32) -> u32 {
    let all = word | flags as u32;
    if flags & tcp::RST == 0 {
        return all;
    }
    (all & RESET_SECOND_MASK) | (now_s & RESET_SECOND_MASK) << RESET_SECOND_SHIFT
}

/// True when `seen_s` is later than the second `at`, which is known modulo 2^16, and no echo of it.
#[inline(always)]
const fn seen_after(seen_s: u32, at: u32) -> bool {
    let since = seen_s.wrapping_sub(at) & RESET_SECOND_MASK;
    since > RESET_ECHO_S && since <= RESET_SECOND_MASK / 2
}
