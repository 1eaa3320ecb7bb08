//! Contents of configMap, secret, downwardAPI and projected volumes. [pure]

use std::collections::BTreeMap;

use control_api::desired::Name;
use control_api::v1::{FileSet, KeyedData, KeyedSource, file_source::Kind};

use super::downward::{field, resource};
use super::env::{ConfigError, Context};
use super::node::join_inside;

/// Files by their path inside the volume.
pub(crate) type Files = BTreeMap<String, File>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct File {
    pub(crate) data: Vec<u8>,
    pub(crate) mode: u32,
}

/// When the file set does not say.
const DEFAULT_MODE: u32 = 0o644;
const MODE_BITS: u32 = 0o777;

/// Everything a file set shows, later sources over earlier ones.
pub(crate) fn files(context: Context<'_>, set: &FileSet) -> Result<Files, ConfigError> {
    let default_mode = match u32::try_from(set.default_mode) {
        Ok(mode) if mode > 0 => mode & MODE_BITS,
        _ => DEFAULT_MODE,
    };
    let mut files = Files::new();
    for source in &set.sources {
        match &source.kind {
            None => {}
            Some(Kind::ConfigMap(source)) => {
                let objects = &context.desired.config_maps;
                let missing = ConfigError::NoConfigMap;
                keyed(
                    context,
                    source,
                    objects,
                    "ConfigMap",
                    missing,
                    default_mode,
                    &mut files,
                )?;
            }
            Some(Kind::Secret(source)) => {
                let objects = &context.desired.secrets;
                let missing = ConfigError::NoSecret;
                keyed(
                    context,
                    source,
                    objects,
                    "Secret",
                    missing,
                    default_mode,
                    &mut files,
                )?;
            }
            Some(Kind::Downward(source)) => {
                for item in &source.items {
                    let text = match &item.resource {
                        Some(reference) => resource(context, reference, None)?,
                        None => field(context, &item.field_path)?,
                    };
                    let mode = item_mode(item.mode, default_mode);
                    put(&mut files, &item.path, text.into_bytes(), mode)?;
                }
            }
            Some(Kind::Token(source)) => {
                // A control plane that issues none, or a state from the node's disk, which carries no secrets.
                if source.token.is_empty() {
                    continue;
                }
                put(
                    &mut files,
                    &source.path,
                    source.token.clone().into_bytes(),
                    default_mode,
                )?;
            }
        }
    }
    Ok(files)
}

/// True when the contents must not touch the disk.
pub(crate) fn is_secret(set: &FileSet) -> bool {
    set.sources
        .iter()
        .any(|s| matches!(s.kind, Some(Kind::Secret(_) | Kind::Token(_))))
}

/// Paths of tokens that did not come along: what the volume has of them stays.
pub(crate) fn absent_tokens(set: &FileSet) -> impl Iterator<Item = &str> {
    set.sources.iter().filter_map(|source| match &source.kind {
        Some(Kind::Token(token)) if token.token.is_empty() => Some(token.path.as_str()),
        _ => None,
    })
}

fn item_mode(mode: i32, default_mode: u32) -> u32 {
    u32::try_from(mode)
        .ok()
        .filter(|m| *m > 0)
        .map_or(default_mode, |m| m & MODE_BITS)
}

fn keyed(
    context: Context<'_>,
    source: &KeyedSource,
    objects: &BTreeMap<Name, KeyedData>,
    kind: &'static str,
    missing: fn(String) -> ConfigError,
    default_mode: u32,
    files: &mut Files,
) -> Result<(), ConfigError> {
    let name = Name::new(&context.spec.namespace, &source.name);
    let Some(object) = objects.get(&name) else {
        return if source.optional {
            Ok(())
        } else {
            Err(missing(source.name.clone()))
        };
    };
    if source.items.is_empty() {
        for (key, value) in &object.data {
            put(files, key, value.clone(), default_mode)?;
        }
        return Ok(());
    }
    for item in &source.items {
        match object.data.get(&item.key) {
            Some(value) => {
                put(
                    files,
                    &item.path,
                    value.clone(),
                    item_mode(item.mode, default_mode),
                )?;
            }
            None if source.optional => {}
            None => {
                return Err(ConfigError::NoKey {
                    kind,
                    key: item.key.clone(),
                    object: name,
                });
            }
        }
    }
    Ok(())
}

