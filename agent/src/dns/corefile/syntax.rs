//! Tokens to server blocks: keys and lines, with snippets, imports and environment variables put in place. [pure]

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::lex::{Token, is_blank, tokens};
use super::{CorefileError, Place, Sources};

/// Imports of snippets and files in one configuration: what imports itself ends here.
const MAX_IMPORTS: usize = 1000;
/// Words and braces after all imports.
const MAX_TOKENS: usize = 100_000;
/// Braces within braces.
const MAX_DEPTH: usize = 8;

/// A server block as written: what it serves, and its directives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawBlock {
    pub keys: Vec<String>,
    pub lines: Vec<Line>,
    pub place: Place,
}

/// A directive or a line inside one: its words, at least one, and what is between its braces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub words: Vec<String>,
    pub body: Option<Vec<Line>>,
    pub place: Place,
}

/// Reads a Corefile into blocks; nothing of what directives mean is checked.
///
/// # Errors
/// [`CorefileError`] with file and line.
pub fn read(text: &str, file: &str, sources: &dyn Sources) -> Result<Vec<RawBlock>, CorefileError> {
    let file = Arc::from(file);
    let mut parser = Parser {
        rest: tokens(text, &file)?,
        sources,
        snippets: HashMap::new(),
        imports: 0,
        taken: 0,
        last: Place { file, line: 1 },
    };
    parser.rest.reverse();
    let mut blocks = Vec::new();
    while let Some(token) = parser.next()? {
        if token.text == "import" {
            parser.import(&token)?;
        } else {
            blocks.extend(parser.block(token)?);
        }
    }
    Ok(blocks)
}

struct Parser<'a> {
    /// What is still to be read, the next one last.
    rest: Vec<Token>,
    sources: &'a dyn Sources,
    snippets: HashMap<String, Vec<Token>>,
    imports: usize,
    taken: usize,
    last: Place,
}

impl Parser<'_> {
    /// The next token, with its variables replaced.
    fn next(&mut self) -> Result<Option<Token>, CorefileError> {
        let Some(mut token) = self.rest.pop() else {
            return Ok(None);
        };
        self.taken += 1;
        if self.taken > MAX_TOKENS {
            return Err(token
                .place
                .error(format!("a configuration has at most {MAX_TOKENS} words")));
        }
        self.last = token.place.clone();
        token.text = variables(&token.text, self.sources).map_err(|why| token.place.error(why))?;
        Ok(Some(token))
    }

    fn next_of_line(&mut self) -> Result<Option<Token>, CorefileError> {
        match self.rest.last() {
            Some(token) if !token.starts_line => self.next(),
            _ => Ok(None),
        }
    }

    /// A server block, or none for the definition of a snippet.
    fn block(&mut self, first: Token) -> Result<Option<RawBlock>, CorefileError> {
        let place = first.place.clone();
        let mut keys = Vec::new();
        let mut token = first;
        let braces = loop {
            if token.opens() {
                if keys.is_empty() {
                    return Err(token
                        .place
                        .error("a server block needs a zone before its {"));
                }
                break true;
            }
            if token.closes() {
                return Err(token.place.error("this } closes nothing"));
            }
            let (key, more) = match token.text.strip_suffix(',') {
                Some(key) => (key, true),
                None => (&*token.text, false),
            };
            if key.is_empty() || key.ends_with(',') {
                return Err(token.place.error("a zone is missing here"));
            }
            keys.push(key.to_owned());
            let following = if more {
                self.next()?
            } else {
                self.next_of_line()?
            };
            token = match following {
                Some(next) if more && next.opens() => {
                    return Err(next.place.error("a zone is missing after the comma"));
                }
                Some(next) => next,
                None if more => return Err(self.last.error("a zone is missing after the comma")),
                None => break false,
            };
        };
        if let [key] = keys.as_slice()
            && let Some(name) = key.strip_prefix('(').and_then(|k| k.strip_suffix(')'))
        {
            if !braces {
                return Err(place.error(format!("the snippet {name} needs braces")));
            }
            self.snippet(name.to_owned(), &place)?;
            return Ok(None);
        }
        let lines = self.lines(braces.then_some(&place), 1)?;
        Ok(Some(RawBlock { keys, lines, place }))
    }

    /// Lines up to the brace that closes them, or to the end where nothing was opened.
    fn lines(&mut self, opened: Option<&Place>, depth: usize) -> Result<Vec<Line>, CorefileError> {
        let mut lines = Vec::new();
        while let Some(token) = self.next()? {
            if token.closes() {
                return match opened {
                    Some(_) => Ok(lines),
                    None => Err(token.place.error("this } closes nothing")),
                };
            }
            if token.opens() {
                return Err(token.place.error("a directive is missing before this {"));
            }
            if token.text == "import" {
                self.import(&token)?;
            } else {
                lines.push(self.line(token, depth)?);
            }
        }
        match opened {
            None => Ok(lines),
            Some(place) => Err(place.error("the braces that begin here are not closed")),
        }
    }

    fn line(&mut self, first: Token, depth: usize) -> Result<Line, CorefileError> {
        let place = first.place;
        let mut words = vec![first.text];
        let mut body = None;
        while self.rest.last().is_some_and(|token| !token.closes())
            && let Some(token) = self.next_of_line()?
        {
            if !token.opens() {
                words.push(token.text);
                continue;
            }
            if depth >= MAX_DEPTH {
                return Err(token.place.error(format!("more than {MAX_DEPTH} braces")));
            }
            body = Some(self.lines(Some(&token.place), depth + 1)?);
            break;
        }
        Ok(Line { words, body, place })
    }

    /// Keeps everything up to the closing brace for imports.
    fn snippet(&mut self, name: String, place: &Place) -> Result<(), CorefileError> {
        let mut depth = 1usize;
        let mut kept: Vec<Token> = Vec::new();
        while let Some(token) = self.rest.pop() {
            depth = if token.opens() {
                depth + 1
            } else if token.closes() {
                depth - 1
            } else {
                depth
            };
            if depth == 0 {
                // Where it is imported, it begins a line.
                if let Some(first) = kept.first_mut() {
                    first.starts_line = true;
                }
                return match self.snippets.insert(name, kept) {
                    None => Ok(()),
                    Some(_) => Err(place.error("this snippet is defined already")),
                };
            }
            kept.push(token);
        }
        Err(place.error("the braces of this snippet are not closed"))
    }

    /// Puts a snippet's or files' tokens in the place of the directive.
    fn import(&mut self, directive: &Token) -> Result<(), CorefileError> {
        let place = &directive.place;
        let pattern = self.next_of_line()?;
        let (Some(pattern), None) = (pattern, self.next_of_line()?) else {
            return Err(place.error("import takes one snippet, file or pattern"));
        };
        self.imports += 1;
        if self.imports > MAX_IMPORTS {
            return Err(place.error(format!(
                "more than {MAX_IMPORTS} imports: does {} import itself?",
                pattern.text
            )));
        }
        if let Some(snippet) = self.snippets.get(&pattern.text) {
            let tokens = snippet.clone();
            return self.put(tokens, place);
        }
        let path = beside(&place.file, &pattern.text);
        let files = if path.contains(['*', '?', '[']) {
            self.sources.matching(&path)
        } else {
            vec![path]
        };
        for file in files.iter().rev() {
            let text = self
                .sources
                .read(file)
                .map_err(|why| place.error(format!("import {}: {why}", pattern.text)))?;
            let tokens = tokens(&text, &Arc::from(file.as_str()))?;
            self.put(tokens, place)?;
        }
        Ok(())
    }

    fn put(&mut self, tokens: Vec<Token>, place: &Place) -> Result<(), CorefileError> {
        if self.rest.len() + tokens.len() > MAX_TOKENS {
            return Err(place.error(format!("a configuration has at most {MAX_TOKENS} words")));
        }
        self.rest.extend(tokens.into_iter().rev());
        Ok(())
    }
}

