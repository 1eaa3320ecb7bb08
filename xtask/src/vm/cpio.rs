//! Writer of the `newc` cpio format that the kernel takes as an initramfs (Documentation/driver-api/early-userspace).

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// An archive under construction.
#[derive(Debug, Default)]
pub(super) struct Cpio {
    bytes: Vec<u8>,
    inode: u32,
}

impl Cpio {
    pub(super) fn folder(&mut self, path: &str) {
        self.entry(path, FOLDER | 0o755, b"");
    }

    /// The folders above a path; one that is there already stays as it is.
    pub(super) fn parents(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            self.folder(path.get(..at).unwrap_or_default());
        }
    }

    pub(super) fn file(&mut self, path: &str, content: &[u8], mode: u32) {
        self.entry(path, FILE | mode, content);
    }

    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.entry(path, LINK | 0o777, target.as_bytes());
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, b"");
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        let links = if mode & FOLDER != 0 { 2 } else { 1 };
        // magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        let header = format!(
            "070701{:08x}{mode:08x}{:08x}{:08x}{links:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}",
            self.inode,
            0,
            0,
            0,
            content.len(),
            0,
            0,
            0,
            0,
            path.len() + 1,
            0
        );
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_110_bytes_and_entries_start_aligned() {
        let mut cpio = Cpio::default();
        cpio.folder("bin");
        cpio.file("bin/a", b"12345", 0o755);
        let bytes = cpio.finish();
        let starts: Vec<usize> = bytes
            .windows(6)
            .enumerate()
            .filter(|(_, w)| *w == b"070701")
            .map(|(at, _)| at)
            .collect();
        assert_eq!(starts.len(), 3);
        assert!(starts.iter().all(|at| at % 4 == 0), "{starts:?}");
        // The name follows the header: 6 bytes of magic and 13 fields of 8 digits.
        assert_eq!(bytes.get(110..114), Some(&b"bin\0"[..]));
    }
}
