//! StatefulSets, DaemonSets, Jobs, budgets, quotas and preemption on a real API.

use std::sync::Arc;

use serde_json::{Value, json};

use super::harness::{Cluster, OUTCOME, deployment};
use super::pods::is_ready;
use super::runtime::informer::Store;
use super::runtime::object::{Key, Object};
use crate::client::resources;

fn key(name: &str) -> Key {
    Key::new("default", name)
}

fn names(pods: &Store) -> Vec<String> {
    pods.in_namespace("default")
        .iter()
        .map(|p| p.name().to_owned())
        .collect()
}

fn stateful(replicas: u32, outcome: &str) -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {
            "replicas": replicas, "serviceName": "web",
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}, "annotations": {OUTCOME: outcome}},
                "spec": {"containers": [{"name": "c", "image": "app:1"}]}},
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}}}}],
        },
    })
}

async fn make_ready(cluster: &Cluster, name: &str) {
    let patch = json!({"metadata": {"annotations": {OUTCOME: "ready"}}});
    cluster.merge(resources::PODS, &key(name), patch).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stateful_set_starts_and_stops_in_order_and_updates_from_the_top() {
    let cluster = Cluster::start().await;
    cluster.nodes(1).await;
    cluster
        .create(resources::STATEFUL_SETS, stateful(3, "unready"))
        .await;
    for (n, name) in ["web-0", "web-1", "web-2"].into_iter().enumerate() {
        cluster
            .until(resources::PODS, |pods| {
                pods.get(&key(name))
                    .is_some_and(|p| p.condition("Ready").is_some())
            })
            .await;
        assert_eq!(
            names(&cluster.store(resources::PODS)).len(),
            n + 1,
            "one after the other"
        );
        make_ready(&cluster, name).await;
    }
    let set = |sets: &Store| sets.get(&key("web")).unwrap();
    cluster
        .until(resources::STATEFUL_SETS, |sets| {
            set(sets).number(&["status", "readyReplicas"]) == Some(3)
        })
        .await;
    let pod = cluster.get(resources::PODS, &key("web-1")).await.unwrap();
    assert_eq!(pod.label("apps.kubernetes.io/pod-index"), Some("1"));
    assert_eq!(pod.text(&["spec", "subdomain"]), "web");
    let claimed = pod
        .items(&["spec", "volumes"])
        .iter()
        .any(|v| v.text(&["persistentVolumeClaim", "claimName"]) == "data-web-1");
    assert!(claimed);
    assert!(
        cluster
            .get(resources::PERSISTENT_VOLUME_CLAIMS, &key("data-web-1"))
            .await
            .is_ok()
    );
    update_above_partition(&cluster).await;
    cluster
        .merge(
            resources::STATEFUL_SETS,
            &key("web"),
            json!({"spec": {"replicas": 1}}),
        )
        .await;
    cluster
        .until(resources::PODS, |pods| names(pods) == ["web-0"])
        .await;
    let claim = key("data-web-2");
    let kept = cluster.get(resources::PERSISTENT_VOLUME_CLAIMS, &claim);
    assert!(kept.await.is_ok(), "claims outlive their pods");
}

/// Of three pods only the last is at or above the partition.
async fn update_above_partition(cluster: &Cluster) {
    let set = |sets: &Store| sets.get(&key("web")).unwrap();
    let patch = json!({"spec": {
        "updateStrategy": {"rollingUpdate": {"partition": 2}},
        "template": {"metadata": {"annotations": {OUTCOME: "ready"}},
            "spec": {"containers": [{"name": "c", "image": "app:2"}]}},
    }});
    cluster
        .merge(resources::STATEFUL_SETS, &key("web"), patch)
        .await;
    let image = |pod: &Value| {
        pod.items(&["spec", "containers"])[0]
            .text(&["image"])
            .to_owned()
    };
    cluster
        .until(resources::PODS, |pods| {
            pods.get(&key("web-2"))
                .is_some_and(|p| image(&p) == "app:2" && is_ready(&p))
        })
        .await;
    cluster
        .until(resources::STATEFUL_SETS, |sets| {
            let set = set(sets);
            set.number(&["status", "updatedReplicas"]) == Some(1)
                && set.number(&["status", "currentReplicas"]) == Some(2)
        })
        .await;
    let first = cluster.get(resources::PODS, &key("web-0")).await.unwrap();
    assert_eq!(
        image(&first),
        "app:1",
        "below the partition nothing changes"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_set_follows_the_nodes() {
    let cluster = Cluster::start().await;
    cluster.nodes(2).await;
    let ds = json!({
        "metadata": {"name": "all", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"ds": "all"}},
            "template": {"metadata": {"labels": {"ds": "all"}},
                "spec": {"containers": [{"name": "c", "image": "app:1"}]}}},
    });
    cluster.create(resources::DAEMON_SETS, ds).await;
    let on = |pods: &Store| {
        let pods = pods.in_namespace("default");
        let ready = pods.iter().filter(|p| is_ready(p));
        let mut nodes: Vec<String> = ready
            .map(|p| p.text(&["spec", "nodeName"]).to_owned())
            .collect();
        nodes.sort();
        nodes
    };
    cluster
        .until(resources::PODS, |pods| on(pods) == ["n1", "n2"])
        .await;
    cluster
        .node("n3", json!({"cpu": "1", "memory": "1Gi", "pods": "10"}))
        .await;
    cluster
        .until(resources::PODS, |pods| on(pods) == ["n1", "n2", "n3"])
        .await;
    let count = |sets: &Store, field: &str| {
        sets.get(&key("all"))
            .and_then(|d| d.number(&["status", field]))
            .unwrap_or(0)
    };
    cluster
        .until(resources::DAEMON_SETS, |sets| {
            count(sets, "desiredNumberScheduled") == 3 && count(sets, "numberAvailable") == 3
        })
        .await;
    let patch =
        json!({"spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": "n2"}}}}});
    cluster
        .merge(resources::DAEMON_SETS, &key("all"), patch)
        .await;
    cluster
        .until(resources::PODS, |pods| {
            on(pods) == ["n2"] && names(pods).len() == 1
        })
        .await;
    cluster
        .until(resources::DAEMON_SETS, |sets| {
            count(sets, "desiredNumberScheduled") == 1 && count(sets, "updatedNumberScheduled") == 1
        })
        .await;
}

