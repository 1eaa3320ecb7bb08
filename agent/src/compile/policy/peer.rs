//! Peer sets: what rules call the other end, as keys that are equal where they mean the same.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::prefix::Prefix;

/// A set of addresses that a rule may name, or that a name of a port stands for.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum PeerSet {
    /// A selector, by the id that the feed gave it.
    Selector([u8; 16]),
    Block(Block),
    /// A domain name, or `*.` and a suffix. Lower case, without a closing dot.
    Domain(String),
    /// Pods that have a port of this name. Never named by a rule, but asked for where a rule names ports of its peers.
    PortName(String),
}

/// An address range with holes.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Block {
    pub range: Prefix,
    /// Sorted.
    pub except: Vec<Prefix>,
}

impl Block {
    /// True when the block holds all of a range. One that only overlaps a hole is not asked for: holes are ranges of the
    /// trie too.
    #[must_use]
    pub fn holds(&self, range: Prefix) -> bool {
        self.range.holds(range) && !self.except.iter().any(|hole| hole.holds(range))
    }
}

impl PeerSet {
    /// The same text for the same set, for ever; [`PeerSet::parse`] reads it.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Selector(id) => {
                let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("s{hex}")
            }
            Self::Block(block) => {
                let holes: String = block.except.iter().map(|hole| format!("!{hole}")).collect();
                format!("b{}{holes}", block.range)
            }
            Self::Domain(name) => format!("d{name}"),
            Self::PortName(name) => format!("p{name}"),
        }
    }

    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let rest = text.get(1..)?;
        match text.as_bytes().first()? {
            b's' => {
                let mut id = [0; 16];
                if rest.len() != 32 {
                    return None;
                }
                for (byte, at) in id.iter_mut().zip((0..32).step_by(2)) {
                    *byte = u8::from_str_radix(rest.get(at..at + 2)?, 16).ok()?;
                }
                Some(Self::Selector(id))
            }
            b'b' => {
                let mut parts = rest.split('!');
                let range = Prefix::parse(parts.next()?)?;
                let except = parts.map(Prefix::parse).collect::<Option<Vec<_>>>()?;
                Some(Self::Block(Block { range, except }))
            }
            b'd' => Some(Self::Domain(rest.into())),
            b'p' => Some(Self::PortName(rest.into())),
            _ => None,
        }
    }
}

impl fmt::Display for PeerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Selector(_) => f.write_str(&self.text()),
            Self::Block(block) => {
                write!(f, "{}", block.range)?;
                for (place, hole) in block.except.iter().enumerate() {
                    let word = if place == 0 { " except " } else { ", " };
                    write!(f, "{word}{hole}")?;
                }
                Ok(())
            }
            Self::Domain(name) => f.write_str(name),
            Self::PortName(name) => write!(f, "port {name}"),
        }
    }
}

/// Number of a peer set in this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SetId(pub u32);

/// Peer sets by number.
#[derive(Clone, Debug, Default)]
pub struct PeerSets {
    ids: HashMap<Arc<PeerSet>, SetId>,
    sets: Vec<Arc<PeerSet>>,
}

impl PeerSets {
    /// The number of a set, a new one if need be.
    pub fn id(&mut self, set: &PeerSet) -> SetId {
        if let Some(id) = self.ids.get(set) {
            return *id;
        }
        let id = SetId(u32::try_from(self.sets.len()).unwrap_or(u32::MAX));
        let set = Arc::new(set.clone());
        self.sets.push(Arc::clone(&set));
        self.ids.insert(set, id);
        id
    }

    #[must_use]
    pub fn find(&self, set: &PeerSet) -> Option<SetId> {
        self.ids.get(set).copied()
    }

    #[must_use]
    pub fn get(&self, id: SetId) -> Option<&PeerSet> {
        self.sets.get(id.0 as usize).map(AsRef::as_ref)
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }
}
