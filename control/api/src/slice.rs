//! One endpoint slice, in the form in which a state keeps it: a cluster's endpoints are most of what a node knows.
//!
//! A message takes four hundred bytes and five allocations for each endpoint, this form about a hundred bytes and none.
//! Addresses are numbers, and come back in their canonical text; those that cannot be read are kept as they are.

use std::net::IpAddr;

use crate::v1::{self, AddressFamily, EndpointPort, EndpointSlice};

/// See the module documentation. Its namespace and name are with whoever keeps it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slice {
    pub service: Box<str>,
    family: i32,
    pub ports: Box<[EndpointPort]>,
    endpoints: Box<[Stored]>,
    /// All texts, one after the other.
    text: Box<str>,
    /// Where the parts of lists are, one list after the other.
    lists: Box<[Span]>,
}

/// A part of the slice's text, or of its lists. Equal parts that follow one another are kept once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Span {
    at: u32,
    length: u32,
}

#[derive(Clone, Debug, PartialEq)]
struct Stored {
    /// The first address; none when it cannot be read or there is none.
    address: Option<IpAddr>,
    /// [`READY`], [`SERVING`] and [`TERMINATING`].
    conditions: u8,
    /// List of the addresses that `address` does not tell.
    other_addresses: Span,
    node: Span,
    zone: Span,
    hostname: Span,
    target_pod: Span,
    /// Lists.
    hint_zones: Span,
    hint_nodes: Span,
}

const READY: u8 = 1;
const SERVING: u8 = 2;
const TERMINATING: u8 = 4;

/// An endpoint of a [`Slice`].
#[derive(Clone, Copy, Debug)]
pub struct Endpoint<'a> {
    slice: &'a Slice,
    stored: &'a Stored,
}

impl Slice {
    #[must_use]
    pub fn family(&self) -> AddressFamily {
        AddressFamily::try_from(self.family).unwrap_or_default()
    }

    pub fn endpoints(&self) -> impl Iterator<Item = Endpoint<'_>> {
        self.endpoints.iter().map(|stored| Endpoint {
            slice: self,
            stored,
        })
    }

    /// The message that the slice was made of, but for the names.
    #[must_use]
    pub fn to_message(&self, namespace: &str, name: &str) -> EndpointSlice {
        EndpointSlice {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            service: self.service.clone().into(),
            family: self.family,
            ports: self.ports.to_vec(),
            endpoints: self.endpoints().map(|e| e.to_message()).collect(),
        }
    }

    fn text(&self, span: Span) -> &str {
        let (at, length) = (span.at as usize, span.length as usize);
        self.text.get(at..at + length).unwrap_or_default()
    }

    fn list(&self, span: Span) -> impl Iterator<Item = &str> {
        let (at, length) = (span.at as usize, span.length as usize);
        let parts = self.lists.get(at..at + length).unwrap_or_default();
        parts.iter().map(|part| self.text(*part))
    }
}

impl<'a> Endpoint<'a> {
    /// The first address: all of an endpoint's addresses are of one host, and consumers use one (discovery/v1). None when
    /// it is no address.
    #[must_use]
    pub fn address(self) -> Option<IpAddr> {
        self.stored.address
    }

