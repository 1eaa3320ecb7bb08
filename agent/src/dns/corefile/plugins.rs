//! What each directive of a block means. [pure]

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hickory_proto::rr::Name;

use super::config::{
    Cache, CacheClass, Forward, Health, Hosts, Key, Kubernetes, LogClass, LogRule, Policy,
    Prefetch, Reload, ServeStale, ServerBlock, Target, Tls,
};
use super::syntax::{Line, RawBlock};
use super::{CorefileError, rewrites};
use crate::dns::zone::PodRecords;

const DNS_PORT: u16 = 53;
const DNS_OVER_TLS_PORT: u16 = 853;
/// As resolv.conf users and CoreDNS have it.
const MAX_TARGETS: usize = 15;
const MAX_TTL_S: u32 = 3600;
/// Entries of a cache class; CoreDNS's default.
const CACHE_CAPACITY: usize = 9984;
const MAX_CACHE_CAPACITY: usize = 1 << 20;
const MAX_SERVFAIL: Duration = Duration::from_secs(300);

const HEALTH: &str = ":8080";
const READY: &str = ":8181";
const PROMETHEUS: &str = "localhost:9153";

const KNOWN: &str = "there are bind, bufsize, cache, errors, forward, health, hosts, \
                     import, kubernetes, loadbalance, log, loop, prometheus, ready, reload and rewrite";

pub(super) fn block(raw: &RawBlock, keys: Vec<Key>) -> Result<ServerBlock, CorefileError> {
    let mut block = ServerBlock {
        place: raw.place.clone(),
        keys,
        bind: Vec::new(),
        errors: false,
        log: Vec::new(),
        health: None,
        ready: None,
        prometheus: None,
        kubernetes: None,
        hosts: None,
        rewrites: Vec::new(),
        cache: None,
        forwards: Vec::new(),
        finds_loops: false,
        reload: None,
        loadbalance: false,
        bufsize: None,
    };
    for (number, line) in raw.lines.iter().enumerate() {
        let repeats = matches!(line.name(), "forward" | "rewrite" | "log" | "bind");
        if !repeats && raw.lines[..number].iter().any(|l| l.name() == line.name()) {
            return Err(line.error(format!("{} is there twice in this block", line.name())));
        }
        directive(&mut block, line)?;
    }
    Ok(block)
}

fn directive(block: &mut ServerBlock, line: &Line) -> Result<(), CorefileError> {
    match line.name() {
        "bind" => block.bind.extend(bind(line)?),
        "bufsize" => block.bufsize = Some(bufsize(line)?),
        "cache" => block.cache = Some(cache(line)?),
        "errors" => {
            line.bare()?;
            if let Some(option) = line.body().iter().find(|o| o.name() != "stacktrace") {
                return Err(option.unknown_option("errors", &["stacktrace"]));
            }
            block.errors = true;
        }
        "forward" => block.forwards.push(forward(line)?),
        "health" => block.health = Some(health(line)?),
        "hosts" => block.hosts = Some(hosts(line)?),
        "kubernetes" => block.kubernetes = Some(kubernetes(line, &block.keys)?),
        "loadbalance" => {
            line.without_body()?;
            match line.at_most_one()? {
                None | Some("round_robin") => block.loadbalance = true,
                Some(other) => {
                    return Err(line.error(format!(
                        "loadbalance {other} is not done here, only round_robin"
                    )));
                }
            }
        }
        "log" => block.log.push(log(line)?),
        "loop" => {
            line.without_body()?;
            line.bare()?;
            block.finds_loops = true;
        }
        "prometheus" => block.prometheus = Some(listener(line, PROMETHEUS)?),
        "ready" => block.ready = Some(listener(line, READY)?),
        "reload" => block.reload = Some(reload(line)?),
        "rewrite" => block.rewrites.push(rewrites::parse(line)?),
        other => {
            return Err(line.error(format!("the directive {other} is not known here; {KNOWN}")));
        }
    }
    Ok(())
}

fn listener(line: &Line, default: &str) -> Result<SocketAddr, CorefileError> {
    line.without_body()?;
    line.listener(line.at_most_one()?.unwrap_or(default))
}

fn bind(line: &Line) -> Result<Vec<IpAddr>, CorefileError> {
    line.without_body()?;
    let address = |text: &String| {
        text.parse()
            .map_err(|_| line.error(format!("bind takes addresses; {text} is none")))
    };
    line.args().iter().map(address).collect()
}

