//! One uplink: its sockets, opened again when the link comes back, and the loop that answers and tells.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use nix::sys::socket::{LinkAddr, SockaddrLike as _};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::packet::{self, Claim, Heard};
use super::schedule::Schedule;
use super::socket::{Groups, PacketSocket};
use super::{Own, Stats};
use crate::netlink::Netlink;
use crate::netlink::link::{Link, Mac};

/// How often the link is looked at: whether it is there, up, and the same.
const CHECK: Duration = Duration::from_secs(1);

/// What is open while the link is up.
struct Open {
    link: Link,
    arp: PacketSocket,
    /// Only while there are IPv6 addresses: it looks at every IPv6 packet.
    solicitations: Option<PacketSocket>,
    groups: Groups,
}

/// Answers on one link.
pub(super) struct Uplink {
    name: String,
    own: watch::Receiver<Own>,
    stats: Stats,
    schedule: Schedule,
    /// The last problem, to say each once.
    problem: String,
}

impl Uplink {
    pub(super) fn new(name: String, own: watch::Receiver<Own>, stats: Stats) -> Self {
        Self {
            name,
            own,
            stats,
            schedule: Schedule::default(),
            problem: String::new(),
        }
    }

    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let mut open = None;
        let mut check = tokio::time::interval(CHECK);
        check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            // Nothing is open as long as there is nothing to answer for.
            let idle = self.own.borrow().answered.is_empty();
            if idle {
                open = None;
            }
            let next = self.schedule.next().filter(|_| open.is_some());
            let event = tokio::select! {
                () = shutdown.cancelled() => return,
                changed = self.own.changed() => match changed {
                    Ok(()) => Event::Addresses,
                    Err(_) => return,
                },
                _ = check.tick(), if !idle => Event::Check,
                () = sleep_until(next) => Event::Due,
                frame = receive(open.as_ref()) => Event::Frame(frame),
            };
            let done = match event {
                Event::Addresses => {
                    let own = self.own.borrow_and_update().clone();
                    self.schedule.set(&own.proclaimed, Instant::now());
                    self.reopen(&mut open, &own)
                }
                Event::Check => {
                    let own = self.own.borrow().clone();
                    self.reopen(&mut open, &own)
                }
                Event::Due => Ok(()),
                Event::Frame(frame) => frame.and_then(|frame| self.heard(open.as_ref(), &frame)),
            };
            let done = done.and_then(|()| self.tell(open.as_ref()));
            if let Err(e) = done {
                open = None;
                self.complain(&e.to_string());
            }
        }
    }

    /// Opens what is not open, and again what belongs to a link that is another one now.
    fn reopen(&mut self, open: &mut Option<Open>, own: &Own) -> io::Result<()> {
        if own.answered.is_empty() {
            return Ok(());
        }
        let link = find(&self.name)?;
        if open.as_ref().is_none_or(|o| o.link != link) {
            let address = link_address(&self.name)?;
            *open = Some(Open {
                arp: PacketSocket::arp(&address)?,
                solicitations: None,
                groups: Groups::new(link.index),
                link,
            });
            self.problem.clear();
            self.schedule.again(Instant::now());
        }
        let Some(open) = open else { return Ok(()) };
        let v6: Vec<_> = own.answered.iter().filter_map(as_v6).collect();
        if v6.is_empty() {
            open.solicitations = None;
        } else if open.solicitations.is_none() {
            let address = link_address(&self.name)?;
            open.solicitations = Some(PacketSocket::solicitations(&address)?);
        }
        if let Err(e) = open.groups.set(v6.into_iter()) {
            self.complain(&format!("join the groups of solicitations: {e}"));
        }
        Ok(())
    }

    fn heard(&mut self, open: Option<&Open>, frame: &[u8]) -> io::Result<()> {
        let Some(open) = open else { return Ok(()) };
        let own = self.own.borrow();
        let answered = &own.answered;
        match packet::parse(frame) {
            Some(Heard::Question(question)) if answered.contains(&question.target) => {
                let reply = packet::answer(&question, open.link.mac);
                let socket = socket_for(open, question.target);
                socket.send(&reply)?;
                self.stats.answered();
            }
            Some(Heard::Claim(claim)) if is_foreign(&claim, open.link.mac, answered) => {
                self.stats.claimed();
                tracing::debug!(uplink = self.name, ?claim, "another host claims an address");
            }
            _ => {}
        }
        Ok(())
    }

    fn tell(&mut self, open: Option<&Open>) -> io::Result<()> {
        let Some(open) = open else { return Ok(()) };
        for address in self.schedule.take_due(Instant::now()) {
            for frame in packet::proclamations(address, open.link.mac) {
                socket_for(open, address).send(&frame)?;
                self.stats.proclaimed();
            }
        }
        Ok(())
    }

    fn complain(&mut self, problem: &str) {
        if self.problem != problem {
            tracing::warn!(
                uplink = self.name,
                problem,
                "cannot answer for addresses on this link; trying again"
            );
            problem.clone_into(&mut self.problem);
        }
    }
}

enum Event {
    Addresses,
    Check,
    Due,
    Frame(io::Result<Vec<u8>>),
}

fn as_v6(address: &IpAddr) -> Option<std::net::Ipv6Addr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(v6) => Some(*v6),
    }
}

fn is_foreign(claim: &Claim, own: Mac, answered: &BTreeSet<IpAddr>) -> bool {
    claim.mac != own && answered.contains(&claim.address)
}

/// Either socket sends every kind of frame.
fn socket_for(open: &Open, address: IpAddr) -> &PacketSocket {
    match (&open.solicitations, address) {
        (Some(socket), IpAddr::V6(_)) => socket,
        _ => &open.arp,
    }
}

async fn receive(open: Option<&Open>) -> io::Result<Vec<u8>> {
    let Some(open) = open else {
        return std::future::pending().await;
    };
    match &open.solicitations {
        None => open.arp.receive().await,
        Some(solicitations) => tokio::select! {
            frame = open.arp.receive() => frame,
            frame = solicitations.receive() => frame,
        },
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

fn find(name: &str) -> io::Result<Link> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, format!("there is no link {name}"));
    let found = Netlink::open()
        .and_then(|mut netlink| netlink.link(name))
        .map_err(io::Error::other)?;
    match found {
        Some(link) if link.up => Ok(link),
        Some(_) => Err(io::Error::new(
            io::ErrorKind::NetworkDown,
            format!("{name} is down"),
        )),
        None => Err(missing()),
    }
}

/// The link as an address to bind to.
fn link_address(name: &str) -> io::Result<LinkAddr> {
    let mut all = nix::ifaddrs::getifaddrs()?.filter(|entry| entry.interface_name == name);
    let found = all.find_map(|entry| entry.address?.as_link_addr().copied());
    let found =
        found.filter(|address| address.family() == Some(nix::sys::socket::AddressFamily::Packet));
    found.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("{name} has no link address"),
        )
    })
}
