//! The types of the Kubernetes API as facts: fields with their JSON names, protobuf numbers, list kinds and merge keys.
//!
//! One compact table (`types.tsv`, written by `cargo xtask gen-schema`) feeds decoding, OpenAPI, patches and field
//! ownership. It is parsed once, on first use. Nothing here knows a single kind by name; that is for the rooms
//! `defaults` and `validation`.

pub mod normalize;
pub mod quantity;
mod table;
pub mod time;

use std::collections::HashMap;
use std::sync::LazyLock;

/// The index of a type in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TypeId(u16);

/// What a value looks like, in JSON and in protobuf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    String,
    Int32,
    Int64,
    Bool,
    Double,
    /// Base64 text in JSON.
    Bytes,
    /// Any JSON value, and no protobuf form.
    Any,
    Time,
    MicroTime,
    /// Go's notation, for example 1m30s.
    Duration,
    Quantity,
    IntOrString,
    /// A whole object of any kind.
    RawExtension,
    FieldsV1,
    /// Any JSON value, as text in protobuf.
    Json,
    /// A list of strings that is a message of its own in protobuf.
    StringList,
    SchemaOrBool,
    SchemaOrArray,
    SchemaOrStrings,
    Object(TypeId),
    List(Box<Kind>),
    /// Keys are strings.
    Map(Box<Kind>),
}

/// How two writers' views of a list combine (the API's `x-kubernetes-list-type`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListType {
    Atomic,
    Set,
    /// Elements are told apart by these fields.
    Map(Box<[&'static str]>),
}

/// A field of a type.
#[derive(Clone, Debug)]
pub struct Field {
    /// Empty for an inlined struct, whose fields stand in the JSON of the type that holds it.
    pub json: &'static str,
    /// Protobuf number; 0 where protobuf does not carry the field.
    pub number: u32,
    pub kind: Kind,
    /// Absent and zero differ.
    pub pointer: bool,
    /// Left out of JSON when empty.
    pub omit_empty: bool,
    pub required: bool,
    pub list_type: Option<ListType>,
    /// Maps and structs: replaced as a whole by server-side apply.
    pub atomic: bool,
    /// Owned field by field although its type is atomic elsewhere.
    pub granular: bool,
    /// Strategic merge patch replaces the value as a whole.
    pub patch_replace: bool,
    /// Strategic merge patch merges this list by `merge_key`, or as a set where that is empty.
    pub patch_merge: bool,
    /// Strategic merge patch honours `$retainKeys` here.
    pub patch_retain_keys: bool,
    pub merge_key: &'static str,
    /// JSON text of the default that the schema declares, or empty.
    pub default: &'static str,
}

impl Field {
    #[must_use]
    pub fn is_inline(&self) -> bool {
        self.json.is_empty()
    }
}

/// A struct of the API.
#[derive(Debug)]
pub struct Type {
    pub id: TypeId,
    pub name: &'static str,
    pub package: usize,
    /// It carries `apiVersion` and `kind`.
    pub is_kind: bool,
    /// Replaced as a whole by server-side apply, wherever it stands.
    pub atomic: bool,
    pub fields: Box<[Field]>,
}

/// A group version whose types share an OpenAPI prefix.
#[derive(Debug)]
pub struct Package {
    /// For example io.k8s.api.core.v1.
    pub prefix: &'static str,
    /// `-` for helper packages that are no API group.
    pub group: &'static str,
    pub version: &'static str,
}

/// All types.
#[derive(Debug)]
pub struct Schema {
    packages: Vec<Package>,
    types: Vec<Type>,
    kinds: HashMap<(&'static str, &'static str, &'static str), TypeId>,
}

/// The text of the table.
pub(crate) const TABLE: &str = include_str!("types.tsv");

static SCHEMA: LazyLock<Schema> = LazyLock::new(|| table::parse(TABLE));

/// The group of the kinds that exist in every group version, such as DeleteOptions.
pub const META_GROUP: &str = "meta.k8s.io";

/// Kinds of [`META_GROUP`] that clients send under the API version of the resource they act on.
const META_KINDS: &[&str] = &[
    "CreateOptions",
    "DeleteOptions",
    "GetOptions",
    "ListOptions",
    "PatchOptions",
    "Status",
    "UpdateOptions",
    "WatchEvent",
];

/// The one table.
#[must_use]
pub fn schema() -> &'static Schema {
    &SCHEMA
}

impl Schema {
    /// The type of a kind; `group` is empty for the core group.
    #[must_use]
    pub fn kind(&self, group: &str, version: &str, kind: &str) -> Option<&Type> {
        let found = self.kinds.get(&(group, version, kind)).or_else(|| {
            META_KINDS
                .contains(&kind)
                .then(|| self.kinds.get(&(META_GROUP, "v1", kind)))?
        })?;
        Some(self.get(*found))
    }

    /// [`Schema::kind`] by an object's `apiVersion` text.
    #[must_use]
    pub fn kind_of(&self, api_version: &str, kind: &str) -> Option<&Type> {
        let (group, version) = split_api_version(api_version);
        self.kind(group, version, kind)
    }

    #[must_use]
    pub fn get(&self, id: TypeId) -> &Type {
        &self.types[usize::from(id.0)]
    }

    #[must_use]
    pub fn types(&self) -> &[Type] {
        &self.types
    }

    #[must_use]
    pub fn package(&self, t: &Type) -> &Package {
        &self.packages[t.package]
    }

    /// The name under which OpenAPI documents know the type.
    #[must_use]
    pub fn full_name(&self, t: &Type) -> String {
        format!("{}.{}", self.package(t).prefix, t.name)
    }

    /// The field of `t` with this JSON name, inlined structs included.
    #[must_use]
    pub fn field<'a>(&'a self, t: &'a Type, json: &str) -> Option<&'a Field> {
        for field in &t.fields {
            if field.json == json && !json.is_empty() {
                return Some(field);
            }
            if let (true, Kind::Object(inner)) = (field.is_inline(), &field.kind)
                && let Some(found) = self.field(self.get(*inner), json)
            {
                return Some(found);
            }
        }
        None
    }

    /// Calls `f` for every field of `t` as JSON shows it, inlined structs flattened.
    pub fn each_field<'a>(&'a self, t: &'a Type, f: &mut dyn FnMut(&'a Field)) {
        for field in &t.fields {
            match (&field.kind, field.is_inline()) {
                (Kind::Object(inner), true) => self.each_field(self.get(*inner), f),
                _ => f(field),
            }
        }
    }

    /// The kind at a path of JSON field names; list elements and map values are entered without naming them.
    #[must_use]
    pub fn kind_at<'a>(&'a self, t: &'a Type, path: &[&str]) -> Option<&'a Kind> {
        let (first, rest) = path.split_first()?;
        let kind = &self.field(t, first)?.kind;
        if rest.is_empty() {
            return Some(kind);
        }
        match innermost(kind) {
            Kind::Object(id) => self.kind_at(self.get(*id), rest),
            _ => None,
        }
    }
}