fn bufsize(line: &Line) -> Result<u16, CorefileError> {
    line.without_body()?;
    let size = line.at_most_one()?.unwrap_or("1232");
    match line.number(size)? {
        size @ 512..=4096 => Ok(size),
        _ => Err(line.error("bufsize takes 512 to 4096 bytes")),
    }
}

fn health(line: &Line) -> Result<Health, CorefileError> {
    let mut health = Health {
        address: line.listener(line.at_most_one()?.unwrap_or(HEALTH))?,
        lameduck: Duration::ZERO,
    };
    for option in line.body() {
        match option.name() {
            "lameduck" => health.lameduck = option.duration(option.one()?)?,
            _ => return Err(option.unknown_option("health", &["lameduck"])),
        }
    }
    Ok(health)
}

fn reload(line: &Line) -> Result<Reload, CorefileError> {
    line.without_body()?;
    let mut reload = Reload {
        interval: Duration::from_secs(30),
        jitter: Duration::from_secs(15),
    };
    match line.args() {
        [] => {}
        [interval] => {
            reload.interval = line.duration(interval)?;
            reload.jitter = reload.interval / 2;
        }
        [interval, jitter] => {
            reload.interval = line.duration(interval)?;
            reload.jitter = line.duration(jitter)?;
        }
        _ => return Err(line.error("reload takes an interval and a jitter")),
    }
    if reload.interval < Duration::from_secs(2) {
        return Err(line.error("reload looks every two seconds at most"));
    }
    Ok(reload)
}

fn zones_or_root(line: &Line) -> Result<Vec<Name>, CorefileError> {
    match line.args() {
        [] => Ok(vec![Name::root()]),
        zones => line.zones(zones),
    }
}

fn kubernetes(line: &Line, keys: &[Key]) -> Result<Kubernetes, CorefileError> {
    let zones = match line.args() {
        [] => keys.iter().map(|key| key.zone.clone()).collect(),
        zones => line.zones(zones)?,
    };
    let mut kubernetes = Kubernetes {
        place: line.place.clone(),
        zones,
        pods: PodRecords::Disabled,
        fallthrough: Vec::new(),
        ttl_s: 5,
        endpoint_pod_names: false,
        no_endpoints: false,
        ignore_empty_service: false,
        namespaces: Vec::new(),
    };
    for option in line.body() {
        option.without_body()?;
        match option.name() {
            "pods" => {
                kubernetes.pods = match option.one()? {
                    "disabled" => PodRecords::Disabled,
                    "insecure" => PodRecords::Insecure,
                    other => {
                        return Err(option.error(format!(
                            "pods {other} is not done here, only disabled and insecure"
                        )));
                    }
                }
            }
            "fallthrough" => kubernetes.fallthrough = zones_or_root(option)?,
            "ttl" => kubernetes.ttl_s = ttl(option)?,
            "endpoint_pod_names" => {
                option.bare()?;
                kubernetes.endpoint_pod_names = true;
            }
            "noendpoints" => {
                option.bare()?;
                kubernetes.no_endpoints = true;
            }
            "ignore" => match option.one()? {
                "empty_service" => kubernetes.ignore_empty_service = true,
                other => return Err(option.error(format!("ignore {other} is not known"))),
            },
            "namespaces" => kubernetes.namespaces.extend_from_slice(option.args()),
            _ => {
                let known = [
                    "pods",
                    "fallthrough",
                    "ttl",
                    "endpoint_pod_names",
                    "noendpoints",
                    "ignore",
                    "namespaces",
                ];
                return Err(option.unknown_option("kubernetes", &known));
            }
        }
    }
    let forward = kubernetes.zones.iter().filter(|zone| !is_reverse(zone));
    if forward.count() != 1 {
        return Err(line.error("kubernetes serves one zone, besides reverse zones"));
    }
    Ok(kubernetes)
}

/// True for zones of addresses.
pub(super) fn is_reverse(zone: &Name) -> bool {
    let arpa = |tree: &str| Name::from_ascii(tree).is_ok_and(|tree| tree.zone_of(zone));
    arpa("in-addr.arpa.") || arpa("ip6.arpa.")
}

fn ttl(line: &Line) -> Result<u32, CorefileError> {
    match line.number(line.one()?)? {
        ttl if ttl <= MAX_TTL_S => Ok(ttl),
        _ => Err(line.error(format!("a ttl is at most {MAX_TTL_S} seconds"))),
    }
}

