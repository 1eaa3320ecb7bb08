//! Names for every drop and every way a packet can take. The numbers index per-CPU counters.

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[repr(u32)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            /// Every value, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Stable name, for metric labels.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),+
                }
            }
        }
    };
}

numbered! {
    /// Why a packet was dropped.
    DropReason {
        /// No drop: the number of a decision that lets the packet go on.
        None = "none",
        /// A header is cut short or contradicts itself.
        Malformed = "malformed",
        /// A program runs on a link that is not in the link table.
        UnknownLink = "unknown_link",
        /// A pod sent a source address that is not its own.
        SpoofedSource = "spoofed_source",
        /// A pod sent something that is neither IPv4, IPv6 nor ARP.
        UnsupportedProtocol = "unsupported_protocol",
        /// The service port exists and has no usable backend.
        NoBackend = "no_backend",
        /// A slot led to no backend: the service changed under the packet.
        BackendMissing = "backend_missing",
        /// An address of the service ranges where no such port is served.
        NoFrontend = "no_frontend",
        /// The source had to become the node's address, and the node has none of this family.
        NoNodeAddress = "no_node_address",
        /// No free source port was found for a flow that needs another.
        SourcePortsExhausted = "source_ports_exhausted",
        /// The flow table is full. Flows that exist go on.
        FlowTableFull = "flow_table_full",
        /// The pod's link has not got its programs yet.
        EndpointNotReady = "endpoint_not_ready",
        /// The packet could not be rewritten.
        RewriteFailed = "rewrite_failed",
    }
}

impl DropReason {
    /// The sender is told: it asked for a service that nobody serves.
    #[inline(always)]
    #[must_use]
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::NoBackend | Self::NoFrontend)
    }
}

numbered! {
    /// What happened to packets and flows that were not dropped.
    Event {
        ToStack = "to_stack",
        ToPod = "to_pod",
        ToNetwork = "to_network",
        ToHost = "to_host",
        TranslatedForward = "translated_forward",
        TranslatedReply = "translated_reply",
        FlowCreated = "flow_created",
        /// A flow's backend had gone, or its connection was over: it was made anew.
        FlowRenewed = "flow_renewed",
        /// Another flow had the client's port: this one got another.
        SourcePortChanged = "source_port_changed",
        /// Half a flow was found, and removed or completed.
        FlowHealed = "flow_healed",
        /// A dropped packet was answered with a reset or a port unreachable message.
        Refused = "refused",
    }
}
