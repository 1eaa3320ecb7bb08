//! The write path on a real store.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Api, DeleteRequest, ListQuery, PatchRequest, Target, Warnings, WriteOptions};
use crate::apiserver::codec::FieldValidation;
use crate::apiserver::registry::SubresourceKind;
use crate::client::PatchKind;
use crate::config::Network;
use crate::status::ApiError;
use crate::store::{EmbeddedStore, OpenOptions};

pub(super) struct Fixture {
    pub(super) api: Arc<Api>,
    _dir: tempfile::TempDir,
}

pub(super) fn options() -> WriteOptions {
    WriteOptions {
        dry_run: false,
        manager: "test".into(),
        validation: FieldValidation::Strict,
        warnings: Warnings::default(),
    }
}

impl Fixture {
    pub(super) async fn new() -> Self {
        Self::with(Network::default()).await
    }

    pub(super) async fn with(network: Network) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let store = EmbeddedStore::open(&OpenOptions { path, now_us: || 0 }).unwrap();
        let api = Arc::new(Api::new(Arc::new(store), network));
        api.bootstrap("192.0.2.1:6443".parse().unwrap())
            .await
            .unwrap();
        Self { api, _dir: dir }
    }

    pub(super) async fn create(&self, plural: &str, object: Value) -> Result<Arc<Value>, ApiError> {
        let def = self.api.resource("", "v1", plural)?;
        self.api.create(&def, "default", object, &options()).await
    }

    pub(super) async fn merge(
        &self,
        plural: &str,
        name: &str,
        patch: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let def = self.api.resource("", "v1", plural)?;
        let target = Target {
            def: &def,
            namespace: "default",
            name,
            sub: None,
        };
        let request = PatchRequest::Patch(PatchKind::Merge, patch);
        Ok(self.api.patch(target, &request, &options()).await?.0.0)
    }

    async fn get(&self, plural: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        let def = self.api.resource("", "v1", plural)?;
        self.api.get(&def, "default", name).await
    }

    pub(super) async fn delete(&self, plural: &str, name: &str) -> Result<bool, ApiError> {
        let def = self.api.resource("", "v1", plural)?;
        let request = DeleteRequest::default();
        Ok(self.api.delete(&def, "default", name, &request).await?.gone)
    }

    pub(super) async fn keys(&self, prefix: &str) -> Vec<String> {
        let page = self.api.store().list(prefix, None, 0, None).await.unwrap();
        page.records.iter().map(|r| r.key.to_string()).collect()
    }
}

pub(super) fn service(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
}

fn config_map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}})
}

#[tokio::test]
async fn dual_stack_services_take_and_return_addresses_of_both_families() {
    let f = Fixture::new().await;
    let spec =
        json!({"ipFamilyPolicy": "PreferDualStack", "type": "NodePort", "ports": [{"port": 80}]});
    let made = f.create("services", service("s", spec)).await.unwrap();
    let ips = made["spec"]["clusterIPs"].as_array().unwrap();
    assert_eq!(made["spec"]["ipFamilies"], json!(["IPv4", "IPv6"]));
    assert!(ips[0].as_str().unwrap().starts_with("10.96."));
    assert!(ips[1].as_str().unwrap().starts_with("fd00:10:96:"));
    let before = f.keys("networking.k8s.io/ipaddresses/").await.len();
    assert_eq!(f.keys("weir/nodeports/").await.len(), 1);
    let down = json!({"spec": {"ipFamilyPolicy": "SingleStack"}});
    let single = f.merge("services", "s", down).await.unwrap();
    assert_eq!(single["spec"]["clusterIPs"], json!([ips[0]]));
    assert_eq!(
        f.keys("networking.k8s.io/ipaddresses/").await.len(),
        before - 1
    );
    f.delete("services", "s").await.unwrap();
    assert_eq!(
        f.keys("networking.k8s.io/ipaddresses/").await.len(),
        before - 2
    );
    assert!(f.keys("weir/nodeports/").await.is_empty());
}