fn hosts(line: &Line) -> Result<Hosts, CorefileError> {
    let (file, zones) = match line.args() {
        [file, zones @ ..] => (Some(file.clone()), line.zones(zones)?),
        [] => (None, Vec::new()),
    };
    let mut hosts = Hosts {
        place: line.place.clone(),
        file,
        inline: Vec::new(),
        zones,
        ttl_s: 3600,
        reverse: true,
        reload: Duration::from_secs(5),
        fallthrough: Vec::new(),
    };
    for option in line.body() {
        option.without_body()?;
        match option.name() {
            "fallthrough" => hosts.fallthrough = zones_or_root(option)?,
            "ttl" => hosts.ttl_s = option.number(option.one()?)?,
            "no_reverse" => {
                option.bare()?;
                hosts.reverse = false;
            }
            "reload" => hosts.reload = option.duration(option.one()?)?,
            address if address.parse::<IpAddr>().is_ok() => {
                hosts.inline.push(option.words.join(" "));
            }
            _ => {
                let known = [
                    "fallthrough",
                    "ttl",
                    "no_reverse",
                    "reload",
                    "ADDRESS NAME...",
                ];
                return Err(option.unknown_option("hosts", &known));
            }
        }
    }
    Ok(hosts)
}

fn log(line: &Line) -> Result<LogRule, CorefileError> {
    // The last word is a format when there is something to fill in.
    let (zones, format) = match line.args() {
        [zones @ .., format] if format.contains('{') => (zones, format.as_str()),
        zones => (zones, "{common}"),
    };
    let mut rule = LogRule {
        zones: line.zones(zones)?,
        format: format.to_owned(),
        classes: Vec::new(),
    };
    for option in line.body() {
        if option.name() != "class" {
            return Err(option.unknown_option("log", &["class"]));
        }
        for class in option.args() {
            rule.classes.push(match class.as_str() {
                "all" => LogClass::All,
                "success" => LogClass::Success,
                "denial" => LogClass::Denial,
                "error" => LogClass::Error,
                other => return Err(option.error(format!("log knows no class {other}"))),
            });
        }
    }
    if rule.classes.is_empty() {
        rule.classes.push(LogClass::All);
    }
    Ok(rule)
}

fn cache(line: &Line) -> Result<Cache, CorefileError> {
    let (ttl, zones) = match line.args() {
        [first, zones @ ..] if first.parse::<u32>().is_ok() => (Some(line.number(first)?), zones),
        zones => (None, zones),
    };
    let class = |default| CacheClass {
        capacity: CACHE_CAPACITY,
        most: Duration::from_secs(ttl.unwrap_or(default)),
        least: Duration::from_secs(5),
    };
    let mut cache = Cache {
        zones: line.zones(zones)?,
        success: class(3600),
        denial: class(1800),
        servfail: Duration::from_secs(5),
        prefetch: None,
        serve_stale: None,
        without_success: Vec::new(),
        without_denial: Vec::new(),
        keep_ttl: false,
    };
    for option in line.body() {
        option.without_body()?;
        match option.name() {
            "success" => cache_class(option, &mut cache.success)?,
            "denial" => cache_class(option, &mut cache.denial)?,
            "prefetch" => cache.prefetch = prefetch(option)?,
            "serve_stale" => cache.serve_stale = Some(serve_stale(option)?),
            "servfail" => {
                cache.servfail = option.duration(option.one()?)?;
                if cache.servfail > MAX_SERVFAIL {
                    return Err(option.error("servfail is kept for five minutes at most"));
                }
            }
            "disable" => disable(option, &mut cache)?,
            "keepttl" => {
                option.bare()?;
                cache.keep_ttl = true;
            }
            _ => {
                let known = [
                    "success",
                    "denial",
                    "prefetch",
                    "serve_stale",
                    "servfail",
                    "disable",
                    "keepttl",
                ];
                return Err(option.unknown_option("cache", &known));
            }
        }
    }
    Ok(cache)
}

fn cache_class(line: &Line, class: &mut CacheClass) -> Result<(), CorefileError> {
    let [capacity, times @ ..] = line.args() else {
        return Err(line.error(format!("{} takes a capacity", line.name())));
    };
    class.capacity = line.number(capacity)?;
    if !(1..=MAX_CACHE_CAPACITY).contains(&class.capacity) {
        return Err(line.error(format!("a cache holds 1 to {MAX_CACHE_CAPACITY} answers")));
    }
    match times {
        [] => {}
        [most] => class.most = Duration::from_secs(line.number(most)?),
        [most, least] => {
            class.most = Duration::from_secs(line.number(most)?);
            class.least = Duration::from_secs(line.number(least)?);
        }
        _ => return Err(line.error("a capacity, the most and the least seconds, and no more")),
    }
    Ok(())
}

