//! Claims and Services brought back into agreement: what no Service holds is given back, what one holds is claimed.
//!
//! Both are written in one transaction, so a difference means that somebody deleted an IPAddress by hand or that an
//! earlier version left something behind.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{families, held, ip_address, ip_key, owner};
use crate::apiserver::api::{Api, store_error};
use crate::apiserver::object::{self, text};
use crate::status::ApiError;
use crate::store::{Expect, Op, Record, StoreError};

const IPS: &str = "networking.k8s.io/ipaddresses/";
const PORTS: &str = "weir/nodeports/";
const MANAGED_BY: &str = "ipallocator.k8s.io";

impl Api {
    /// Compares all claims with all Services, at one revision, and writes what differs. A claim or Service that changes
    /// meanwhile is left alone. Returns the number of repairs.
    ///
    /// # Errors
    /// As the store's.
    pub(crate) async fn repair_services(&self) -> Result<usize, ApiError> {
        let at = Some(self.revision().await?);
        let list = async |prefix: &str| {
            let page = self.store.list(prefix, None, 0, at).await;
            page.map(|page| page.records).map_err(store_error)
        };
        let services = list("core/services/").await?;
        let mut claims = list(IPS).await?;
        claims.extend(list(PORTS).await?);
        let claims: BTreeMap<&str, &Record> = claims.iter().map(|r| (&*r.key, &**r)).collect();
        let mut wanted: BTreeMap<String, &Record> = BTreeMap::new();
        for record in &services {
            for key in held(&*object::decode(record)?) {
                let other = wanted.entry(key.clone()).or_insert(record);
                if other.key != record.key {
                    tracing::warn!(%key, first = %other.key, second = %record.key,
                        "two Services hold the same address or port");
                }
            }
        }
        let mut repairs = Vec::new();
        for (key, claim) in &claims {
            if !wanted.contains_key(*key) && is_ours(claim)? {
                repairs.push(vec![Op::Delete {
                    key: (*key).to_owned(),
                    expect: Expect::Revision(claim.revision),
                }]);
            }
        }
        for (key, service) in wanted
            .iter()
            .filter(|(k, _)| !claims.contains_key(k.as_str()))
        {
            repairs.push(claim(key, service)?);
        }
        let mut done = 0;
        for repair in repairs {
            let key = repair[0].key().to_owned();
            match self.store.commit(repair).await {
                Ok(_) => {
                    tracing::info!(key, "repaired the claim of an address or port");
                    done += 1;
                }
                Err(StoreError::Conflict { .. }) => {}
                Err(e) => return Err(store_error(e)),
            }
        }
        Ok(done)
    }
}

/// Node ports always; an IPAddress when a Service's allocation made it.
fn is_ours(claim: &Record) -> Result<bool, ApiError> {
    if claim.key.starts_with(PORTS) {
        return Ok(true);
    }
    let object = object::decode(claim)?;
    let manager = object.pointer("/metadata/labels/ipaddress.kubernetes.io~1managed-by");
    Ok(manager.and_then(Value::as_str) == Some(MANAGED_BY)
        && text(&object, "/spec/parentRef/resource") == "services")
}

fn claim(key: &str, record: &Record) -> Result<Vec<Op>, ApiError> {
    let service = object::decode(record)?;
    let value = match key.strip_prefix(IPS) {
        Some(ip) => {
            let v6 = ip.contains(':');
            let family = if v6 { families::IPV6 } else { families::IPV4 };
            debug_assert_eq!(ip_key(ip), key);
            ip_address(&service, ip, family)?
        }
        None => owner(&service),
    };
    Ok(vec![
        Op::Put {
            key: key.to_owned(),
            value,
            expect: Expect::Absent,
        },
        Op::Check {
            key: record.key.to_string(),
            expect: Expect::Revision(record.revision),
        },
    ])
}