#[tokio::test]
async fn system_services_come_back_after_somebody_deletes_them() {
    let f = Fixture::new().await;
    let stop = tokio_util::sync::CancellationToken::new();
    let (advertise, period) = (
        "192.0.2.1:6443".parse().unwrap(),
        std::time::Duration::from_millis(20),
    );
    let keeper = Arc::clone(&f.api).keep_bootstrapped(advertise, period, stop.clone());
    f.delete("services", "kubernetes").await.unwrap();
    tokio::spawn(keeper);
    let back = async {
        while f.get("services", "kubernetes").await.is_err() {
            tokio::time::sleep(period).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), back)
        .await
        .unwrap();
    stop.cancel();
}

#[tokio::test]
async fn a_requested_address_has_one_owner() {
    let f = Fixture::new().await;
    let spec = json!({"clusterIP": "10.96.0.77", "ports": [{"port": 80}]});
    let racers = (0..8).map(|n| f.create("services", service(&format!("s{n}"), spec.clone())));
    let results = futures::future::join_all(racers).await;
    assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1);
    let refused = results.into_iter().find_map(Result::err).unwrap();
    assert_eq!(refused.code, 422);
    assert!(refused.message.contains("already allocated"), "{refused}");
}

#[tokio::test]
async fn writers_and_patchers_lose_nothing() {
    let f = Fixture::new().await;
    f.create("configmaps", config_map("a")).await.unwrap();
    let patches =
        (0..30).map(|n| f.merge("configmaps", "a", json!({"data": {format!("k{n}"): "v"}})));
    for result in futures::future::join_all(patches).await {
        result.unwrap();
    }
    let def = f.api.resource("", "v1", "configmaps").unwrap();
    let stored = f.api.get(&def, "default", "a").await.unwrap();
    assert_eq!(stored["data"].as_object().unwrap().len(), 30);
}

#[tokio::test]
async fn a_write_without_a_change_keeps_the_version() {
    let f = Fixture::new().await;
    let made = f.create("configmaps", config_map("a")).await.unwrap();
    let same = f
        .merge("configmaps", "a", json!({"metadata": {"labels": null}}))
        .await
        .unwrap();
    assert_eq!(
        made["metadata"]["resourceVersion"],
        same["metadata"]["resourceVersion"]
    );
    let mut stale = Value::clone(&made);
    stale["metadata"]["resourceVersion"] = "1".into();
    stale["data"] = json!({"k": "v"});
    let def = f.api.resource("", "v1", "configmaps").unwrap();
    let target = Target {
        def: &def,
        namespace: "default",
        name: "a",
        sub: None,
    };
    assert!(
        f.api
            .update(target, stale, &options())
            .await
            .unwrap_err()
            .is_conflict()
    );
}

#[tokio::test]
async fn the_last_finalizer_removes_a_deleted_object() {
    let f = Fixture::new().await;
    let mut held = config_map("a");
    held["metadata"]["finalizers"] = json!(["example.com/hold"]);
    f.create("configmaps", held).await.unwrap();
    assert!(!f.delete("configmaps", "a").await.unwrap());
    let more = json!({"metadata": {"finalizers": ["example.com/hold", "example.com/more"]}});
    assert_eq!(
        f.merge("configmaps", "a", more).await.unwrap_err().code,
        422
    );
    f.merge("configmaps", "a", json!({"metadata": {"finalizers": null}}))
        .await
        .unwrap();
    assert!(
        f.delete("configmaps", "a")
            .await
            .unwrap_err()
            .is_not_found()
    );
}

