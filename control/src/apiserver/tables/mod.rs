//! Columns and cells of `kubectl get`. Pure: the present time is an argument.

use jiff::Timestamp;
use serde_json::Value;

use super::registry::Gvk;

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
    let _ = gvk;
    let column = |name, kind, format| Column {
        name,
        kind,
        format,
        description: "",
        priority: 0,
    };
    vec![
        column("Name", "string", "name"),
        column("Created At", "date", ""),
    ]
}

/// Cells of one object, one per column.
#[must_use]
pub fn cells(gvk: Gvk<'_>, object: &Value, now: Timestamp) -> Vec<Value> {
    let _ = (gvk, now);
    let metadata = &object["metadata"];
    vec![
        metadata["name"].clone(),
        metadata["creationTimestamp"].clone(),
    ]
}
