//! Learnt addresses on disk, so that a new agent lets through what the one before it let through.
//!
//! The first line names the boot: after another start of the machine nobody remembers an answer, and the clock of the
//! times below begins again. Then one line for each address, written before the address is used, and the whole anew when
//! something ended or is believed for longer. Nothing waits for the disk: what a power cut takes away is of no use.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::compile::policy::DomainAnswers;
use crate::policy::PolicyError;
use crate::policy::line_file::{LineFile, lines};

/// Name of the file below the state directory.
pub const DOMAINS_NAME: &str = "policy.domains";

/// A larger file is not ours: all that may be learnt is less than half as long.
const MAX_FILE_BYTES: u64 = 32 << 20;

/// An address of a name, until a time of the boot's clock in microseconds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::policy) struct Record {
    pub(super) name: String,
    pub(super) address: IpAddr,
    pub(super) until_us: i64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    boot: String,
}

/// The file, open for more.
#[derive(Debug)]
pub(in crate::policy) struct DomainFile {
    lines: LineFile,
    boot: String,
}

impl DomainFile {
    /// Opens the file and reads what an earlier agent of this boot wrote. A file that makes no sense counts as empty, with a
    /// line in the log; only its last line may be cut off.
    pub(in crate::policy) fn open(state_dir: &Path, boot: &str) -> io::Result<(Self, Vec<Record>)> {
        let path = state_dir.join(DOMAINS_NAME);
        let records = match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
            Ok(meta) if meta.len() > MAX_FILE_BYTES => {
                tracing::warn!(path = %path.display(), bytes = meta.len(),
                    "ignored learnt addresses of domain names: the file is too large to be ours");
                Vec::new()
            }
            Ok(_) => parse(&std::fs::read(&path)?, boot).unwrap_or_else(|line| {
                tracing::warn!(path = %path.display(), line,
                    "ignored learnt addresses of domain names: the file is broken; names have to be asked for again");
                Vec::new()
            }),
        };
        let lines = replace(path, boot, &records)?;
        let boot = boot.to_owned();
        Ok((Self { lines, boot }, records))
    }

    /// Adds lines.
    pub(super) fn add(&mut self, records: &[Record]) -> io::Result<()> {
        self.lines.add(records)
    }

    /// Makes the file hold these answers and no others.
    pub(super) fn rewrite(&mut self, answers: &DomainAnswers) -> io::Result<()> {
        let records = answers.iter().flat_map(|(name, addresses)| {
            addresses.map(|(address, until_us)| Record {
                name: name.to_owned(),
                address,
                until_us,
            })
        });
        let records: Vec<Record> = records.collect();
        self.lines = replace(self.lines.path.clone(), &self.boot, &records)?;
        Ok(())
    }

    /// What a failure is called.
    pub(in crate::policy) fn failed(&self, source: io::Error) -> PolicyError {
        PolicyError::Domains {
            path: self.lines.path.clone(),
            source,
        }
    }
}

/// The records of this boot, or the number of the line that is broken.
fn parse(text: &[u8], boot: &str) -> Result<Vec<Record>, usize> {
    let whole = text
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |end| end + 1);
    let mut lines = text[..whole].split_inclusive(|byte| *byte == b'\n');
    let Some(first) = lines.next() else {
        return if text.is_empty() {
            Ok(Vec::new())
        } else {
            Err(1)
        };
    };
    let header: Header = serde_json::from_slice(first).map_err(|_| 1_usize)?;
    if header.boot != boot {
        return Ok(Vec::new());
    }
    let records = lines.zip(2..);
    records
        .map(|(line, number)| serde_json::from_slice(line).map_err(|_| number))
        .collect()
}

fn replace(path: PathBuf, boot: &str, records: &[Record]) -> io::Result<LineFile> {
    let header = Header {
        boot: boot.to_owned(),
    };
    let mut text = lines(&[header])?;
    text.extend(lines(records)?);
    LineFile::replace(path, &text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::domains::Domains;

    fn record(last: u8) -> Record {
        Record {
            name: format!("n{last}.example"),
            address: IpAddr::from([192, 0, 2, last]),
            until_us: 100 + i64::from(last),
        }
    }

    #[test]
    fn what_was_added_is_there_again_in_the_same_boot() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, records) = DomainFile::open(dir.path(), "b1").unwrap();
        assert_eq!(records, []);
        file.add(&[record(1), record(2)]).unwrap();
        drop(file);
        let path = dir.path().join(DOMAINS_NAME);
        let mut text = std::fs::read(&path).unwrap();
        text.extend(b"{\"name\":\"cut.exam");
        std::fs::write(&path, text).unwrap();
        let (mut file, records) = DomainFile::open(dir.path(), "b1").unwrap();
        assert_eq!(records, [record(1), record(2)]);
        let mut answers = DomainAnswers::default();
        answers.learn("n3.example", &[record(3).address], 103);
        file.rewrite(&answers).unwrap();
        file.add(&[record(4)]).unwrap();
        let (_, records) = DomainFile::open(dir.path(), "b1").unwrap();
        assert_eq!(records, [record(3), record(4)]);
        assert_eq!(DomainFile::open(dir.path(), "b2").unwrap().1, []);
        assert_eq!(
            DomainFile::open(dir.path(), "b1").unwrap().1,
            [],
            "another boot began the file anew"
        );
    }

    #[test]
    fn a_broken_file_is_empty() {
        for broken in [
            "no header\n",
            "no end",
            "{\"boot\":\"b1\"}\n{\"name\":3}\n",
            "{\"boot\":\"b1\"}\n\n",
        ] {
            assert!(parse(broken.as_bytes(), "b1").is_err(), "{broken:?}");
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(DOMAINS_NAME), broken).unwrap();
            let (mut file, records) = DomainFile::open(dir.path(), "b1").unwrap();
            assert_eq!(records, []);
            file.add(&[record(7)]).unwrap();
            let (_, records) = DomainFile::open(dir.path(), "b1").unwrap();
            assert_eq!(records, [record(7)]);
        }
    }

    #[test]
    fn a_full_disk_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, _) = DomainFile::open(dir.path(), "b1").unwrap();
        let full = std::fs::OpenOptions::new().append(true).open("/dev/full");
        file.lines.file = full.unwrap();
        let domains = Domains::default();
        domains.known().fresh.push(record(1));
        let mut snapshot = domains.snapshot();
        domains.write_fresh(&mut snapshot, &mut file);
        assert!(domains.known().stale);
        std::sync::Arc::make_mut(&mut domains.known().answers).learn(
            "n1.example",
            &[record(1).address],
            101,
        );
        domains.tidy_file(&mut file).unwrap();
        let (_, records) = DomainFile::open(dir.path(), "b1").unwrap();
        assert_eq!(records, [record(1)]);
    }

    proptest! {
        #[test]
        fn foreign_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes, "b1");
        }
    }
}
