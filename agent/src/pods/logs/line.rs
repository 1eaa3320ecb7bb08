//! The CRI log format: `TIME STREAM TAGS CONTENT` a line. [pure]

use super::super::view::Micros;

/// One line, or a part of a long one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    /// RFC 3339 with nanoseconds, as the runtime wrote it.
    pub(crate) time: &'a str,
    pub(crate) at_us: Micros,
    /// The line goes on in the next entry: no newline after it.
    pub(crate) partial: bool,
    pub(crate) content: &'a [u8],
}

/// Reads one entry without its newline; `None` when it is not in the format.
pub(crate) fn parse(entry: &[u8]) -> Option<Line<'_>> {
    let (time, rest) = split(entry)?;
    let (stream, rest) = split(rest)?;
    if stream != b"stdout" && stream != b"stderr" {
        return None;
    }
    // An empty line has nothing, not even the last space, after its tags.
    let (tags, content) = split(rest).unwrap_or((rest, b""));
    let time = std::str::from_utf8(time).ok()?;
    let at_us = time.parse::<jiff::Timestamp>().ok()?.as_microsecond();
    let partial = tags.split(|b| *b == b':').next() == Some(b"P");
    Some(Line {
        time,
        at_us,
        partial,
        content,
    })
}

fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|b| *b == b' ')?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

/// What of a log is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) timestamps: bool,
    /// Entries before this time are left out; zero keeps all.
    pub(crate) since_us: Micros,
    /// Bytes that may still be sent.
    pub(crate) left: Option<u64>,
}

/// Turns entries into what the reader sees, across any cut of the input.
#[derive(Debug)]
pub(crate) struct Shaper {
    wanted: Wanted,
    /// An entry whose end has not come yet.
    rest: Vec<u8>,
    mid_line: bool,
}

/// An entry longer than this is not one that a runtime wrote; it is dropped.
const MAX_ENTRY_BYTES: usize = 1 << 20;

impl Shaper {
    pub(crate) fn new(wanted: Wanted) -> Self {
        Self {
            wanted,
            rest: Vec::new(),
            mid_line: false,
        }
    }

    /// True when as many bytes as were asked for have been given out.
    pub(crate) fn is_full(&self) -> bool {
        self.wanted.left == Some(0)
    }

    /// Takes bytes of the file and appends what they show.
    pub(crate) fn push(&mut self, mut bytes: &[u8], output: &mut Vec<u8>) {
        while let Some(at) = bytes.iter().position(|b| *b == b'\n') {
            let entry = &bytes[..at];
            bytes = &bytes[at + 1..];
            if self.rest.is_empty() {
                self.entry(entry, output);
            } else {
                let mut whole = std::mem::take(&mut self.rest);
                whole.extend_from_slice(entry);
                self.entry(&whole, output);
            }
        }
        if self.rest.len() + bytes.len() <= MAX_ENTRY_BYTES {
            self.rest.extend_from_slice(bytes);
        }
    }

    fn entry(&mut self, entry: &[u8], output: &mut Vec<u8>) {
        let Some(line) = parse(entry) else { return };
        if line.at_us < self.wanted.since_us {
            return;
        }
        if self.wanted.timestamps && !self.mid_line {
            self.put(line.time.as_bytes(), output);
            self.put(b" ", output);
        }
        self.put(line.content, output);
        if !line.partial {
            self.put(b"\n", output);
        }
        self.mid_line = line.partial;
    }

    fn put(&mut self, bytes: &[u8], output: &mut Vec<u8>) {
        let count = match &mut self.wanted.left {
            None => bytes.len(),
            Some(left) => {
                let count = usize::try_from(*left)
                    .unwrap_or(usize::MAX)
                    .min(bytes.len());
                *left -= count as u64;
                count
            }
        };
        output.extend_from_slice(&bytes[..count]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "2026-01-02T03:04:05.000000001Z stdout F one\n\
        2026-01-02T03:04:06.5Z stderr P tw\n2026-01-02T03:04:06.6Z stderr F o\nnot a line\n\
        2026-01-02T03:04:07Z stdout F\n2026-01-02T03:04:08Z stdout F three\n";

    fn shown(wanted: Wanted, chunk: usize) -> String {
        let mut shaper = Shaper::new(wanted);
        let mut output = Vec::new();
        for piece in LOG.as_bytes().chunks(chunk) {
            shaper.push(piece, &mut output);
        }
        String::from_utf8(output).unwrap()
    }

    #[test]
    fn entries_become_lines_however_they_are_cut() {
        for chunk in [1, 7, 50, 10_000] {
            assert_eq!(shown(Wanted::default(), chunk), "one\ntwo\n\nthree\n");
        }
    }

    #[test]
    fn time_and_size_limits() {
        let since_us = "2026-01-02T03:04:06.55Z"
            .parse::<jiff::Timestamp>()
            .unwrap()
            .as_microsecond();
        let wanted = Wanted {
            since_us,
            ..Wanted::default()
        };
        assert_eq!(shown(wanted, 9), "o\n\nthree\n");
        let wanted = Wanted {
            left: Some(5),
            ..Wanted::default()
        };
        assert_eq!(shown(wanted, 9), "one\nt");
        let wanted = Wanted {
            timestamps: true,
            ..Wanted::default()
        };
        assert!(shown(wanted, 9).starts_with(
            "2026-01-02T03:04:05.000000001Z one\n2026-01-02T03:04:06.5Z two\n2026-01-02T03:04:07Z \n"
        ));
    }

    #[test]
    fn foreign_bytes_are_skipped() {
        for bytes in [
            &b"\xff\xfe"[..],
            b"",
            b"a b c d",
            b"2026-01-02T03:04:05Z stdin F x",
        ] {
            assert_eq!(parse(bytes), None);
        }
    }
}
