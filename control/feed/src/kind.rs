//! The Kubernetes kinds that the feed is made of.

use control_api::desired::Name;
use control_api::v1::ObjectKind;
use serde_json::Value;

use crate::translate;

/// The Kubernetes kinds that the index reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Namespace,
    Node,
    Service,
    EndpointSlice,
    Pod,
    ConfigMap,
    Secret,
    NetworkPolicy,
    ClusterNetworkPolicy,
}

impl Kind {
    pub const ALL: [Self; 9] = [
        Self::Namespace,
        Self::Node,
        Self::Service,
        Self::EndpointSlice,
        Self::ConfigMap,
        Self::Secret,
        Self::NetworkPolicy,
        Self::ClusterNetworkPolicy,
        // Last: what pods refer to is known by then.
        Self::Pod,
    ];

    /// The kind of an object that says what it is.
    #[must_use]
    pub fn of(object: &Value) -> Option<Self> {
        let version = object["apiVersion"].as_str()?;
        let group = version.split_once('/').map_or("", |(group, _)| group);
        match (group, object["kind"].as_str()?) {
            ("", "Namespace") => Some(Self::Namespace),
            ("", "Node") => Some(Self::Node),
            ("", "Service") => Some(Self::Service),
            ("discovery.k8s.io", "EndpointSlice") => Some(Self::EndpointSlice),
            ("", "Pod") => Some(Self::Pod),
            ("", "ConfigMap") => Some(Self::ConfigMap),
            ("", "Secret") => Some(Self::Secret),
            ("networking.k8s.io", "NetworkPolicy") => Some(Self::NetworkPolicy),
            ("policy.networking.k8s.io", "ClusterNetworkPolicy") => {
                Some(Self::ClusterNetworkPolicy)
            }
            _ => None,
        }
    }

    /// Whether a cluster may lack it: its definition is not part of every API server.
    #[must_use]
    pub fn is_optional(self) -> bool {
        self == Self::ClusterNetworkPolicy
    }

    pub(crate) fn name_of(self, object: &Value) -> Name {
        match self {
            Self::Namespace | Self::Node | Self::ClusterNetworkPolicy => {
                Name::new("", translate::name(object))
            }
            _ => Name::new(translate::namespace(object), translate::name(object)),
        }
    }

    /// The feed's kind of what it becomes.
    pub(crate) fn feed_kind(self) -> ObjectKind {
        match self {
            Self::Namespace => ObjectKind::Config,
            Self::Node => ObjectKind::Node,
            Self::Service => ObjectKind::Service,
            Self::EndpointSlice => ObjectKind::EndpointSlice,
            Self::Pod => ObjectKind::Pod,
            Self::ConfigMap => ObjectKind::ConfigMap,
            Self::Secret => ObjectKind::Secret,
            Self::NetworkPolicy | Self::ClusterNetworkPolicy => ObjectKind::Policy,
        }
    }
}
