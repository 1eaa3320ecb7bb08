//! What the API server serves: one [`ResourceDef`] per resource, by group, version and plural name.
//!
//! Data and lookups only; behaviour of single kinds lives in `defaults`, `validation`, `tables` and `strategy`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

mod builtin;

/// Names are static for built-in resources and owned for those that are defined at run time.
pub type Text = Cow<'static, str>;

/// Group, version and kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gvk<'a> {
    pub group: &'a str,
    pub version: &'a str,
    pub kind: &'a str,
}

impl<'a> Gvk<'a> {
    #[must_use]
    pub const fn new(group: &'a str, version: &'a str, kind: &'a str) -> Self {
        Self {
            group,
            version,
            kind,
        }
    }

    /// From `apiVersion` and `kind` of an object.
    #[must_use]
    pub fn parse(api_version: &'a str, kind: &'a str) -> Self {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        Self {
            group,
            version,
            kind,
        }
    }

    /// `v1` or `apps/v1`.
    #[must_use]
    pub fn api_version(&self) -> String {
        join_group_version(self.group, self.version)
    }
}

/// `v1` for the core group, `group/version` otherwise.
#[must_use]
pub fn join_group_version(group: &str, version: &str) -> String {
    if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    }
}

/// What may be done with a resource or subresource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verb {
    Create,
    Delete,
    DeleteCollection,
    Get,
    List,
    Patch,
    Update,
    Watch,
}

impl Verb {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Delete => "delete",
            Self::DeleteCollection => "deletecollection",
            Self::Get => "get",
            Self::List => "list",
            Self::Patch => "patch",
            Self::Update => "update",
            Self::Watch => "watch",
        }
    }
}

/// Every verb, in discovery's order.
pub const ALL_VERBS: &[Verb] = &[
    Verb::Create,
    Verb::Delete,
    Verb::DeleteCollection,
    Verb::Get,
    Verb::List,
    Verb::Patch,
    Verb::Update,
    Verb::Watch,
];

/// What a subresource does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SubresourceKind {
    Status,
    Scale,
    Binding,
    Eviction,
    Log,
    Finalize,
    Token,
    Approval,
}

/// One subresource. Group, version and kind are those of its bodies, which may differ from the parent's.
#[derive(Clone, Debug)]
pub struct SubresourceDef {
    pub name: &'static str,
    pub what: SubresourceKind,
    pub group: Text,
    pub version: Text,
    pub kind: Text,
    pub verbs: &'static [Verb],
}

/// Names under which fields of a kind may be selected by `fieldSelector`, with the path of each.
pub type FieldLabels = &'static [(&'static str, &'static str)];

/// One served resource in one version.
#[derive(Clone, Debug)]
pub struct ResourceDef {
    pub group: Text,
    pub version: Text,
    pub kind: Text,
    pub plural: Text,
    pub singular: Text,
    pub short_names: Vec<Text>,
    pub categories: Vec<Text>,
    pub namespaced: bool,
    pub verbs: &'static [Verb],
    pub subresources: Vec<SubresourceDef>,
    /// Store topic, `GROUP/PLURAL` (`core` for the core group); versions and groups that share it share objects.
    pub storage: Text,
    /// `apiVersion` of stored objects.
    pub storage_version: Text,
    /// The strategy gives `spec` changes a new `metadata.generation`.
    pub has_generation: bool,
    /// PUT of a missing object creates it.
    pub create_on_update: bool,
    /// Selectable fields besides metadata.name and metadata.namespace.
    pub field_labels: FieldLabels,
}

impl ResourceDef {
    #[must_use]
    pub fn gvk(&self) -> Gvk<'_> {
        Gvk {
            group: &self.group,
            version: &self.version,
            kind: &self.kind,
        }
    }

    #[must_use]
    pub fn api_version(&self) -> String {
        join_group_version(&self.group, &self.version)
    }

    #[must_use]
    pub fn subresource(&self, name: &str) -> Option<&SubresourceDef> {
        self.subresources.iter().find(|s| s.name == name)
    }

    #[must_use]
    pub fn has_status(&self) -> bool {
        self.subresource("status").is_some()
    }

    #[must_use]
    pub fn allows(&self, verb: Verb) -> bool {
        self.verbs.contains(&verb)
    }

    /// Store key of one object.
    #[must_use]
    pub fn key(&self, namespace: &str, name: &str) -> String {
        if self.namespaced {
            format!("{}/{namespace}/{name}", self.storage)
        } else {
            format!("{}/{name}", self.storage)
        }
    }

    /// Store prefix of all objects, or of one namespace's.
    #[must_use]
    pub fn prefix(&self, namespace: &str) -> String {
        if self.namespaced && !namespace.is_empty() {
            format!("{}/{namespace}/", self.storage)
        } else {
            format!("{}/", self.storage)
        }
    }
}

/// All served resources.
#[derive(Debug)]
pub struct Registry {
    /// In discovery's order: core first, then groups by name, versions by preference.
    defs: Vec<Arc<ResourceDef>>,
    by_path: BTreeMap<(String, String, String), Arc<ResourceDef>>,
    by_kind: BTreeMap<(String, String, String), Arc<ResourceDef>>,
}

impl Registry {
    /// The built-in resources.
    #[must_use]
    pub fn builtin() -> Self {
        Self::new(builtin::resources())
    }

    #[must_use]
    pub fn new(defs: Vec<ResourceDef>) -> Self {
        let defs: Vec<_> = defs.into_iter().map(Arc::new).collect();
        let index = |third: fn(&ResourceDef) -> &str| {
            defs.iter()
                .map(|d| {
                    let key = (
                        d.group.to_string(),
                        d.version.to_string(),
                        third(d).to_owned(),
                    );
                    (key, Arc::clone(d))
                })
                .collect()
        };
        Self {
            by_path: index(|d| &d.plural),
            by_kind: index(|d| &d.kind),
            defs,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<ResourceDef>> {
        self.defs.iter()
    }

    #[must_use]
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<ResourceDef>> {
        self.by_path
            .get(&(group.to_owned(), version.to_owned(), plural.to_owned()))
    }

    #[must_use]
    pub fn find_kind(&self, gvk: Gvk<'_>) -> Option<&Arc<ResourceDef>> {
        self.by_kind.get(&(
            gvk.group.to_owned(),
            gvk.version.to_owned(),
            gvk.kind.to_owned(),
        ))
    }

    /// Groups with their versions, both in discovery's order; the core group is `""`.
    #[must_use]
    pub fn groups(&self) -> Vec<(String, Vec<String>)> {
        let mut groups: Vec<(String, Vec<String>)> = Vec::new();
        for def in &self.defs {
            let index = groups
                .iter()
                .position(|(g, _)| *g == def.group)
                .unwrap_or_else(|| {
                    groups.push((def.group.to_string(), Vec::new()));
                    groups.len() - 1
                });
            let versions = &mut groups[index].1;
            if !versions.iter().any(|v| *v == def.version) {
                versions.push(def.version.to_string());
            }
        }
        groups
    }

    /// Resources of one group and version, in order.
    pub fn of_version<'a>(
        &'a self,
        group: &'a str,
        version: &'a str,
    ) -> impl Iterator<Item = &'a Arc<ResourceDef>> {
        self.defs
            .iter()
            .filter(move |d| d.group == group && d.version == version)
    }
}
