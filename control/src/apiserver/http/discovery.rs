//! Discovery documents: which groups, versions and resources are served. Pure.

use serde_json::{Map, Value, json};

use crate::apiserver::registry::{Registry, ResourceDef, SubresourceDef, Text, Verb};

/// Content-Type of an aggregated answer; clients look for exactly what they asked for.
pub(super) const fn aggregated_content_type(beta: bool) -> &'static str {
    if beta {
        "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
    } else {
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    }
}

/// `/api`
pub(super) fn legacy_versions() -> Value {
    json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
}

/// `/apis`
pub(super) fn groups(registry: &Registry) -> Value {
    let groups: Vec<Value> = registry
        .groups()
        .iter()
        .filter(|(group, _)| !group.is_empty())
        .map(|(group, versions)| group_fields(group, versions))
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

/// `/apis/GROUP`
pub(super) fn group(registry: &Registry, wanted: &str) -> Option<Value> {
    let groups = registry.groups();
    let (name, versions) = groups.iter().find(|(g, _)| g == wanted && !g.is_empty())?;
    let mut fields = group_fields(name, versions);
    fields["kind"] = "APIGroup".into();
    fields["apiVersion"] = "v1".into();
    Some(fields)
}

fn group_fields(group: &str, versions: &[String]) -> Value {
    let version = |v: &String| json!({"groupVersion": format!("{group}/{v}"), "version": v});
    let all: Vec<Value> = versions.iter().map(version).collect();
    json!({"name": group, "versions": all, "preferredVersion": versions.first().map(version)})
}

fn verbs(verbs: &[Verb]) -> Value {
    verbs.iter().map(|v| v.as_str()).collect::<Vec<_>>().into()
}

fn texts(names: &[Text]) -> Value {
    names
        .iter()
        .map(|n| n.as_ref())
        .collect::<Vec<&str>>()
        .into()
}

/// `/api/v1` and `/apis/GROUP/VERSION`; `None` when nothing is served there.
pub(super) fn resources(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let mut list = Vec::new();
    for def in registry.of_version(group, version) {
        list.push(resource(def));
        list.extend(def.subresources.iter().map(|sub| subresource(def, sub)));
    }
    if list.is_empty() {
        return None;
    }
    let group_version = crate::apiserver::registry::join_group_version(group, version);
    Some(
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version,
        "resources": list}),
    )
}

fn resource(def: &ResourceDef) -> Value {
    let mut entry = json!({"name": def.plural, "singularName": def.singular,
        "namespaced": def.namespaced, "kind": def.kind, "verbs": verbs(def.verbs)});
    if !def.short_names.is_empty() {
        entry["shortNames"] = texts(&def.short_names);
    }
    if !def.categories.is_empty() {
        entry["categories"] = texts(&def.categories);
    }
    entry
}

fn subresource(def: &ResourceDef, sub: &SubresourceDef) -> Value {
    let mut entry = json!({"name": format!("{}/{}", def.plural, sub.name), "singularName": "",
        "namespaced": def.namespaced, "kind": sub.kind, "verbs": verbs(sub.verbs)});
    if sub.group != def.group || sub.version != def.version {
        entry["group"] = json!(sub.group);
        entry["version"] = json!(sub.version);
    }
    entry
}

/// Aggregated discovery of the core group (`core`) or of all the others.
pub(super) fn aggregated(registry: &Registry, core: bool, beta: bool) -> Value {
    let items: Vec<Value> = registry
        .groups()
        .iter()
        .filter(|(group, _)| group.is_empty() == core)
        .map(|(group, versions)| {
            let versions: Vec<Value> = versions
                .iter()
                .map(|v| aggregated_version(registry, group, v))
                .collect();
            let mut metadata = Map::new();
            if !group.is_empty() {
                metadata.insert("name".into(), group.as_str().into());
            }
            metadata.insert("creationTimestamp".into(), Value::Null);
            json!({"metadata": metadata, "versions": versions})
        })
        .collect();
    let version = if beta { "v2beta1" } else { "v2" };
    json!({"kind": "APIGroupDiscoveryList", "apiVersion": format!("apidiscovery.k8s.io/{version}"),
        "metadata": {}, "items": items})
}

fn aggregated_version(registry: &Registry, group: &str, version: &str) -> Value {
    let resources: Vec<Value> = registry
        .of_version(group, version)
        .map(|d| aggregated_resource(d))
        .collect();
    json!({"version": version, "resources": resources, "freshness": "Current"})
}

fn aggregated_resource(def: &ResourceDef) -> Value {
    let mut entry = json!({
        "resource": def.plural,
        "responseKind": {"group": def.group, "version": def.version, "kind": def.kind},
        "scope": if def.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": def.singular,
        "verbs": verbs(def.verbs),
    });
    if !def.short_names.is_empty() {
        entry["shortNames"] = texts(&def.short_names);
    }
    if !def.categories.is_empty() {
        entry["categories"] = texts(&def.categories);
    }
    if !def.subresources.is_empty() {
        let subs = def.subresources.iter().map(|sub| {
            json!({"subresource": sub.name, "verbs": verbs(sub.verbs),
                "responseKind": {"group": sub.group, "version": sub.version, "kind": sub.kind}})
        });
        entry["subresources"] = subs.collect();
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_lists_name_scopes_verbs_and_subresource_kinds() {
        let registry = Registry::builtin();
        let core = resources(&registry, "", "v1").unwrap();
        let find = |name: &str| {
            core["resources"]
                .as_array()
                .unwrap()
                .iter()
                .find(|r| r["name"] == name)
                .unwrap()
        };
        assert_eq!(find("pods")["shortNames"], json!(["po"]));
        assert_eq!(find("nodes")["namespaced"], false);
        assert_eq!(find("pods/eviction")["group"], "policy");
        assert_eq!(find("pods/eviction")["verbs"], json!(["create"]));
        assert!(find("pods/status").get("group").is_none());
        assert!(resources(&registry, "", "v9").is_none());
    }

    #[test]
    fn the_first_version_of_a_group_is_preferred() {
        let scaling = group(&Registry::builtin(), "autoscaling").unwrap();
        assert_eq!(scaling["preferredVersion"]["version"], "v2");
        assert!(group(&Registry::builtin(), "").is_none());
    }
}
