//! Bind protection: the kernel gives no ephemeral port of the node port range to the node's own connections
//! (`net.ipv4.ip_local_reserved_ports`, Documentation/networking/ip-sysctl.rst). A process may still bind one by number;
//! a node port of a Service then has precedence on the node's addresses.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io;
use std::ops::RangeInclusive;
use std::path::Path;

use super::{NetlinkError, sysctl};

const KEY: &str = "net/ipv4/ip_local_reserved_ports";
/// Below the agent's state directory: what was reserved before us, and what we reserved.
pub const STATE_NAME: &str = "reserved-ports";

/// Reserves exactly this range beside what others reserved. Safe to repeat.
///
/// # Errors
/// [`NetlinkError`] names the sysctl or the file.
pub fn reserve(state_dir: &Path, range: &RangeInclusive<u16>) -> Result<(), NetlinkError> {
    let Some(now) = sysctl::get(KEY) else {
        return Ok(());
    };
    let ours: BTreeSet<u16> = range.clone().collect();
    let path = state_dir.join(STATE_NAME);
    let before = match Saved::read(&path)? {
        Some(saved) if saved.ours == ours => {
            let wanted: BTreeSet<u16> = parse(&now).union(&ours).copied().collect();
            return sysctl::set(KEY, &format(&wanted));
        }
        Some(saved) => saved.without(&parse(&now)),
        None => parse(&now),
    };
    // The file first: whatever happens after it, it says what to give back.
    let wanted = before.union(&ours).copied().collect();
    Saved { before, ours }.write(&path)?;
    sysctl::set(KEY, &format(&wanted))
}

/// Gives back what [`reserve`] took; true when there was something.
///
/// # Errors
/// [`NetlinkError`] names the sysctl or the file.
pub fn release(state_dir: &Path) -> Result<bool, NetlinkError> {
    let path = state_dir.join(STATE_NAME);
    let Some(saved) = Saved::read(&path)? else {
        return Ok(false);
    };
    if let Some(now) = sysctl::get(KEY) {
        sysctl::set(KEY, &format(&saved.without(&parse(&now))))?;
    }
    std::fs::remove_file(&path).map_err(|e| failed("remove", &path, e))?;
    Ok(true)
}

fn failed(action: &str, path: &Path, source: io::Error) -> NetlinkError {
    NetlinkError::new(format!("{action} {}", path.display()), source)
}

/// The file: two lines in the kernel's form.
struct Saved {
    before: BTreeSet<u16>,
    ours: BTreeSet<u16>,
}

impl Saved {
    fn read(path: &Path) -> Result<Option<Self>, NetlinkError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed("read", path, e)),
        };
        let mut lines = text.lines().map(parse);
        Ok(Some(Self {
            before: lines.next().unwrap_or_default(),
            ours: lines.next().unwrap_or_default(),
        }))
    }

    fn write(&self, path: &Path) -> Result<(), NetlinkError> {
        let text = format!("{}\n{}\n", format(&self.before), format(&self.ours));
        std::fs::write(path, text).map_err(|e| failed("write", path, e))
    }

    /// What is reserved without us: somebody may have changed it meanwhile.
    fn without(&self, now: &BTreeSet<u16>) -> BTreeSet<u16> {
        now.iter()
            .copied()
            .filter(|port| !self.ours.contains(port) || self.before.contains(port))
            .collect()
    }
}

/// Ports and ranges between commas. What is none is passed over: the kernel wrote it, or we did.
fn parse(text: &str) -> BTreeSet<u16> {
    let mut ports = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u16>(), last.trim().parse()) {
            ports.extend(first..=last);
        }
    }
    ports
}

/// As the kernel writes it: ranges as long as possible.
fn format(ports: &BTreeSet<u16>) -> String {
    let mut text = String::new();
    let mut ports = ports.iter().copied().peekable();
    while let Some(first) = ports.next() {
        let mut last = first;
        while let Some(next) = ports.next_if(|next| Some(*next) == last.checked_add(1)) {
            last = next;
        }
        let separator = if text.is_empty() { "" } else { "," };
        let result = if first == last {
            write!(text, "{separator}{first}")
        } else {
            write!(text, "{separator}{first}-{last}")
        };
        // Writing to a string does not fail.
        let _ = result;
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_kernels_form_is_read_and_written() {
        for text in ["", "8080", "30000-32767", "1-3,5,65534-65535"] {
            assert_eq!(format(&parse(text)), text);
        }
        assert_eq!(format(&parse("3,1-2, 7 ,x,9-\n")), "1-3,7");
    }

    proptest! {
        /// Whatever others reserved before and meanwhile stays when ours goes.
        #[test]
        fn what_others_reserved_stays(before in any_ports(), ours in any_ports(), later in any_ports()) {
            let now: BTreeSet<u16> = before.union(&ours).chain(&later).copied().collect();
            let saved = Saved { before: before.clone(), ours: ours.clone() };
            let left = saved.without(&now);
            prop_assert!(before.is_subset(&left));
            prop_assert!(later.difference(&ours).all(|port| left.contains(port)));
            prop_assert!(ours.difference(&before).all(|port| !left.contains(port)));
            prop_assert_eq!(parse(&format(&left)), left);
        }
    }

    fn any_ports() -> impl Strategy<Value = BTreeSet<u16>> {
        prop::collection::btree_set(0u16..40, 0..20)
    }
}
