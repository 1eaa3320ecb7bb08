//! DNS cases: questions put to the zone and message code that the agent serves, packet in, packet out.
//!
//! The format is described at the head of each case file. Options that the product does not have are skipped by name.

mod expect;
mod fixture;

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use control_api::desired::{Changes, DesiredState};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RecordType};
use serde_json::Value;
use weir_agent::dns::{self, Options as ZoneOptions, PodRecords, Step, Transport, Zone};

use super::{Outcome, Summary, case_files};
use expect::Answered;

/// What a run needs to know.
#[derive(Clone, Debug)]
pub struct Options {
    pub folder: PathBuf,
    /// Only cases whose id contains this.
    pub only: Option<String>,
}

/// Runs a folder of cases: one line per case, then the counts.
///
/// # Errors
/// When the folder or a file cannot be read.
pub fn run_folder(options: &Options, print: fn(&str)) -> Result<Summary> {
    let mut summary = Summary::default();
    for path in case_files(&options.folder, None)? {
        let shown = path.display();
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {shown}"))?;
        let file: Value =
            serde_yaml_ng::from_str(&text).with_context(|| format!("parse {shown}"))?;
        for case in file["cases"].as_array().into_iter().flatten() {
            let id = case["id"].as_str().unwrap_or("(no id)");
            if options.only.as_ref().is_some_and(|only| !id.contains(only)) {
                continue;
            }
            let outcome = run_case(&file, case);
            summary.count(&outcome);
            match outcome {
                Outcome::Passed => print(&format!("ok      {id}")),
                Outcome::Failed(why) => print(&format!("FAILED  {id}: {why}")),
                Outcome::Skipped(why) => print(&format!("skipped {id}: {why}")),
            }
        }
    }
    Ok(summary)
}

/// Options of a case over the file's defaults.
struct Settings<'a> {
    file: &'a Value,
    case: &'a Value,
}

impl<'a> Settings<'a> {
    fn get(&self, key: &str) -> &'a Value {
        match &self.case["options"][key] {
            Value::Null => &self.file["defaults"][key],
            set => set,
        }
    }

    /// An option that the product does not have.
    fn unmet(&self) -> Option<String> {
        let known = [
            "zone",
            "reverse_zones",
            "ttl",
            "pods",
            "endpoint_pod_names",
            "ignore_empty_service",
            "fallthrough",
            "forward",
            "transport",
            "edns",
            "synced",
        ];
        let options = self.case["options"].as_object().into_iter().flatten();
        let unknown = options
            .map(|(key, _)| key)
            .find(|key| !known.contains(&key.as_str()));
        if let Some(key) = unknown {
            return Some(format!("needs the option {key}"));
        }
        (self.get("pods") == "verified").then(|| "needs the option pods: verified".to_owned())
    }

    fn zone(&self) -> Result<Zone> {
        let names = |value: &Value| -> Result<Vec<Name>> {
            let texts = value
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str);
            texts.map(|text| Ok(Name::from_ascii(text)?)).collect()
        };
        let reverse = names(self.get("reverse_zones"))?;
        let options = ZoneOptions {
            ttl_s: u32::try_from(self.get("ttl").as_u64().unwrap_or(30))?,
            pods: match self.get("pods").as_str() {
                Some("insecure") => PodRecords::Insecure,
                _ => PodRecords::Disabled,
            },
            endpoint_pod_names: self.get("endpoint_pod_names") == true,
            ignore_empty_service: self.get("ignore_empty_service") == true,
            fallthrough: names(self.get("fallthrough"))?,
            reverse: reverse
                .iter()
                .map(fixture::reverse_network)
                .collect::<Result<_>>()?,
            ..ZoneOptions::default()
        };
        let mut zone = Zone::new(options);
        let zone_name = self.get("zone").as_str().unwrap_or("cluster.local.");
        let synced = self.get("synced") != false;
        let state = if synced {
            fixture::state(self.fixture(), zone_name)?
        } else {
            DesiredState::default()
        };
        zone.update(&state, &Changes::everything());
        if synced {
            zone.set_synced();
        }
        Ok(zone)
    }

    fn fixture(&self) -> &'a Value {
        let name = self.case["fixture"].as_str().unwrap_or("base");
        &self.file["fixtures"][name]
    }
}