    /// All addresses that are some.
    pub fn addresses(self) -> impl Iterator<Item = IpAddr> + 'a {
        let others = self.slice.list(self.stored.other_addresses);
        let first = self.stored.address.into_iter();
        first.chain(others.filter_map(|text| text.parse().ok()))
    }

    #[must_use]
    pub fn ready(self) -> bool {
        self.stored.conditions & READY != 0
    }

    #[must_use]
    pub fn serving(self) -> bool {
        self.stored.conditions & SERVING != 0
    }

    #[must_use]
    pub fn terminating(self) -> bool {
        self.stored.conditions & TERMINATING != 0
    }

    /// Empty when the endpoint has none; so are the other texts.
    #[must_use]
    pub fn node_name(self) -> &'a str {
        self.slice.text(self.stored.node)
    }

    #[must_use]
    pub fn zone(self) -> &'a str {
        self.slice.text(self.stored.zone)
    }

    #[must_use]
    pub fn hostname(self) -> &'a str {
        self.slice.text(self.stored.hostname)
    }

    /// Namespace/name of the pod behind it.
    #[must_use]
    pub fn target_pod(self) -> &'a str {
        self.slice.text(self.stored.target_pod)
    }

    pub fn hint_zones(self) -> impl Iterator<Item = &'a str> {
        self.slice.list(self.stored.hint_zones)
    }

    pub fn hint_nodes(self) -> impl Iterator<Item = &'a str> {
        self.slice.list(self.stored.hint_nodes)
    }

    fn to_message(self) -> v1::Endpoint {
        let owned = |list: &mut dyn Iterator<Item = &'a str>| list.map(str::to_owned).collect();
        let mut addresses: Vec<String> =
            self.stored.address.iter().map(IpAddr::to_string).collect();
        let others = self.slice.list(self.stored.other_addresses);
        addresses.extend(others.map(str::to_owned));
        v1::Endpoint {
            addresses,
            ready: self.ready(),
            serving: self.serving(),
            terminating: self.terminating(),
            node_name: self.node_name().to_owned(),
            zone: self.zone().to_owned(),
            hostname: self.hostname().to_owned(),
            hint_zones: owned(&mut self.hint_zones()),
            hint_nodes: owned(&mut self.hint_nodes()),
            target_pod: self.target_pod().to_owned(),
        }
    }
}

impl From<EndpointSlice> for Slice {
    fn from(message: EndpointSlice) -> Self {
        let mut texts = Texts::default();
        let mut last: Option<Stored> = None;
        let mut endpoints = Vec::with_capacity(message.endpoints.len());
        for endpoint in &message.endpoints {
            let stored = texts.endpoint(endpoint, last.as_ref());
            endpoints.push(stored.clone());
            last = Some(stored);
        }
        Self {
            service: message.service.into(),
            family: message.family,
            ports: message.ports.into(),
            endpoints: endpoints.into(),
            text: texts.text.into(),
            lists: texts.lists.into(),
        }
    }
}

/// The texts of a slice in the making.
#[derive(Default)]
struct Texts {
    text: String,
    lists: Vec<Span>,
}

impl Texts {
    /// `last` is the endpoint before: neighbours often agree.
    fn endpoint(&mut self, endpoint: &v1::Endpoint, last: Option<&Stored>) -> Stored {
        let address = endpoint
            .addresses
            .first()
            .and_then(|text| text.parse().ok());
        let others = endpoint.addresses.get(usize::from(address.is_some())..);
        let mut conditions = 0;
        for (flag, holds) in [
            (READY, endpoint.ready),
            (SERVING, endpoint.serving),
            (TERMINATING, endpoint.terminating),
        ] {
            conditions |= if holds { flag } else { 0 };
        }
        let before = |of: fn(&Stored) -> Span| last.map(of).unwrap_or_default();
        Stored {
            address,
            conditions,
            other_addresses: self.list(others.unwrap_or_default(), Span::default()),
            node: self.text(&endpoint.node_name, before(|last| last.node)),
            zone: self.text(&endpoint.zone, before(|last| last.zone)),
            hostname: self.text(&endpoint.hostname, before(|last| last.hostname)),
            target_pod: self.text(&endpoint.target_pod, before(|last| last.target_pod)),
            hint_zones: self.list(&endpoint.hint_zones, before(|last| last.hint_zones)),
            hint_nodes: self.list(&endpoint.hint_nodes, before(|last| last.hint_nodes)),
        }
    }

