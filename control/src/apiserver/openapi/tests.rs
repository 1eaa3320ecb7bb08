use std::collections::BTreeSet;

use super::*;

/// Every reference in a document.
fn references(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value.as_str() {
                    Some(target) if key == "$ref" => {
                        found.insert(target.to_owned());
                    }
                    _ => references(value, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        _ => {}
    }
}

#[test]
fn every_group_version_has_a_closed_document_under_its_hashed_url() {
    let registry = Registry::builtin();
    let index = v3_index(&registry);
    let paths = index["paths"].as_object().unwrap();
    assert!(paths.contains_key("api/v1") && paths.contains_key("apis/apps/v1"));
    for (path, entry) in paths {
        let url = entry["serverRelativeURL"].as_str().unwrap();
        assert!(
            url.starts_with(&format!("/openapi/v3/{path}?hash=")),
            "{url}"
        );
        let document = v3_document(&registry, path).unwrap();
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        for target in found {
            let pointer = target.strip_prefix('#').unwrap();
            assert!(
                document.pointer(pointer).is_some_and(Value::is_object),
                "{path}: {target}"
            );
        }
    }
    assert!(v3_document(&registry, "apis/nope/v1").is_none());
}

#[test]
fn patch_operations_say_what_apply_looks_for() {
    let document = v3_document(&Registry::builtin(), "api/v1").unwrap();
    let patch = &document["paths"]["/api/v1/namespaces/{namespace}/configmaps/{name}"]["patch"];
    assert_eq!(
        patch["x-kubernetes-group-version-kind"],
        json!({"group": "", "version": "v1", "kind": "ConfigMap"})
    );
    assert!(patch["requestBody"]["content"]["application/strategic-merge-patch+json"].is_object());
    assert!(patch["requestBody"]["content"][paths::APPLY_PATCH].is_object());
    let parameters = patch["parameters"].as_array().unwrap();
    assert!(
        parameters
            .iter()
            .any(|p| p["name"] == "fieldValidation" && p["in"] == "query")
    );
    let schemas = &document["components"]["schemas"];
    let ports = &schemas["io.k8s.api.core.v1.ServiceSpec"]["properties"]["ports"];
    assert_eq!(ports["x-kubernetes-patch-merge-key"], "port");
    assert_eq!(
        ports["x-kubernetes-list-map-keys"],
        json!(["port", "protocol"])
    );
    let kinds = &schemas["io.k8s.api.core.v1.ConfigMap"]["x-kubernetes-group-version-kind"];
    assert_eq!(kinds[0]["kind"], "ConfigMap");
}

#[test]
fn the_second_version_is_closed_and_has_a_binary_form() {
    let registry = Registry::builtin();
    let document = v2_document(&registry);
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    for target in found {
        let pointer = target.strip_prefix('#').unwrap();
        assert!(
            document.pointer(pointer).is_some_and(Value::is_object),
            "{target}"
        );
    }
    let bytes = v2_protobuf(&registry);
    assert!(bytes.starts_with(b"\x0a\x032.0"));
}
