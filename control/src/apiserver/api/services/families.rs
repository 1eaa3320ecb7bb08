//! Which address families a Service has, by its policy, its requested addresses and the cluster's ranges (KEP-563).
//!
//! Pure: the ranges of the cluster are an argument.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use super::{cause, cluster_ips, has_cluster_ip, invalid_value};
use crate::apiserver::object::{map_mut, put, text};
use crate::status::{ApiError, Cause};

pub(super) const IPV4: &str = "IPv4";
pub(super) const IPV6: &str = "IPv6";
const SINGLE: &str = "SingleStack";
const PREFER: &str = "PreferDualStack";
const REQUIRE: &str = "RequireDualStack";
const POLICY: &str = "spec.ipFamilyPolicy";

/// `spec.ipFamilies`.
pub(super) fn of(service: &Value) -> Vec<String> {
    let list = service["spec"]["ipFamilies"].as_array();
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

pub(super) fn family_of_net(net: IpNetwork) -> &'static str {
    if net.is_ipv4() { IPV4 } else { IPV6 }
}

fn family_of(ip: &str) -> Option<&'static str> {
    let address = ip.parse::<IpAddr>().ok()?;
    Some(if address.is_ipv4() { IPV4 } else { IPV6 })
}

fn is_headless(service: &Value) -> bool {
    cluster_ips(service) == ["None"]
}

fn policy(service: &Value) -> &str {
    text(service, "/spec/ipFamilyPolicy")
}

