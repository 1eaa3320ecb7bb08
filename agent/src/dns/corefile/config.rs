//! What a Corefile says, typed. Defaults are CoreDNS's.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::Name;

use super::rewrites::RewriteRule;
use super::{CorefileError, Place, Sources, keys, plugins, syntax};
use crate::dns::zone::PodRecords;

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Corefile {
    pub blocks: Vec<ServerBlock>,
}

/// A zone that a block serves, on a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Lower case, absolute.
    pub zone: Name,
    pub port: u16,
}

/// What becomes of questions for the block's zones.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerBlock {
    pub place: Place,
    pub keys: Vec<Key>,
    /// Addresses to listen on; empty: all.
    pub bind: Vec<IpAddr>,
    /// Failures are logged.
    pub errors: bool,
    pub log: Vec<LogRule>,
    pub health: Option<Health>,
    /// Where readiness is served.
    pub ready: Option<SocketAddr>,
    /// Where metrics are served.
    pub prometheus: Option<SocketAddr>,
    pub kubernetes: Option<Kubernetes>,
    pub hosts: Option<Hosts>,
    pub rewrites: Vec<RewriteRule>,
    pub cache: Option<Cache>,
    /// The first one whose zone holds the name is asked.
    pub forwards: Vec<Forward>,
    /// Upstream servers that lead back here are looked for.
    pub finds_loops: bool,
    pub reload: Option<Reload>,
    /// Addresses in answers change places.
    pub loadbalance: bool,
    /// Bytes; the most that is offered upstream and sent to clients over UDP.
    pub bufsize: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    pub address: SocketAddr,
    /// How long questions are still answered after the end was asked for.
    pub lameduck: Duration,
}

/// Names of the cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Kubernetes {
    pub place: Place,
    /// The cluster's zone and reverse zones, lower case.
    pub zones: Vec<Name>,
    pub pods: PodRecords,
    /// Zones whose missing names are asked further on.
    pub fallthrough: Vec<Name>,
    /// Seconds.
    pub ttl_s: u32,
    pub endpoint_pod_names: bool,
    /// Names that stand for endpoints do not exist.
    pub no_endpoints: bool,
    pub ignore_empty_service: bool,
    /// Only these are shown; empty: all.
    pub namespaces: Vec<String>,
}

/// Where an upstream server's address comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Server {
        address: SocketAddr,
        tls: bool,
        /// The name to expect in its certificate, where it has one of its own.
        server_name: Option<String>,
    },
    /// The name servers of a resolv.conf.
    ResolvConf(PathBuf),
}

/// Which server is asked first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    #[default]
    Random,
    RoundRobin,
    Sequential,
}

/// Files with what TLS needs; none: no certificate of our own, the system's authorities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    pub certificate_and_key: Option<(String, String)>,
    pub authority: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    pub place: Place,
    pub from: Name,
    pub to: Vec<Target>,
    pub except: Vec<Name>,
    pub policy: Policy,
    pub force_tcp: bool,
    pub prefer_udp: bool,
    /// A connection that nobody used for so long is closed.
    pub expire: Duration,
    /// Failed probes in a row after which a server is down; zero: never.
    pub max_fails: u32,
    pub health_check: Duration,
    pub health_check_recursion: bool,
    pub health_check_domain: Name,
    /// Questions in flight; more are refused. Zero: no limit of its own.
    pub max_concurrent: usize,
    pub tls: Tls,
    pub tls_server_name: Option<String>,
    /// Response codes after which the block's next forward is asked.
    pub next: Vec<ResponseCode>,
    /// Response codes after which another server of this one is asked.
    pub failover: Vec<ResponseCode>,
    /// SERVFAIL at once while every server is down.
    pub fail_fast: bool,
}

/// How one kind of answers is kept. Times are the bounds of what an answer says itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheClass {
    pub capacity: usize,
    pub most: Duration,
    pub least: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// So many questions make an answer popular,
    pub amount: u32,
    /// when there was no longer pause between them.
    pub pause: Duration,
    /// Asked again when so much of its time is left.
    pub percentage: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeStale {
    /// How long after its end an answer is still given (RFC 8767).
    pub longest: Duration,
    /// Only when upstream has been asked in vain.
    pub verify: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Names in these are kept; empty: all of the block.
    pub zones: Vec<Name>,
    pub success: CacheClass,
    pub denial: CacheClass,
    pub servfail: Duration,
    pub prefetch: Option<Prefetch>,
    pub serve_stale: Option<ServeStale>,
    /// Zones whose answers, or denials, are not kept.
    pub without_success: Vec<Name>,
    pub without_denial: Vec<Name>,
    /// Clients see the TTL that upstream gave, whatever the age.
    pub keep_ttl: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    pub place: Place,
    pub file: Option<String>,
    /// Lines like those of the file.
    pub inline: Vec<String>,
    /// Names in these; empty: all of the block.
    pub zones: Vec<Name>,
    pub ttl_s: u32,
    /// Addresses lead back to names.
    pub reverse: bool,
    /// How often the file is looked at; zero: never again.
    pub reload: Duration,
    /// None: a missing name does not exist.
    pub fallthrough: Vec<Name>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reload {
    pub interval: Duration,
    pub jitter: Duration,
}

/// Which answers a line of the log is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogClass {
    All,
    Success,
    Denial,
    Error,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRule {
    pub zones: Vec<Name>,
    /// Text with places like {remote}.
    pub format: String,
    pub classes: Vec<LogClass>,
}

impl Corefile {
    /// Reads a whole configuration.
    ///
    /// # Errors
    /// [`CorefileError`] with file and line: broken syntax, a directive or option that is unknown or not done here, two
    /// blocks with one zone.
    pub fn parse(text: &str, file: &str, sources: &dyn Sources) -> Result<Self, CorefileError> {
        let mut blocks: Vec<ServerBlock> = Vec::new();
        for raw in syntax::read(text, file, sources)? {
            let mut served = Vec::new();
            for key in &raw.keys {
                served.extend(keys::parse(key).map_err(|why| raw.place.error(why))?);
            }
            for (number, key) in served.iter().enumerate() {
                let before = blocks.iter().flat_map(|block| &block.keys);
                if before.chain(&served[..number]).any(|other| other == key) {
                    return Err(raw.place.error(format!(
                        "{} on port {} is served by another block already",
                        key.zone, key.port
                    )));
                }
            }
            blocks.push(plugins::block(&raw, served)?);
        }
        if blocks.is_empty() {
            let place = Place {
                file: file.into(),
                line: 1,
            };
            return Err(place.error("there is no server block, as . { } is one"));
        }
        Ok(Self { blocks })
    }
}
