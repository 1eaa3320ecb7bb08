//! Sets of fields: what a manager owns, in memory and in the `FieldsV1` form of the API.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

/// Nesting of stored sets beyond this is ignored.
const MAX_DEPTH: usize = 128;

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Element {
    /// A field of a struct or a key of a map.
    Field(String),
    /// An element of a list by its key fields, sorted by name; values as JSON text.
    Key(Vec<(String, String)>),
    /// An element of a set, as JSON text.
    Value(String),
    Index(usize),
}

impl Element {
    pub(super) fn field(name: &str) -> Self {
        Self::Field(name.to_owned())
    }

    fn parse(text: &str) -> Option<Self> {
        let (kind, rest) = text.split_once(':')?;
        match kind {
            "f" => Some(Self::Field(rest.to_owned())),
            "v" => Some(Self::Value(
                serde_json::from_str::<Value>(rest).ok()?.to_string(),
            )),
            "i" => rest.parse().ok().map(Self::Index),
            "k" => {
                let map: BTreeMap<String, Value> = serde_json::from_str(rest).ok()?;
                Some(Self::Key(
                    map.into_iter().map(|(k, v)| (k, v.to_string())).collect(),
                ))
            }
            _ => None,
        }
    }

    fn encode(&self) -> String {
        match self {
            Self::Field(name) => format!("f:{name}"),
            Self::Value(text) => format!("v:{text}"),
            Self::Index(index) => format!("i:{index}"),
            Self::Key(fields) => {
                let members: Vec<String> = fields
                    .iter()
                    .map(|(name, value)| format!("{}:{value}", Value::from(name.as_str())))
                    .collect();
                format!("k:{{{}}}", members.join(","))
            }
        }
    }
}

/// The form of conflict messages: `.spec.containers[name="c"].args`.
impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => write!(f, ".{name}"),
            Self::Value(text) => write!(f, "[={text}]"),
            Self::Index(index) => write!(f, "[{index}]"),
            Self::Key(fields) => {
                let members: Vec<String> = fields
                    .iter()
                    .map(|(name, value)| format!("{name}={value}"))
                    .collect();
                write!(f, "[{}]", members.join(","))
            }
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Node {
    member: bool,
    children: Set,
}

/// A set of paths, as a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Set {
    nodes: BTreeMap<Element, Node>,
}

impl Set {
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub(super) fn insert(&mut self, path: &[Element]) {
        let Some((last, parents)) = path.split_last() else {
            return;
        };
        let mut set = self;
        for element in parents {
            set = &mut set.nodes.entry(element.clone()).or_default().children;
        }
        set.nodes.entry(last.clone()).or_default().member = true;
    }

    /// Adds an element with what is below it.
    pub(super) fn add(&mut self, element: Element, member: bool, children: Set) {
        if member || !children.is_empty() {
            let node = self.nodes.entry(element).or_default();
            node.member |= member;
            node.children = node.children.union(&children);
        }
    }

    pub(super) fn has(&self, element: &Element) -> bool {
        self.nodes.get(element).is_some_and(|n| n.member)
    }

    pub(super) fn below(&self, element: &Element) -> Option<&Set> {
        self.nodes
            .get(element)
            .map(|n| &n.children)
            .filter(|c| !c.is_empty())
    }

    pub(super) fn elements(&self) -> impl Iterator<Item = (&Element, bool, &Set)> {
        self.nodes
            .iter()
            .map(|(element, node)| (element, node.member, &node.children))
    }

    pub(super) fn union(&self, other: &Self) -> Self {
        let mut result = self.clone();
        for (element, node) in &other.nodes {
            let mine = result.nodes.entry(element.clone()).or_default();
            mine.member |= node.member;
            mine.children = mine.children.union(&node.children);
        }
        result
    }

    /// The members that the other set does not have.
    pub(super) fn difference(&self, other: &Self) -> Self {
        self.combine(other, |mine, theirs| mine && !theirs)
    }

    pub(super) fn intersection(&self, other: &Self) -> Self {
        self.combine(other, |mine, theirs| mine && theirs)
    }

    fn combine(&self, other: &Self, keep: fn(bool, bool) -> bool) -> Self {
        let nothing = Node::default();
        let mut result = Self::default();
        for (element, node) in &self.nodes {
            let theirs = other.nodes.get(element).unwrap_or(&nothing);
            let children = node.children.combine(&theirs.children, keep);
            result.add(element.clone(), keep(node.member, theirs.member), children);
        }
        result
    }

    /// Without the members of the other set and everything below them.
    pub(super) fn without(&self, other: &Self) -> Self {
        let mut result = Self::default();
        for (element, node) in &self.nodes {
            match other.nodes.get(element) {
                Some(theirs) if theirs.member => {}
                Some(theirs) => {
                    result.add(
                        element.clone(),
                        node.member,
                        node.children.without(&theirs.children),
                    );
                }
                None => result.add(element.clone(), node.member, node.children.clone()),
            }
        }
        result
    }

    /// Every member's path, in order.
    pub(super) fn paths(&self) -> Vec<String> {
        let mut out = Vec::new();
        self.collect("", &mut out);
        out
    }

    fn collect(&self, prefix: &str, out: &mut Vec<String>) {
        for (element, node) in &self.nodes {
            let path = format!("{prefix}{element}");
            if node.member {
                out.push(path.clone());
            }
            node.children.collect(&path, out);
        }
    }

    /// The `FieldsV1` form.
    pub(super) fn to_json(&self) -> Value {
        let mut map = Map::new();
        for (element, node) in &self.nodes {
            let mut inner = node.children.to_json();
            if let (true, false, Value::Object(members)) =
                (node.member, node.children.is_empty(), &mut inner)
            {
                members.shift_insert(0, ".".to_owned(), Value::Object(Map::new()));
            }
            map.insert(element.encode(), inner);
        }
        Value::Object(map)
    }

    /// Reads the `FieldsV1` form; what cannot be understood is left out.
    pub(super) fn from_json(value: &Value) -> Self {
        Self::read(value, 0)
    }

    fn read(value: &Value, depth: usize) -> Self {
        let mut set = Self::default();
        let Value::Object(map) = value else {
            return set;
        };
        if depth > MAX_DEPTH {
            return set;
        }
        for (key, inner) in map {
            let Some(element) = Element::parse(key) else {
                continue;
            };
            let children = Self::read(inner, depth + 1);
            let member = children.is_empty() || inner.get(".").is_some();
            set.add(element, member, children);
        }
        set
    }
}
