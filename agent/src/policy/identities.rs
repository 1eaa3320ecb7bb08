//! Identities on disk: maps outlive the agent, and are full of the numbers that it gave.
//!
//! One line for each, added before the number is used. Maps do not survive the machine, so nothing waits for the disk: what
//! a power cut takes away is of no use afterwards.

use std::io;
use std::path::Path;

use super::line_file::{LineFile, lines};
use crate::compile::policy::Record;

/// Name of the file below the state directory.
pub const IDENTITIES_NAME: &str = "policy.identities";

/// A larger file is not ours.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The file, open for more.
#[derive(Debug)]
pub(super) struct IdentityFile(LineFile);

impl IdentityFile {
    /// Opens the file and reads what an earlier agent wrote. Lines that make no sense are left out; of two with one number
    /// the last counts.
    pub(super) fn open(state_dir: &Path) -> io::Result<(Self, Vec<Record>)> {
        let path = state_dir.join(IDENTITIES_NAME);
        let text = match std::fs::metadata(&path) {
            Ok(meta) if meta.len() <= MAX_FILE_BYTES => std::fs::read(&path)?,
            _ => Vec::new(),
        };
        let written = text.split(|byte| *byte == b'\n');
        let records: Vec<Record> = written
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect();
        // Whatever was cut off must not run into the next line.
        let file = if text.is_empty() || text.ends_with(b"\n") {
            LineFile::open(path)?
        } else {
            LineFile::replace(path, &lines(&records)?)?
        };
        Ok((Self(file), records))
    }

    /// Adds lines.
    pub(super) fn add(&mut self, records: &[Record]) -> io::Result<()> {
        self.0.add(records)
    }

    /// Makes the file hold these and no others.
    pub(super) fn rewrite(&mut self, records: &[Record]) -> io::Result<()> {
        self.0 = LineFile::replace(self.0.path.clone(), &lines(records)?)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u32) -> Record {
        Record {
            id,
            sets: vec![format!("d{id}.example")],
            ports: vec![("http".into(), 6, 80)],
        }
    }

    #[test]
    fn what_was_added_is_there_again_but_for_a_line_that_was_cut() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, records) = IdentityFile::open(dir.path()).unwrap();
        assert_eq!(records, []);
        file.add(&[record(1), record(2)]).unwrap();
        drop(file);
        let path = dir.path().join(IDENTITIES_NAME);
        let mut text = std::fs::read(&path).unwrap();
        text.extend(b"{\"id\":3,\"sets\":[\"dc.ex");
        std::fs::write(&path, text).unwrap();
        let (mut file, records) = IdentityFile::open(dir.path()).unwrap();
        assert_eq!(records, [record(1), record(2)]);
        file.add(&[record(4)]).unwrap();
        let (mut file, records) = IdentityFile::open(dir.path()).unwrap();
        assert_eq!(records, [record(1), record(2), record(4)]);
        file.rewrite(&[record(9)]).unwrap();
        assert_eq!(IdentityFile::open(dir.path()).unwrap().1, [record(9)]);
    }
}
