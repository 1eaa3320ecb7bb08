//! Sysctls of the node that the agent changes, with what they were: on disk before each change, so that whatever happens
//! after it they can be given back. Sysctls of links of our own go with the links and are not in here.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::{NetlinkError, sysctl};

/// Below the agent's state directory: a line for each sysctl with its key, its value before us, and ours.
pub const STATE_NAME: &str = "sysctls";

/// The sysctls that were changed.
#[derive(Clone, Debug)]
pub struct ChangedSysctls {
    path: PathBuf,
}

/// Values before us and ours, by key.
type Entries = BTreeMap<String, (String, String)>;

impl ChangedSysctls {
    /// Those of the agent with this state directory.
    #[must_use]
    pub fn of(state_dir: &Path) -> Self {
        Self {
            path: state_dir.join(STATE_NAME),
        }
    }

    /// Sets a sysctl (slashes, not dots) unless it has that value already. A key that the kernel lacks is no error.
    ///
    /// # Errors
    /// [`NetlinkError`] names the key or the file.
    pub fn set(&self, key: &str, value: &str) -> Result<(), NetlinkError> {
        self.set_with(key, value, &[])
    }

    /// As [`Self::set`], of a sysctl that carries those of single links along: they are given back with it.
    ///
    /// # Errors
    /// [`NetlinkError`] names the key or the file.
    pub fn set_with(&self, key: &str, value: &str, carried: &[String]) -> Result<(), NetlinkError> {
        let Some(now) = sysctl::get(key) else {
            return Ok(());
        };
        if now == value {
            return Ok(());
        }
        let mut entries = self.read()?;
        for key in carried {
            if let Some(now) = sysctl::get(key) {
                note(&mut entries, key, &now, value);
            }
        }
        note(&mut entries, key, &now, value);
        self.write(&entries)?;
        sysctl::set(key, value)
    }

    /// Gives back what was changed and still has our value; one line for each. Safe to repeat.
    ///
    /// # Errors
    /// [`NetlinkError`] names the key or the file.
    pub fn restore(&self) -> Result<Vec<String>, NetlinkError> {
        let entries = self.read()?;
        let mut ours: Vec<(&String, &(String, String))> = entries
            .iter()
            // What has another value now was set by somebody else since.
            .filter(|(key, (_, ours))| sysctl::get(key).as_ref() == Some(ours))
            .collect();
        // Those that carry others along first.
        ours.sort_by_key(|(key, _)| key.contains("/conf/") && !key.contains("/conf/all/"));
        let mut restored = Vec::new();
        for (key, (before, value)) in ours {
            sysctl::set_if_present(key, before)?;
            if value != before {
                restored.push(format!("{key} is {before} again"));
            }
        }
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(self.failed("remove", e)),
            _ => Ok(restored),
        }
    }

    fn read(&self) -> Result<Entries, NetlinkError> {
        match fs::read_to_string(&self.path) {
            Ok(text) => Ok(parse(&text)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Entries::new()),
            Err(e) => Err(self.failed("read", e)),
        }
    }

    fn write(&self, entries: &Entries) -> Result<(), NetlinkError> {
        let fresh = self.path.with_extension("new");
        let write = || {
            let mut file = File::create(&fresh)?;
            file.write_all(format(entries).as_bytes())?;
            file.sync_all()?;
            fs::rename(&fresh, &self.path)
        };
        write().map_err(|e| self.failed("write", e))
    }

    fn failed(&self, action: &str, source: io::Error) -> NetlinkError {
        NetlinkError::new(format!("{action} {}", self.path.display()), source)
    }
}

/// Notes that a value becomes ours. What it was when we changed it last counts: a start of the machine or somebody else may
/// have set it since.
fn note(entries: &mut Entries, key: &str, now: &str, ours: &str) {
    let before = match entries.get(key) {
        Some((before, known)) if known == now => before.clone(),
        _ => now.to_owned(),
    };
    entries.insert(key.to_owned(), (before, ours.to_owned()));
}

fn parse(text: &str) -> Entries {
    let line = |line: &str| {
        let mut parts = line.split('\t');
        let (key, before, ours) = (parts.next()?, parts.next()?, parts.next()?);
        Some((key.to_owned(), (before.to_owned(), ours.to_owned())))
    };
    text.lines().filter_map(line).collect()
}

fn format(entries: &Entries) -> String {
    let mut text = String::new();
    for (key, (before, ours)) in entries {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{key}\t{before}\t{ours}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_before_us_is_kept_over_changes_of_ours() {
        let mut entries = Entries::new();
        note(&mut entries, "a", "0", "1");
        note(&mut entries, "a", "1", "2");
        assert_eq!(entries["a"], ("0".into(), "2".into()));
        // Somebody else, or a start of the machine.
        note(&mut entries, "a", "5", "2");
        assert_eq!(entries["a"], ("5".into(), "2".into()));
        note(&mut entries, "b", "", "x");
        assert_eq!(parse(&format(&entries)), entries);
        assert_eq!(parse("junk\nc\t1\n"), Entries::new());
    }
}