/// The element kind of nested lists and maps.
#[must_use]
pub fn innermost(kind: &Kind) -> &Kind {
    match kind {
        Kind::List(inner) | Kind::Map(inner) => innermost(inner),
        other => other,
    }
}

/// `apps/v1` is ("apps", "v1"), `v1` is ("", "v1").
#[must_use]
pub fn split_api_version(api_version: &str) -> (&str, &str) {
    api_version.split_once('/').unwrap_or(("", api_version))
}

/// The opposite of [`split_api_version`].
#[must_use]
pub fn join_api_version(group: &str, version: &str) -> String {
    if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_leads_to_its_container_ports() {
        let s = schema();
        let pod = s.kind_of("v1", "Pod").expect("Pod is in the table");
        let port = s.kind_at(pod, &["spec", "containers", "ports", "containerPort"]);
        assert_eq!(port, Some(&Kind::Int32));
        let volume = s.kind_at(pod, &["spec", "volumes", "configMap", "name"]);
        assert_eq!(volume, Some(&Kind::String), "inlined structs are entered");
    }

    #[test]
    fn merge_facts_are_read() {
        let s = schema();
        let service = s.kind_of("v1", "Service").expect("Service is in the table");
        let Some(Kind::Object(spec)) = s.kind_at(service, &["spec"]) else {
            panic!("spec is a struct")
        };
        let ports = s.field(s.get(*spec), "ports").expect("ports");
        assert_eq!(ports.merge_key, "port");
        assert!(ports.patch_merge);
        assert_eq!(
            ports.list_type,
            Some(ListType::Map(Box::new(["port", "protocol"])))
        );
        assert!(s.field(s.get(*spec), "selector").expect("selector").atomic);
    }

    #[test]
    fn options_are_found_under_any_group() {
        assert!(schema().kind_of("policy/v1", "DeleteOptions").is_some());
        assert!(schema().kind_of("v1", "DeleteOptions").is_some());
        assert!(schema().kind_of("v1", "Nonsense").is_none());
    }
}
