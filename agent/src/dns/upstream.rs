//! Which upstream servers to use: configured ones, or those of resolv.conf, never ourselves.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::config::Config;

const DNS_PORT: u16 = 53;
/// A larger resolv.conf is not one.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The servers, in order. An unreadable resolv.conf means none: names of the cluster are answered all the same.
pub(super) fn discover(config: &Config, cluster_dns: &[IpAddr]) -> Vec<SocketAddr> {
    let listed = if config.dns.upstreams.is_empty() {
        read_resolv_conf(&config.dns.resolv_conf)
    } else {
        config.dns.upstreams.clone()
    };
    let ours = |address: &SocketAddr| {
        let ip = address.ip();
        let here = config.node_ips.contains(&ip) || ip.is_loopback();
        cluster_dns.contains(&ip) || (here && address.port() == config.dns.port)
    };
    let mut servers: Vec<SocketAddr> = Vec::new();
    for address in listed {
        if ours(&address) {
            tracing::debug!(%address, "ignored an upstream DNS server that leads back here");
        } else if !servers.contains(&address) {
            servers.push(address);
        }
    }
    servers
}

fn read_resolv_conf(path: &Path) -> Vec<SocketAddr> {
    let small = std::fs::metadata(path).is_ok_and(|m| m.len() <= MAX_FILE_BYTES);
    match std::fs::read_to_string(path) {
        Ok(text) if small => parse_resolv_conf(&text),
        Ok(_) => Vec::new(),
        Err(error) => {
            tracing::debug!(path = %path.display(), %error,
                "read upstream DNS servers; names outside the cluster are refused");
            Vec::new()
        }
    }
}

/// The `nameserver` lines. A scope (fe80::1%eth0) is resolved by the interface's index where it is a number.
pub(super) fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        if words.next()? != "nameserver" {
            return None;
        }
        let word = words.next()?;
        let (ip, scope) = word.split_once('%').unwrap_or((word, "0"));
        let mut address = SocketAddr::new(ip.parse().ok()?, DNS_PORT);
        if let SocketAddr::V6(v6) = &mut address {
            v6.set_scope_id(scope.parse().unwrap_or_default());
        }
        Some(address)
    };
    text.lines().filter_map(address).collect()
}