fn job(name: &str, spec: Value) -> Value {
    let mut job = json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"template": {"metadata": {"annotations": {OUTCOME: "succeed"}},
            "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "app"}]}}},
    });
    for (field, value) in spec.as_object().unwrap() {
        job["spec"][field] = value.clone();
    }
    job
}

fn ended(jobs: &Store, name: &str, kind: &str) -> bool {
    let job = jobs.get(&key(name));
    job.is_some_and(|j| {
        j.condition(kind)
            .is_some_and(|c| c.text(&["status"]) == "True")
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_completes_and_lets_its_pods_go() {
    let cluster = Cluster::start().await;
    cluster.nodes(1).await;
    let j = resources::JOBS;
    cluster
        .create(j, job("plain", json!({"completions": 3, "parallelism": 2})))
        .await;
    cluster
        .until(j, |jobs| ended(jobs, "plain", "Complete"))
        .await;
    let done = cluster.get(j, &key("plain")).await.unwrap();
    assert_eq!(done.number(&["status", "succeeded"]), Some(3));
    assert_eq!(done.number(&["status", "active"]), None);
    assert!(!done.text(&["status", "completionTime"]).is_empty());
    let pods = cluster.store(resources::PODS).in_namespace("default");
    assert_eq!(pods.len(), 3);
    cluster
        .until(resources::PODS, |pods| {
            pods.in_namespace("default")
                .iter()
                .all(|p| p.items(&["metadata", "finalizers"]).is_empty())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_fail_wait_expire_and_take_their_pods_along() {
    let cluster = Cluster::start().await;
    cluster.nodes(1).await;
    let j = resources::JOBS;
    let mut failing = job("failing", json!({"backoffLimit": 0}));
    failing["spec"]["template"]["metadata"]["annotations"] = json!({OUTCOME: "fail"});
    cluster.create(j, failing).await;
    cluster
        .until(j, |jobs| ended(jobs, "failing", "Failed"))
        .await;
    let failed = cluster.get(j, &key("failing")).await.unwrap();
    let reason = failed
        .condition("Failed")
        .unwrap()
        .text(&["reason"])
        .to_owned();
    assert_eq!(reason, "BackoffLimitExceeded");
    assert_eq!(failed.number(&["status", "failed"]), Some(1));

    let indexed =
        json!({"suspend": true, "completionMode": "Indexed", "completions": 3, "parallelism": 3});
    cluster.create(j, job("index", indexed)).await;
    cluster
        .until(j, |jobs| ended(jobs, "index", "Suspended"))
        .await;
    cluster
        .merge(j, &key("index"), json!({"spec": {"suspend": false}}))
        .await;
    cluster
        .until(j, |jobs| ended(jobs, "index", "Complete"))
        .await;
    let done = cluster.get(j, &key("index")).await.unwrap();
    assert_eq!(done.text(&["status", "completedIndexes"]), "0-2");

    cluster
        .create(j, job("ttl", json!({"ttlSecondsAfterFinished": 1})))
        .await;
    cluster
        .until(j, |jobs| ended(jobs, "ttl", "Complete"))
        .await;
    cluster
        .until(j, |jobs| jobs.get(&key("ttl")).is_none())
        .await;
    cluster
        .until(resources::PODS, |pods| {
            !names(pods).iter().any(|n| n.starts_with("ttl-"))
        })
        .await;

    let mut endless = job("endless", json!({}));
    endless["spec"]["template"]["metadata"]["annotations"] = json!({OUTCOME: "hold"});
    cluster.create(j, endless).await;
    cluster
        .until(resources::PODS, |pods| {
            names(pods).iter().any(|n| n.starts_with("endless-"))
        })
        .await;
    cluster.delete(j, &key("endless")).await;
    cluster
        .until(resources::PODS, |pods| {
            !names(pods).iter().any(|n| n.starts_with("endless-"))
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cron_job_starts_jobs_and_takes_them_along() {
    let cluster = Cluster::start().await;
    let spec = job("unused", json!({}))["spec"].clone();
    let cron = json!({
        "metadata": {"name": "c", "namespace": "default"},
        "spec": {"schedule": "*/5 * * * *", "suspend": true, "jobTemplate": {"spec": spec}},
    });
    let cron = cluster.create(resources::CRON_JOBS, cron).await;
    let mut by_hand = job("by-hand", json!({}));
    by_hand["metadata"]["ownerReferences"] = json!([{"apiVersion": "batch/v1", "kind": "CronJob",
        "name": "c", "uid": cron.uid(), "controller": true}]);
    cluster.create(resources::JOBS, by_hand).await;
    cluster
        .until(resources::CRON_JOBS, |crons| {
            crons
                .get(&key("c"))
                .is_some_and(|c| c.items(&["status", "active"]).len() == 1)
        })
        .await;
    cluster.delete(resources::CRON_JOBS, &key("c")).await;
    cluster
        .until(resources::JOBS, |jobs| jobs.get(&key("by-hand")).is_none())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn budgets_follow_the_health_of_their_pods() {
    let cluster = Cluster::start().await;
    cluster.nodes(1).await;
    cluster
        .create(resources::DEPLOYMENTS, deployment("d", 2, "app"))
        .await;
    let budget = json!({"metadata": {"name": "b", "namespace": "default"},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "d"}}}});
    cluster
        .create(resources::POD_DISRUPTION_BUDGETS, budget)
        .await;
    let shows = |budgets: &Store, healthy: i64, allowed: i64| {
        budgets.get(&key("b")).is_some_and(|b| {
            b.number(&["status", "currentHealthy"]) == Some(healthy)
                && b.number(&["status", "disruptionsAllowed"]) == Some(allowed)
                && b.number(&["status", "observedGeneration"]) == Some(b.generation())
        })
    };
    let r = resources::POD_DISRUPTION_BUDGETS;
    cluster.until(r, |budgets| shows(budgets, 2, 0)).await;
    cluster
        .merge(r, &key("b"), json!({"spec": {"minAvailable": 1}}))
        .await;
    cluster.until(r, |budgets| shows(budgets, 2, 1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_show_what_is_used() {
    let cluster = Cluster::start().await;
    let quota = json!({"metadata": {"name": "q", "namespace": "default"},
        "spec": {"hard": {"secrets": "5", "pods": "10", "requests.cpu": "4"}}});
    cluster.create(resources::RESOURCE_QUOTAS, quota).await;
    let used = |quotas: &Store| {
        quotas
            .get(&key("q"))
            .and_then(|q| q.at(&["status", "used"]).cloned())
            .unwrap_or_default()
    };
    let r = resources::RESOURCE_QUOTAS;
    let want = |secrets: &str, pods: &str, cpu: &str| json!({"secrets": secrets, "pods": pods, "requests.cpu": cpu});
    cluster
        .until(r, |quotas| used(quotas) == want("0", "0", "0"))
        .await;
    let secret = json!({"metadata": {"name": "s", "namespace": "default"}});
    cluster.create(resources::SECRETS, secret).await;
    let pod = json!({"metadata": {"name": "p", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "app",
            "resources": {"requests": {"cpu": "250m"}}}]}});
    cluster.create(resources::PODS, pod).await;
    cluster
        .until(r, |quotas| used(quotas) == want("1", "1", "250m"))
        .await;
    cluster.delete(resources::SECRETS, &key("s")).await;
    cluster.delete(resources::PODS, &key("p")).await;
    cluster
        .until(r, |quotas| used(quotas) == want("0", "0", "0"))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_important_pod_takes_the_place_of_a_lesser_one() {
    let cluster = Cluster::start().await;
    cluster
        .node("n1", json!({"cpu": "1", "memory": "1Gi", "pods": "10"}))
        .await;
    let class = json!({"metadata": {"name": "high"}, "value": 1000});
    cluster
        .client
        .create(resources::PRIORITY_CLASSES, "", class)
        .await
        .unwrap();
    let pod = |name: &str, class: Option<&str>| {
        let mut pod = json!({"metadata": {"name": name, "namespace": "default"},
            "spec": {"containers": [{"name": "c", "image": "app",
                "resources": {"requests": {"cpu": "800m"}}}]}});
        if let Some(class) = class {
            pod["spec"]["priorityClassName"] = class.into();
            // Where no admission turns the class into a number the test does.
            pod["spec"]["priority"] = 1000.into();
        }
        pod
    };
    cluster.create(resources::PODS, pod("low", None)).await;
    cluster
        .until(resources::PODS, |pods| {
            pods.get(&key("low")).is_some_and(|p| is_ready(&p))
        })
        .await;
    cluster
        .create(resources::PODS, pod("high", Some("high")))
        .await;
    cluster
        .until(resources::PODS, |pods| {
            pods.get(&key("high")).is_some_and(|p| is_ready(&p)) && pods.get(&key("low")).is_none()
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_keep_their_distance_and_seek_company() {
    let cluster = Cluster::start().await;
    cluster.nodes(2).await;
    let mut lone = deployment("lone", 3, "app");
    lone["spec"]["template"]["spec"]["affinity"] = json!({"podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [{
            "labelSelector": {"matchLabels": {"app": "lone"}},
            "topologyKey": "kubernetes.io/hostname"}]}});
    cluster.create(resources::DEPLOYMENTS, lone).await;
    let waits = |pod: &Arc<Value>| {
        pod.condition("PodScheduled").is_some_and(|c| {
            c.text(&["message"])
                .contains("didn't match pod anti-affinity rules")
        })
    };
    cluster
        .until(resources::PODS, |pods| {
            let pods = pods.in_namespace("default");
            pods.iter().filter(|p| is_ready(p)).count() == 2
                && pods.iter().filter(|p| waits(p)).count() == 1
        })
        .await;
    cluster
        .node("n3", json!({"cpu": "4", "memory": "8Gi", "pods": "10"}))
        .await;
    cluster
        .until(resources::PODS, |pods| {
            pods.in_namespace("default")
                .iter()
                .filter(|p| is_ready(p))
                .count()
                == 3
        })
        .await;
    let follower = json!({"metadata": {"name": "follower", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "app"}], "affinity": {"podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{
                "labelSelector": {"matchLabels": {"role": "anchor"}},
                "topologyKey": "kubernetes.io/hostname"}]}}}});
    cluster.create(resources::PODS, follower).await;
    let anchor = json!({"metadata": {"name": "anchor", "namespace": "default", "labels": {"role": "anchor"}},
        "spec": {"nodeSelector": {"kubernetes.io/hostname": "n2"},
            "containers": [{"name": "c", "image": "app"}]}});
    cluster.create(resources::PODS, anchor).await;
    cluster
        .until(resources::PODS, |pods| {
            pods.get(&key("follower"))
                .is_some_and(|p| p.text(&["spec", "nodeName"]) == "n2")
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_no_execute_taint_evicts_and_a_cordon_does_not() {
    let cluster = Cluster::start().await;
    cluster.nodes(1).await;
    let pod = |name: &str, tolerations: Value| {
        json!({"metadata": {"name": name, "namespace": "default"},
            "spec": {"tolerations": tolerations, "containers": [{"name": "c", "image": "app"}]}})
    };
    cluster
        .create(resources::PODS, pod("plain", json!([])))
        .await;
    cluster
        .create(resources::PODS, pod("any", json!([{"operator": "Exists"}])))
        .await;
    let all_ready = |pods: &Store| {
        ["plain", "any"]
            .iter()
            .all(|n| pods.get(&key(n)).is_some_and(|p| is_ready(&p)))
    };
    cluster.until(resources::PODS, all_ready).await;
    let node = Key::new("", "n1");
    cluster
        .merge(
            resources::NODES,
            &node,
            json!({"spec": {"unschedulable": true}}),
        )
        .await;
    cluster
        .until(resources::NODES, |nodes| {
            nodes.get(&node).is_some_and(|n| {
                n.items(&["spec", "taints"])
                    .iter()
                    .any(|t| t.text(&["key"]) == "node.kubernetes.io/unschedulable")
            })
        })
        .await;
    assert!(all_ready(&cluster.store(resources::PODS)));
    let taints = json!({"spec": {"unschedulable": null, "taints":
        [{"key": "out", "value": "1", "effect": "NoExecute"}]}});
    cluster.merge(resources::NODES, &node, taints).await;
    cluster
        .until(resources::PODS, |pods| pods.get(&key("plain")).is_none())
        .await;
    assert!(cluster.get(resources::PODS, &key("any")).await.is_ok());
}