fn run_case(file: &Value, case: &Value) -> Outcome {
    let settings = Settings { file, case };
    if let Some(why) = settings.unmet() {
        return Outcome::Skipped(why);
    }
    if case["query"].is_null() {
        return Outcome::Skipped("steps in prose: the agent's own tests cover them".to_owned());
    }
    match answer(&settings) {
        Ok(answered) => match expect::check(&settings.case["expect"], &answered) {
            Ok(()) => Outcome::Passed,
            Err(why) => Outcome::Failed(why),
        },
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

fn answer(settings: &Settings<'_>) -> Result<Answered> {
    let zone = settings.zone()?;
    let query = query(settings)?;
    let transport = match setting_of_query(settings, "transport").as_str() {
        Some("tcp") => Transport::Tcp,
        _ => Transport::Udp,
    };
    let recursion = !matches!(settings.get("forward").as_str(), None | Some("none"));
    let packet = query.to_vec()?;
    let reply = match dns::handle(&zone, &packet, transport, recursion, 0) {
        Step::Reply(reply) => reply,
        Step::Drop => bail!("the query was dropped"),
        Step::Ask(request) => {
            let upstream = upstream_answer(settings, &request.name, request.record_type)?;
            if request.is_relay() {
                request.relay(upstream)
            } else {
                request.finish(Some(&upstream))
            }
        }
    };
    Ok(Answered {
        message: Message::from_vec(&reply)?,
        size: reply.len(),
        question: query.queries[0].name().clone(),
        ttl: u32::try_from(settings.get("ttl").as_u64().unwrap_or(u64::MAX)).unwrap_or(u32::MAX),
    })
}

fn setting_of_query<'a>(settings: &Settings<'a>, key: &str) -> &'a Value {
    match &settings.case["query"][key] {
        Value::Null => settings.get(key),
        set => set,
    }
}

fn query(settings: &Settings<'_>) -> Result<Message> {
    let query = &settings.case["query"];
    let op_code = match query["opcode"].as_str() {
        None | Some("QUERY") => OpCode::Query,
        Some("STATUS") => OpCode::Status,
        Some("NOTIFY") => OpCode::Notify,
        Some("UPDATE") => OpCode::Update,
        Some(other) => bail!("unknown opcode {other}"),
    };
    let mut message = Message::new(0x5745, MessageType::Query, op_code);
    message.metadata.recursion_desired = true;
    let name = Name::from_ascii(query["name"].as_str().context("the query has no name")?)?;
    let mut question = Query::query(name, record_type(query["type"].as_str().unwrap_or("A"))?);
    question.set_query_class(match query["class"].as_str() {
        None | Some("IN") => DNSClass::IN,
        Some("CH") => DNSClass::CH,
        Some("HS") => DNSClass::HS,
        Some("ANY") => DNSClass::ANY,
        Some(other) => bail!("unknown class {other}"),
    });
    message.add_query(question);
    let edns = setting_of_query(settings, "edns");
    if edns.is_object() {
        let mut record = Edns::new();
        record.set_max_payload(u16::try_from(edns["udp"].as_u64().unwrap_or(1232))?);
        record.set_version(u8::try_from(edns["version"].as_u64().unwrap_or(0))?);
        record.set_dnssec_ok(edns["do"] == true);
        message.set_edns(record);
    }
    Ok(message)
}

fn record_type(text: &str) -> Result<RecordType> {
    match text
        .strip_prefix("TYPE")
        .and_then(|number| number.parse::<u16>().ok())
    {
        Some(number) => Ok(RecordType::from(number)),
        None => text
            .parse()
            .with_context(|| format!("unknown record type {text}")),
    }
}

/// What the fixture's upstream server says.
fn upstream_answer(settings: &Settings<'_>, name: &Name, wanted: RecordType) -> Result<Vec<u8>> {
    let mut message = Message::response(1, OpCode::Query);
    message.add_query(Query::query(name.clone(), wanted));
    let known = settings.fixture()["upstream"]
        .as_object()
        .into_iter()
        .flatten();
    let entry = known
        .map(|(key, value)| (Name::from_ascii(key), value))
        .find_map(|(key, value)| key.is_ok_and(|key| key == *name).then_some(value));
    match entry {
        Some(records) if records.is_object() => {
            let list = records[wanted.to_string()].as_array().into_iter().flatten();
            for text in list.filter_map(Value::as_str) {
                message.add_answer(fixture::address_record(name, text)?);
            }
        }
        _ => message.metadata.response_code = ResponseCode::NXDomain,
    }
    Ok(message.to_vec()?)
}
