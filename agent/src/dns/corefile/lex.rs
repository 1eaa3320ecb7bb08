//! Text to tokens. [pure]

use std::sync::Arc;

use super::{CorefileError, Place};

/// A larger file is no Corefile.
pub(super) const MAX_FILE_BYTES: usize = 1 << 20;

/// A word or a brace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) text: String,
    /// In quotes: never a brace.
    pub(super) quoted: bool,
    /// The first one of its line.
    pub(super) starts_line: bool,
    pub(super) place: Place,
}

impl Token {
    pub(super) fn opens(&self) -> bool {
        !self.quoted && self.text == "{"
    }

    pub(super) fn closes(&self) -> bool {
        !self.quoted && self.text == "}"
    }
}

/// White space; a mark of byte order counts as such.
pub(super) fn is_blank(c: char) -> bool {
    c.is_whitespace() || c == '\u{feff}'
}

/// Reads words: separated by white space, or between quotes, where \" is a quote. A # where a word could begin starts a
/// comment up to the end of the line.
pub(super) fn tokens(text: &str, file: &Arc<str>) -> Result<Vec<Token>, CorefileError> {
    let mut place = Place {
        file: Arc::clone(file),
        line: 1,
    };
    if text.len() > MAX_FILE_BYTES {
        return Err(place.error(format!("a Corefile has at most {MAX_FILE_BYTES} bytes")));
    }
    let mut found = Vec::new();
    let mut characters = text.chars().peekable();
    let mut starts_line = true;
    while let Some(first) = characters.next() {
        if first == '\n' {
            place.line += 1;
            starts_line = true;
            continue;
        }
        if is_blank(first) {
            continue;
        }
        if first == '#' {
            while characters.next_if(|c| *c != '\n').is_some() {}
            continue;
        }
        let begin = place.clone();
        let text = if first == '"' {
            quoted(&mut characters, &mut place)?
        } else {
            let mut word = String::from(first);
            while let Some(next) = characters.next_if(|c| !is_blank(*c)) {
                word.push(next);
            }
            word
        };
        found.push(Token {
            text,
            quoted: first == '"',
            starts_line: std::mem::take(&mut starts_line),
            place: begin,
        });
    }
    Ok(found)
}

fn quoted(
    characters: &mut impl Iterator<Item = char>,
    place: &mut Place,
) -> Result<String, CorefileError> {
    let begin = place.clone();
    let mut word = String::new();
    let mut escaped = false;
    for next in characters {
        if next == '\n' {
            place.line += 1;
        }
        match next {
            '"' if !escaped => return Ok(word),
            '\\' if !escaped => {
                escaped = true;
                continue;
            }
            // Only quotes are escaped: every other backslash stands for itself.
            '"' => {}
            _ if escaped => word.push('\\'),
            _ => {}
        }
        escaped = false;
        word.push(next);
    }
    Err(begin.error("the quotes that begin here do not end"))
}