fn disable(line: &Line, cache: &mut Cache) -> Result<(), CorefileError> {
    let [class, zones @ ..] = line.args() else {
        return Err(line.error("disable takes success or denial"));
    };
    let zones = match zones {
        [] => vec![Name::root()],
        zones => line.zones(zones)?,
    };
    match class.as_str() {
        "success" => cache.without_success.extend(zones),
        "denial" => cache.without_denial.extend(zones),
        other => return Err(line.error(format!("disable knows success and denial, not {other}"))),
    }
    Ok(())
}

/// None for an amount of zero.
fn prefetch(line: &Line) -> Result<Option<Prefetch>, CorefileError> {
    let mut prefetch = Prefetch {
        amount: 0,
        pause: Duration::from_secs(60),
        percentage: 10,
    };
    let (amount, rest) = match line.args() {
        [amount, rest @ ..] if rest.len() <= 2 => (amount, rest),
        _ => return Err(line.error("prefetch takes an amount, a pause and a percentage")),
    };
    prefetch.amount = line.number(amount)?;
    for word in rest {
        match word.strip_suffix('%') {
            Some(percentage) => prefetch.percentage = line.number(percentage)?,
            None => prefetch.pause = line.duration(word)?,
        }
    }
    if !(10..=90).contains(&prefetch.percentage) {
        return Err(line.error("prefetch takes 10% to 90%"));
    }
    Ok((prefetch.amount > 0).then_some(prefetch))
}

fn serve_stale(line: &Line) -> Result<ServeStale, CorefileError> {
    let mut stale = ServeStale {
        longest: Duration::from_secs(3600),
        verify: false,
    };
    let mode = match line.args() {
        [] => None,
        [longest] => {
            stale.longest = line.duration(longest)?;
            None
        }
        [longest, mode] => {
            stale.longest = line.duration(longest)?;
            Some(mode.as_str())
        }
        _ => return Err(line.error("serve_stale takes a time and immediate or verify")),
    };
    match mode {
        None | Some("immediate") => {}
        Some("verify") => stale.verify = true,
        Some(other) => {
            return Err(line.error(format!(
                "serve_stale knows immediate and verify, not {other}"
            )));
        }
    }
    Ok(stale)
}

fn forward(line: &Line) -> Result<Forward, CorefileError> {
    let [from, to @ ..] = line.args() else {
        return Err(line.error("forward takes a zone and where to"));
    };
    let from = match line.zones(std::slice::from_ref(from))?.as_slice() {
        [zone] => zone.clone(),
        _ => return Err(line.error(format!("{from} is more than one zone"))),
    };
    if to.is_empty() || to.len() > MAX_TARGETS {
        return Err(line.error(format!("forward takes 1 to {MAX_TARGETS} upstream servers")));
    }
    let to = to.iter().map(|text| target(line, text));
    let mut forward = Forward {
        place: line.place.clone(),
        from,
        to: to.collect::<Result<_, _>>()?,
        except: Vec::new(),
        policy: Policy::Random,
        force_tcp: false,
        prefer_udp: false,
        expire: Duration::from_secs(10),
        max_fails: 2,
        health_check: Duration::from_millis(500),
        health_check_recursion: true,
        health_check_domain: Name::root(),
        max_concurrent: 0,
        tls: Tls::default(),
        tls_server_name: None,
        next: Vec::new(),
        failover: Vec::new(),
        fail_fast: false,
    };
    for option in line.body() {
        option.without_body()?;
        forward_option(&mut forward, option)?;
    }
    Ok(forward)
}

