use serde_json::json;

use super::*;

fn defaulted(group: &str, version: &str, kind: &str, mut object: Value) -> Value {
    apply_defaults(Gvk::new(group, version, kind), &mut object, None);
    let again = {
        let mut copy = object.clone();
        apply_defaults(Gvk::new(group, version, kind), &mut copy, Some(&object));
        copy
    };
    assert_eq!(
        again, object,
        "defaulting a defaulted object changes nothing"
    );
    object
}

#[test]
fn a_pod_gets_what_kubelets_and_schedulers_read() {
    let image = |name: &str, image: &str| json!({"name": name, "image": image});
    let pod = defaulted(
        "",
        "v1",
        "Pod",
        json!({"metadata": {"name": "p"}, "spec": {"schedulerName": "", "containers": [
            {"name": "tagged", "image": "example.com/app:1", "ports": [{"containerPort": 80}],
             "readinessProbe": {"httpGet": {"port": 80}},
             "resources": {"limits": {"cpu": "1000m", "memory": "64Mi"}}},
            image("latest", "example.com/app:latest"),
            image("bare", "example.com/app"),
            image("ported", "example.com:5000/app"),
            image("digest", "example.com/app@sha256:00"),
        ], "volumes": [{"name": "e"}, {"name": "s", "secret": {"secretName": "none"}}]}}),
    );
    let spec = &pod["spec"];
    let policies: Vec<_> = spec["containers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["imagePullPolicy"].clone())
        .collect();
    assert_eq!(
        policies,
        ["IfNotPresent", "Always", "Always", "Always", "IfNotPresent"]
    );
    let first = &spec["containers"][0];
    assert_eq!(
        first["ports"],
        json!([{"containerPort": 80, "protocol": "TCP"}])
    );
    assert_eq!(
        first["readinessProbe"],
        json!({"httpGet": {"port": 80, "path": "/", "scheme": "HTTP"},
               "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3})
    );
    assert_eq!(
        first["resources"]["requests"],
        json!({"cpu": "1", "memory": "64Mi"})
    );
    assert_eq!(
        spec["volumes"],
        json!([{"name": "e", "emptyDir": {}}, {"name": "s", "secret": {"secretName": "none", "defaultMode": 420}}])
    );
    for (pointer, expected) in [
        ("/restartPolicy", json!("Always")),
        ("/terminationGracePeriodSeconds", json!(30)),
        ("/dnsPolicy", json!("ClusterFirst")),
        ("/schedulerName", json!("default-scheduler")),
        ("/serviceAccountName", json!("default")),
        ("/enableServiceLinks", json!(true)),
        ("/priority", json!(0)),
        ("/securityContext", json!({})),
    ] {
        assert_eq!(spec.pointer(pointer), Some(&expected), "{pointer}");
    }
    assert_eq!(spec["tolerations"].as_array().unwrap().len(), 2);
    assert_eq!(
        pod["status"],
        json!({"phase": "Pending", "qosClass": "Burstable"})
    );
}

#[test]
fn quality_of_service_classes() {
    let class = |resources: Value| {
        let pod =
            json!({"spec": {"containers": [{"name": "c", "image": "i", "resources": resources}]}});
        defaulted("", "v1", "Pod", pod)["status"]["qosClass"].clone()
    };
    assert_eq!(class(json!({})), "BestEffort");
    assert_eq!(
        class(json!({"limits": {"cpu": "1", "memory": "1Gi"}})),
        "Guaranteed"
    );
    assert_eq!(class(json!({"limits": {"cpu": "1"}})), "Burstable");
    assert_eq!(
        class(json!({"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "1Gi"}})),
        "Burstable"
    );
    assert_eq!(
        class(json!({"requests": {"ephemeral-storage": "1Gi"}})),
        "BestEffort"
    );
}

#[test]
fn a_deployment_and_its_template() {
    let d = defaulted(
        "apps",
        "v1",
        "Deployment",
        json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}}),
    );
    assert_eq!(d["spec"]["replicas"], 1);
    assert_eq!(
        d["spec"]["strategy"],
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}})
    );
    assert_eq!(d["spec"]["template"]["spec"]["restartPolicy"], "Always");
    assert!(
        d["spec"]["template"]["spec"].get("priority").is_none(),
        "admission is for pods alone"
    );
}

#[test]
fn services_of_each_type() {
    let service = |spec: Value| defaulted("", "v1", "Service", json!({"spec": spec}));
    let plain = service(json!({"ports": [{"port": 80}]}));
    assert_eq!(
        plain["spec"]["ports"],
        json!([{"port": 80, "protocol": "TCP", "targetPort": 80}])
    );
    assert_eq!(plain["spec"]["type"], "ClusterIP");
    assert_eq!(plain["spec"]["internalTrafficPolicy"], "Cluster");
    assert!(plain["spec"].get("externalTrafficPolicy").is_none());
    assert_eq!(plain["status"], json!({"loadBalancer": {}}));
    let sticky = service(json!({"sessionAffinity": "ClientIP", "ports": []}));
    assert_eq!(
        sticky["spec"]["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"],
        10_800
    );
    let balanced =
        service(json!({"type": "LoadBalancer", "ports": [{"port": 80, "targetPort": "web"}]}));
    assert_eq!(balanced["spec"]["externalTrafficPolicy"], "Cluster");
    assert_eq!(balanced["spec"]["allocateLoadBalancerNodePorts"], true);
    assert_eq!(balanced["spec"]["ports"][0]["targetPort"], "web");
    let external = service(json!({"type": "ExternalName", "externalName": "a.example.com"}));
    assert!(external["spec"].get("internalTrafficPolicy").is_none());
}

#[test]
fn secrets_take_plain_text() {
    let s = defaulted(
        "",
        "v1",
        "Secret",
        json!({"data": {"k": "b2xk", "l": "b2xk"}, "stringData": {"k": "new"}}),
    );
    assert_eq!(s["data"], json!({"k": "bmV3", "l": "b2xk"}));
    assert_eq!(s["type"], "Opaque");
    assert!(s.get("stringData").is_none());
}

#[test]
fn a_job_selects_its_pods_by_uid() {
    let j = defaulted(
        "batch",
        "v1",
        "Job",
        json!({"metadata": {"name": "j", "uid": "u1"}, "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": []}}}}),
    );
    assert_eq!(
        j["spec"]["selector"]["matchLabels"],
        json!({"batch.kubernetes.io/controller-uid": "u1"})
    );
    assert_eq!(j["spec"]["template"]["metadata"]["labels"]["job-name"], "j");
    for (key, value) in [
        ("parallelism", json!(1)),
        ("completions", json!(1)),
        ("backoffLimit", json!(6)),
        ("completionMode", json!("NonIndexed")),
    ] {
        assert_eq!(j["spec"][key], value);
    }
}

#[test]
fn objects_that_do_not_fit_are_left_alone() {
    let broken = json!({"metadata": 3, "spec": {"containers": "text", "volumes": [1]}});
    let mut object = broken.clone();
    apply_defaults(Gvk::new("", "v1", "Pod"), &mut object, None);
    assert_eq!(object["spec"]["containers"], "text");
    let mut custom = json!({"spec": {"x": null}});
    apply_defaults(Gvk::new("example.com", "v1", "Custom"), &mut custom, None);
    assert_eq!(custom, json!({"spec": {"x": null}}));
}
