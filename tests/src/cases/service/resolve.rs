//! References of steps to addresses: `$ip(…)`, and the targets of probes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::steps::strings;
use crate::cases::cluster::Overlay;
use crate::cases::cluster::spec;

/// Services by namespace and name.
pub(super) type Services = BTreeMap<(String, String), Value>;

/// What references mean in the world of a case.
pub(super) trait Names {
    /// Addresses of a pod (the last ones, if it is gone), `node:NAME` or `ext:NAME`.
    ///
    /// # Errors
    /// When there never was such a thing.
    fn addresses_of(&self, reference: &str) -> Result<Vec<IpAddr>>;
    fn services(&self) -> &Services;
    /// True when IPv6 is the family of names that have both.
    fn prefers_v6(&self) -> bool;
    fn overlay(&self) -> Overlay;

    /// Replaces `$ip(REF)`, `$ip6(REF)` in every string.
    fn resolve(&self, value: &Value) -> Result<Value> {
        Ok(match value {
            Value::String(text) => Value::String(self.resolve_text(text)?),
            Value::Array(list) => Value::Array(
                list.iter()
                    .map(|v| self.resolve(v))
                    .collect::<Result<_>>()?,
            ),
            Value::Object(map) => {
                let pairs = map.iter().map(|(k, v)| Ok((k.clone(), self.resolve(v)?)));
                Value::Object(pairs.collect::<Result<_>>()?)
            }
            other => other.clone(),
        })
    }

    fn resolve_text(&self, text: &str) -> Result<String> {
        let mut out = text.to_owned();
        for (open, v6) in [("$ip(", false), ("$ip6(", true)] {
            while let Some(start) = out.find(open) {
                let end = out[start..].find(')').context("unclosed $ip")? + start;
                let reference = out[start + open.len()..end].to_owned();
                let ips = self.addresses_of(&reference)?;
                let ip = spec::of_family(&ips, v6)
                    .with_context(|| format!("no such address of {reference}"))?;
                out.replace_range(start..=end, &ip.to_string());
            }
        }
        let overlay = self.overlay();
        let out = out.replace("$vxlan(port)", &overlay.port.to_string());
        Ok(out.replace("$vxlan(vni)", &overlay.vni.to_string()))
    }

    fn target(&self, to: &str, family: Option<&str>, icmp: bool) -> Result<Vec<SocketAddr>> {
        let v6 = family.map_or(self.prefers_v6(), |f| f == "IPv6");
        let text = self.resolve_text(to)?;
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(vec![address]);
        }
        if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, 0)]);
        }
        let (kind, rest) = text
            .split_once(':')
            .with_context(|| format!("bad target {to}"))?;
        let (name, port) = match rest.rsplit_once(':') {
            Some((name, port)) => (
                name,
                port.parse::<u16>()
                    .with_context(|| format!("bad port in {to}"))?,
            ),
            None if icmp => (rest, 0),
            None => bail!("no port in {to}"),
        };
        let ips: Vec<Vec<IpAddr>> = match kind {
            "svc" => self.service_ips(name)?,
            "pod" => vec![self.addresses_of(name)?],
            _ => vec![self.addresses_of(&format!("{kind}:{name}"))?],
        };
        let one = |ips: &Vec<IpAddr>| {
            // A family that a case names must be there; else the one that there is serves.
            let ip = spec::of_family(ips, v6).or(if family.is_none() {
                ips.first().copied()
            } else {
                None
            });
            ip.map(|ip| SocketAddr::new(ip, port))
                .with_context(|| format!("{to} has no such family"))
        };
        ips.iter().map(one).collect()
    }

    fn service_ips(&self, name: &str) -> Result<Vec<Vec<IpAddr>>> {
        let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
        let matches = |candidate: &str| match name.strip_suffix('*') {
            Some(prefix) => candidate.starts_with(prefix),
            None => candidate == name,
        };
        let found: Vec<Vec<IpAddr>> = self
            .services()
            .iter()
            .filter(|((ns, n), _)| ns == namespace && matches(n))
            .map(|(_, s)| {
                strings(&s["spec"]["clusterIPs"])
                    .iter()
                    .filter_map(|ip| ip.parse().ok())
                    .collect()
            })
            .collect();
        ensure!(!found.is_empty(), "no Service {namespace}/{name}");
        Ok(found)
    }
}
