//! What a case expects of an answer.

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use serde_json::Value;

/// An answer, and what it is judged by.
pub(super) struct Answered {
    pub(super) message: Message,
    pub(super) size: usize,
    pub(super) question: Name,
    pub(super) ttl: u32,
}

type Judged = Result<(), String>;

pub(super) fn check(expect: &Value, answered: &Answered) -> Judged {
    let judged = check_main(expect, answered);
    if judged.is_err() && list(&expect["alternatives"]).any(|text| is_alternative(text, answered)) {
        return Ok(());
    }
    judged
}

fn list(value: &Value) -> impl Iterator<Item = &str> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}

/// "SERVFAIL" or "NOERROR with no answer".
fn is_alternative(text: &str, answered: &Answered) -> bool {
    let rcode = rcode_text(answered.message.response_code);
    match text.split_once(' ') {
        None => text == rcode,
        Some((code, "with no answer")) => code == rcode && answered.message.answers.is_empty(),
        Some(_) => false,
    }
}

fn check_main(expect: &Value, answered: &Answered) -> Judged {
    let message = &answered.message;
    equal(
        "rcode",
        expect["rcode"].as_str().unwrap_or("NOERROR"),
        &rcode_text(message.response_code),
    )?;
    check_answers(expect, answered)?;
    for (key, actual) in [
        ("aa", message.authoritative),
        ("tc", message.truncation),
        ("opt", message.edns.is_some()),
        ("ra", message.recursion_available),
    ] {
        if let Some(wanted) = expect[key].as_bool() {
            equal(key, &wanted, &actual)?;
        }
    }
    let has_soa = message
        .authorities
        .iter()
        .any(|r| r.record_type() == RecordType::SOA);
    if expect["soa"] == true && !has_soa {
        return Err("the authority section holds no SOA".into());
    }
    if expect["additional"].is_array() {
        let allowed: Vec<&str> = list(&expect["additional"]).collect();
        for record in &message.additionals {
            if !allowed.iter().any(|wanted| matches(wanted, record, false)) {
                return Err(format!("unexpected additional record {record}"));
            }
        }
    }
    if let Some(most) = expect["max_bytes"].as_u64()
        && answered.size as u64 > most
    {
        return Err(format!(
            "{} bytes, at most {most} were allowed",
            answered.size
        ));
    }
    Ok(())
}

fn check_answers(expect: &Value, answered: &Answered) -> Judged {
    let answers = &answered.message.answers;
    let exact_case = expect["exact_case"] == true;
    let ttl = expect["ttl"]
        .as_u64()
        .unwrap_or_else(|| answered.ttl.into());
    if let Some(record) = answers.iter().find(|record| u64::from(record.ttl) > ttl) {
        return Err(format!("the TTL of {record} is above {ttl}"));
    }
    if let Some(count) = expect["answer_count"].as_u64() {
        equal("number of answers", &count, &(answers.len() as u64))?;
    }
    if let Some(range) = expect["answer_subset_of"].as_str() {
        let stray = answers.iter().find(|record| !in_range(range, record));
        return stray.map_or(Ok(()), |record| Err(format!("{record} is not in {range}")));
    }
    if expect["cname_first"] == true
        && answers
            .first()
            .is_none_or(|r| r.record_type() != RecordType::CNAME)
    {
        return Err("the first answer is no CNAME".into());
    }
    if exact_case
        && let Some(record) = answers.iter().find(|r| r.name == answered.question)
        && !record.name.eq_case(&answered.question)
    {
        return Err(format!("the owner {} is not spelled as asked", record.name));
    }
    if !expect["answer"].is_array() {
        return Ok(());
    }
    let mut rest: Vec<&Record> = answers.iter().collect();
    for wanted in list(&expect["answer"]) {
        match rest
            .iter()
            .position(|record| matches(wanted, record, exact_case))
        {
            Some(at) => drop(rest.swap_remove(at)),
            None => return Err(format!("no answer {wanted:?} among {}", show(answers))),
        }
    }
    if rest.is_empty() {
        Ok(())
    } else {
        Err(format!("unexpected answers {}", show_refs(&rest)))
    }
}

/// "range A-B" over IPv4 addresses.
fn in_range(range: &str, record: &Record) -> bool {
    let bounds = range.trim_start_matches("range").trim().split_once('-');
    let parse = |text: &str| text.trim().parse::<std::net::Ipv4Addr>().ok();
    let Some((first, last)) = bounds.and_then(|(a, b)| Some((parse(a)?, parse(b)?))) else {
        return false;
    };
    matches!(&record.data, RData::A(a) if (first..=last).contains(&a.0))
}

/// "OWNER TYPE RDATA", `*` for any word, or for all of the data when it stands alone.
fn matches(wanted: &str, record: &Record, exact_case: bool) -> bool {
    let mut words = wanted.split_ascii_whitespace();
    let (Some(owner), Some(kind)) = (words.next(), words.next()) else {
        return false;
    };
    let Ok(owner) = Name::from_ascii(owner) else {
        return false;
    };
    let same_owner = if exact_case {
        record.name.eq_case(&owner)
    } else {
        record.name == owner
    };
    if !same_owner || record.record_type().to_string() != kind {
        return false;
    }
    let wanted: Vec<&str> = words.collect();
    if wanted == ["*"] {
        return true;
    }
    let data = match &record.data {
        RData::TXT(txt) => txt
            .txt_data
            .iter()
            .map(|part| format!("\"{}\"", String::from_utf8_lossy(part)))
            .collect::<Vec<_>>()
            .join(" "),
        other => other.to_string(),
    };
    let actual: Vec<&str> = data.split_ascii_whitespace().collect();
    wanted.len() == actual.len()
        && wanted
            .iter()
            .zip(&actual)
            .all(|(w, a)| *w == "*" || w.eq_ignore_ascii_case(a))
}

fn rcode_text(rcode: ResponseCode) -> String {
    match rcode {
        ResponseCode::NoError => "NOERROR".into(),
        ResponseCode::FormErr => "FORMERR".into(),
        ResponseCode::ServFail => "SERVFAIL".into(),
        ResponseCode::NXDomain => "NXDOMAIN".into(),
        ResponseCode::NotImp => "NOTIMP".into(),
        ResponseCode::Refused => "REFUSED".into(),
        ResponseCode::BADVERS | ResponseCode::BADSIG => "BADVERS".into(),
        other => other.to_string(),
    }
}

fn equal<T: PartialEq<U> + std::fmt::Debug + ?Sized, U: std::fmt::Debug + ?Sized>(
    what: &str,
    wanted: &T,
    actual: &U,
) -> Judged {
    if wanted == actual {
        Ok(())
    } else {
        Err(format!("{what} is {actual:?}, not {wanted:?}"))
    }
}

fn show(records: &[Record]) -> String {
    show_refs(&records.iter().collect::<Vec<_>>())
}

fn show_refs(records: &[&Record]) -> String {
    let list: Vec<String> = records.iter().map(ToString::to_string).collect();
    format!("[{}]", list.join("; "))
}
