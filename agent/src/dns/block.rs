//! Server blocks at work: which block a name belongs to, what it knows itself, and whom it asks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use arc_swap::ArcSwap;
use hickory_proto::op::{Message, OpCode};
use hickory_proto::rr::{Name, RecordType};

use super::cache::{Cache, Hit, Key};
use super::corefile::{Corefile, CorefileError, Kubernetes, ServerBlock, Sources, Target};
use super::exchange::Dialer;
use super::forward::{ForwardError, Forwarder, lock, rcode};
use super::hosts::HostTable;
use super::learn;
use super::lookup::{Answer, Reverse};
use super::message::{Request, Transport};
use super::metrics::Metrics;
use super::tls;
use super::upstream::Surroundings;
use super::zone::Options;
use crate::compile::policy::Wanted;
use crate::policy::domains;

const RCODE_SERV_FAIL: u8 = 2;
/// What hosts reads when it names no file.
const USUAL_HOSTS: &str = "/etc/hosts";

/// All blocks of one port, found by name.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The longest zones first.
    zones: Vec<(Name, Arc<Block>)>,
    /// Every block once.
    pub(super) all: Vec<Arc<Block>>,
    /// Some block writes a log.
    pub(super) logs: bool,
}

impl Blocks {
    /// Makes every block of a configuration ready to answer, by port.
    ///
    /// # Errors
    /// [`CorefileError`] for what can be seen only now: files that cannot be read, two different clusters.
    pub(super) fn build(
        corefile: &Corefile,
        sources: &dyn Sources,
        surroundings: &Surroundings,
        metrics: &Arc<Metrics>,
    ) -> Result<BTreeMap<u16, Self>, CorefileError> {
        let mut ports: BTreeMap<u16, Self> = BTreeMap::new();
        kubernetes(corefile)?;
        for config in &corefile.blocks {
            let block = Arc::new(Block::new(config, sources, metrics)?);
            block.find_upstreams(surroundings);
            for key in &config.keys {
                let blocks = ports.entry(key.port).or_default();
                if !blocks
                    .all
                    .last()
                    .is_some_and(|last| Arc::ptr_eq(last, &block))
                {
                    blocks.all.push(Arc::clone(&block));
                }
                blocks.zones.push((key.zone.clone(), Arc::clone(&block)));
                blocks.logs |= !config.log.is_empty();
            }
        }
        for blocks in ports.values_mut() {
            blocks
                .zones
                .sort_by_key(|(zone, _)| std::cmp::Reverse(zone.num_labels()));
        }
        Ok(ports)
    }

    /// The block with the longest zone that holds a name.
    pub(super) fn find(&self, name: &Name) -> Option<&Arc<Block>> {
        let found = self.zones.iter().find(|(zone, _)| zone.zone_of(name));
        found.map(|(_, block)| block)
    }

    pub(super) fn find_upstreams(&self, surroundings: &Surroundings) {
        for block in &self.all {
            block.find_upstreams(surroundings);
        }
    }

    /// What caches know of the addresses of names that rules ask for.
    pub(super) fn remembered(&self, wanted: &Wanted) -> Vec<domains::Answer> {
        let caches = self.all.iter().filter_map(|block| block.cache.as_ref());
        let messages = caches
            .flat_map(|cache| lock(cache).wanted(Instant::now(), |name| wanted.asks_for(name)));
        messages
            .filter_map(|message| learn::answer(&message))
            .collect()
    }

    /// Answers in caches, and of them those that are no denials.
    pub(super) fn cache_entries(&self) -> (usize, usize) {
        let caches = self.all.iter().filter_map(|block| block.cache.as_ref());
        caches.fold((0, 0), |sum, cache| {
            let (all, successes) = lock(cache).len();
            (sum.0 + all, sum.1 + successes)
        })
    }
}

