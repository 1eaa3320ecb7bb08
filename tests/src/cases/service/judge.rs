//! Do the attempts of a probe meet what a case expects? Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use crate::actor::command::{Attempt, Outcome, Reply};
use crate::cases::cluster::spec::{cidr_holds, normal_key};

/// Attempts of one source.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// The reference of the source (`c1`, `node:n1`, `ext:e1`).
    pub(super) source: String,
    /// Its own addresses.
    pub(super) addresses: Vec<IpAddr>,
    /// It used several addresses, each of which counts as a source.
    pub(super) several: bool,
    pub(super) attempts: Vec<Attempt>,
}

/// Who answered earlier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    /// A kept flow is compared socket by socket, a note source by source.
    flow: bool,
    by_socket: BTreeMap<(String, usize), BTreeSet<String>>,
}

/// What the judge needs to know of the world.
pub(super) trait Lookup {
    /// Addresses of `node:NAME`, a pod, or `ext:NAME`.
    fn addresses(&self, reference: &str) -> Vec<IpAddr>;
    /// An earlier flow or note.
    fn record(&self, id: &str) -> Option<Record>;
}

type Check = Result<(), String>;

/// Who answered an attempt.
#[must_use]
pub(super) fn backend(attempt: &Attempt) -> Option<String> {
    attempt.answer.as_ref().map(|a| a.name.clone())
}

fn peer(attempt: &Attempt) -> Option<SocketAddr> {
    attempt.answer.as_ref()?.peer.parse().ok()
}

/// Where the server that answered was reached.
#[must_use]
pub(super) fn local(attempt: &Attempt) -> Option<SocketAddr> {
    attempt.answer.as_ref()?.local.parse().ok()
}

fn list(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(list) => list.iter().collect(),
        Value::Null => Vec::new(),
        one => vec![one],
    }
}

fn names(value: &Value) -> Vec<String> {
    list(value)
        .into_iter()
        .filter_map(Value::as_str)
        .map(normal_key)
        .collect()
}

/// Checks every key of an `expect` that attempts alone decide; at most `allowed` attempts may fail.
///
/// # Errors
/// The first key that does not hold, with what was seen.
pub(super) fn check(expect: &Value, seen: &[Seen], lookup: &dyn Lookup) -> Check {
    outcomes(expect, seen)?;
    for source in seen {
        for attempt in &source.attempts {
            each(expect, source, attempt, lookup)
                .map_err(|e| format!("{} socket {}: {e}", source.source, attempt.socket))?;
        }
    }
    whole(expect, seen)?;
    compare(expect, seen, lookup)
}

fn outcomes(expect: &Value, seen: &[Seen]) -> Check {
    let allowed: Vec<Outcome> = if expect["outcome"].is_null() {
        vec![Outcome::Reply]
    } else {
        let parse =
            |v: &Value| serde_json::from_value(v.clone()).map_err(|e| format!("outcome {v}: {e}"));
        list(&expect["outcome"])
            .into_iter()
            .map(parse)
            .collect::<Result<_, _>>()?
    };
    let mut failed = Vec::new();
    let mut total = 0;
    for source in seen {
        for attempt in &source.attempts {
            total += 1;
            if !allowed.contains(&attempt.outcome) {
                failed.push(format!(
                    "{} {:?} after {} ms {}",
                    source.source, attempt.outcome, attempt.took_ms, attempt.detail
                ));
            }
        }
    }
    let limit = usize::try_from(expect["failed_at_most"].as_u64().unwrap_or(0)).unwrap_or(0);
    if failed.len() <= limit {
        return Ok(());
    }
    let first = failed
        .iter()
        .take(3)
        .cloned()
        .collect::<Vec<_>>()
        .join("; ");
    Err(format!(
        "{} of {total} attempts were not {allowed:?}: {first}",
        failed.len()
    ))
}

fn each(expect: &Value, source: &Seen, attempt: &Attempt, lookup: &dyn Lookup) -> Check {
    if let Some(limit) = expect["max_ms"].as_u64()
        && attempt.took_ms > limit
    {
        return Err(format!(
            "took {} ms, at most {limit} allowed",
            attempt.took_ms
        ));
    }
    if let Some(mtu) = expect["mtu_learned"].as_u64()
        && attempt.mtu.map(u64::from) != Some(mtu)
    {
        return Err(format!(
            "the kernel knows path MTU {:?}, expected {mtu}",
            attempt.mtu
        ));
    }
    let Some(name) = backend(attempt) else {
        return Ok(());
    };
    if !expect["backends"].is_null() && !names(&expect["backends"]).contains(&name) {
        return Err(format!(
            "answered by {name}, expected one of {}",
            expect["backends"]
        ));
    }
    if let Some(cidr) = expect["server_ip_in"].as_str()
        && !local(attempt).is_some_and(|l| cidr_holds(cidr, l.ip()))
    {
        return Err(format!(
            "reached at {:?}, expected in {cidr}",
            local(attempt)
        ));
    }
    server_port(&expect["server_port"], &name, attempt)?;
    source_seen(&expect["source_seen"], source, attempt, lookup)?;
    if expect["source_port"] == "same" {
        let (client, seen) = (
            attempt.source.map(|s| s.port()),
            peer(attempt).map(|p| p.port()),
        );
        if client.is_none() || client != seen {
            return Err(format!(
                "the client's port is {client:?}, the server saw {seen:?}"
            ));
        }
    }
    Ok(())
}

