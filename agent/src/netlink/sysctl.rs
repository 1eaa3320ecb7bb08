//! Network sysctls. /proc/sys/net shows the namespace of the thread that opens it.

use std::io;

use super::NetlinkError;

fn path(key: &str) -> String {
    format!("/proc/sys/{key}")
}

/// Sets a sysctl (slashes, not dots) unless it has that value already.
///
/// # Errors
/// [`NetlinkError`] names key and value.
pub fn set(key: &str, value: &str) -> Result<(), NetlinkError> {
    let path = path(key);
    // Reading first spares a write where /proc/sys is read-only and already right.
    if std::fs::read_to_string(&path).is_ok_and(|now| now.trim() == value) {
        return Ok(());
    }
    // With a line end: an empty value would otherwise be no write at all.
    std::fs::write(&path, format!("{value}\n"))
        .map_err(|e| NetlinkError::new(format!("set sysctl {key} to {value}"), e))
}

/// Like [`set`], but a key that this kernel does not have is no error (IPv6 may be switched off).
///
/// # Errors
/// [`NetlinkError`] names key and value.
pub fn set_if_present(key: &str, value: &str) -> Result<(), NetlinkError> {
    match set(key, value) {
        Err(e) if e.source.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The value of a sysctl, if it exists.
#[must_use]
pub fn get(key: &str) -> Option<String> {
    std::fs::read_to_string(path(key))
        .ok()
        .map(|v| v.trim().to_owned())
}