/// The one cluster of a configuration, when there is one.
///
/// # Errors
/// [`CorefileError`] for a second one with other options.
pub(super) fn kubernetes(corefile: &Corefile) -> Result<Option<&Kubernetes>, CorefileError> {
    let mut all = corefile.blocks.iter().filter_map(|b| b.kubernetes.as_ref());
    let Some(first) = all.next() else {
        return Ok(None);
    };
    match all.find(|other| *other != first) {
        Some(other) => Err(other
            .place
            .error("kubernetes is configured in another block already, and differently")),
        None => Ok(Some(first)),
    }
}

/// The options of the cluster's zone.
pub(super) fn zone_options(kubernetes: &Kubernetes) -> Options {
    let reverse = |zone: &Name| Reverse::parse(zone).and_then(|reverse| reverse.network());
    let is_own = |zone: &&Name| Reverse::parse(zone).is_none();
    Options {
        ttl_s: kubernetes.ttl_s,
        pods: kubernetes.pods,
        endpoint_pod_names: kubernetes.endpoint_pod_names,
        ignore_empty_service: kubernetes.ignore_empty_service,
        fallthrough: kubernetes.fallthrough.clone(),
        reverse: kubernetes.zones.iter().filter_map(reverse).collect(),
        zone: kubernetes.zones.iter().find(is_own).cloned(),
        no_endpoints: kubernetes.no_endpoints,
        namespaces: kubernetes.namespaces.clone(),
    }
}

/// One block at work.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) config: ServerBlock,
    hosts: ArcSwap<HostTable>,
    cache: Option<Mutex<Cache>>,
    pub(super) forwards: Vec<Forwarder>,
    metrics: Arc<Metrics>,
}

