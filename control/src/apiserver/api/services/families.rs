//! Which address families a Service has, by its policy, its requested addresses and the cluster's ranges.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use super::{cause, cluster_ips, invalid_value, refuse};
use crate::apiserver::api::Api;
use crate::apiserver::object::{map_mut, put, text};
use crate::status::ApiError;

const IPV4: &str = "IPv4";
const IPV6: &str = "IPv6";

/// `spec.ipFamilies`.
pub(super) fn of(service: &Value) -> Vec<String> {
    let list = service["spec"]["ipFamilies"].as_array();
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

fn family_of_net(net: IpNetwork) -> &'static str {
    if net.is_ipv4() { IPV4 } else { IPV6 }
}

fn family_of(ip: &str) -> Option<&'static str> {
    ip.parse::<IpAddr>()
        .ok()
        .map(|ip| if ip.is_ipv4() { IPV4 } else { IPV6 })
}

impl Api {
    pub(super) fn service_cidr(&self, family: &str) -> Option<IpNetwork> {
        self.network
            .service_cidrs
            .iter()
            .find(|c| family_of_net(**c) == family)
            .copied()
    }

    /// Fills ipFamilyPolicy, ipFamilies and the pair clusterIP and clusterIPs, or refuses what contradicts itself.
    pub(super) fn assign_families(
        &self,
        service: &mut Value,
        old: Option<&Value>,
    ) -> Result<(), ApiError> {
        unify_ips(service)?;
        if let Some(old) = old {
            check_primary(service, old)?;
        }
        let cluster: Vec<&'static str> = self
            .network
            .service_cidrs
            .iter()
            .map(|c| family_of_net(*c))
            .collect();
        check_requested(service, &cluster)?;
        let ips = cluster_ips(service);
        let headless = ips.first().is_some_and(|ip| ip == "None");
        let selectorless = service["spec"]["selector"]
            .as_object()
            .is_none_or(|s| s.is_empty());
        let mut families = of(service);
        let policy = match text(service, "/spec/ipFamilyPolicy") {
            "" if headless && selectorless && families.is_empty() => "RequireDualStack",
            "" if families.len() == 2 || ips.len() == 2 => "RequireDualStack",
            "" => "SingleStack",
            given => given,
        }
        .to_owned();
        let free = headless && selectorless;
        if policy == "SingleStack" && (families.len() > 1 || ips.len() > 1) {
            if old.is_none_or(|o| text(o, "/spec/ipFamilyPolicy") == "SingleStack") {
                let why = "must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified";
                return Err(refuse(
                    service,
                    invalid_value("spec.ipFamilyPolicy", &policy, why),
                ));
            }
            families.truncate(1);
            shorten_ips(service)?;
        }
        if policy == "RequireDualStack" && cluster.len() < 2 && !free {
            let why = "Cluster is not configured for dual-stack services";
            return Err(refuse(
                service,
                invalid_value("spec.ipFamilyPolicy", &policy, why),
            ));
        }
        fill(
            &mut families,
            &cluster_ips(service),
            &cluster,
            &policy,
            free,
        );
        let spec = map_mut(service, "spec")?;
        spec.insert("ipFamilyPolicy".into(), policy.into());
        spec.insert("ipFamilies".into(), json!(families));
        Ok(())
    }
}

fn fill(
    families: &mut Vec<String>,
    ips: &[String],
    cluster: &[&'static str],
    policy: &str,
    free: bool,
) {
    for (n, ip) in ips.iter().enumerate() {
        if let Some(family) = family_of(ip)
            && families.len() <= n
        {
            families.push(family.to_owned());
        }
    }
    let both = [IPV4, IPV6];
    let available = if free && policy == "RequireDualStack" {
        &both[..]
    } else {
        cluster
    };
    let wanted = if policy == "SingleStack" { 1 } else { 2 };
    let ordered = cluster.iter().chain(available);
    for family in ordered {
        if families.len() < wanted && !families.iter().any(|f| f == family) {
            families.push((*family).to_owned());
        }
    }
}

fn unify_ips(service: &mut Value) -> Result<(), ApiError> {
    let first = text(service, "/spec/clusterIP").to_owned();
    let list = cluster_ips(service);
    match (first.as_str(), list.first()) {
        ("", None) => {}
        (ip, None) => {
            map_mut(service, "spec")?.insert("clusterIPs".into(), json!([ip]));
        }
        ("", Some(_)) => {
            let why = "must be empty when `clusterIP` is not specified";
            return Err(refuse(
                service,
                invalid_value("spec.clusterIPs", &list, why),
            ));
        }
        (ip, Some(head)) if ip == head => {}
        (_, Some(_)) => {
            let why = "first value must match `clusterIP`";
            return Err(refuse(
                service,
                invalid_value("spec.clusterIPs", &list, why),
            ));
        }
    }
    Ok(())
}

fn check_primary(service: &Value, old: &Value) -> Result<(), ApiError> {
    let (before, after) = (cluster_ips(old), cluster_ips(service));
    if let (Some(before), after) = (before.first(), after.first())
        && after != Some(before)
    {
        let why = "may not change once set";
        let given = after.map_or("", String::as_str);
        return Err(refuse(
            service,
            invalid_value("spec.clusterIPs[0]", &[given], why),
        ));
    }
    let (before, after) = (of(old), of(service));
    if let (Some(before), Some(after)) = (before.first(), after.first())
        && before != after
    {
        let why = "may not change once set";
        return Err(refuse(
            service,
            invalid_value("spec.ipFamilies[0]", after, why),
        ));
    }
    Ok(())
}

fn check_requested(service: &Value, cluster: &[&'static str]) -> Result<(), ApiError> {
    let families = of(service);
    let ips = cluster_ips(service);
    let headless = ips.first().is_some_and(|ip| ip == "None");
    for (n, family) in families.iter().enumerate() {
        let field = format!("spec.ipFamilies[{n}]");
        if family != IPV4 && family != IPV6 {
            let why =
                format!("Unsupported value: {family:?}: supported values: \"IPv4\", \"IPv6\"");
            return Err(refuse(service, cause("FieldValueNotSupported", field, why)));
        }
        if families[..n].contains(family) {
            let why = format!("Duplicate value: {family:?}");
            return Err(refuse(service, cause("FieldValueDuplicate", field, why)));
        }
        if !headless && !cluster.contains(&family.as_str()) {
            let why = "not configured on this cluster";
            return Err(refuse(service, invalid_value(field, family, why)));
        }
        if let Some(ip) = ips.get(n).filter(|_| !headless)
            && family_of(ip).is_some_and(|f| f != family)
        {
            let why = format!("expected an {family} value as indicated by `ipFamilies[{n}]`");
            return Err(refuse(
                service,
                invalid_value(format!("spec.clusterIPs[{n}]"), ip, &why),
            ));
        }
    }
    if !headless {
        for (n, ip) in ips.iter().enumerate() {
            if family_of(ip).is_none() {
                let why = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
                let field = format!("spec.clusterIPs[{n}]");
                return Err(refuse(service, invalid_value(field, ip, why)));
            }
        }
    }
    Ok(())
}

fn shorten_ips(service: &mut Value) -> Result<(), ApiError> {
    let mut ips = cluster_ips(service);
    ips.truncate(1);
    put(
        map_mut(service, "spec")?,
        "clusterIPs",
        (!ips.is_empty()).then(|| json!(ips)),
    );
    Ok(())
}
