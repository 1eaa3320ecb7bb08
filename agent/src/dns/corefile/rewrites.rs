//! The directive rewrite: rules for questions, and for their answers. [pure]

use hickory_proto::rr::{Name, RecordType};
use regex::Regex;

use super::CorefileError;
use super::syntax::Line;

/// Bytes of the program that a pattern may become.
const MAX_PATTERN_BYTES: usize = 1 << 18;

/// One rule. The first that matches ends the list unless it says otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct RewriteRule {
    pub goes_on: bool,
    pub field: Field,
}

/// What of the question, or of its answer, is changed.
#[derive(Clone, Debug, PartialEq)]
pub enum Field {
    Name(NameRule),
    Type(RecordType, RecordType),
    /// The TTLs of answers for matching names.
    Ttl(Match, TtlRange),
}

/// Seconds; TTLs outside are moved to the nearer end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TtlRange {
    pub least: u32,
    pub most: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NameRule {
    pub matching: Match,
    /// A name or a part of one, with {1} for groups of a regular expression.
    pub to: String,
    /// How names in the answer are changed back.
    pub answer: Vec<AnswerRule>,
}

/// Names are matched in lower case, with their last dot.
#[derive(Clone, Debug)]
pub enum Match {
    Exact(Name),
    Prefix(String),
    Suffix(String),
    Substring(String),
    Regex(Regex),
}

impl PartialEq for Match {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Exact(a), Self::Exact(b)) => a == b,
            (Self::Prefix(a), Self::Prefix(b))
            | (Self::Suffix(a), Self::Suffix(b))
            | (Self::Substring(a), Self::Substring(b)) => a == b,
            (Self::Regex(a), Self::Regex(b)) => a.as_str() == b.as_str(),
            _ => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum AnswerRule {
    /// What was asked for stands where the rewritten name did.
    Auto,
    /// Owners.
    Name(Replacement),
    /// Names that records hold.
    Value(Replacement),
}

#[derive(Clone, Debug)]
pub struct Replacement {
    pub pattern: Regex,
    pub to: String,
}

impl PartialEq for Replacement {
    fn eq(&self, other: &Self) -> bool {
        self.pattern.as_str() == other.pattern.as_str() && self.to == other.to
    }
}

const KINDS: [&str; 5] = ["exact", "prefix", "suffix", "substring", "regex"];

/// Reads a line, with its braces where it has some.
pub(super) fn parse(line: &Line) -> Result<RewriteRule, CorefileError> {
    let mut words: Vec<&str> = line.args().iter().map(String::as_str).collect();
    // Braces hold the same words, line by line.
    for inner in line.body() {
        inner.without_body()?;
        words.extend(inner.words.iter().map(String::as_str));
    }
    let goes_on = match words.first() {
        Some(&"continue") => true,
        Some(&"stop") => false,
        _ => {
            return field(line, &words).map(|field| RewriteRule {
                goes_on: false,
                field,
            });
        }
    };
    let field = field(line, &words[1..])?;
    Ok(RewriteRule { goes_on, field })
}

fn field(line: &Line, words: &[&str]) -> Result<Field, CorefileError> {
    match words {
        ["type", from, to] => {
            let parse = |text: &str| {
                text.to_ascii_uppercase()
                    .parse()
                    .map_err(|_| line.error(format!("{text} is no record type")))
            };
            Ok(Field::Type(parse(from)?, parse(to)?))
        }
        ["ttl", kind, from, ttl] if KINDS.contains(kind) => Ok(Field::Ttl(
            matching(line, kind, from)?,
            ttl_range(line, ttl)?,
        )),
        ["ttl", from, ttl] => Ok(Field::Ttl(
            matching(line, "exact", from)?,
            ttl_range(line, ttl)?,
        )),
        ["name", kind, from, to, answer @ ..] if KINDS.contains(kind) => {
            name_rule(line, kind, from, to, answer)
        }
        ["name", from, to, answer @ ..] => name_rule(line, "exact", from, to, answer),
        [field @ ("type" | "ttl" | "name"), ..] => {
            Err(line.error(format!("rewrite {field} needs a source and a target")))
        }
        [other, ..] => Err(line.error(format!(
            "rewriting {other} is not done here, only name, type and ttl"
        ))),
        [] => Err(line.error("rewrite needs a field, a source and a target")),
    }
}

fn name_rule(
    line: &Line,
    kind: &str,
    from: &str,
    to: &str,
    answer: &[&str],
) -> Result<Field, CorefileError> {
    let matching = matching(line, kind, from)?;
    let to = match matching {
        Match::Exact(_) => absolute(line, to)?.to_ascii(),
        // Groups are put in later.
        _ => to.to_ascii_lowercase(),
    };
    let mut rest = answer;
    let mut rules = Vec::new();
    while !rest.is_empty() {
        let (rule, after) = match rest {
            ["answer", "auto", after @ ..] => (AnswerRule::Auto, after),
            ["answer", "name", from, to, after @ ..] => {
                (AnswerRule::Name(replacement(line, from, to)?), after)
            }
            ["answer", "value", from, to, after @ ..] => {
                (AnswerRule::Value(replacement(line, from, to)?), after)
            }
            _ => {
                return Err(line.error(format!(
                    "{:?} is no rule for answers, as answer auto, answer name FROM TO and answer value FROM TO are",
                    rest.join(" ")
                )));
            }
        };
        rules.push(rule);
        rest = after;
    }
    Ok(Field::Name(NameRule {
        matching,
        to,
        answer: rules,
    }))
}

fn matching(line: &Line, kind: &str, from: &str) -> Result<Match, CorefileError> {
    let text = from.to_ascii_lowercase();
    Ok(match kind {
        "prefix" => Match::Prefix(text),
        "suffix" => Match::Suffix(text),
        "substring" => Match::Substring(text),
        "regex" => Match::Regex(pattern(line, from)?),
        _ => Match::Exact(absolute(line, from)?),
    })
}

fn absolute(line: &Line, text: &str) -> Result<Name, CorefileError> {
    let name = Name::from_ascii(text).map(|mut name| {
        name.set_fqdn(true);
        name.to_lowercase()
    });
    name.map_err(|why| line.error(format!("{text} is no name: {why}")))
}

fn replacement(line: &Line, from: &str, to: &str) -> Result<Replacement, CorefileError> {
    Ok(Replacement {
        pattern: pattern(line, from)?,
        to: to.to_ascii_lowercase(),
    })
}

fn pattern(line: &Line, text: &str) -> Result<Regex, CorefileError> {
    regex::RegexBuilder::new(text)
        .size_limit(MAX_PATTERN_BYTES)
        .build()
        .map_err(|why| line.error(format!("{text:?} is no pattern: {why}")))
}

/// 30, or 30-60, -60, 30-.
fn ttl_range(line: &Line, text: &str) -> Result<TtlRange, CorefileError> {
    let number = |text: &str, unset| match text {
        "" => Ok(unset),
        text => line.number(text),
    };
    let range = match text.split_once('-') {
        Some((least, most)) => TtlRange {
            least: number(least, 0)?,
            most: number(most, u32::MAX)?,
        },
        None => {
            let ttl = line.number(text)?;
            TtlRange {
                least: ttl,
                most: ttl,
            }
        }
    };
    if range.least > range.most {
        return Err(line.error(format!("{text} is no range")));
    }
    Ok(range)
}
