//! Names for every drop and every way a packet can take. The numbers index per-CPU counters.

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[repr(u32)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl Default for $name {
            fn default() -> Self {
                Self::ALL[0]
            }
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
        /// A header is cut short or contradicts itself, or there are more IPv6 extension headers than are looked through.
        Malformed = "malformed",
        /// A program runs on a link that is not in the link table.
        UnknownLink = "unknown_link",
        /// A pod sent a source address that is not its own, or what only a router may say.
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
        /// The traffic policy wants a backend of this node, and there are only others.
        NoLocalBackend = "no_local_backend",
        /// The client is in none of the service's source ranges.
        SourceRange = "source_range",
        /// An address of this node's pod range that no pod has.
        NoEndpoint = "no_endpoint",
        /// A program that goes on with the packet is not loaded.
        ProgramMissing = "program_missing",
        /// A fragment came before the first of its datagram, and no agent ran that keeps it.
        EarlyFragment = "early_fragment",
        /// A wrapped packet came from an address that is no node's, or is of another network.
        ForeignTunnel = "foreign_tunnel",
        /// A packet on the overlay's device is for no node behind it.
        NoTunnel = "no_tunnel",
        /// Only nodes may send to the port on which nodes take wrapped packets.
        OverlayPort = "overlay_port",
        /// The policies of the pod that the packet left do not allow it.
        PolicyEgress = "policy_egress",
        /// The policies of the pod that the packet was to enter do not allow it.
        PolicyIngress = "policy_ingress",
        /// Which policies apply to the pod is not known yet, or they did not fit.
        PolicyPending = "policy_pending",
        /// An SCTP packet in fragments would have needed other ports: its checksum spans what is not there.
        SctpFragment = "sctp_fragment",
    }
}

impl DropReason {
    /// The sender is told: it asked for a service that nobody serves.
    #[inline(always)]
    #[must_use]
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::NoBackend | Self::NoFrontend | Self::NoEndpoint)
    }
}

numbered! {
    /// What happened to packets and flows that were not dropped.
    Event {
        ToStack = "to_stack",
        ToPod = "to_pod",
        ToNetwork = "to_network",
        ToHost = "to_host",
        /// A client's packet went to the node of its backend, which answers the client itself.
        ToBackendNode = "to_backend_node",
        TranslatedForward = "translated_forward",
        TranslatedReply = "translated_reply",
        FlowCreated = "flow_created",
        /// A flow's backend had gone, or its connection was over: it was made anew.
        FlowRenewed = "flow_renewed",
        /// Another flow had the client's port: this one got another.
        SourcePortChanged = "source_port_changed",
        /// A new flow took the place of one without a conversation, in a table that is full.
        FlowDisplaced = "flow_displaced",
        /// Half a flow was found, and removed or completed.
        FlowHealed = "flow_healed",
        /// A flow that needs no translation found no room: its packets go on without a record.
        FlowUntracked = "flow_untracked",
        /// An ICMP error was about a packet of a translated flow, and was translated too.
        TranslatedError = "translated_error",
        /// A fragment that came before the first of its datagram was handed to user space.
        Parked = "parked",
        /// An echo request to a service's address was answered.
        EchoAnswered = "echo_answered",
        /// A dropped packet was not answered: too many others were.
        RefusalLimited = "refusal_limited",
        /// A packet was led on to another machine by the uplink's driver.
        ForwardedAtDriver = "forwarded_at_driver",
        /// A dropped packet was answered with a reset or a port unreachable message.
        Refused = "refused",
    }
}

numbered! {
    /// What socket hooks did. Everything that passed is left to the packet path.
    SocketEvent {
        /// A connection was made to a backend instead of the service.
        ConnectionTranslated = "connection_translated",
        /// A datagram was sent to a backend instead of the service.
        DatagramTranslated = "datagram_translated",
        /// A socket's datagrams to a service got a backend, the first or another.
        FlowSteered = "flow_steered",
        /// A received datagram was shown as coming from the service.
        SourceRestored = "source_restored",
        /// The service was named as a socket's peer.
        PeerRestored = "peer_restored",
        /// No service has this address, protocol and port.
        PassedNoService = "passed_no_service",
        /// The service has no usable backend: the packet is refused or dropped, as the service says.
        PassedNoBackend = "passed_no_backend",
        /// Neither a pod's network namespace nor the node's.
        PassedUnknownNamespace = "passed_unknown_namespace",
        /// The service has affinity, and the client has no address of this family.
        PassedUnknownClient = "passed_unknown_client",
        /// The service takes clients of certain addresses only: what the socket will send from is known later.
        PassedSourceRanges = "passed_source_ranges",
        /// The socket is bound to a link.
        PassedBoundToLink = "passed_bound_to_link",
        /// A datagram socket with a peer: only the packet path can give it another backend.
        PassedConnectedDatagram = "passed_connected_datagram",
        /// Neither TCP nor UDP.
        PassedProtocol = "passed_protocol",
        /// The socket writes to the same backend by another name already.
        PassedAmbiguous = "passed_ambiguous",
        /// The datagram socket has as many destinations as can be noted.
        PassedTooManyDestinations = "passed_too_many_destinations",
        /// The chosen backend is itself a service.
        PassedChained = "passed_chained",
        /// A table of the socket hooks is full.
        PassedTableFull = "passed_table_full",
        /// The chosen backend is the pod that asks, and policies judge it: what it sends to itself meets no program.
        PassedPolicy = "passed_policy",
    }
}
