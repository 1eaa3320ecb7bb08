//! Label selectors, and the sets of pods or nodes that policies make of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use control_api::v1::PeerSet;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::translate::text;

pub(crate) type Labels = BTreeMap<String, String>;
/// Content of a set's selector, shortened: equal selectors have equal ids everywhere.
pub(crate) type SetId = [u8; 16];

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Test {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    Absent,
}

/// A label selector in canonical form: requirements sorted, each once, `matchLabels` among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    requirements: BTreeSet<(String, Test)>,
}

impl Selector {
    /// Reads a metav1.LabelSelector; `None` for what an API server refuses.
    pub(crate) fn parse(value: &Value) -> Option<Self> {
        let fields = value.as_object()?;
        let mut requirements = BTreeSet::new();
        match fields.get("matchLabels").unwrap_or(&Value::Null) {
            Value::Null => {}
            Value::Object(labels) => {
                for (key, label) in labels {
                    let label = label.as_str().filter(|label| is_plain(label))?;
                    let test = Test::In([label.to_owned()].into());
                    requirements.insert((valid_key(key)?, test));
                }
            }
            _ => return None,
        }
        match fields.get("matchExpressions").unwrap_or(&Value::Null) {
            Value::Null => {}
            Value::Array(list) => {
                for expression in list {
                    requirements.insert(requirement(expression)?);
                }
            }
            _ => return None,
        }
        Some(Self { requirements })
    }

    /// As [`Selector::parse`], where absence selects everything.
    pub(crate) fn parse_or_all(value: &Value) -> Option<Self> {
        if value.is_null() {
            Some(Self::default())
        } else {
            Self::parse(value)
        }
    }

    fn is_all(&self) -> bool {
        self.requirements.is_empty()
    }

    /// `NotIn` and `DoesNotExist` also match what lacks the key.
    pub(crate) fn matches(&self, labels: &Labels) -> bool {
        self.requirements.iter().all(|(key, test)| {
            let label = labels.get(key);
            match test {
                Test::In(values) => label.is_some_and(|label| values.contains(label)),
                Test::NotIn(values) => label.is_none_or(|label| !values.contains(label)),
                Test::Exists => label.is_some(),
                Test::Absent => label.is_none(),
            }
        })
    }
}

fn requirement(expression: &Value) -> Option<(String, Test)> {
    let key = valid_key(expression["key"].as_str()?)?;
    let mut values = BTreeSet::new();
    match &expression["values"] {
        Value::Null => {}
        Value::Array(list) => {
            for value in list {
                let value = value.as_str().filter(|value| is_plain(value))?;
                values.insert(value.to_owned());
            }
        }
        _ => return None,
    }
    let test = match (expression["operator"].as_str()?, values.is_empty()) {
        ("In", false) => Test::In(values),
        ("NotIn", false) => Test::NotIn(values),
        ("Exists", true) => Test::Exists,
        ("DoesNotExist", true) => Test::Absent,
        _ => return None,
    };
    Some((key, test))
}

/// No other character stands in a label, and none of these has a meaning in the text of a selector.
fn is_plain(text: &str) -> bool {
    text.bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

fn valid_key(key: &str) -> Option<String> {
    let parts = key.split('/');
    let valid = parts.clone().count() <= 2 && parts.clone().all(|p| !p.is_empty() && is_plain(p));
    valid.then(|| key.to_owned())
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (key, test)) in self.requirements.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let list = |values: &BTreeSet<String>| {
                let values: Vec<&str> = values.iter().map(String::as_str).collect();
                values.join(",")
            };
            match test {
                Test::In(values) if values.len() == 1 => {
                    write!(f, "{comma}{key}={}", list(values))?;
                }
                Test::NotIn(values) if values.len() == 1 => {
                    write!(f, "{comma}{key}!={}", list(values))?;
                }
                Test::In(values) => write!(f, "{comma}{key} in ({})", list(values))?,
                Test::NotIn(values) => write!(f, "{comma}{key} notin ({})", list(values))?,
                Test::Exists => write!(f, "{comma}{key}")?,
                Test::Absent => write!(f, "{comma}!{key}")?,
            }
        }
        Ok(())
    }
}

/// Where a selector of pods looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Namespaces {
    One(String),
    Matching(Selector),
}

/// A set of pods or of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Members {
    Pods {
        namespaces: Namespaces,
        pods: Selector,
    },
    Nodes(Selector),
}

impl Members {
    /// Every pod of namespaces with these labels.
    pub(crate) fn of_namespaces(selector: Selector) -> Self {
        Self::Pods {
            namespaces: Namespaces::Matching(selector),
            pods: Selector::default(),
        }
    }

    pub(crate) fn id(&self) -> SetId {
        let digest = Sha256::digest(self.to_string());
        let mut id = SetId::default();
        id.copy_from_slice(&digest[..16]);
        id
    }

    pub(crate) fn message(&self) -> PeerSet {
        PeerSet {
            id: self.id().to_vec(),
            text: self.to_string(),
        }
    }
}

/// The text that ids are made of: it must never change.
impl fmt::Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nodes(selector) if selector.is_all() => write!(f, "all nodes"),
            Self::Nodes(selector) => write!(f, "nodes [{selector}]"),
            Self::Pods { namespaces, pods } => {
                write!(f, "pods ")?;
                if !pods.is_all() {
                    write!(f, "[{pods}] ")?;
                }
                match namespaces {
                    Namespaces::One(name) => write!(f, "in namespace {name}"),
                    Namespaces::Matching(all) if all.is_all() => write!(f, "in all namespaces"),
                    Namespaces::Matching(some) => write!(f, "in namespaces [{some}]"),
                }
            }
        }
    }
}

/// Reads `{namespaceSelector, podSelector}` of a ClusterNetworkPolicy.
pub(crate) fn namespaced_pods(value: &Value) -> Option<Members> {
    Some(Members::Pods {
        namespaces: Namespaces::Matching(Selector::parse_or_all(&value["namespaceSelector"])?),
        pods: Selector::parse(&value["podSelector"])?,
    })
}

/// Reads the peer of a NetworkPolicy that names pods: at least one of both selectors is there.
pub(crate) fn selected_pods(namespace: &str, peer: &Value) -> Option<Members> {
    let namespaces = match &peer["namespaceSelector"] {
        Value::Null => Namespaces::One(namespace.to_owned()),
        selector => Namespaces::Matching(Selector::parse(selector)?),
    };
    Some(Members::Pods {
        namespaces,
        pods: Selector::parse_or_all(&peer["podSelector"])?,
    })
}

/// Labels of an object.
pub(crate) fn labels(object: &Value) -> Labels {
    crate::translate::text_map(&object["metadata"]["labels"])
}

/// Labels of a namespace: its name is always one of them (KEP-2161).
pub(crate) fn namespace_labels(object: &Value) -> Labels {
    let mut labels = labels(object);
    labels.insert(
        "kubernetes.io/metadata.name".to_owned(),
        text(&object["metadata"]["name"]),
    );
    labels
}
