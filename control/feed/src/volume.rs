//! Volumes of pods, and which ConfigMaps and Secrets a pod refers to.

use std::collections::BTreeSet;

use control_api::v1::{
    DownwardItem, DownwardSource, EmptyDir, FileSet, FileSource, HostPath, KeyToPath, KeyedSource,
    ObjectKind, PodSpec, TokenSource, Volume, env_var, file_source, volume,
};
use serde_json::Value;

use crate::pod::{quantity_text, resource_ref};
use crate::quantity;
use crate::translate::{flag, items, text};

/// core/v1: defaultMode when unset.
const DEFAULT_MODE: i32 = 0o644;
/// core/v1: expirationSeconds of a projected token when unset.
const DEFAULT_TOKEN_EXPIRATION_S: i64 = 3600;

/// A volume. One of a type that Weir does not mount has no source; the agent reports it on the pod.
pub(crate) fn volume(object: &Value) -> Volume {
    let source = if object["emptyDir"].is_object() {
        let empty_dir = &object["emptyDir"];
        let size = quantity_text(&empty_dir["sizeLimit"]).and_then(|q| quantity::units(&q));
        Some(volume::Source::EmptyDir(EmptyDir {
            medium: text(&empty_dir["medium"]),
            size_limit_bytes: size.unwrap_or_default(),
        }))
    } else if object["hostPath"].is_object() {
        let host_path = &object["hostPath"];
        Some(volume::Source::HostPath(HostPath {
            path: text(&host_path["path"]),
            r#type: text(&host_path["type"]),
        }))
    } else {
        file_set(object).map(volume::Source::Files)
    };
    Volume {
        name: text(&object["name"]),
        source,
    }
}

fn file_set(object: &Value) -> Option<FileSet> {
    let (holder, kinds) = if object["configMap"].is_object() {
        let config_map = &object["configMap"];
        (
            config_map,
            vec![file_source::Kind::ConfigMap(keyed_source(
                config_map, "name",
            ))],
        )
    } else if object["secret"].is_object() {
        let secret = &object["secret"];
        (
            secret,
            vec![file_source::Kind::Secret(keyed_source(
                secret,
                "secretName",
            ))],
        )
    } else if object["downwardAPI"].is_object() {
        let downward = &object["downwardAPI"];
        (
            downward,
            vec![file_source::Kind::Downward(downward_source(downward))],
        )
    } else if object["projected"].is_object() {
        let projected = &object["projected"];
        (
            projected,
            items(&projected["sources"])
                .filter_map(projected_source)
                .collect(),
        )
    } else {
        return None;
    };
    Some(FileSet {
        default_mode: mode(&holder["defaultMode"]).unwrap_or(DEFAULT_MODE),
        sources: kinds
            .into_iter()
            .map(|kind| FileSource { kind: Some(kind) })
            .collect(),
    })
}

fn projected_source(source: &Value) -> Option<file_source::Kind> {
    if source["configMap"].is_object() {
        Some(file_source::Kind::ConfigMap(keyed_source(
            &source["configMap"],
            "name",
        )))
    } else if source["secret"].is_object() {
        Some(file_source::Kind::Secret(keyed_source(
            &source["secret"],
            "name",
        )))
    } else if source["downwardAPI"].is_object() {
        Some(file_source::Kind::Downward(downward_source(
            &source["downwardAPI"],
        )))
    } else if source["serviceAccountToken"].is_object() {
        let token = &source["serviceAccountToken"];
        Some(file_source::Kind::Token(TokenSource {
            path: text(&token["path"]),
            audience: text(&token["audience"]),
            expiration_s: token["expirationSeconds"]
                .as_i64()
                .unwrap_or(DEFAULT_TOKEN_EXPIRATION_S),
            token: String::new(),
        }))
    } else {
        None
    }
}

fn keyed_source(source: &Value, name_key: &str) -> KeyedSource {
    KeyedSource {
        name: text(&source[name_key]),
        optional: flag(&source["optional"]),
        items: items(&source["items"])
            .map(|item| KeyToPath {
                key: text(&item["key"]),
                path: text(&item["path"]),
                mode: mode(&item["mode"]).unwrap_or(-1),
            })
            .collect(),
    }
}

fn downward_source(source: &Value) -> DownwardSource {
    let downward_item = |item: &Value| DownwardItem {
        path: text(&item["path"]),
        field_path: text(&item["fieldRef"]["fieldPath"]),
        resource: item["resourceFieldRef"]
            .is_object()
            .then(|| resource_ref(&item["resourceFieldRef"])),
        mode: mode(&item["mode"]).unwrap_or(-1),
    };
    DownwardSource {
        items: items(&source["items"]).map(downward_item).collect(),
    }
}

fn mode(value: &Value) -> Option<i32> {
    value.as_i64().and_then(|n| i32::try_from(n).ok())
}

/// ConfigMaps and Secrets, by kind and name, that the agent needs to run this pod.
pub(crate) fn references(pod: &PodSpec) -> BTreeSet<(ObjectKind, String)> {
    let mut found = BTreeSet::new();
    let mut add = |kind, name: &str| {
        if !name.is_empty() {
            found.insert((kind, name.to_owned()));
        }
    };
    for container in pod.init_containers.iter().chain(&pod.containers) {
        for variable in &container.env {
            match &variable.source {
                Some(env_var::Source::ConfigMapKey(key)) => add(ObjectKind::ConfigMap, &key.name),
                Some(env_var::Source::SecretKey(key)) => add(ObjectKind::Secret, &key.name),
                _ => {}
            }
        }
        for from in &container.env_from {
            add(ObjectKind::ConfigMap, &from.config_map);
            add(ObjectKind::Secret, &from.secret);
        }
    }
    for volume in &pod.volumes {
        let Some(volume::Source::Files(files)) = &volume.source else {
            continue;
        };
        for source in &files.sources {
            match &source.kind {
                Some(file_source::Kind::ConfigMap(keyed)) => {
                    add(ObjectKind::ConfigMap, &keyed.name);
                }
                Some(file_source::Kind::Secret(keyed)) => add(ObjectKind::Secret, &keyed.name),
                _ => {}
            }
        }
    }
    found
}
