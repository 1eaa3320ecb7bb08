//! Identities on disk: maps outlive the agent, and are full of the numbers that it gave.
//!
//! One line for each, added before the number is used. Maps do not survive the machine, so nothing waits for the disk: what
//! a power cut takes away is of no use afterwards.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::compile::policy::Record;

/// Name of the file below the state directory.
pub const IDENTITIES_NAME: &str = "policy.identities";

/// A larger file is not ours.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The file, open for more.
#[derive(Debug)]
pub(super) struct IdentityFile {
    path: PathBuf,
    file: File,
}

impl IdentityFile {
    /// Opens the file and reads what an earlier agent wrote. Lines that make no sense are left out; of two with one number
    /// the last counts.
    pub(super) fn open(state_dir: &Path) -> io::Result<(Self, Vec<Record>)> {
        let path = state_dir.join(IDENTITIES_NAME);
        let text = match std::fs::metadata(&path) {
            Ok(meta) if meta.len() <= MAX_FILE_BYTES => std::fs::read(&path)?,
            _ => Vec::new(),
        };
        let lines = text.split(|byte| *byte == b'\n');
        let records: Vec<Record> = lines
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect();
        // Whatever was cut off must not run into the next line.
        if !text.is_empty() && !text.ends_with(b"\n") {
            return Ok((Self::replace(path, &records)?, records));
        }
        let file = options().append(true).open(&path)?;
        Ok((Self { path, file }, records))
    }

    /// Adds lines.
    pub(super) fn add(&mut self, records: &[Record]) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        self.file.write_all(&lines(records)?)
    }

    /// Makes the file hold these and no others.
    pub(super) fn rewrite(&mut self, records: &[Record]) -> io::Result<()> {
        *self = Self::replace(self.path.clone(), records)?;
        Ok(())
    }

    fn replace(path: PathBuf, records: &[Record]) -> io::Result<Self> {
        let new = path.with_extension("new");
        let mut file = options().write(true).truncate(true).open(&new)?;
        file.write_all(&lines(records)?)?;
        std::fs::rename(&new, &path)?;
        let file = options().append(true).open(&path)?;
        Ok(Self { path, file })
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).mode(0o600);
    options
}

fn lines(records: &[Record]) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    for record in records {
        serde_json::to_writer(&mut text, record)?;
        text.push(b'\n');
    }
    Ok(text)
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
