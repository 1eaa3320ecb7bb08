//! Applies rewrite rules to questions, and undoes them in answers. [pure]

use hickory_proto::rr::{Name, RData, Record, RecordType};

use super::corefile::{AnswerRule, Field, Match, NameRule, Replacement, RewriteRule, TtlRange};

/// A question as it goes on, and what has to be done to its answer.
#[derive(Clone, Debug)]
pub(super) struct Rewritten {
    pub(super) name: Name,
    pub(super) record_type: RecordType,
    pub(super) undo: Undo,
}

/// How an answer becomes one to the question that was asked.
#[derive(Clone, Debug, Default)]
pub(super) struct Undo {
    /// The last change first.
    names: Vec<(Change, Vec<AnswerRule>)>,
    ttl: Option<TtlRange>,
}

#[derive(Clone, Debug)]
struct Change {
    asked: Name,
    became: Name,
}

/// What the rules make of a question; none when none of them matches.
pub(super) fn apply(
    rules: &[RewriteRule],
    name: &Name,
    record_type: RecordType,
) -> Option<Rewritten> {
    let mut rewritten = Rewritten {
        name: name.clone(),
        record_type,
        undo: Undo::default(),
    };
    let mut changed = false;
    for rule in rules {
        let matched = match &rule.field {
            Field::Name(name_rule) => rename(name_rule, &mut rewritten),
            Field::Type(from, to) => {
                let matched = rewritten.record_type == *from;
                if matched {
                    rewritten.record_type = *to;
                }
                matched
            }
            Field::Ttl(matching, range) => {
                let matched = matching.rewrite(&text_of(&rewritten.name), "").is_some();
                if matched {
                    rewritten.undo.ttl = Some(*range);
                }
                matched
            }
        };
        changed |= matched;
        if matched && !rule.goes_on {
            break;
        }
    }
    changed.then_some(rewritten)
}

/// A name that would be none is left as it is.
fn rename(rule: &NameRule, rewritten: &mut Rewritten) -> bool {
    let Some(became) = rule
        .matching
        .rewrite(&text_of(&rewritten.name), &rule.to)
        .and_then(|text| absolute(&text))
    else {
        return false;
    };
    let change = Change {
        asked: std::mem::replace(&mut rewritten.name, became.clone()),
        became,
    };
    rewritten
        .undo
        .names
        .insert(0, (change, rule.answer.clone()));
    true
}

fn text_of(name: &Name) -> String {
    name.to_ascii().to_ascii_lowercase()
}

fn absolute(text: &str) -> Option<Name> {
    let mut name = Name::from_ascii(text).ok()?;
    name.set_fqdn(true);
    Some(name)
}

impl Match {
    /// The whole name with what matched replaced; none when nothing does. A pattern takes names with or without the
    /// last dot, as both are written.
    fn rewrite(&self, name: &str, to: &str) -> Option<String> {
        match self {
            Self::Exact(own) => (text_of(own) == name).then(|| to.to_owned()),
            Self::Prefix(prefix) => Some(format!("{to}{}", name.strip_prefix(prefix.as_str())?)),
            Self::Suffix(suffix) => {
                let dotted = suffix.ends_with('.');
                let name = if dotted {
                    name
                } else {
                    name.trim_end_matches('.')
                };
                Some(format!("{}{to}", name.strip_suffix(suffix.as_str())?))
            }
            Self::Substring(part) => name
                .contains(part.as_str())
                .then(|| name.replace(part.as_str(), to)),
            Self::Regex(pattern) => expand(pattern, name, to),
        }
    }
}

impl Replacement {
    fn rewrite(&self, name: &Name) -> Option<Name> {
        absolute(&expand(&self.pattern, &text_of(name), &self.to)?)
    }
}

/// Puts the groups of a match into {0}, {1} and so on.
fn expand(pattern: &regex::Regex, name: &str, to: &str) -> Option<String> {
    let captures = pattern
        .captures(name)
        .or_else(|| pattern.captures(name.trim_end_matches('.')))?;
    let mut text = to.to_owned();
    for number in 0..captures.len() {
        let group = captures.get(number).map_or("", |group| group.as_str());
        text = text.replace(&format!("{{{number}}}"), group);
    }
    Some(text)
}

impl Undo {
    /// Changes an answer's records.
    pub(super) fn undo(&self, records: &mut [Record]) {
        for record in records {
            if let Some(range) = self.ttl {
                record.ttl = record.ttl.clamp(range.least, range.most);
            }
            for (change, rules) in &self.names {
                if rules.is_empty() {
                    change.restore(record);
                }
                for rule in rules {
                    match rule {
                        AnswerRule::Auto => change.restore(record),
                        AnswerRule::Name(replacement) => {
                            if let Some(name) = replacement.rewrite(&record.name) {
                                record.name = name;
                            }
                        }
                        AnswerRule::Value(replacement) => rename_value(record, replacement),
                    }
                }
            }
        }
    }
}

