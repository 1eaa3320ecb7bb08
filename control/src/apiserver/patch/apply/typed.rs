//! Values seen through their schema: the set of their fields, what differs between two, merging and removing.
//!
//! Lists are atomic, sets, or maps by key fields; maps and structs are granular unless declared atomic (the API's
//! `x-kubernetes-list-type` and `x-kubernetes-map-type`). Kinds without a schema have granular maps and atomic lists.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::fieldset::{Element, Set};
use crate::apiserver::schema::{Field, Kind, ListType, Type, schema};

/// How a value is divided among managers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    /// Scalars and everything that is owned as a whole.
    Leaf,
    Struct(&'static Type),
    Map(&'static Kind),
    SetList,
    KeyedList(&'static [&'static str], &'static Kind),
    /// No schema: decided by the value.
    Untyped,
    /// An object without a schema: only its metadata has one.
    Custom,
}

impl Shape {
    /// The shape of a whole object.
    pub(super) fn of_kind(t: Option<&'static Type>) -> Self {
        t.map_or(Self::Custom, Self::Struct)
    }

    fn of_field(field: &'static Field) -> Self {
        match &field.kind {
            Kind::List(inner) => match &field.list_type {
                Some(ListType::Set) => Self::SetList,
                Some(ListType::Map(keys)) => Self::KeyedList(keys, inner),
                Some(ListType::Atomic) | None => Self::Leaf,
            },
            Kind::Object(_) | Kind::Map(_) if field.atomic => Self::Leaf,
            Kind::Object(id) if field.granular => Self::Struct(schema().get(*id)),
            kind => Self::of_element(kind),
        }
    }

    fn of_element(kind: &'static Kind) -> Self {
        match kind {
            Kind::Object(id) if schema().get(*id).atomic => Self::Leaf,
            Kind::Object(id) => Self::Struct(schema().get(*id)),
            Kind::Map(inner) => Self::Map(inner),
            Kind::RawExtension | Kind::Any => Self::Untyped,
            _ => Self::Leaf,
        }
    }

    /// The shape of a member, and whether the member is a declared field.
    fn member(self, key: &str) -> (Self, bool) {
        match self {
            Self::Struct(t) => match schema().field(t, key) {
                Some(field) => (Self::of_field(field), true),
                None => (Self::Untyped, false),
            },
            Self::Map(inner) => (Self::of_element(inner), false),
            Self::Custom if key == "metadata" => {
                let t = schema().kind("", "v1", "Pod");
                let field = t.and_then(|t| schema().field(t, "metadata"));
                (field.map_or(Self::Untyped, Self::of_field), true)
            }
            _ => (Self::Untyped, false),
        }
    }

    fn item(self) -> Self {
        match self {
            Self::KeyedList(_, inner) => Self::of_element(inner),
            _ => Self::Leaf,
        }
    }

    fn is_granular_map(self, value: &Value) -> bool {
        match self {
            Self::Struct(_) | Self::Map(_) | Self::Custom | Self::Untyped => value.is_object(),
            _ => false,
        }
    }

    fn is_granular_list(self, value: &Value) -> bool {
        matches!(self, Self::SetList | Self::KeyedList(..)) && value.is_array()
    }

    /// How an item of this list is named. An item without its keys has no name.
    pub(super) fn name_of(self, item: &Value) -> Option<Element> {
        match self {
            Self::SetList => Some(Element::Value(item.to_string())),
            Self::KeyedList(keys, inner) => {
                let mut fields = Vec::new();
                for key in keys {
                    let value = match item.get(*key) {
                        Some(value) => value.to_string(),
                        None => default_of(inner, key)?,
                    };
                    fields.push(((*key).to_owned(), value));
                }
                fields.sort();
                Some(Element::Key(fields))
            }
            _ => None,
        }
    }
}

/// A key that an item leaves out has the value that the schema declares. Protocols of ports are the case that matters.
fn default_of(kind: &'static Kind, key: &str) -> Option<String> {
    let Kind::Object(id) = kind else { return None };
    let field = schema().field(schema().get(*id), key)?;
    match (field.default, key) {
        ("", "protocol") => Some("\"TCP\"".to_owned()),
        ("", _) => (!field.required)
            .then(|| crate::apiserver::schema::normalize::zero(&field.kind).to_string()),
        (default, _) => Some(default.to_owned()),
    }
}

/// Items of a list by name, in order of first appearance.
struct Items<'a> {
    order: Vec<Element>,
    by_name: BTreeMap<Element, Vec<&'a Value>>,
}

