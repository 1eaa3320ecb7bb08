use serde_json::json;

use super::*;
use crate::apiserver::defaults::apply_defaults;

/// Fields and reasons of what is wrong with a defaulted object.
fn faults(group: &str, kind: &str, mut object: Value) -> Vec<(String, &'static str)> {
    let gvk = Gvk::new(group, "v1", kind);
    if object["metadata"]["name"].is_null() {
        object["metadata"]["name"] = "x".into();
    }
    apply_defaults(gvk, &mut object, None);
    validate_create(gvk, &object)
        .into_iter()
        .map(|c| (c.field, c.reason))
        .collect()
}

fn changed(group: &str, kind: &str, mut old: Value, change: Value) -> Vec<(String, &'static str)> {
    let gvk = Gvk::new(group, "v1", kind);
    old["metadata"]["name"] = "x".into();
    apply_defaults(gvk, &mut old, None);
    assert_eq!(
        validate_create(gvk, &old),
        Vec::new(),
        "the old object is valid"
    );
    let mut new = old.clone();
    crate::apiserver::patch::apply_merge_patch(&mut new, &change);
    apply_defaults(gvk, &mut new, Some(&old));
    validate_update(gvk, &new, &old)
        .into_iter()
        .map(|c| (c.field, c.reason))
        .collect()
}

fn has(found: &[(String, &str)], field: &str, reason: &str) {
    assert!(
        found.iter().any(|(f, r)| f == field && *r == reason),
        "{field} {reason} in {found:?}"
    );
}

const INVALID: &str = "FieldValueInvalid";
const REQUIRED: &str = "FieldValueRequired";
const FORBIDDEN: &str = "FieldValueForbidden";
const DUPLICATE: &str = "FieldValueDuplicate";
const UNSUPPORTED: &str = "FieldValueNotSupported";

fn pod(spec: Value) -> Vec<(String, &'static str)> {
    faults("", "Pod", json!({"spec": spec}))
}

fn container(extra: Value) -> Value {
    let mut c = json!({"name": "c", "image": "example.com/app:1"});
    crate::apiserver::patch::apply_merge_patch(&mut c, &extra);
    json!({"containers": [c]})
}

#[test]
fn a_plain_pod_is_valid() {
    assert_eq!(pod(container(json!({}))), []);
}

#[test]
fn each_mistake_in_a_pod_is_named_by_its_path() {
    has(&pod(json!({"containers": []})), "spec.containers", REQUIRED);
    has(
        &pod(container(json!({"name": "Upper"}))),
        "spec.containers[0].name",
        INVALID,
    );
    has(
        &pod(container(json!({"image": null}))),
        "spec.containers[0].image",
        REQUIRED,
    );
    let twice = json!({"containers": [{"name": "c", "image": "i"}, {"name": "c", "image": "i"}]});
    has(&pod(twice), "spec.containers[1].name", DUPLICATE);
    let mut policy = container(json!({}));
    policy["restartPolicy"] = "Sometimes".into();
    has(&pod(policy), "spec.restartPolicy", UNSUPPORTED);
    let over = container(json!({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}));
    has(&pod(over), "spec.containers[0].resources.requests", INVALID);
    let negative = container(json!({"resources": {"requests": {"cpu": "-1"}}}));
    has(
        &pod(negative),
        "spec.containers[0].resources.requests[cpu]",
        INVALID,
    );
    let mount = container(json!({"volumeMounts": [{"name": "none", "mountPath": "/x"}]}));
    has(
        &pod(mount),
        "spec.containers[0].volumeMounts[0].name",
        "FieldValueNotFound",
    );
    let port = container(json!({"ports": [{"containerPort": 70000}]}));
    has(
        &pod(port),
        "spec.containers[0].ports[0].containerPort",
        INVALID,
    );
    let mut volumes = container(json!({}));
    volumes["volumes"] = json!([{"name": "v"}, {"name": "v"}]);
    has(&pod(volumes), "spec.volumes[1].name", DUPLICATE);
    let probe = container(json!({"livenessProbe": {"periodSeconds": 5}}));
    has(&pod(probe), "spec.containers[0].livenessProbe", REQUIRED);
}

#[test]
fn messages_read_like_upstream() {
    let mut object = json!({"metadata": {"name": "x"}, "spec": container(json!({}))});
    object["spec"]["restartPolicy"] = "Sometimes".into();
    let gvk = Gvk::new("", "v1", "Pod");
    apply_defaults(gvk, &mut object, None);
    let causes = validate_create(gvk, &object);
    assert_eq!(
        causes[0].message,
        "Unsupported value: \"Sometimes\": supported values: \"Always\", \"OnFailure\", \"Never\""
    );
}

