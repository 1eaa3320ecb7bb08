//! External addresses of Services: off unless the operator allows them, and never an address that already means
//! something in the cluster, because whoever may make Services could otherwise take over its traffic (CVE-2020-8554).

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::Value;

use super::{invalid_value, refuse};
use crate::apiserver::api::{Api, store_error};
use crate::apiserver::object;
use crate::status::{ApiError, Cause};

/// What an address must not be, with the words that refuse it.
#[derive(Debug, Default)]
struct Taken {
    addresses: Vec<(IpAddr, &'static str)>,
    ranges: Vec<(ipnetwork::IpNetwork, &'static str)>,
}

impl Taken {
    fn why(&self, address: IpAddr) -> Option<String> {
        let named = self.addresses.iter().find(|(a, _)| *a == address);
        if let Some((_, what)) = named {
            return Some(format!("may not be the address of {what}"));
        }
        let (range, what) = self.ranges.iter().find(|(r, _)| r.contains(address))?;
        Some(format!("may not be in the range of {what} ({range})"))
    }
}

fn given(service: &Value) -> Vec<&str> {
    let list = service["spec"]["externalIPs"].as_array();
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

impl Api {
    /// Checks the external addresses that a write adds; those that the Service has already may stay or go.
    pub(super) async fn check_external_ips(
        &self,
        service: &Value,
        old: Option<&Value>,
    ) -> Result<(), ApiError> {
        let before: BTreeSet<&str> = old.map(given).into_iter().flatten().collect();
        let list = given(service);
        let added: Vec<(usize, &str)> = list
            .into_iter()
            .enumerate()
            .filter(|(_, ip)| !before.contains(ip))
            .collect();
        if added.is_empty() {
            return Ok(());
        }
        if !self.network.allow_external_ips {
            let def = self.resource("", "v1", "services")?;
            let why = "Use of external IPs is denied by admission control.";
            return Err(super::super::forbidden(&def, object::name(service), why));
        }
        let taken = self.taken_addresses().await?;
        let faults: Vec<Cause> = added
            .into_iter()
            .filter_map(|(n, ip)| {
                let why = taken.why(ip.parse().ok()?)?;
                let field = format!("spec.externalIPs[{n}]");
                Some(invalid_value(field, ip, &why))
            })
            .collect();
        match faults.into_iter().next() {
            Some(first) => Err(refuse(service, first)),
            None => Ok(()),
        }
    }

    async fn taken_addresses(&self) -> Result<Taken, ApiError> {
        let mut taken = Taken::default();
        let dns = self.network.cluster_dns();
        taken
            .addresses
            .extend(dns.into_iter().map(|ip| (ip, "cluster DNS")));
        let own = |ranges: &[ipnetwork::IpNetwork], what| {
            ranges
                .iter()
                .map(move |range| (*range, what))
                .collect::<Vec<_>>()
        };
        taken
            .ranges
            .extend(own(&self.network.service_cidrs, "cluster IPs"));
        taken.ranges.extend(own(&self.network.pod_cidrs, "pods"));
        let endpoints = self.store.get("core/endpoints/default/kubernetes").await;
        if let Some(record) = endpoints.map_err(store_error)? {
            let endpoints = object::decode(&record)?;
            for subset in items(&endpoints["subsets"]) {
                for ip in addresses(&subset["addresses"], "ip") {
                    taken.addresses.push((ip, "the API server"));
                }
            }
        }
        let nodes = self.store.list("core/nodes/", None, 0, None).await;
        for record in nodes.map_err(store_error)?.records {
            let node = object::decode(&record)?;
            for ip in addresses(&node["status"]["addresses"], "address") {
                taken.addresses.push((ip, "a node"));
            }
            let ranges = items(&node["spec"]["podCIDRs"]).filter_map(Value::as_str);
            for range in ranges.filter_map(|r| r.parse().ok()) {
                taken.ranges.push((range, "pods"));
            }
        }
        Ok(taken)
    }
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn addresses<'a>(list: &'a Value, key: &'a str) -> impl Iterator<Item = IpAddr> + 'a {
    items(list).filter_map(move |entry| entry[key].as_str()?.parse().ok())
}
