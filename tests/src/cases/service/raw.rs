//! The step `raw`: forged packets, wrapped ones, and segments of kept flows.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::resolve::Names;
use super::steps::{Run, number, strings};
use super::wire;
use crate::actor::command::{Command, Forged};
use crate::actor::message::{REQUEST_HEAD, Request};
use crate::actor::packet::{self, Place};
use crate::cases::cluster::spec::normal_key;

/// Time for a forged packet to arrive (or not).
const ARRIVAL: Duration = Duration::from_millis(300);
/// What a forged segment of a flow carries.
const STRAY: &[u8] = b"stray";

impl Run {
    pub(super) fn raw(&mut self, body: &Value) -> Result<()> {
        let from = body["from"].as_str().context("raw without from")?;
        let token: u64 = rand::random();
        let forged = match body["flow"].as_str() {
            Some(flow) => self.segment_of(flow, from, body)?,
            None => self.packet(body, token)?,
        };
        let (actor, _, _) = self.cluster.source(from)?;
        for forged in forged {
            actor.call(Command::Forge(forged), Duration::ZERO)?;
        }
        std::thread::sleep(ARRIVAL);
        if body["expect"]["arrives_at"].is_null() {
            return Ok(());
        }
        let wanted: Vec<String> = strings(&body["expect"]["arrives_at"])
            .iter()
            .map(|n| normal_key(n))
            .collect();
        let externals = self.cluster.externals.keys().map(|n| format!("ext:{n}"));
        let everybody: Vec<String> = self.cluster.pods.keys().cloned().chain(externals).collect();
        for name in everybody {
            let saw = self.saw(&name, token)?;
            ensure!(
                saw == wanted.contains(&name),
                "{name} {} the packet",
                if saw { "saw" } else { "did not see" }
            );
        }
        Ok(())
    }

    fn packet(&self, body: &Value, token: u64) -> Result<Vec<Forged>> {
        let packet = self.resolve(&body["packet"])?;
        let (src, dst) = (end(&packet, "src", "sport")?, end(&packet, "dst", "dport")?);
        ensure!(
            src.is_ipv4() == dst.is_ipv4(),
            "a packet between {src} and {dst}"
        );
        let request = Request {
            length: REQUEST_HEAD,
            token,
            answer_size: 0,
            answer_after_ms: 0,
            server_closes: false,
        };
        let bytes = match packet["protocol"].as_str().unwrap_or("UDP") {
            "UDP" => packet::udp_packet(src, dst, &request.encode()),
            "TCP" => packet::tcp_packet(src, dst, None, &[]),
            other => bail!("no {other} packets are forged"),
        };
        if body["inside"].is_null() {
            return Ok(vec![Forged {
                packet: bytes,
                to: dst.ip(),
                inside: None,
            }]);
        }
        let outer = self.resolve(&body["inside"])?;
        let to = end(&outer, "dst", "port")?;
        let overlay = self.overlay();
        let vni = whole(&outer["vni"]).unwrap_or(overlay.vni.into());
        Ok(vec![Forged {
            packet: packet::vxlan(&bytes, u32::try_from(vni)?, overlay.mac),
            to: to.ip(),
            inside: Some(to),
        }])
    }

    /// A segment of every connection of a flow that the source is an end of, moved out of its place.
    fn segment_of(&self, flow: &str, from: &str, body: &Value) -> Result<Vec<Forged>> {
        let shift = body["seq_shift"].as_i64().unwrap_or(0);
        let open = self.open.get(flow);
        let open = open.with_context(|| format!("no flow {flow}"))?;
        let capture = open.captures.get(from);
        let capture = capture.with_context(|| format!("{from} was not there for {flow}"))?;
        let frames = capture.frames();
        let key = normal_key(from);
        let mut forged = Vec::new();
        for ends in &open.ends {
            let served = ends.server.as_ref().filter(|(name, _, _)| *name == key);
            let own = match (served, ends.client) {
                (Some((_, local, peer)), _) => Some((*local, *peer)),
                (None, client) => client.filter(|_| open.sources.iter().any(|s| s == from)),
            };
            let Some((src, dst)) = own else {
                continue;
            };
            let bytes = frames.iter().map(|f| f.bytes.as_slice());
            let Some(place) = wire::last_place(bytes, src, dst) else {
                continue;
            };
            let moved = Place {
                sequence: shifted(place.sequence, shift),
                ..place
            };
            forged.push(Forged {
                packet: packet::tcp_packet(src, dst, Some(moved), STRAY),
                to: dst.ip(),
                inside: None,
            });
        }
        ensure!(
            !forged.is_empty(),
            "{from} has sent nothing on the flow {flow}"
        );
        Ok(forged)
    }
}

/// Sequence numbers wrap (RFC 9293 section 3.4).
fn shifted(sequence: u32, by: i64) -> u32 {
    let moved = (i64::from(sequence) + by).rem_euclid(1 << 32);
    u32::try_from(moved).unwrap_or(0)
}

fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn end(packet: &Value, address: &str, port: &str) -> Result<SocketAddr> {
    let ip: IpAddr = packet[address]
        .as_str()
        .unwrap_or_default()
        .parse()
        .with_context(|| format!("packet {address}"))?;
    let port = whole(&packet[port]).unwrap_or_else(|| number(&packet[port], 0));
    Ok(SocketAddr::new(ip, u16::try_from(port)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_wrap_both_ways() {
        assert_eq!(shifted(5, -6), u32::MAX);
        assert_eq!(shifted(u32::MAX, 1), 0);
        assert_eq!(shifted(7, 1_000_000_000), 1_000_000_007);
    }
}