#[test]
fn metadata_rules() {
    let meta = |metadata: Value| faults("", "ConfigMap", json!({"metadata": metadata}));
    for name in ["Upper", "under_score", "-dash"] {
        has(&meta(json!({"name": name})), "metadata.name", INVALID);
    }
    assert_eq!(
        meta(json!({"name": "a.b-c.0", "labels": {"k": "", "example.com/x_Y.z": "A-1_b.c"}})),
        []
    );
    has(
        &meta(json!({"labels": {"k": "has space"}})),
        "metadata.labels",
        INVALID,
    );
    has(
        &meta(json!({"labels": {"a/b/c": "v"}})),
        "metadata.labels",
        INVALID,
    );
    has(
        &meta(json!({"annotations": {"bad key": "v"}})),
        "metadata.annotations",
        INVALID,
    );
    has(
        &meta(json!({"annotations": {"k": "a".repeat(262_145)}})),
        "metadata.annotations",
        "FieldValueTooLong",
    );
    let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "", "controller": true});
    has(
        &meta(json!({"ownerReferences": [owner]})),
        "metadata.ownerReferences.uid",
        INVALID,
    );
    let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "u", "controller": true});
    has(
        &meta(json!({"ownerReferences": [owner, owner]})),
        "metadata.ownerReferences",
        INVALID,
    );
    let event = json!({"apiVersion": "v1", "kind": "Event", "name": "x", "uid": "u"});
    has(
        &meta(json!({"ownerReferences": [event]})),
        "metadata.ownerReferences",
        INVALID,
    );
    let dotted = json!({"metadata": {"name": "dotted.name"}, "spec": {"ports": [{"port": 80}]}});
    has(&faults("", "Service", dotted), "metadata.name", INVALID);
    let odd = json!({"metadata": {"name": "system:Odd_Name"}});
    assert_eq!(faults("rbac.authorization.k8s.io", "Role", odd), []);
    let frozen = changed(
        "",
        "ConfigMap",
        json!({"metadata": {"deletionTimestamp": "2024-01-01T00:00:00Z"}}),
        json!({"metadata": {"finalizers": ["a/b"]}}),
    );
    has(&frozen, "metadata.finalizers", FORBIDDEN);
}

#[test]
fn services() {
    let service = |spec: Value| faults("", "Service", json!({"spec": spec}));
    assert_eq!(service(json!({"ports": [{"port": 80}]})), []);
    has(&service(json!({})), "spec.ports", REQUIRED);
    has(
        &service(json!({"type": "ExternalName"})),
        "spec.externalName",
        REQUIRED,
    );
    has(
        &service(json!({"ports": [{"port": 80, "nodePort": 30999}]})),
        "spec.ports[0].nodePort",
        FORBIDDEN,
    );
    has(
        &service(json!({"ports": [{"port": 80}, {"port": 81}]})),
        "spec.ports[0].name",
        REQUIRED,
    );
    has(
        &service(json!({"ports": [{"port": 0}]})),
        "spec.ports[0].port",
        INVALID,
    );
    let both = json!({"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4", "IPv6"], "ports": [{"port": 80}]});
    has(&service(both), "spec.ipFamilyPolicy", INVALID);
    has(
        &service(json!({"ipFamilies": ["IPv5"], "ports": [{"port": 80}]})),
        "spec.ipFamilies[0]",
        UNSUPPORTED,
    );
    assert_eq!(
        service(
            json!({"ports": [{"name": "t", "port": 80}, {"name": "u", "port": 80, "protocol": "UDP"}]})
        ),
        []
    );
    let fixed = changed(
        "",
        "Service",
        json!({"spec": {"clusterIP": "10.96.0.5", "clusterIPs": ["10.96.0.5"], "ports": [{"port": 80}]}}),
        json!({"spec": {"clusterIP": "None", "clusterIPs": ["None"]}}),
    );
    has(&fixed, "spec.clusterIPs[0]", INVALID);
}

fn template(labels: &str) -> Value {
    json!({"metadata": {"labels": {"app": labels}}, "spec": container(json!({}))})
}