#[tokio::test]
async fn an_ending_namespace_takes_nothing_new_and_goes_when_finalized() {
    let f = Fixture::new().await;
    let namespaces = f.api.resource("", "v1", "namespaces").unwrap();
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}});
    f.api
        .create(&namespaces, "", namespace, &options())
        .await
        .unwrap();
    let gone = f
        .api
        .delete(&namespaces, "", "n", &DeleteRequest::default())
        .await
        .unwrap();
    assert!(!gone.gone);
    assert_eq!(gone.object["status"]["phase"], "Terminating");
    let maps = f.api.resource("", "v1", "configmaps").unwrap();
    let refused = f
        .api
        .create(&maps, "n", config_map("late"), &options())
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code, refused.details.causes[0].reason),
        (403, "NamespaceTerminating")
    );
    let target = Target {
        def: &namespaces,
        namespace: "",
        name: "n",
        sub: Some(SubresourceKind::Finalize),
    };
    let finalize = PatchRequest::Patch(PatchKind::Merge, json!({"spec": {"finalizers": []}}));
    f.api.patch(target, &finalize, &options()).await.unwrap();
    assert!(
        f.api
            .get(&namespaces, "", "n")
            .await
            .unwrap_err()
            .is_not_found()
    );
    let kept = f
        .api
        .delete(&namespaces, "", "default", &DeleteRequest::default())
        .await;
    assert_eq!(kept.unwrap_err().code, 403);
}

#[tokio::test]
async fn dry_runs_leave_nothing() {
    let f = Fixture::new().await;
    let def = f.api.resource("", "v1", "services").unwrap();
    let dry = WriteOptions {
        dry_run: true,
        ..options()
    };
    let before = f.api.revision().await.unwrap();
    let spec = json!({"type": "NodePort", "ports": [{"port": 80}]});
    let shown = f
        .api
        .create(&def, "default", service("s", spec), &dry)
        .await
        .unwrap();
    assert!(shown["spec"]["ports"][0]["nodePort"].as_u64().unwrap() >= 30000);
    assert_eq!(f.api.revision().await.unwrap(), before);
}

#[tokio::test]
async fn selected_lists_come_in_pages() {
    let f = Fixture::new().await;
    for n in 0..6 {
        let mut map = config_map(&format!("c{n}"));
        map["metadata"]["labels"] = json!({"odd": (n % 2 == 1).to_string()});
        f.create("configmaps", map).await.unwrap();
    }
    let def = f.api.resource("", "v1", "configmaps").unwrap();
    let labels = crate::apiserver::selector::LabelSelector::parse("odd=true").unwrap();
    let mut query = ListQuery {
        labels,
        limit: 2,
        ..ListQuery::default()
    };
    let first = f.api.list(&def, "default", &query).await.unwrap();
    assert_eq!((first.records.len(), first.remaining), (2, None));
    query.after = first.next;
    query.at = Some(first.revision);
    let second = f.api.list(&def, "default", &query).await.unwrap();
    assert_eq!((second.records.len(), second.next), (1, None));
    assert!(second.records[0].key.ends_with("/c5"));
}

#[tokio::test]
async fn both_event_groups_show_one_object() {
    let f = Fixture::new().await;
    let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": "p"}, "reason": "R",
        "message": "m", "type": "Normal", "source": {"component": "c"}});
    f.create("events", event).await.unwrap();
    let other = f.api.resource("events.k8s.io", "v1", "events").unwrap();
    let seen = f.api.get(&other, "default", "e").await.unwrap();
    assert_eq!(
        (&seen["apiVersion"], &seen["regarding"]["name"]),
        (&json!("events.k8s.io/v1"), &json!("p"))
    );
}

#[tokio::test]
async fn events_are_removed_an_hour_after_they_were_last_seen() {
    let f = Fixture::new().await;
    for (name, seen) in [
        ("old", "2026-01-01T00:00:00Z"),
        ("new", "2026-01-01T01:30:00Z"),
    ] {
        let mut event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": name},
            "involvedObject": {"kind": "Pod", "namespace": "default", "name": "p"}, "reason": "R",
            "message": "m", "type": "Normal", "source": {"component": "c"}});
        event["lastTimestamp"] = seen.into();
        f.create("events", event).await.unwrap();
    }
    // Created now, so nothing is old yet at the time that the events name.
    let early = "2026-01-01T02:00:00Z".parse().unwrap();
    assert_eq!(f.api.sweep_events(early).await.unwrap(), 0);
    let late = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(2);
    assert_eq!(f.api.sweep_events(late).await.unwrap(), 2);
    assert!(f.keys("core/events/").await.is_empty());
}

