//! Addresses of domain names, as DNS answers told pods of this node, and which names rules ask for.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;

use control_api::v1::{Policy, policy_rule_peer};

/// More names are not learnt: a rule with `*.` matches names without end.
pub(super) const NAMES: usize = 10_000;
/// More addresses of one name are not learnt. The API wants 100 at least (NPEP-133, expected behavior).
pub(super) const ADDRESSES_PER_NAME: usize = 1_024;
/// More addresses of all names together are not learnt.
pub(super) const ADDRESSES: usize = 32_768;

/// Which limit refused an address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DomainLimit {
    Names,
    AddressesPerName,
    Addresses,
}

impl DomainLimit {
    pub const ALL: [Self; 3] = [Self::Names, Self::AddressesPerName, Self::Addresses];

    /// As metrics call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Names => "names",
            Self::AddressesPerName => "addresses_per_name",
            Self::Addresses => "addresses",
        }
    }
}

impl std::fmt::Display for DomainLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Names => write!(f, "{NAMES} names"),
            Self::AddressesPerName => write!(f, "{ADDRESSES_PER_NAME} addresses of one name"),
            Self::Addresses => write!(f, "{ADDRESSES} addresses of all names"),
        }
    }
}

/// What an answer taught.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Lesson {
    /// Addresses that the name did not have.
    pub new: Vec<IpAddr>,
    /// Known addresses are believed for longer.
    pub extended: bool,
    /// Addresses that did not fit, and the limit that refused the last of them.
    pub refused: usize,
    pub limit: Option<DomainLimit>,
}

/// Which addresses names have, and until when that is believed (microseconds of any clock that does not go back).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DomainAnswers {
    /// Lower case, without a closing dot. No name is without addresses.
    names: BTreeMap<String, BTreeMap<IpAddr, i64>>,
    /// Addresses of all names, counted once for each name.
    addresses: usize,
}

impl DomainAnswers {
    /// Takes an answer. What does not fit is not learnt, so that rules do not match it.
    pub fn learn(&mut self, name: &str, addresses: &[IpAddr], until_us: i64) -> Lesson {
        let name = canonical(name);
        let mut lesson = Lesson::default();
        let mut known = self.names.remove(&name).unwrap_or_default();
        for address in addresses {
            if let Some(until) = known.get_mut(address) {
                lesson.extended |= until_us > *until;
                *until = until_us.max(*until);
                continue;
            }
            let limits = [
                (self.names.len() >= NAMES, DomainLimit::Names),
                (
                    known.len() >= ADDRESSES_PER_NAME,
                    DomainLimit::AddressesPerName,
                ),
                (self.addresses >= ADDRESSES, DomainLimit::Addresses),
            ];
            match limits.iter().find(|(full, _)| *full) {
                Some((_, limit)) => {
                    lesson.refused += 1;
                    lesson.limit = Some(*limit);
                }
                None => {
                    known.insert(*address, until_us);
                    self.addresses += 1;
                    lesson.new.push(*address);
                }
            }
        }
        if !known.is_empty() {
            self.names.insert(name, known);
        }
        lesson
    }

    /// True when some address is over at a time, so that [`Self::expire`] has something to look at.
    #[must_use]
    pub fn has_expired(&self, now_us: i64) -> bool {
        self.expired(now_us).next().is_some()
    }

    /// Addresses that are over.
    pub fn expired(&self, now_us: i64) -> impl Iterator<Item = IpAddr> {
        let all = self.names.values().flatten();
        all.filter(move |(_, until)| **until <= now_us)
            .map(|(address, _)| *address)
    }

    /// Forgets what is over, but for addresses that are in use for their name. True when something went.
    pub fn expire(&mut self, now_us: i64, in_use: impl Fn(&str, IpAddr) -> bool) -> bool {
        let before = self.addresses;
        let count = &mut self.addresses;
        self.names.retain(|name, addresses| {
            addresses.retain(|address, until| {
                let stays = *until > now_us || in_use(name, *address);
                *count -= usize::from(!stays);
                stays
            });
            !addresses.is_empty()
        });
        self.addresses < before
    }

    /// Names with their addresses.
    pub fn iter(&self) -> impl Iterator<Item = (&str, impl Iterator<Item = (IpAddr, i64)>)> {
        self.names.iter().map(|(name, addresses)| {
            let addresses = addresses.iter().map(|(address, until)| (*address, *until));
            (name.as_str(), addresses)
        })
    }

    /// The addresses of a name.
    pub fn addresses_of(&self, name: &str) -> impl Iterator<Item = IpAddr> {
        let known = self.names.get(&canonical(name));
        known.into_iter().flat_map(|all| all.keys().copied())
    }

    /// The names that have an address.
    pub fn names_of(&self, address: IpAddr) -> impl Iterator<Item = &str> {
        let with = self.names.iter();
        with.filter(move |(_, addresses)| addresses.contains_key(&address))
            .map(|(name, _)| name.as_str())
    }

    #[must_use]
    pub fn name_count(&self) -> usize {
        self.names.len()
    }

    #[must_use]
    pub fn address_count(&self) -> usize {
        self.addresses
    }
}

/// The names that rules ask for: `a.example` means that name alone, `*.example` every name below `example`, however many
/// labels (`DomainName` of policy.networking.k8s.io/v1alpha2).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Wanted {
    exact: HashSet<String>,
    /// Without the asterisk, with the dot.
    suffixes: HashSet<String>,
}

impl Wanted {
    /// What the rules of these policies ask for, staged ones included: comparisons want to know as well.
    pub fn of<'a>(policies: impl IntoIterator<Item = &'a Policy>) -> Self {
        let mut wanted = Self::default();
        let rules = policies.into_iter().flat_map(|policy| &policy.egress);
        for peer in rules.flat_map(|rule| &rule.peers) {
            let Some(policy_rule_peer::Kind::DomainName(pattern)) = &peer.kind else {
                continue;
            };
            let pattern = canonical(pattern);
            match pattern.strip_prefix('*') {
                Some(suffix) => wanted.suffixes.insert(suffix.to_owned()),
                None => wanted.exact.insert(pattern),
            };
        }
        wanted
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.suffixes.is_empty()
    }

    /// Whether some rule asks for a name, in canonical form.
    #[must_use]
    pub fn asks_for(&self, name: &str) -> bool {
        let mut dots = name.match_indices('.').filter(|(at, _)| *at > 0);
        self.exact.contains(name) || dots.any(|(at, _)| self.suffixes.contains(&name[at..]))
    }
}

/// The form in which names are compared.
#[must_use]
pub(super) fn canonical(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

/// What rules may call a name: itself, and `*.` before each suffix of it.
pub(super) fn patterns(name: &str) -> BTreeSet<String> {
    let dots = name.match_indices('.');
    let suffixes = dots.map(|(at, _)| format!("*{}", &name[at..]));
    suffixes.chain([name.to_owned()]).collect()
}
