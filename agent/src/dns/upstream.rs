//! Which upstream servers to use: those that are named, or those of a resolv.conf, never ourselves.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use rustls::pki_types::ServerName;

use super::corefile::{Forward, Target};
use super::exchange::Server;

const DNS_PORT: u16 = 53;
/// A larger resolv.conf is not one.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// What people mean by the machine's own servers.
const USUAL_RESOLV_CONF: &str = "/etc/resolv.conf";
/// Where systemd-resolved is asked by programs of its machine,
const RESOLVED_STUBS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(127, 0, 0, 53)),
    IpAddr::V4(Ipv4Addr::new(127, 0, 0, 54)),
];
/// and where it writes which servers it asks itself.
const RESOLVED_CONF: &str = "/run/systemd/resolve/resolv.conf";

/// What this machine is, as far as it decides which servers can be asked.
#[derive(Clone, Debug, Default)]
pub(super) struct Surroundings {
    /// Read where /etc/resolv.conf is named; none: that file.
    pub(super) resolv_conf: Option<PathBuf>,
    /// Used in its place, when there are some.
    pub(super) upstreams: Vec<SocketAddr>,
    /// Addresses and ports where questions come back to this process.
    pub(super) own_addresses: Vec<IpAddr>,
    pub(super) own_ports: Vec<u16>,
    /// Addresses of cluster DNS.
    pub(super) cluster_dns: Vec<IpAddr>,
}

impl Surroundings {
    /// The servers of a directive, in order. An unreadable resolv.conf means none: names that are known here are
    /// answered all the same.
    pub(super) fn servers(&self, forward: &Forward) -> Vec<Server> {
        let mut servers: Vec<Server> = Vec::new();
        for target in &forward.to {
            let listed = match target {
                Target::Server {
                    address,
                    tls,
                    server_name,
                } => {
                    let name = server_name.as_ref().or(forward.tls_server_name.as_ref());
                    let tls = tls.then(|| tls_name(name, address.ip()));
                    vec![Server {
                        address: *address,
                        tls,
                    }]
                }
                Target::ResolvConf(path) => {
                    let plain = |address| Server { address, tls: None };
                    self.listed(path).into_iter().map(plain).collect()
                }
            };
            for server in listed {
                if self.is_ours(server.address) {
                    tracing::debug!(address = %server.address, "ignored an upstream DNS server that leads back here");
                } else if !servers.contains(&server) {
                    servers.push(server);
                }
            }
        }
        servers
    }

    fn listed(&self, path: &Path) -> Vec<SocketAddr> {
        let usual = path == Path::new(USUAL_RESOLV_CONF);
        match &self.resolv_conf {
            _ if usual && !self.upstreams.is_empty() => self.upstreams.clone(),
            Some(own) if usual => servers_of(own, Path::new(RESOLVED_CONF)),
            _ => servers_of(path, Path::new(RESOLVED_CONF)),
        }
    }

    fn is_ours(&self, address: SocketAddr) -> bool {
        let ip = address.ip();
        let here = self.own_addresses.contains(&ip) || ip.is_loopback();
        self.cluster_dns.contains(&ip) || (here && self.own_ports.contains(&address.port()))
    }
}

/// Without a name of its own a server is expected to have a certificate for its address.
fn tls_name(name: Option<&String>, address: IpAddr) -> ServerName<'static> {
    let named = name.and_then(|name| ServerName::try_from(name.clone()).ok());
    named.unwrap_or_else(|| ServerName::from(address))
}

/// A resolv.conf's servers; where it names systemd-resolved, those that this asks: it may well ask cluster DNS.
fn servers_of(path: &Path, resolved: &Path) -> Vec<SocketAddr> {
    let listed = read_resolv_conf(path);
    if !listed.iter().any(|a| RESOLVED_STUBS.contains(&a.ip())) {
        return listed;
    }
    let behind = read_resolv_conf(resolved);
    if behind.is_empty() { listed } else { behind }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stub_of_systemd_resolved_is_looked_behind() {
        let folder = tempfile::tempdir().unwrap();
        let (own, behind) = (folder.path().join("own"), folder.path().join("behind"));
        std::fs::write(&own, "nameserver 127.0.0.53\n").unwrap();
        let shown = |servers: Vec<SocketAddr>| -> Vec<String> {
            servers.iter().map(ToString::to_string).collect()
        };
        assert_eq!(shown(servers_of(&own, &behind)), ["127.0.0.53:53"]);
        std::fs::write(&behind, "nameserver 192.0.2.1\nnameserver 192.0.2.2\n").unwrap();
        assert_eq!(
            shown(servers_of(&own, &behind)),
            ["192.0.2.1:53", "192.0.2.2:53"]
        );
    }
}