#[tokio::test]
async fn racing_creates_end_at_exactly_the_quota() {
    const HARD: usize = 3;
    let f = Fixture::new().await;
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
        "spec": {"hard": {"configmaps": HARD.to_string()}}});
    f.create("resourcequotas", quota).await.unwrap();
    let early = f
        .create("configmaps", config_map("early"))
        .await
        .unwrap_err();
    assert!(early.message.contains("status unknown for quota: q"));
    let def = f.api.resource("", "v1", "resourcequotas").unwrap();
    let target = Target {
        def: &def,
        namespace: "default",
        name: "q",
        sub: Some(SubresourceKind::Status),
    };
    let counted = json!({"status": {"used": {"configmaps": "0"}}});
    let request = PatchRequest::Patch(PatchKind::Merge, counted);
    f.api.patch(target, &request, &options()).await.unwrap();
    let names: Vec<String> = (0..12).map(|n| format!("c{n}")).collect();
    let racers = names.iter().map(|n| f.create("configmaps", config_map(n)));
    let results = futures::future::join_all(racers).await;
    let made: Vec<&String> = names
        .iter()
        .zip(&results)
        .filter_map(|(name, result)| result.is_ok().then_some(name))
        .collect();
    assert_eq!(made.len(), HARD);
    assert!(
        results
            .iter()
            .flat_map(|r| r.as_ref().err())
            .all(|e| e.code == 403)
    );
    let used = async || {
        let quota = f.api.get(&def, "default", "q").await.unwrap();
        quota["status"]["used"]["configmaps"].clone()
    };
    assert_eq!(used().await, json!("3"));
    f.delete("configmaps", made[0]).await.unwrap();
    assert_eq!(used().await, json!("2"), "a delete gives back at once");
    f.create("configmaps", config_map(made[0])).await.unwrap();
    assert_eq!(used().await, json!("3"));
}

#[tokio::test]
async fn limit_ranges_shape_new_pods() {
    let f = Fixture::new().await;
    let range = json!({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"},
        "spec": {"limits": [{"type": "Container", "max": {"cpu": "500m", "memory": "64Mi"}}]}});
    f.create("limitranges", range).await.unwrap();
    let pod = |resources: Value| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {"containers": [{"name": "c", "image": "example.com/app:1", "resources": resources}]}})
    };
    let greedy = f.create("pods", pod(json!({"limits": {"cpu": "1"}}))).await;
    let refused = greedy.unwrap_err();
    assert_eq!(refused.code, 403);
    assert_eq!(
        refused.message,
        "pods \"p\" is forbidden: maximum cpu usage per Container is 500m, but limit is 1"
    );
    let made = f.create("pods", pod(json!({}))).await.unwrap();
    assert_eq!(
        made["spec"]["containers"][0]["resources"]["limits"]["memory"],
        "64Mi"
    );
    assert_eq!(made["status"]["qosClass"], "Guaranteed");
}

#[tokio::test]
async fn pod_security_refuses_pods_and_warns_about_templates() {
    let f = Fixture::new().await;
    let namespaces = f.api.resource("", "v1", "namespaces").unwrap();
    let label = async |level: &str| {
        let patch = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level,
            "pod-security.kubernetes.io/warn": "restricted"}}});
        let target = Target {
            def: &namespaces,
            namespace: "",
            name: "default",
            sub: None,
        };
        let request = PatchRequest::Patch(PatchKind::Merge, patch);
        f.api.patch(target, &request, &options()).await
    };
    assert_eq!(label("strange").await.unwrap_err().code, 422);
    label("baseline").await.unwrap();
    let spec =
        json!({"hostPID": true, "containers": [{"name": "c", "image": "example.com/app:1"}]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec});
    let refused = f.create("pods", pod).await.unwrap_err();
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (
            403,
            "pods \"p\" is forbidden: violates PodSecurity \"baseline:latest\": host namespaces (hostPID=true)"
        )
    );
    let template = json!({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "t"},
        "template": {"spec": spec}});
    let def = f.api.resource("", "v1", "podtemplates").unwrap();
    let told = options();
    f.api
        .create(&def, "default", template, &told)
        .await
        .unwrap();
    let warnings = told.warnings.take();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0].starts_with("would violate PodSecurity \"restricted:latest\": host namespaces")
    );
}