impl<'a> Items<'a> {
    fn of(shape: Shape, list: Option<&'a Value>) -> Self {
        let mut items = Self {
            order: Vec::new(),
            by_name: BTreeMap::new(),
        };
        for (index, item) in list
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .enumerate()
        {
            let name = shape.name_of(item).unwrap_or(Element::Index(index));
            let same = items.by_name.entry(name.clone()).or_default();
            if same.is_empty() {
                items.order.push(name);
            }
            same.push(item);
        }
        items
    }

    fn get(&self, name: &Element) -> &[&'a Value] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }
}

/// The fields of a value.
pub(super) fn fields(shape: Shape, value: &Value) -> Set {
    let mut set = Set::default();
    if shape.is_granular_map(value) {
        for (key, member) in value.as_object().into_iter().flatten() {
            let (inner, declared) = shape.member(key);
            let granular = inner.is_granular_map(member) || inner.is_granular_list(member);
            let empty = member.is_null() || member.as_object().is_some_and(Map::is_empty);
            let children = if granular {
                fields(inner, member)
            } else {
                Set::default()
            };
            set.add(
                Element::field(key),
                !granular || empty || !declared,
                children,
            );
        }
    } else if shape.is_granular_list(value) {
        let items = Items::of(shape, Some(value));
        for name in items.order.iter() {
            // Items that share a name are owned together.
            let children = match items.get(name) {
                [one] => fields(shape.item(), one),
                _ => Set::default(),
            };
            set.add(name.clone(), true, children);
        }
    }
    set
}

/// What one value has against another.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    pub(super) added: Set,
    pub(super) modified: Set,
    pub(super) removed: Set,
}

impl Comparison {
    pub(super) fn of(shape: Shape, old: &Value, new: &Value) -> Self {
        let mut comparison = Self::default();
        comparison.walk(shape, Some(old), Some(new), &mut Vec::new());
        comparison
    }

    pub(super) fn is_same(&self) -> bool {
        self.added.is_empty() && self.modified.is_empty() && self.removed.is_empty()
    }

    fn leaf(&mut self, old: Option<&Value>, new: Option<&Value>, path: &[Element]) {
        match (old, new) {
            (None, Some(_)) => self.added.insert(path),
            (Some(_), None) => self.removed.insert(path),
            (Some(a), Some(b)) if a != b => self.modified.insert(path),
            _ => {}
        }
    }

    fn walk(
        &mut self,
        shape: Shape,
        old: Option<&Value>,
        new: Option<&Value>,
        path: &mut Vec<Element>,
    ) {
        let all = |f: &dyn Fn(&Value) -> bool| old.is_none_or(f) && new.is_none_or(f);
        let map = all(&|v| shape.is_granular_map(v));
        let list = all(&|v| shape.is_granular_list(v));
        let empty = all(&|v| match v {
            Value::Object(m) => m.is_empty(),
            Value::Array(a) => a.is_empty(),
            _ => false,
        });
        if empty || !(map || list) {
            self.leaf(old, new, path);
            return;
        }
        if map {
            self.walk_map(shape, old, new, path);
        } else {
            self.walk_list(shape, old, new, path);
        }
        match (old, new) {
            (None, _) => self.added.insert(path),
            (_, None) => self.removed.insert(path),
            _ => {}
        }
    }

    fn walk_map(
        &mut self,
        shape: Shape,
        old: Option<&Value>,
        new: Option<&Value>,
        path: &mut Vec<Element>,
    ) {
        let nothing = Map::new();
        let old = old.and_then(Value::as_object).unwrap_or(&nothing);
        let new = new.and_then(Value::as_object).unwrap_or(&nothing);
        for key in old
            .keys()
            .chain(new.keys().filter(|k| !old.contains_key(*k)))
        {
            path.push(Element::field(key));
            self.walk(shape.member(key).0, old.get(key), new.get(key), path);
            path.pop();
        }
    }

    fn walk_list(
        &mut self,
        shape: Shape,
        old: Option<&Value>,
        new: Option<&Value>,
        path: &mut Vec<Element>,
    ) {
        let (old, new) = (Items::of(shape, old), Items::of(shape, new));
        for name in old
            .order
            .iter()
            .chain(new.order.iter().filter(|n| !old.by_name.contains_key(*n)))
        {
            path.push(name.clone());
            match (old.get(name), new.get(name)) {
                ([] | [_], [] | [_]) => {
                    let (a, b) = (old.get(name).first(), new.get(name).first());
                    self.walk(shape.item(), a.copied(), b.copied(), path);
                }
                ([], _) => self.added.insert(path),
                (_, []) => self.removed.insert(path),
                (a, b) if a != b => self.modified.insert(path),
                _ => {}
            }
            path.pop();
        }
    }
}