#[test]
fn workloads() {
    let deployment =
        json!({"spec": {"selector": {"matchLabels": {"app": "d"}}, "template": template("d")}});
    let change = |patch: Value| changed("apps", "Deployment", deployment.clone(), patch);
    assert_eq!(change(json!({"spec": {"replicas": 3}})), []);
    has(
        &change(
            json!({"spec": {"selector": {"matchLabels": {"app": "x"}}, "template": template("x")}}),
        ),
        "spec.selector",
        INVALID,
    );
    has(
        &change(
            json!({"spec": {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}}}),
        ),
        "spec.strategy.rollingUpdate.maxUnavailable",
        INVALID,
    );
    has(
        &change(json!({"spec": {"replicas": -1}})),
        "spec.replicas",
        INVALID,
    );
    has(
        &change(json!({"spec": {"template": {"spec": {"restartPolicy": "Never"}}}})),
        "spec.template.spec.restartPolicy",
        UNSUPPORTED,
    );
    let foreign =
        json!({"spec": {"selector": {"matchLabels": {"app": "e"}}, "template": template("other")}});
    has(
        &faults("apps", "Deployment", foreign),
        "spec.template.metadata.labels",
        INVALID,
    );
    has(
        &faults(
            "apps",
            "Deployment",
            json!({"spec": {"template": template("e")}}),
        ),
        "spec.selector",
        REQUIRED,
    );
    let set = json!({"spec": {"serviceName": "web", "selector": {"matchLabels": {"app": "d"}}, "template": template("d")}});
    has(
        &changed(
            "apps",
            "StatefulSet",
            set,
            json!({"spec": {"podManagementPolicy": "Parallel"}}),
        ),
        "spec",
        FORBIDDEN,
    );
}

#[test]
fn jobs() {
    let job = |policy: Value| {
        let mut spec = container(json!({}));
        spec["restartPolicy"] = policy;
        json!({"metadata": {"uid": "u1"}, "spec": {"template": {"spec": spec}}})
    };
    has(
        &faults("batch", "Job", job("Always".into())),
        "spec.template.spec.restartPolicy",
        UNSUPPORTED,
    );
    has(
        &faults("batch", "Job", job(Value::Null)),
        "spec.template.spec.restartPolicy",
        UNSUPPORTED,
    );
    let never = job("Never".into());
    has(
        &changed(
            "batch",
            "Job",
            never.clone(),
            json!({"spec": {"completions": 5}}),
        ),
        "spec.completions",
        INVALID,
    );
    assert_eq!(
        changed(
            "batch",
            "Job",
            never,
            json!({"spec": {"parallelism": 3, "backoffLimit": 1}})
        ),
        []
    );
}

#[test]
fn configuration() {
    let secure = json!({"immutable": true, "data": {"k": "v"}});
    let change = |patch: Value| changed("", "ConfigMap", secure.clone(), patch);
    has(&change(json!({"data": {"k": "w"}})), "data", FORBIDDEN);
    has(&change(json!({"immutable": false})), "immutable", FORBIDDEN);
    assert_eq!(change(json!({"metadata": {"labels": {"x": "1"}}})), []);
    has(
        &faults("", "ConfigMap", json!({"data": {"bad key": "v"}})),
        "data[bad key]",
        INVALID,
    );
    has(
        &faults(
            "",
            "ConfigMap",
            json!({"data": {"k": "a".repeat(1_048_577)}}),
        ),
        "",
        "FieldValueTooLong",
    );
    let secret =
        |kind: &str, data: Value| faults("", "Secret", json!({"type": kind, "stringData": data}));
    has(
        &secret("kubernetes.io/tls", json!({"tls.crt": "x"})),
        "data[tls.key]",
        REQUIRED,
    );
    has(
        &secret(
            "kubernetes.io/dockerconfigjson",
            json!({".dockerconfigjson": "no"}),
        ),
        "data[.dockerconfigjson]",
        INVALID,
    );
    assert_eq!(
        secret("kubernetes.io/basic-auth", json!({"username": "u"})),
        []
    );
    has(
        &changed("", "Secret", json!({}), json!({"type": "example.com/x"})),
        "type",
        INVALID,
    );
}

#[test]
fn values_of_any_shape_do_not_panic() {
    for def in crate::apiserver::registry::Registry::builtin().iter() {
        for object in [
            json!({}),
            json!({"metadata": 1, "spec": [1], "status": "x"}),
            json!(null),
        ] {
            let _ = validate_create(def.gvk(), &object);
            let _ = validate_update(def.gvk(), &object, &json!({"spec": {"selector": 1}}));
            let _ = validate_status_update(def.gvk(), &object, &object);
        }
    }
}

mod network_policy;