/// Fills ipFamilyPolicy and ipFamilies of a Service that has cluster IPs, and shortens clusterIPs when the second one is
/// given back. `cluster` are the families of the cluster's service ranges, the default one first.
///
/// # Errors
/// 422 with every contradiction of the kind that was met first.
pub(super) fn assign(
    service: &mut Value,
    old: Option<&Value>,
    cluster: &[&'static str],
) -> Result<(), Faults> {
    unify_ips(service)?;
    let old = old.filter(|o| has_cluster_ip(o));
    if let Some(old) = old {
        Faults::none_or(changed_ips(service, old))?;
        // A cluster that gains or loses a family changes no Service by itself.
        if stays_preferring(service, old) {
            return Ok(());
        }
    }
    let selectorless = service["spec"]["selector"]
        .as_object()
        .is_none_or(serde_json::Map::is_empty);
    let free = is_headless(service) && selectorless;
    if policy(service).is_empty() {
        let chosen = match old.map(policy).filter(|p| !p.is_empty()) {
            Some(before) => before,
            None if free => REQUIRE,
            None => SINGLE,
        };
        put_policy(service, chosen)?;
    }
    Faults::none_or(malformed(service))?;
    let mut faults = Vec::new();
    if let Some(old) = old {
        faults.extend(give_back(service, old)?);
    }
    faults.extend(too_many_for_policy(service));
    faults.extend(infer(service, cluster)?);
    Faults::none_or(faults)?;
    let mut families = of(service);
    if !free {
        Faults::none_or(not_configured(service, cluster))?;
    }
    if families.is_empty() {
        families.extend(cluster.first().map(|f| (*f).to_owned()));
    }
    let both = free || cluster.len() == 2;
    if policy(service) != SINGLE && families.len() == 1 && both {
        let other = if families[0] == IPV4 { IPV6 } else { IPV4 };
        families.push(other.to_owned());
    }
    map_mut(service, "spec")?.insert("ipFamilies".into(), json!(families));
    Ok(())
}

/// Why families could not be assigned.
#[derive(Debug)]
pub(super) enum Faults {
    Causes(Vec<Cause>),
    Other(ApiError),
}

impl Faults {
    fn none_or(causes: Vec<Cause>) -> Result<(), Self> {
        if causes.is_empty() {
            Ok(())
        } else {
            Err(Self::Causes(causes))
        }
    }
}

impl From<ApiError> for Faults {
    fn from(error: ApiError) -> Self {
        Self::Other(error)
    }
}

fn put_policy(service: &mut Value, chosen: &str) -> Result<(), ApiError> {
    let chosen = chosen.to_owned();
    map_mut(service, "spec")?.insert("ipFamilyPolicy".into(), chosen.into());
    Ok(())
}

/// A writer of `clusterIP` alone means the list as well.
fn unify_ips(service: &mut Value) -> Result<(), Faults> {
    let first = text(service, "/spec/clusterIP").to_owned();
    let list = cluster_ips(service);
    let why = match (first.as_str(), list.first()) {
        ("", None) => return Ok(()),
        (ip, None) => {
            map_mut(service, "spec")?.insert("clusterIPs".into(), json!([ip]));
            return Ok(());
        }
        (ip, Some(head)) if ip == head => return Ok(()),
        ("", Some(_)) => "must be empty when `clusterIP` is not specified",
        (_, Some(_)) => "first value must match `clusterIP`",
    };
    Faults::none_or(vec![invalid_value("spec.clusterIPs", list, why)])
}

/// Addresses and families stay as long as the Service has a cluster IP; only the second ones come and go.
fn changed_ips(service: &Value, old: &Value) -> Vec<Cause> {
    if is_headless(service) && is_headless(old) {
        return Vec::new();
    }
    let mut faults = Vec::new();
    for (field, before, after) in [
        ("spec.clusterIPs", cluster_ips(old), cluster_ips(service)),
        ("spec.ipFamilies", of(old), of(service)),
    ] {
        for (n, (was, is)) in before.iter().zip(&after).enumerate() {
            if was != is {
                let field = format!("{field}[{n}]");
                faults.push(invalid_value(field, &after, "may not change once set"));
            }
        }
    }
    faults
}

fn stays_preferring(service: &Value, old: &Value) -> bool {
    let same = policy(service) == PREFER
        && policy(old) == PREFER
        && cluster_ips(service) == cluster_ips(old)
        && of(service) == of(old);
    same && !of(old).is_empty()
}

/// What contradicts itself, whatever the cluster has.
fn malformed(service: &Value) -> Vec<Cause> {
    let (families, ips) = (of(service), cluster_ips(service));
    let mut faults = Vec::new();
    for (n, family) in families.iter().enumerate() {
        let field = format!("spec.ipFamilies[{n}]");
        if family != IPV4 && family != IPV6 {
            let why =
                format!("Unsupported value: {family:?}: supported values: \"IPv4\", \"IPv6\"");
            faults.push(cause("FieldValueNotSupported", field, why));
        } else if families[..n].contains(family) {
            let why = format!("Duplicate value: {family:?}");
            faults.push(cause("FieldValueDuplicate", field, why));
        }
    }
    if ![SINGLE, PREFER, REQUIRE].contains(&policy(service)) {
        let why = format!(
            "Unsupported value: {:?}: supported values: {PREFER:?}, {REQUIRE:?}, {SINGLE:?}",
            policy(service)
        );
        faults.push(cause("FieldValueNotSupported", POLICY, why));
    }
    if ips.first().is_some_and(|ip| ip == "None") {
        if ips.len() > 1 {
            let why = "'None' must be the first and only value";
            faults.push(invalid_value("spec.clusterIPs", &ips, why));
        }
        return faults;
    }
    let before = faults.len();
    for (n, ip) in ips.iter().enumerate() {
        if family_of(ip).is_none() {
            let why = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
            faults.push(invalid_value(format!("spec.clusterIPs[{n}]"), ip, why));
        }
    }
    if ips.len() > 2 {
        let why = "may only hold up to 2 values";
        faults.push(invalid_value("spec.clusterIPs", &ips, why));
    }
    if faults.len() > before {
        return faults;
    }
    if let [first, second] = ips.as_slice()
        && family_of(first) == family_of(second)
    {
        let why = "may specify no more than one IP for each IP family";
        faults.push(invalid_value("spec.clusterIPs", &ips, why));
    }
    for (n, (ip, family)) in ips.iter().zip(&families).enumerate() {
        if family_of(ip).is_some_and(|f| f != family) {
            let why = format!("expected an {family} value as indicated by `ipFamilies[{n}]`");
            faults.push(invalid_value(format!("spec.clusterIPs[{n}]"), ip, &why));
        }
    }
    faults
}

/// A policy that is set to SingleStack gives the second address back. With any other policy, leaving it out is no clear
/// wish.
fn give_back(service: &mut Value, old: &Value) -> Result<Vec<Cause>, ApiError> {
    let (ips, families) = (cluster_ips(service), of(service));
    let (old_ips, old_families) = (cluster_ips(old), of(old));
    let mut faults = Vec::new();
    if policy(service) == SINGLE {
        let spec = map_mut(service, "spec")?;
        if ips == old_ips && ips.len() > 1 {
            put(spec, "clusterIPs", Some(json!(ips[..1])));
        }
        if families == old_families && families.len() > 1 {
            put(spec, "ipFamilies", Some(json!(families[..1])));
        }
        return Ok(faults);
    }
    for (what, now, before) in [
        ("cluster IP", ips.len(), old_ips.len()),
        ("IP family", families.len(), old_families.len()),
    ] {
        if now > 0 && now < before {
            let why = format!("must be 'SingleStack' to release the secondary {what}");
            faults.push(invalid_value(POLICY, policy(service), &why));
        }
    }
    Ok(faults)
}

fn too_many_for_policy(service: &Value) -> Vec<Cause> {
    if policy(service) != SINGLE {
        return Vec::new();
    }
    let counts = [
        ("cluster IPs", cluster_ips(service).len()),
        ("IP families", of(service).len()),
    ];
    let many = counts.iter().filter(|(_, count)| *count == 2);
    many.map(|(what, _)| {
        let why = format!(
            "must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified"
        );
        invalid_value(POLICY, SINGLE, &why)
    })
    .collect()
}

/// Families follow from requested addresses.
fn infer(service: &mut Value, cluster: &[&'static str]) -> Result<Vec<Cause>, ApiError> {
    let (ips, mut families) = (cluster_ips(service), of(service));
    let mut faults = Vec::new();
    for (n, ip) in ips.iter().enumerate().skip(families.len()) {
        let Some(family) = family_of(ip) else {
            continue;
        };
        if cluster.contains(&family) {
            families.push(family.to_owned());
        } else {
            let why = format!("{family} is not configured on this cluster");
            faults.push(invalid_value(format!("spec.clusterIPs[{n}]"), &ips, &why));
        }
    }
    if !families.is_empty() {
        map_mut(service, "spec")?.insert("ipFamilies".into(), json!(families));
    }
    Ok(faults)
}

fn not_configured(service: &Value, cluster: &[&'static str]) -> Vec<Cause> {
    let mut faults = Vec::new();
    if policy(service) == REQUIRE && cluster.len() < 2 {
        let why = "Cluster is not configured for dual-stack services";
        faults.push(invalid_value(POLICY, REQUIRE, why));
    }
    for (n, family) in of(service).iter().enumerate() {
        if !cluster.contains(&family.as_str()) {
            let field = format!("spec.ipFamilies[{n}]");
            faults.push(invalid_value(
                field,
                family,
                "not configured on this cluster",
            ));
        }
    }
    faults
}

#[cfg(test)]
#[path = "families_tests.rs"]
mod tests;
