//! Columns and cells of `kubectl get`. Pure: the present time is an argument.
//!
//! Names, order and cell texts are what scripts around kubectl expect from any Kubernetes server.

mod cluster;
mod columns;
mod network;
mod pods;
mod row;
mod workloads;

use jiff::Timestamp;
use serde_json::Value;

use super::registry::Gvk;
use row::Row;

/// One column of a Table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: &'static str,
    /// string, integer, number, boolean or date.
    pub kind: &'static str,
    /// For example `name` for the first column.
    pub format: &'static str,
    pub description: &'static str,
    /// 0 is always shown, 1 only with `-o wide`.
    pub priority: u8,
}

/// Columns of a kind; kinds without own columns have Name and Created At.
#[must_use]
pub fn columns(gvk: Gvk<'_>) -> Vec<Column> {
    columns::of(gvk)
}

/// Cells of one object, one per column.
#[must_use]
pub fn cells(gvk: Gvk<'_>, object: &Value, now: Timestamp) -> Vec<Value> {
    let row = Row::new(object, now);
    let own = match (gvk.group, gvk.kind) {
        ("", "Pod") => Some(pods::pod(&row)),
        ("apps" | "batch", kind) => workloads::cells(kind, &row),
        ("", "ReplicationController" | "PodTemplate") => workloads::cells(gvk.kind, &row),
        ("", "Service" | "Endpoints") => network::cells(gvk.kind, &row),
        ("discovery.k8s.io" | "networking.k8s.io" | "policy.networking.k8s.io", kind) => {
            network::cells(kind, &row)
        }
        (group, kind) => cluster::cells(group, kind, &row),
    };
    own.unwrap_or_else(|| {
        vec![
            row.name(),
            row.at("/metadata/creationTimestamp")
                .cloned()
                .unwrap_or(Value::Null),
        ]
    })
}

#[cfg(test)]
mod tests;