impl Change {
    fn restore(&self, record: &mut Record) {
        if record.name == self.became {
            record.name = self.asked.clone();
        }
    }
}

fn rename_value(record: &mut Record, replacement: &Replacement) {
    let name = match &mut record.data {
        RData::CNAME(cname) => &mut cname.0,
        RData::PTR(ptr) => &mut ptr.0,
        RData::NS(ns) => &mut ns.0,
        RData::MX(mx) => &mut mx.exchange,
        RData::SRV(srv) => &mut srv.target,
        _ => return,
    };
    if let Some(renamed) = replacement.rewrite(name) {
        *name = renamed;
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::{A, CNAME};

    use super::*;
    use crate::dns::corefile::{Corefile, Mounted};

    fn rules(lines: &str) -> Vec<RewriteRule> {
        let text = format!(". {{\n{lines}\n}}");
        let corefile = Corefile::parse(&text, "F", &Mounted::default()).unwrap();
        corefile.blocks[0].rewrites.clone()
    }

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    /// The name that is asked for, and the owner of an address of it in the answer.
    fn there_and_back(lines: &str, asked: &str) -> Option<(String, String)> {
        let rewritten = apply(&rules(lines), &name(asked), RecordType::A)?;
        let data = RData::A(A::new(192, 0, 2, 1));
        let mut records = [Record::from_rdata(rewritten.name.clone(), 5, data)];
        rewritten.undo.undo(&mut records);
        Some((rewritten.name.to_ascii(), records[0].name.to_ascii()))
    }

    #[test]
    fn names_there_and_back() {
        for (lines, asked, wanted) in [
            (
                "rewrite name a.example b.example",
                "A.example.",
                Some("b.example."),
            ),
            ("rewrite name a.example b.example", "x.a.example.", None),
            (
                "rewrite name prefix api- web-",
                "api-1.example.",
                Some("web-1.example."),
            ),
            (
                "rewrite name suffix .a.example .b.example",
                "x.a.example.",
                Some("x.b.example."),
            ),
            (
                "rewrite name suffix .a.example. .b.example.",
                "x.a.example.",
                Some("x.b.example."),
            ),
            (
                "rewrite name substring mid other",
                "x.mid.example.",
                Some("x.other.example."),
            ),
            (
                "rewrite name regex (.*)-(us)\\.example\\.org {1}.svc.{2}.example",
                "ftp-us.example.org.",
                Some("ftp.svc.us.example."),
            ),
            (
                "rewrite continue name a.example b.example\nrewrite name b.example c.example",
                "a.example.",
                Some("c.example."),
            ),
            (
                "rewrite name a.example b.example\nrewrite name b.example c.example",
                "a.example.",
                Some("b.example."),
            ),
            ("rewrite name regex (.*) a..{1}", "x.example.", None),
        ] {
            let found = there_and_back(lines, asked);
            let wanted = wanted.map(|name| (name.to_owned(), asked.to_owned()));
            assert_eq!(found, wanted, "{lines}");
        }
    }

    #[test]
    fn answers_by_rules_of_their_own() {
        let rules = rules(
            "rewrite stop {\n name regex (.*)\\.shop\\.example {1}.svc.local\n answer name (.*)\\.svc\\.local {1}.shop.example\n answer value (.*)\\.svc\\.local {1}.out.example\n }",
        );
        let rewritten = apply(&rules, &name("a.shop.example."), RecordType::A).unwrap();
        assert_eq!(rewritten.name, name("a.svc.local."));
        let target = RData::CNAME(CNAME(name("b.svc.local.")));
        let mut records = [Record::from_rdata(rewritten.name, 5, target)];
        rewritten.undo.undo(&mut records);
        assert_eq!(
            records[0].to_string(),
            "a.shop.example. 5 IN CNAME b.out.example."
        );
    }

    #[test]
    fn types_and_ttls() {
        let rules = rules("rewrite continue type ANY A\nrewrite ttl suffix example 30-60");
        let rewritten = apply(&rules, &name("a.example."), RecordType::ANY).unwrap();
        assert_eq!(rewritten.record_type, RecordType::A);
        for (ttl, wanted) in [(5, 30), (45, 45), (99, 60)] {
            let data = RData::A(A::new(192, 0, 2, 1));
            let mut records = [Record::from_rdata(name("a.example."), ttl, data)];
            rewritten.undo.undo(&mut records);
            assert_eq!(records[0].ttl, wanted);
        }
    }
}