/// Merges an applied configuration into a value; where both have a leaf, the configuration's counts.
pub(super) fn merge(shape: Shape, live: Option<&Value>, config: &Value) -> Value {
    let Some(live) = live else {
        return config.clone();
    };
    if shape.is_granular_map(live) && shape.is_granular_map(config) {
        let mut result = live.as_object().cloned().unwrap_or_default();
        for (key, member) in config.as_object().into_iter().flatten() {
            let merged = merge(shape.member(key).0, live.get(key), member);
            result.insert(key.clone(), merged);
        }
        return Value::Object(result);
    }
    if shape.is_granular_list(live) && shape.is_granular_list(config) {
        return Value::Array(merge_lists(shape, live, config));
    }
    config.clone()
}

/// Items keep the live order as far as the configuration's order allows: items that only the live list has stay in
/// front of what follows them, items that both have come in the configuration's order.
fn merge_lists(shape: Shape, live: &Value, config: &Value) -> Vec<Value> {
    let (left, right) = (Items::of(shape, Some(live)), Items::of(shape, Some(config)));
    let mut shared = right
        .order
        .iter()
        .filter(|n| left.by_name.contains_key(*n))
        .peekable();
    let mut placed = BTreeSet::new();
    let mut out = Vec::new();
    let (mut l, mut r) = (0, 0);
    while l < left.order.len() || r < right.order.len() {
        if let Some(name) = left.order.get(l) {
            let known = right.by_name.contains_key(name);
            if !known {
                out.extend(left.get(name).iter().map(|item| (*item).clone()));
                l += 1;
                continue;
            }
            let its_turn = shared.peek().is_some_and(|next| *next == name);
            if placed.contains(name) || (!its_turn && r < right.order.len()) {
                l += 1;
                continue;
            }
        }
        let Some(name) = right.order.get(r) else {
            continue;
        };
        if let Some(wanted) = right.get(name).first() {
            out.push(merge(shape.item(), left.get(name).first().copied(), wanted));
        }
        placed.insert(name);
        shared.next_if(|next| *next == name);
        r += 1;
    }
    out
}

/// The value without the members of a set. Containers that become empty by that go, too.
pub(super) fn remove(shape: Shape, value: &Value, set: &Set) -> Value {
    removed(shape, value, set).unwrap_or_else(|| Value::Object(Map::new()))
}

fn removed(shape: Shape, value: &Value, set: &Set) -> Option<Value> {
    if shape.is_granular_map(value) {
        let mut result = Map::new();
        for (key, member) in value.as_object().into_iter().flatten() {
            let element = Element::field(key);
            if set.has(&element) {
                continue;
            }
            match set.below(&element) {
                Some(inner) => {
                    if let Some(kept) = removed(shape.member(key).0, member, inner) {
                        result.insert(key.clone(), kept);
                    }
                }
                None => {
                    result.insert(key.clone(), member.clone());
                }
            }
        }
        return (!result.is_empty()).then_some(Value::Object(result));
    }
    if shape.is_granular_list(value) {
        let mut result = Vec::new();
        for (index, item) in value.as_array().into_iter().flatten().enumerate() {
            let name = shape.name_of(item).unwrap_or(Element::Index(index));
            if set.has(&name) {
                continue;
            }
            match set.below(&name) {
                Some(inner) => result.extend(removed(shape.item(), item, inner)),
                None => result.push(item.clone()),
            }
        }
        return (!result.is_empty()).then_some(Value::Array(result));
    }
    Some(value.clone())
}

/// The set with every declared field on the way to a member as a member itself.
pub(super) fn with_named_fields(shape: Shape, set: &Set) -> Set {
    let mut result = Set::default();
    for (element, member, children) in set.elements() {
        let (inner, declared) = match element {
            Element::Field(name) => shape.member(name),
            _ => (shape.item(), false),
        };
        result.add(
            element.clone(),
            member || declared,
            with_named_fields(inner, children),
        );
    }
    result
}

/// Names that occur twice in one list of an applied configuration, which cannot say whose value is meant.
pub(super) fn duplicates(shape: Shape, value: &Value, path: &str) -> Option<String> {
    if shape.is_granular_map(value) {
        return value.as_object()?.iter().find_map(|(key, member)| {
            duplicates(shape.member(key).0, member, &format!("{path}.{key}"))
        });
    }
    if shape.is_granular_list(value) {
        let items = Items::of(shape, Some(value));
        for name in &items.order {
            if matches!(name, Element::Index(_)) {
                return Some(format!("{path}: an element omits its key fields"));
            }
            match items.get(name) {
                [one] => {
                    if let Some(found) = duplicates(shape.item(), one, &format!("{path}{name}")) {
                        return Some(found);
                    }
                }
                _ => return Some(format!("{path}: duplicate entries for key {name}")),
            }
        }
    }
    None
}
