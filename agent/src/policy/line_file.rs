//! A file with a JSON record in each line, added to at its end or replaced as a whole. Nothing waits for the disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use serde::Serialize;

/// The file, open for more.
#[derive(Debug)]
pub(super) struct LineFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

impl LineFile {
    /// The file as it is, made where there is none. Its last line has to be whole.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let file = options().append(true).open(&path)?;
        Ok(Self { path, file })
    }

    /// The file with these lines and no others; until they are all there, with those it had.
    pub(super) fn replace(path: PathBuf, text: &[u8]) -> io::Result<Self> {
        let mut new = path.clone().into_os_string();
        new.push(".new");
        let mut file = options().write(true).truncate(true).open(&new)?;
        file.write_all(text)?;
        std::fs::rename(&new, &path)?;
        Self::open(path)
    }

    /// Adds lines.
    pub(super) fn add(&mut self, records: &[impl Serialize]) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        self.file.write_all(&lines(records)?)
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).mode(0o600);
    options
}

/// The text of the records.
pub(super) fn lines(records: &[impl Serialize]) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    for record in records {
        serde_json::to_writer(&mut text, record)?;
        text.push(b'\n');
    }
    Ok(text)
}