fn server_port(expected: &Value, name: &str, attempt: &Attempt) -> Check {
    let port = match expected {
        Value::Null => return Ok(()),
        Value::Object(map) => {
            let found = map
                .iter()
                .find(|(k, _)| normal_key(k) == name)
                .and_then(|(_, v)| v.as_u64());
            found.ok_or_else(|| format!("no server_port for {name}"))?
        }
        one => one.as_u64().unwrap_or(0),
    };
    let reached = local(attempt).map(|l| u64::from(l.port()));
    if reached == Some(port) {
        Ok(())
    } else {
        Err(format!("reached at port {reached:?}, expected {port}"))
    }
}

fn source_seen(expected: &Value, source: &Seen, attempt: &Attempt, lookup: &dyn Lookup) -> Check {
    if expected.is_null() {
        return Ok(());
    }
    let Some(peer) = peer(attempt) else {
        return Err("the answer names no peer".into());
    };
    let own = attempt
        .source
        .map(|s| s.ip())
        .filter(|ip| !ip.is_unspecified());
    let holds = |one: &Value| match one.as_str().unwrap_or_default() {
        "client" => own == Some(peer.ip()) || source.addresses.contains(&peer.ip()),
        reference if reference.contains('/') => cidr_holds(reference, peer.ip()),
        reference => lookup.addresses(reference).contains(&peer.ip()),
    };
    if list(expected).into_iter().any(holds) {
        Ok(())
    } else {
        Err(format!("the server saw {}, expected {expected}", peer.ip()))
    }
}

fn whole(expect: &Value, seen: &[Seen]) -> Check {
    let answered = || seen.iter().flat_map(|s| &s.attempts);
    if let Some(least) = expect["spread"]["each_at_least"].as_u64() {
        let mut counts: BTreeMap<String, u64> = names(&expect["backends"])
            .into_iter()
            .map(|n| (n, 0))
            .collect();
        for name in answered().filter_map(backend) {
            *counts.entry(name).or_default() += 1;
        }
        if counts.values().any(|n| *n < least) {
            return Err(format!("spread {counts:?}, expected each at least {least}"));
        }
    }
    if let Some(least) = expect["distinct_at_least"].as_u64() {
        let distinct: BTreeSet<SocketAddr> = answered().filter_map(local).collect();
        if u64::try_from(distinct.len()).unwrap_or(0) < least {
            return Err(format!(
                "{} different answering addresses, expected {least}",
                distinct.len()
            ));
        }
    }
    if expect["sticky"] == true {
        for source in seen {
            let mut by_address: BTreeMap<Option<IpAddr>, BTreeSet<String>> = BTreeMap::new();
            for attempt in &source.attempts {
                let from = attempt.source.map(|s| s.ip());
                by_address.entry(from).or_default().extend(backend(attempt));
            }
            if let Some((from, several)) = by_address.iter().find(|(_, b)| b.len() > 1) {
                return Err(format!(
                    "{} ({from:?}) saw several backends {several:?}",
                    source.source
                ));
            }
        }
    }
    Ok(())
}

/// Who answered, by source and socket.
#[must_use]
pub(super) fn record(seen: &[Seen], flow: bool) -> Record {
    let mut by_socket: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
    for source in seen {
        for attempt in &source.attempts {
            let name = match attempt.source {
                Some(own) if source.several => format!("{} {}", source.source, own.ip()),
                _ => source.source.clone(),
            };
            let entry = by_socket.entry((name, attempt.socket)).or_default();
            entry.extend(backend(attempt));
        }
    }
    Record { flow, by_socket }
}

fn by_source(record: &Record) -> BTreeMap<&str, BTreeSet<&String>> {
    let mut all: BTreeMap<&str, BTreeSet<&String>> = BTreeMap::new();
    for ((source, _), backends) in &record.by_socket {
        all.entry(source).or_default().extend(backends);
    }
    all
}