/// A path as it is meant in a file: relative to that file's folder.
pub(super) fn beside(file: &str, path: &str) -> String {
    match file.rsplit_once('/') {
        Some((folder, _)) if !path.starts_with('/') => format!("{folder}/{path}"),
        _ => path.to_owned(),
    }
}

/// Replaces {$NAME} and {%NAME%}. What a variable holds is not looked through again.
fn variables(text: &str, sources: &dyn Sources) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let found = [("{$", "}"), ("{%", "%}")]
            .into_iter()
            .find_map(|(begin, end)| from.strip_prefix(begin)?.split_once(end))
            .filter(|(name, _)| !name.is_empty());
        match found {
            Some((name, after)) => {
                out.push_str(&sources.variable(name)?);
                rest = after;
            }
            None => {
                out.push('{');
                rest = &from[1..];
            }
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// The block as a Corefile has it; reading that gives the same block.
impl fmt::Display for RawBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<String> = self.keys.iter().map(|key| word(key)).collect();
        writeln!(f, "{} {{", keys.join(" "))?;
        for line in &self.lines {
            line.write(f, 1)?;
        }
        writeln!(f, "}}")
    }
}

impl Line {
    fn write(&self, f: &mut fmt::Formatter<'_>, depth: usize) -> fmt::Result {
        let indent = "    ".repeat(depth);
        let words: Vec<String> = self.words.iter().map(|text| word(text)).collect();
        write!(f, "{indent}{}", words.join(" "))?;
        match &self.body {
            None => writeln!(f),
            Some(lines) => {
                writeln!(f, " {{")?;
                for line in lines {
                    line.write(f, depth + 1)?;
                }
                writeln!(f, "{indent}}}")
            }
        }
    }
}

fn word(text: &str) -> String {
    let plain = !text.is_empty()
        && !text.contains(is_blank)
        && !text.starts_with(['#', '"'])
        && text != "{"
        && text != "}";
    if plain {
        text.to_owned()
    } else {
        format!("\"{}\"", text.replace('"', "\\\""))
    }
}