fn put(files: &mut Files, path: &str, data: Vec<u8>, mode: u32) -> Result<(), ConfigError> {
    let safe = join_inside(std::path::Path::new(""), path)
        .filter(|p| !p.as_os_str().is_empty() && !path.starts_with(".."))
        .ok_or_else(|| {
            ConfigError::Invalid(format!("volume file {path:?} would lie outside its volume"))
        })?;
    files.insert(safe.to_string_lossy().into_owned(), File { data, mode });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::node::NodeFacts;
    use super::*;
    use control_api::desired::DesiredState;
    use control_api::v1::{DownwardItem, DownwardSource, FileSource, KeyToPath, PodSpec};

    fn source(kind: Kind) -> FileSource {
        FileSource { kind: Some(kind) }
    }

    fn desired() -> DesiredState {
        let mut desired = DesiredState::default();
        let data = BTreeMap::from([("a".to_owned(), b"1".to_vec()), ("b".into(), b"2".to_vec())]);
        let map = KeyedData {
            namespace: "ns".into(),
            name: "conf".into(),
            data,
        };
        desired.config_maps.insert(Name::new("ns", "conf"), map);
        desired
    }

    fn shown(set: &FileSet) -> Result<Files, ConfigError> {
        let (desired, node) = (desired(), NodeFacts::default());
        let spec = PodSpec {
            namespace: "ns".into(),
            name: "p".into(),
            ..PodSpec::default()
        };
        files(
            Context {
                spec: &spec,
                desired: &desired,
                node: &node,
                pod_ips: &[],
            },
            set,
        )
    }

    #[test]
    fn keys_items_and_downward_fields_become_files() {
        let all = KeyedSource {
            name: "conf".into(),
            ..KeyedSource::default()
        };
        let items = KeyedSource {
            items: vec![KeyToPath {
                key: "a".into(),
                path: "dir/x".into(),
                mode: 0o400,
            }],
            ..all.clone()
        };
        let field = DownwardItem {
            path: "me".into(),
            field_path: "metadata.name".into(),
            mode: -1,
            ..DownwardItem::default()
        };
        let set = FileSet {
            default_mode: 0o640,
            sources: vec![
                source(Kind::ConfigMap(all)),
                source(Kind::ConfigMap(items)),
                source(Kind::Downward(DownwardSource { items: vec![field] })),
            ],
        };
        let files = shown(&set).unwrap();
        let names: Vec<_> = files.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "b", "dir/x", "me"]);
        assert_eq!(files["dir/x"].mode, 0o400);
        assert_eq!(files["a"].mode, 0o640);
        assert_eq!(files["me"].data, b"p");
    }

    #[test]
    fn missing_objects_and_escapes_are_errors() {
        let gone = KeyedSource {
            name: "gone".into(),
            ..KeyedSource::default()
        };
        let set = |s: KeyedSource| FileSet {
            default_mode: 0,
            sources: vec![source(Kind::ConfigMap(s))],
        };
        assert_eq!(
            shown(&set(gone.clone())),
            Err(ConfigError::NoConfigMap("gone".into()))
        );
        assert!(
            shown(&set(KeyedSource {
                optional: true,
                ..gone
            }))
            .unwrap()
            .is_empty()
        );
        for path in ["../x", "a/../../x", "", "..data"] {
            let items = vec![KeyToPath {
                key: "a".into(),
                path: path.into(),
                mode: -1,
            }];
            let escape = KeyedSource {
                name: "conf".into(),
                items,
                optional: false,
            };
            assert!(
                matches!(shown(&set(escape)), Err(ConfigError::Invalid(_))),
                "{path}"
            );
        }
    }
}
