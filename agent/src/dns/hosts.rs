//! Names and addresses from lines of /etc/hosts' shape. [pure]

use std::collections::HashMap;
use std::net::IpAddr;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::{A, AAAA, PTR};
use hickory_proto::rr::{Name, RData, Record, RecordType};

use super::corefile::Hosts;
use super::lookup::{Answer, Reverse};

/// Names and addresses in one table; lines after that are not read.
const MAX_ENTRIES: usize = 65_536;

/// Addresses by name and names by address, in the order of the lines.
#[derive(Debug, Default)]
pub(super) struct HostTable {
    addresses: HashMap<Name, Vec<IpAddr>>,
    names: HashMap<IpAddr, Vec<Name>>,
    entries: usize,
}

impl HostTable {
    /// Reads lines: an address, its names, a # before what is no part of it. What is no address or name is passed over.
    pub(super) fn read<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let mut table = Self::default();
        for line in lines {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_ascii_whitespace();
            let Some(address) = words.next().and_then(|word| word.parse().ok()) else {
                continue;
            };
            for word in words {
                if let Ok(mut name) = Name::from_ascii(word)
                    && table.entries < MAX_ENTRIES
                {
                    name.set_fqdn(true);
                    table.insert(address, name.to_lowercase());
                }
            }
        }
        table
    }

    fn insert(&mut self, address: IpAddr, name: Name) {
        let addresses = self.addresses.entry(name.clone()).or_default();
        if !addresses.contains(&address) {
            addresses.push(address);
            self.names.entry(address).or_default().push(name);
            self.entries += 1;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries
    }

    /// What the table says of a name; none when somebody else is to be asked.
    pub(super) fn lookup(
        &self,
        hosts: &Hosts,
        name: &Name,
        record_type: RecordType,
    ) -> Option<Answer> {
        let within = |zones: &[Name]| zones.iter().any(|zone| zone.zone_of(name));
        if !hosts.zones.is_empty() && !within(&hosts.zones) {
            return None;
        }
        if record_type == RecordType::PTR
            && let Some(address) = Reverse::parse(name).and_then(|reverse| reverse.address())
        {
            let names = self.names.get(&address).filter(|_| hosts.reverse)?;
            let names = names.iter().map(|name| RData::PTR(PTR(name.clone())));
            return Some(answer(hosts, name, names));
        }
        let Some(addresses) = self.addresses.get(&name.to_lowercase()) else {
            if within(&hosts.fallthrough) {
                return None;
            }
            // A table has no SOA that would make it a denial.
            return Some(Answer {
                rcode: ResponseCode::ServFail,
                ..Answer::default()
            });
        };
        let data = addresses.iter().filter_map(|address| match address {
            IpAddr::V4(v4) if record_type == RecordType::A => Some(RData::A(A(*v4))),
            IpAddr::V6(v6) if record_type == RecordType::AAAA => Some(RData::AAAA(AAAA(*v6))),
            _ => None,
        });
        Some(answer(hosts, name, data))
    }
}

fn answer(hosts: &Hosts, owner: &Name, data: impl Iterator<Item = RData>) -> Answer {
    let records = data.map(|data| Record::from_rdata(owner.clone(), hosts.ttl_s, data));
    Answer {
        records: records.collect(),
        ..Answer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dns::corefile::{Corefile, Mounted};

    fn hosts(options: &str) -> (Hosts, HostTable) {
        let text = format!(". {{\nhosts {{\n{options}\n}}\n}}");
        let corefile = Corefile::parse(&text, "F", &Mounted::default()).unwrap();
        let hosts = corefile.blocks[0].hosts.clone().unwrap();
        let table = HostTable::read(hosts.inline.iter().map(String::as_str));
        (hosts, table)
    }

    #[test]
    fn what_a_table_says() {
        let lines = "192.0.2.1 a.example A.Example b.example\n2001:db8::1 a.example\nfallthrough f.example\nttl 9";
        let (hosts, table) = hosts(lines);
        assert_eq!(table.len(), 3);
        let say = |name: &str, record_type| {
            let answer = table.lookup(&hosts, &Name::from_ascii(name).unwrap(), record_type)?;
            let records = answer.records.iter().map(ToString::to_string);
            Some((answer.rcode, records.collect::<Vec<_>>().join(" | ")))
        };
        let good = |text: &str| Some((ResponseCode::NoError, text.to_owned()));
        for (name, record_type, wanted) in [
            (
                "A.example.",
                RecordType::A,
                good("A.example. 9 IN A 192.0.2.1"),
            ),
            (
                "a.example.",
                RecordType::AAAA,
                good("a.example. 9 IN AAAA 2001:db8::1"),
            ),
            ("b.example.", RecordType::AAAA, good("")),
            ("b.example.", RecordType::MX, good("")),
            ("x.f.example.", RecordType::A, None),
            (
                "x.example.",
                RecordType::A,
                Some((ResponseCode::ServFail, String::new())),
            ),
            (
                "1.2.0.192.in-addr.arpa.",
                RecordType::PTR,
                good(
                    "1.2.0.192.in-addr.arpa. 9 IN PTR a.example. | 1.2.0.192.in-addr.arpa. 9 IN PTR b.example.",
                ),
            ),
            ("2.2.0.192.in-addr.arpa.", RecordType::PTR, None),
        ] {
            assert_eq!(say(name, record_type), wanted, "{name} {record_type}");
        }
    }
}