fn compare(expect: &Value, seen: &[Seen], lookup: &dyn Lookup) -> Check {
    let now = record(seen, false);
    if let Some(id) = expect["same_backend_as"].as_str() {
        let before = lookup
            .record(id)
            .ok_or_else(|| format!("nothing recorded as {id}"))?;
        let same_sockets = now.by_socket.keys().eq(before.by_socket.keys());
        if before.flow && same_sockets {
            let moved = |(key, backends): &(&(String, usize), &BTreeSet<String>)| {
                before.by_socket.get(*key) != Some(*backends)
            };
            if let Some((key, backends)) = now.by_socket.iter().find(moved) {
                return Err(format!(
                    "{} socket {} moved from {:?} to {backends:?}",
                    key.0,
                    key.1,
                    before.by_socket.get(key)
                ));
            }
            return Ok(());
        }
        let (before, now) = (by_source(&before), by_source(&now));
        if let Some((source, backends)) = now.iter().find(|(s, b)| before.get(*s) != Some(*b)) {
            return Err(format!(
                "{source} moved from {:?} to {backends:?}",
                before.get(source)
            ));
        }
    }
    if let Some(id) = expect["differs_from"].as_str() {
        let before = lookup
            .record(id)
            .ok_or_else(|| format!("nothing recorded as {id}"))?;
        if by_source(&before) == by_source(&now) {
            return Err(format!("no source changed its backend since {id}"));
        }
    }
    Ok(())
}

/// Does an HTTP answer, or what came instead, meet what a case expects?
///
/// # Errors
/// What was seen instead.
pub(super) fn http(expect: &Value, reply: &Reply) -> Check {
    match (reply, expect["status"].as_u64()) {
        (Reply::Http { status, body }, Some(wanted)) => {
            if u64::from(*status) != wanted {
                return Err(format!("status {status}, expected {wanted}: {body}"));
            }
            let found: Value = serde_json::from_str(body).unwrap_or(Value::Null);
            let members = expect["json"].as_object().into_iter().flatten();
            let mut wrong = members.filter(|(key, value)| found[key.as_str()] != **value);
            wrong.next().map_or(Ok(()), |(key, value)| {
                Err(format!("{key} is {}, expected {value}", found[key]))
            })
        }
        (Reply::HttpFailed(outcome), None) => {
            let name = serde_json::to_value(outcome).map_err(|e| e.to_string())?;
            if list(&expect["outcome"]).contains(&&name) {
                return Ok(());
            }
            Err(format!("{outcome:?}, expected {}", expect["outcome"]))
        }
        (other, _) => Err(format!("{other:?}, expected {expect}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor::message::Answer;
    use serde_json::json;

    struct World;

    impl Lookup for World {
        fn addresses(&self, reference: &str) -> Vec<IpAddr> {
            if reference == "node:n1" {
                vec!["192.0.2.11".parse().unwrap()]
            } else {
                vec![]
            }
        }
        fn record(&self, id: &str) -> Option<Record> {
            (id == "k").then(|| record(&[seen("w1", 0)], true))
        }
    }

    fn seen(name: &str, socket: usize) -> Seen {
        let answer = Answer {
            name: name.into(),
            local: "10.244.1.5:8080".into(),
            peer: "10.244.1.2:999".into(),
        };
        let attempt = Attempt {
            outcome: Outcome::Reply,
            answer: Some(answer),
            source: Some("10.244.1.2:999".parse().unwrap()),
            socket,
            took_ms: 3,
            mtu: Some(1500),
            resent: 0,
            detail: String::new(),
        };
        Seen {
            source: "c1".into(),
            addresses: vec![],
            several: false,
            attempts: vec![attempt],
        }
    }

    #[test]
    fn expectations_hold_or_say_why_not() {
        let holds = [
            json!({"backends": ["w1", "default/w2"], "source_seen": "client", "server_port": 8080}),
            json!({"server_port": {"w1": 8080}, "source_seen": ["node:n1", "10.244.0.0/16"], "source_port": "same"}),
            json!({"same_backend_as": "k", "sticky": true, "distinct_at_least": 1, "max_ms": 5}),
        ];
        for expect in holds {
            assert_eq!(check(&expect, &[seen("w1", 0)], &World), Ok(()), "{expect}");
        }
        let fails = [
            json!({"outcome": "refused"}),
            json!({"backends": ["w2"]}),
            json!({"backends": ["w1", "w2"], "spread": {"each_at_least": 1}}),
            json!({"source_seen": "node:n1"}),
            json!({"differs_from": "k"}),
            json!({"mtu_learned": 1300}),
        ];
        for expect in fails {
            assert!(
                check(&expect, &[seen("w1", 0)], &World).is_err(),
                "{expect}"
            );
        }
        assert!(check(&json!({"same_backend_as": "k"}), &[seen("w2", 0)], &World).is_err());
    }
}