fn forward_option(forward: &mut Forward, line: &Line) -> Result<(), CorefileError> {
    match line.name() {
        "except" => forward.except.extend(line.zones(line.args())?),
        "force_tcp" => {
            line.bare()?;
            forward.force_tcp = true;
        }
        "prefer_udp" => {
            line.bare()?;
            forward.prefer_udp = true;
        }
        "expire" => forward.expire = line.duration(line.one()?)?,
        "max_fails" => forward.max_fails = line.number(line.one()?)?,
        "max_concurrent" => forward.max_concurrent = line.number(line.one()?)?,
        "health_check" => health_check(forward, line)?,
        "policy" => {
            forward.policy = match line.one()? {
                "random" => Policy::Random,
                "round_robin" => Policy::RoundRobin,
                "sequential" => Policy::Sequential,
                other => return Err(line.error(format!("there is no policy {other}"))),
            }
        }
        "tls" => {
            let pair =
                |certificate: &String, key: &String| Some((certificate.clone(), key.clone()));
            let (certificate_and_key, authority) = match line.args() {
                [] => (None, None),
                [authority] => (None, Some(authority.clone())),
                [certificate, key] => (pair(certificate, key), None),
                [certificate, key, authority] => (pair(certificate, key), Some(authority.clone())),
                _ => return Err(line.error("tls takes a certificate, a key and an authority")),
            };
            forward.tls = Tls {
                certificate_and_key,
                authority,
            };
        }
        "tls_servername" => forward.tls_server_name = Some(line.one()?.to_owned()),
        "next" => forward.next.extend(rcodes(line)?),
        "failover" => forward.failover.extend(rcodes(line)?),
        "failfast_all_unhealthy_upstreams" => {
            line.bare()?;
            forward.fail_fast = true;
        }
        _ => {
            let known = [
                "except",
                "force_tcp",
                "prefer_udp",
                "expire",
                "max_fails",
                "max_concurrent",
                "health_check",
                "policy",
                "tls",
                "tls_servername",
                "next",
                "failover",
                "failfast_all_unhealthy_upstreams",
            ];
            return Err(line.unknown_option("forward", &known));
        }
    }
    Ok(())
}

fn rcodes(line: &Line) -> Result<Vec<hickory_proto::op::ResponseCode>, CorefileError> {
    if line.args().is_empty() {
        return Err(line.error(format!("{} takes response codes", line.name())));
    }
    line.args().iter().map(|text| line.rcode(text)).collect()
}

fn health_check(forward: &mut Forward, line: &Line) -> Result<(), CorefileError> {
    let [interval, rest @ ..] = line.args() else {
        return Err(line.error("health_check takes a time"));
    };
    forward.health_check = line.duration(interval)?;
    if forward.health_check.is_zero() {
        return Err(line.error("health_check takes a time above zero"));
    }
    let mut rest = rest;
    loop {
        rest = match rest {
            [] => return Ok(()),
            [word, after @ ..] if word == "no_rec" => {
                forward.health_check_recursion = false;
                after
            }
            [word, name, after @ ..] if word == "domain" => {
                let zones = line.zones(std::slice::from_ref(name))?;
                forward.health_check_domain = zones.into_iter().next().unwrap_or_default();
                after
            }
            [other, ..] => {
                return Err(line.error(format!("health_check has no option {other}")));
            }
        }
    }
}

/// 192.0.2.1, [2001:db8::1]:5353, tls://192.0.2.1%NAME, or a path of a resolv.conf.
fn target(line: &Line, text: &str) -> Result<Target, CorefileError> {
    let (tls, rest) = match text.split_once("://") {
        Some(("dns", rest)) => (false, rest),
        Some(("tls", rest)) => (true, rest),
        Some((scheme, _)) => {
            return Err(line.error(format!(
                "{text}: forwarding over {scheme} is not done here, only dns and tls"
            )));
        }
        None if text.starts_with('/') => return Ok(Target::ResolvConf(text.into())),
        None => (false, text),
    };
    let default = if tls { DNS_OVER_TLS_PORT } else { DNS_PORT };
    // The name may carry the port: ADDRESS%NAME:PORT.
    let (address, server_name, named_port) = match rest.split_once('%') {
        Some((address, name)) if tls => {
            let (name, port) = match name.split_once(':') {
                Some((name, port)) => (name, Some(line.number(port)?)),
                None => (name, None),
            };
            (address, Some(name.to_owned()), port)
        }
        _ => (rest, None, None),
    };
    let bare = address.trim_start_matches('[').trim_end_matches(']');
    let found = bare
        .parse::<IpAddr>()
        .map(|ip| SocketAddr::new(ip, named_port.unwrap_or(default)))
        .or_else(|_| address.parse::<SocketAddr>());
    match found {
        Ok(address) => Ok(Target::Server {
            address,
            tls,
            server_name,
        }),
        Err(_) => Err(line.error(format!(
            "{text} is no address of an upstream server and no path of a resolv.conf; host names are not looked up"
        ))),
    }
}
