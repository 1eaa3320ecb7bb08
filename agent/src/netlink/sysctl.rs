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

/// Switches reverse-path filtering off for one link and keeps it for all others. The kernel takes the larger of the
/// value for `all` and that of the link, so `all` must be zero; links that relied on it get its value as their own.
///
/// # Errors
/// [`NetlinkError`] names the key.
pub fn release_rp_filter_of_all() -> Result<(), NetlinkError> {
    const ALL: &str = "net/ipv4/conf/all/rp_filter";
    let number = |key: &str| get(key).and_then(|v| v.parse::<u8>().ok()).unwrap_or(0);
    let all = number(ALL);
    if all == 0 {
        return Ok(());
    }
    let action = "list /proc/sys/net/ipv4/conf";
    let entries =
        std::fs::read_dir("/proc/sys/net/ipv4/conf").map_err(|e| NetlinkError::new(action, e))?;
    for entry in entries {
        let name = entry.map_err(|e| NetlinkError::new(action, e))?.file_name();
        let name = name.to_string_lossy();
        let key = format!("net/ipv4/conf/{name}/rp_filter");
        if name != "all" && !name.starts_with("weir") && number(&key) < all {
            set_if_present(&key, &all.to_string())?;
        }
    }
    set(ALL, "0")
}
