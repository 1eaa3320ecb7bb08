use base64::Engine as _;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::apiserver::schema::normalize::normalize;

fn base64(text: &str) -> Vec<u8> {
    base64::engine::general_purpose::STANDARD
        .decode(text)
        .unwrap()
}

fn round_trip(object: &Value) -> Value {
    let bytes = encode(object).expect("the kind has a message");
    decode(&bytes, Gvk::new("", "v1", "X"))
        .expect("own bytes decode")
        .0
}

#[test]
fn a_config_map_as_a_client_sends_it() {
    let body = base64("azhzAAoPCgJ2MRIJQ29uZmlnTWFwEg8KBQoDcmF3EgYKAWsSAXY=");
    let (object, known) = decode(&body, Gvk::new("", "v1", "ConfigMap")).unwrap();
    assert!(known);
    assert_eq!(
        object,
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "raw"}, "data": {"k": "v"}})
    );
}

#[test]
fn delete_options_as_a_client_sends_them() {
    let body = base64("azhzAAoTCgJ2MRINRGVsZXRlT3B0aW9ucxIFKgNBbGw=");
    let (object, _) = decode(&body, Gvk::new("", "v1", "DeleteOptions")).unwrap();
    assert_eq!(object["dryRun"], json!(["All"]));
}

#[test]
fn bodies_without_envelope_and_broken_messages_are_refused() {
    let expected = Gvk::new("", "v1", "ConfigMap");
    assert!(decode(br#"{"kind":"ConfigMap"}"#, expected).is_err());
    assert!(decode(b"k8s\0\x0a\xff", expected).is_err());
    assert!(decode(b"k8s\0\x12\x02\x0a\x09", expected).is_err());
}

#[test]
fn special_types_keep_their_meaning() {
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {
            "name": "web", "creationTimestamp": "2024-05-06T07:08:09Z", "labels": {"app": "web"},
            "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {".": {}}}}],
        },
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "web"}},
            "strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 1}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {
                    "containers": [{
                        "name": "c", "image": "nginx",
                        "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}},
                        "livenessProbe": {"httpGet": {"port": "web", "path": "/"}, "periodSeconds": 5},
                    }],
                    "volumes": [{"name": "v", "configMap": {"name": "cm", "optional": false}}],
                    "securityContext": {"runAsUser": -1, "supplementalGroups": [1, 2]},
                },
            },
        },
        "status": {},
    });
    assert_eq!(round_trip(&deployment), deployment);
}

#[test]
fn schema_unions_and_bytes_round_trip() {
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "spec": {
            "group": "example.com",
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {
                    "type": "object",
                    "additionalProperties": false,
                    "properties": {
                        "list": {"type": "array", "items": {"type": "number", "maximum": 1.5}},
                        "any": {"default": {"x": [1, null]}, "additionalProperties": {"type": "string"}},
                    },
                    "dependencies": {"a": ["b"], "c": {"type": "string"}},
                }},
            }],
            "scope": "Namespaced",
        },
    });
    let back = round_trip(&definition);
    assert_eq!(
        back["spec"]["versions"][0]["schema"],
        definition["spec"]["versions"][0]["schema"]
    );
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "data": {"k": "AAEC"}});
    assert_eq!(round_trip(&secret), secret);
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {"extra": {"k": ["a", "b"]}, "user": "u"},
    });
    assert_eq!(round_trip(&review)["spec"], review["spec"]);
}

#[test]
fn nested_messages_have_a_limit() {
    // A JSONSchemaProps inside a JSONSchemaProps and so on, far beyond any real schema.
    let mut schema = json!({"type": "string"});
    for _ in 0..MAX_DEPTH + 8 {
        schema = json!({"not": schema});
    }
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]},
    });
    let bytes = encode(&definition).unwrap();
    let error = decode(&bytes, Gvk::new("", "v1", "X")).unwrap_err();
    assert!(error.contains("nested too deeply"), "{error}");
}

proptest! {
    #[test]
    fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut body = b"k8s\0\x0a\x0d\x0a\x02v1\x12\x03Pod\x12".to_vec();
        body.extend_from_slice(&bytes);
        let _ = decode(&body, Gvk::new("", "v1", "Pod"));
        let _ = decode(&bytes, Gvk::new("", "v1", "Pod"));
    }

    #[test]
    fn what_is_encoded_comes_back(
        name in "[a-z]{1,8}",
        port in 0_i32..70_000,
        int_target in any::<bool>(),
        labels in proptest::collection::btree_map("[a-z]{1,4}", "[ -~]{0,8}", 0..4),
    ) {
        let target = if int_target { json!(port) } else { json!(name) };
        let mut service = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {"ports": [{"name": name, "port": port, "targetPort": target}]},
        });
        let t = schema().kind_of("v1", "Service").unwrap();
        normalize(t, &mut service).unwrap();
        let mut back = round_trip(&service);
        normalize(t, &mut back).unwrap();
        prop_assert_eq!(back, service);
    }
}
