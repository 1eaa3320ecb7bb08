//! Shaping: a token bucket on what a link sends, and, by way of an IFB device, on what it receives.

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use netlink_packet_route::tc::{
    TcAction, TcActionAttribute, TcActionGeneric, TcActionMirror, TcActionMirrorOption,
    TcActionOption, TcActionType, TcAttribute, TcFilterU32, TcFilterU32Option, TcHandle, TcMessage,
    TcMirror, TcMirrorActionType, TcOption,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Netlink, NetlinkError};

/// How long a packet waits in a full bucket's queue at most before packets are dropped.
const LATENCY_MS: u64 = 25;

// linux/pkt_sched.h, linux/pkt_cls.h, linux/rtnetlink.h
const TCA_OPTIONS: u16 = 2;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;
const TCA_U32_SEL: u16 = 5;
const TC_LINKLAYER_ETHERNET: u8 = 1;
const TC_U32_TERMINAL: u8 = 1;
const ETH_P_ALL: u16 = 3;

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Bytes per second, not zero.
    pub rate: u64,
    /// Bytes that may pass at once; packets that are longer never do.
    pub burst: u32,
}

impl Bucket {
    /// The options of a `tbf` queueing discipline.
    fn options(self) -> Vec<u8> {
        let queue = self.rate.saturating_mul(LATENCY_MS) / 1000;
        let limit = queue.saturating_add(self.burst.into());
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        let rate = u32::try_from(self.rate).unwrap_or(u32::MAX);
        // struct tc_tbf_qopt: rate (struct tc_ratespec), peak rate, limit, buffer, MTU. The kernel takes the buffer from
        // the attribute for the burst.
        let mut parameters = vec![0; 36];
        parameters[1] = TC_LINKLAYER_ETHERNET;
        parameters[8..12].copy_from_slice(&rate.to_ne_bytes());
        parameters[24..28].copy_from_slice(&limit.to_ne_bytes());
        let mut options = Vec::new();
        attribute(&mut options, TCA_TBF_PARMS, &parameters);
        attribute(&mut options, TCA_TBF_BURST, &self.burst.to_ne_bytes());
        if self.rate > u64::from(u32::MAX) {
            attribute(&mut options, TCA_TBF_RATE64, &self.rate.to_ne_bytes());
        }
        options
    }
}

/// Appends a netlink attribute, whose value is a multiple of four bytes long.
fn attribute(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    to.extend_from_slice(&length.to_ne_bytes());
    to.extend_from_slice(&kind.to_ne_bytes());
    to.extend_from_slice(value);
}

impl Netlink {
    /// Shapes what a link sends.
    ///
    /// # Errors
    /// [`NetlinkError`]; the kernel may lack `sch_tbf`.
    pub fn shape(&mut self, link: u32, bucket: Bucket) -> Result<(), NetlinkError> {
        let mut message = tc_message(link, TcHandle::ROOT);
        message.attributes = vec![
            TcAttribute::Kind("tbf".into()),
            TcAttribute::Other(DefaultNla::new(TCA_OPTIONS, bucket.options())),
        ];
        let message = RouteNetlinkMessage::NewQueueDiscipline(message);
        self.change(message, NLM_F_CREATE | NLM_F_EXCL)
            .map_err(|e| NetlinkError::new(format!("shape link {link} to {bucket:?}"), e))
    }

    /// Creates an IFB device: what is sent to it comes in where it came from, once its queue lets it go.
    ///
    /// # Errors
    /// [`NetlinkError`] names the device; the kernel may lack `ifb`.
    pub fn create_ifb(&mut self, name: &str, mtu: u32) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(name.to_owned()),
            LinkAttribute::Mtu(mtu),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Ifb)]),
        ];
        let message = RouteNetlinkMessage::NewLink(message);
        self.change(message, NLM_F_CREATE | NLM_F_EXCL)
            .map_err(|e| NetlinkError::new(format!("create IFB device {name}"), e))
    }

    /// Leads all that a link receives through an IFB device.
    ///
    /// # Errors
    /// [`NetlinkError`]; the kernel may lack `sch_ingress`, `cls_u32` or `act_mirred`.
    pub fn lead_ingress(&mut self, link: u32, ifb: u32) -> Result<(), NetlinkError> {
        let failed = |what: &str, e| {
            NetlinkError::new(
                format!("{what} to lead what link {link} receives to {ifb}"),
                e,
            )
        };
        let ingress = TcHandle {
            major: u16::MAX,
            minor: 0,
        };
        let mut message = tc_message(link, TcHandle::INGRESS);
        message.header.handle = ingress;
        message.attributes = vec![TcAttribute::Kind("ingress".into())];
        self.change(
            RouteNetlinkMessage::NewQueueDiscipline(message),
            NLM_F_CREATE | NLM_F_EXCL,
        )
        .map_err(|e| failed("add the ingress hook", e))?;

        let mut message = tc_message(link, ingress);
        // Priority and protocol.
        message.header.info = (1 << 16) | u32::from(ETH_P_ALL.to_be());
        message.attributes = vec![
            TcAttribute::Kind(TcFilterU32::KIND.into()),
            TcAttribute::Options(vec![
                TcOption::U32(TcFilterU32Option::Other(every_packet())),
                TcOption::U32(TcFilterU32Option::Action(vec![redirect(ifb)])),
            ]),
        ];
        self.change(
            RouteNetlinkMessage::NewTrafficFilter(message),
            NLM_F_CREATE | NLM_F_EXCL,
        )
        .map_err(|e| failed("add the filter", e))
    }
}

fn tc_message(link: u32, parent: TcHandle) -> TcMessage {
    let mut message = TcMessage::with_index(link.cast_signed());
    message.header.family = AddressFamily::Unspec;
    message.header.parent = parent;
    message
}

/// struct tc_u32_sel with one key that matches everything.
fn every_packet() -> DefaultNla {
    let mut selector = vec![0; 32];
    selector[0] = TC_U32_TERMINAL;
    selector[2] = 1;
    DefaultNla::new(TCA_U32_SEL, selector)
}

fn redirect(ifb: u32) -> TcAction {
    let mut generic = TcActionGeneric::default();
    generic.action = TcActionType::Stolen;
    let mut mirror = TcMirror::default();
    mirror.generic = generic;
    mirror.eaction = TcMirrorActionType::EgressRedir;
    mirror.ifindex = ifb;
    let mut action = TcAction::default();
    action.attributes = vec![
        TcActionAttribute::Kind(TcActionMirror::KIND.into()),
        TcActionAttribute::Options(vec![TcActionOption::Mirror(TcActionMirrorOption::Parms(
            mirror,
        ))]),
    ];
    action
}