impl Block {
    fn new(
        config: &ServerBlock,
        sources: &dyn Sources,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, CorefileError> {
        let mut forwards = Vec::new();
        for forward in &config.forwards {
            let wants_tls = |to: &Target| matches!(to, Target::Server { tls: true, .. });
            let tls = match forward.to.iter().any(wants_tls) {
                true => Some(
                    tls::client(&forward.tls, sources).map_err(|why| forward.place.error(why))?,
                ),
                false => None,
            };
            let dialer = Dialer::new(tls, forward.expire);
            forwards.push(Forwarder::new(forward.clone(), dialer, Arc::clone(metrics)));
        }
        let block = Self {
            config: config.clone(),
            hosts: ArcSwap::default(),
            cache: config.cache.clone().map(Cache::new).map(Mutex::new),
            forwards,
            metrics: Arc::clone(metrics),
        };
        block.read_hosts(sources)?;
        Ok(block)
    }

    /// Reads the hosts file again.
    ///
    /// # Errors
    /// [`CorefileError`] when a file that is named is not there; the table stays as it is.
    pub(super) fn read_hosts(&self, sources: &dyn Sources) -> Result<(), CorefileError> {
        let Some(hosts) = &self.config.hosts else {
            return Ok(());
        };
        let text = match &hosts.file {
            Some(path) => sources.read(path).map_err(|why| hosts.place.error(why))?,
            None => sources.read(USUAL_HOSTS).unwrap_or_default(),
        };
        let inline = hosts.inline.iter().map(String::as_str);
        let table = HostTable::read(inline.chain(text.lines()));
        self.metrics
            .hosts_entries
            .set(i64::try_from(table.len()).unwrap_or(i64::MAX));
        self.hosts.store(Arc::new(table));
        Ok(())
    }

    pub(super) fn find_upstreams(&self, surroundings: &Surroundings) {
        for forward in &self.forwards {
            forward.set_upstreams(surroundings.servers(&forward.options));
        }
    }

    /// Whether there is somebody to ask for a name.
    pub(super) fn can_ask(&self, name: &Name) -> bool {
        let mut takers = self.forwards.iter().filter(|forward| forward.takes(name));
        takers.any(|forward| !forward.upstreams().is_empty())
    }

    /// What the block's own table says.
    pub(super) fn hosts(&self, name: &Name, record_type: RecordType) -> Option<Answer> {
        let hosts = self.config.hosts.as_ref()?;
        self.hosts.load().lookup(hosts, name, record_type)
    }

    /// What the block's own table says of the name at the end of the zone's chain, as a message.
    pub(super) fn rest_of_chain(&self, request: &Request) -> Option<Vec<u8>> {
        if request.is_relay() {
            return None;
        }
        let known = self.hosts(&request.name, request.record_type)?;
        let mut message = Message::response(0, OpCode::Query);
        message.metadata.response_code = known.rcode;
        message.answers = known.records;
        message.to_vec().ok()
    }

    /// The answer to a request that goes upstream, from the cache where it is fresh.
    pub(super) async fn ask(self: &Arc<Self>, request: &Request) -> Result<Vec<u8>, ForwardError> {
        let query = request
            .upstream_query(rand::random())
            .ok_or(ForwardError::Encode)?;
        let question = Question {
            name: request.name.clone(),
            tcp: request.transport() == Transport::Tcp,
            // A chain's rest has to be whole: its answer is put together here.
            whole: request.transport() == Transport::Tcp || !request.is_relay(),
            query,
        };
        let cache = self.cache.as_ref().filter(|c| lock(c).keeps(&request.name));
        let Some(cache) = cache else {
            return self.ask_upstream(&question).await;
        };
        let key = Key {
            name: request.name.to_lowercase().to_ascii(),
            record_type: request.record_type.into(),
            edns: request.has_edns() || !request.is_relay(),
            dnssec: request.wants_dnssec(),
            checking_disabled: request.checking_disabled(),
        };
        self.metrics.cache_requests.inc();
        let hit = lock(cache).get(&key, Instant::now());
        let verify = lock(cache).settings().serve_stale.is_some_and(|s| s.verify);
        match hit {
            Some(hit) if !hit.stale || !verify => {
                self.metrics.cache_hits.inc();
                self.metrics.cache_stale.inc_by(u64::from(hit.stale));
                if hit.refresh {
                    self.metrics.cache_prefetches.inc_by(u64::from(!hit.stale));
                    self.refresh(key, question);
                }
                Ok(hit.message)
            }
            stale => {
                self.metrics.cache_misses.inc();
                self.ask_and_keep(cache, key, &question, stale).await
            }
        }
    }

    /// Asks upstream; an answer that is over stands in for none.
    async fn ask_and_keep(
        &self,
        cache: &Mutex<Cache>,
        key: Key,
        question: &Question,
        stale: Option<Hit>,
    ) -> Result<Vec<u8>, ForwardError> {
        let mut answer = self.ask_upstream(question).await;
        let failed = answer
            .as_ref()
            .map_or(true, |m| rcode(m) == RCODE_SERV_FAIL);
        if let (true, Some(stale)) = (failed, stale) {
            lock(cache).refresh_failed(&key);
            self.metrics.cache_stale.inc();
            return Ok(stale.message);
        }
        if let Ok(message) = &mut answer {
            lock(cache).put(key, &question.name, message, Instant::now());
        }
        answer
    }

    /// Asks upstream while the client has an older answer already.
    fn refresh(self: &Arc<Self>, key: Key, question: Question) {
        let block = Arc::clone(self);
        tokio::spawn(async move {
            let Some(cache) = &block.cache else { return };
            match block.ask_upstream(&question).await {
                Ok(mut message) if rcode(&message) != RCODE_SERV_FAIL => {
                    lock(cache).put(key, &question.name, &mut message, Instant::now());
                }
                _ => lock(cache).refresh_failed(&key),
            }
        });
    }

    async fn ask_upstream(&self, question: &Question) -> Result<Vec<u8>, ForwardError> {
        let takers = self.forwards.iter();
        let takers: Vec<&Forwarder> = takers.filter(|f| f.takes(&question.name)).collect();
        let mut answer = Err(ForwardError::NoUpstream);
        for forward in takers {
            answer = forward
                .ask(&question.query, question.tcp, question.whole)
                .await;
            let goes_on = answer.as_ref().is_ok_and(|message| {
                let mut codes = forward.options.next.iter();
                codes.any(|code| code.low() == rcode(message))
            });
            if !goes_on {
                break;
            }
        }
        answer
    }
}

/// A question on its way upstream.
#[derive(Debug)]
struct Question {
    name: Name,
    tcp: bool,
    whole: bool,
    query: Vec<u8>,
}