    /// An object is far smaller than what a span can tell; what lies beyond reads as empty.
    fn span(at: usize, length: usize) -> Span {
        match (u32::try_from(at), u32::try_from(length)) {
            (Ok(at), Ok(length)) => Span { at, length },
            _ => Span::default(),
        }
    }

    fn text(&mut self, text: &str, before: Span) -> Span {
        let (at, length) = (before.at as usize, before.length as usize);
        if self.text.get(at..at + length) == Some(text) {
            return before;
        }
        let span = Self::span(self.text.len(), text.len());
        self.text.push_str(text);
        span
    }

    fn list(&mut self, list: &[String], before: Span) -> Span {
        let (at, length) = (before.at as usize, before.length as usize);
        let known = self.lists.get(at..at + length).unwrap_or_default();
        let same = known.len() == list.len()
            && known.iter().zip(list).all(|(part, text)| {
                let (at, length) = (part.at as usize, part.length as usize);
                self.text.get(at..at + length) == Some(text)
            });
        if same {
            return before;
        }
        let parts: Vec<Span> = list
            .iter()
            .map(|text| self.text(text, Span::default()))
            .collect();
        let span = Self::span(self.lists.len(), parts.len());
        self.lists.extend(parts);
        span
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(addresses: &[&str], node: &str, hints: &[&str]) -> v1::Endpoint {
        v1::Endpoint {
            addresses: addresses.iter().map(|&text| text.to_owned()).collect(),
            ready: true,
            terminating: addresses.len() > 1,
            node_name: node.into(),
            zone: "z".into(),
            hint_zones: hints.iter().map(|&text| text.to_owned()).collect(),
            hint_nodes: vec![node.into()],
            hostname: if hints.is_empty() { "h" } else { "" }.into(),
            target_pod: format!("d/{node}"),
            ..v1::Endpoint::default()
        }
    }

    #[test]
    fn the_message_comes_back_as_it_was() {
        let message = EndpointSlice {
            namespace: "d".into(),
            name: "web-1".into(),
            service: "web".into(),
            family: AddressFamily::Ipv6.into(),
            ports: vec![EndpointPort {
                name: "http".into(),
                protocol: v1::Protocol::Tcp.into(),
                port: 80,
            }],
            endpoints: vec![
                endpoint(&["10.0.0.1"], "n1", &["a", "b"]),
                endpoint(&["10.0.0.2"], "n1", &["a", "b"]),
                endpoint(&["fd00::1", "fd00::2", "no address"], "n2", &["a"]),
                endpoint(&["no address", "10.0.0.3"], "", &[]),
                endpoint(&[], "n2", &[]),
                v1::Endpoint::default(),
            ],
        };
        let slice = Slice::from(message.clone());
        assert_eq!(slice.to_message("d", "web-1"), message);
        let addresses: Vec<Vec<String>> = slice
            .endpoints()
            .map(|e| e.addresses().map(|a| a.to_string()).collect())
            .collect();
        let wanted: [&[&str]; 6] = [
            &["10.0.0.1"],
            &["10.0.0.2"],
            &["fd00::1", "fd00::2"],
            &["10.0.0.3"],
            &[],
            &[],
        ];
        assert_eq!(addresses, wanted);
        let unread = slice.endpoints().nth(3).unwrap();
        assert_eq!(unread.address(), None, "only the first address counts");
    }

    #[test]
    fn neighbours_share_what_they_agree_on() {
        let endpoints: Vec<_> = (0..100)
            .map(|n| v1::Endpoint {
                target_pod: String::new(),
                ..endpoint(&[&format!("10.0.0.{n}")], "n1", &["zone-a"])
            })
            .collect();
        let slice = Slice::from(EndpointSlice {
            endpoints,
            ..EndpointSlice::default()
        });
        assert_eq!(&*slice.text, "n1zzone-an1");
        assert_eq!(slice.lists.len(), 2);
        assert!(slice.endpoints().all(|e| e.node_name() == "n1"));
    }
}
