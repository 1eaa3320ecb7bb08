//! Controllers and scheduler together on a real API and store.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::harness::{Cluster, OUTCOME, deployment};
use super::pods::{is_active, is_ready};
use super::runtime::informer::Store;
use super::runtime::object::{Key, Object};
use crate::client::resources;

fn key(name: &str) -> Key {
    Key::new("default", name)
}

fn live(pods: &Store) -> Vec<Arc<Value>> {
    let mut all = pods.in_namespace("default");
    all.retain(|p| is_active(p));
    all
}

fn ready(pods: &Store) -> Vec<Arc<Value>> {
    let mut all = live(pods);
    all.retain(|p| is_ready(p));
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_runs_on_every_node_and_lost_pods_are_replaced_at_once() {
    let cluster = Cluster::start().await;
    cluster.nodes(3).await;
    cluster
        .create(resources::DEPLOYMENTS, deployment("web", 3, "nginx"))
        .await;
    cluster
        .until(resources::PODS, |pods| ready(pods).len() == 3)
        .await;
    let pods = cluster.store(resources::PODS);
    let nodes: BTreeSet<String> = ready(&pods)
        .iter()
        .map(|p| p.text(&["spec", "nodeName"]).to_owned())
        .collect();
    assert_eq!(nodes.len(), 3, "three replicas on three nodes");
    cluster
        .until(resources::DEPLOYMENTS, |all| {
            all.get(&key("web")).is_some_and(|d| {
                d.number(&["status", "availableReplicas"]) == Some(3)
                    && d.condition("Available")
                        .is_some_and(|c| c.text(&["status"]) == "True")
                    && d.condition("Progressing")
                        .is_some_and(|c| c.text(&["reason"]) == "NewReplicaSetAvailable")
            })
        })
        .await;

    let victim = ready(&pods)[0].clone();
    let before: BTreeSet<String> = live(&pods).iter().map(|p| p.uid().to_owned()).collect();
    let start = Instant::now();
    cluster.delete(resources::PODS, &victim.key()).await;
    cluster
        .until(resources::PODS, |pods| {
            live(pods).iter().any(|p| !before.contains(p.uid()))
        })
        .await;
    let took = start.elapsed();
    assert!(
        took < Duration::from_millis(500),
        "replacement took {took:?}"
    );
    println!("replacement after {took:?}");

    cluster.delete(resources::DEPLOYMENTS, &key("web")).await;
    cluster
        .until(resources::PODS, |pods| {
            pods.in_namespace("default").is_empty()
        })
        .await;
    cluster
        .until(resources::REPLICA_SETS, |sets| sets.len() == 0)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_that_never_becomes_ready_stops_at_its_bounds_and_goes_on_when_it_does() {
    let cluster = Cluster::start().await;
    cluster.nodes(1).await;
    let mut d = deployment("web", 4, "app:1");
    d["spec"]["strategy"] =
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}});
    cluster.create(resources::DEPLOYMENTS, d).await;
    cluster
        .until(resources::PODS, |pods| ready(pods).len() == 4)
        .await;
    let patch = json!({"spec": {"template": {
        "metadata": {"annotations": {OUTCOME: "unready"}},
        "spec": {"containers": [{"name": "c", "image": "app:2"}]},
    }}});
    cluster
        .merge(resources::DEPLOYMENTS, &key("web"), patch)
        .await;
    let sizes = |sets: &Store| {
        let sizes = sets.all();
        let mut sizes: Vec<i64> = sizes
            .iter()
            .filter_map(|rs| rs.number(&["spec", "replicas"]))
            .collect();
        sizes.sort_unstable();
        sizes
    };
    cluster
        .until(resources::REPLICA_SETS, |sets| sizes(sets) == [2, 3])
        .await;
    cluster
        .until(resources::DEPLOYMENTS, |all| {
            all.get(&key("web")).is_some_and(|d| {
                d.number(&["status", "replicas"]) == Some(5)
                    && d.number(&["status", "updatedReplicas"]) == Some(2)
                    && d.number(&["status", "availableReplicas"]) == Some(3)
            })
        })
        .await;
    let pods = cluster.store(resources::PODS);
    for pod in live(&pods)
        .iter()
        .filter(|p| p.annotation(OUTCOME).is_some())
    {
        let patch = json!({"metadata": {"annotations": {OUTCOME: "ready"}}});
        cluster.merge(resources::PODS, &pod.key(), patch).await;
    }
    cluster
        .until(resources::DEPLOYMENTS, |all| {
            all.get(&key("web"))
                .is_some_and(|d| d.number(&["status", "updatedReplicas"]).unwrap_or(0) >= 3)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_follow_the_readiness_of_pods() {
    let cluster = Cluster::start().await;
    cluster.nodes(2).await;
    cluster
        .create(resources::DEPLOYMENTS, deployment("web", 2, "app"))
        .await;
    let service = json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    });
    cluster.create(resources::SERVICES, service).await;
    let endpoints = |slices: &Store, ready: bool| {
        slices
            .in_namespace("default")
            .iter()
            .filter(|s| s.label("kubernetes.io/service-name") == Some("web"))
            .flat_map(|s| s.items(&["endpoints"]).to_vec())
            .filter(|e| e.flag(&["conditions", "ready"]) == ready)
            .count()
    };
    let r = resources::ENDPOINT_SLICES;
    cluster
        .until(r, |slices| endpoints(slices, true) == 2)
        .await;
    cluster
        .until(resources::PODS, |pods| ready(pods).len() == 2)
        .await;
    let pod = ready(&cluster.store(resources::PODS))[0].clone();
    let patch = json!({"metadata": {"annotations": {OUTCOME: "unready"}}});
    cluster.merge(resources::PODS, &pod.key(), patch).await;
    cluster
        .until(r, |s| endpoints(s, true) == 1 && endpoints(s, false) == 1)
        .await;
    let slice = cluster.store(r).in_namespace("default");
    let slice = slice
        .iter()
        .find(|s| s.label("kubernetes.io/service-name") == Some("web"));
    let slice = slice.unwrap();
    assert_eq!(slice.items(&["ports"])[0].number(&["port"]), Some(8080));
    cluster.delete(r, &slice.key()).await;
    cluster
        .until(r, |s| endpoints(s, true) == 1 && endpoints(s, false) == 1)
        .await;
    cluster.delete(resources::SERVICES, &key("web")).await;
    cluster
        .until(r, |s| endpoints(s, true) + endpoints(s, false) == 0)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_fits_nowhere_says_why_and_runs_when_there_is_room() {
    let cluster = Cluster::start().await;
    cluster
        .node("small", json!({"cpu": "1", "memory": "1Gi", "pods": "3"}))
        .await;
    let pod = |name: &str| {
        json!({
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"containers": [{"name": "c", "image": "app",
                "resources": {"requests": {"cpu": "600m"}}}]},
        })
    };
    cluster.create(resources::PODS, pod("a")).await;
    cluster
        .until(resources::PODS, |pods| {
            pods.get(&key("a")).is_some_and(|p| is_ready(&p))
        })
        .await;
    cluster.create(resources::PODS, pod("b")).await;
    cluster
        .until(resources::PODS, |pods| {
            let Some(pod) = pods.get(&key("b")) else {
                return false;
            };
            pod.condition("PodScheduled").is_some_and(|c| {
                c.text(&["reason"]) == "Unschedulable"
                    && c.text(&["message"])
                        .starts_with("0/1 nodes are available: 1 Insufficient cpu.")
            })
        })
        .await;
    cluster.delete(resources::PODS, &key("a")).await;
    cluster
        .until(resources::PODS, |pods| {
            pods.get(&key("b")).is_some_and(|p| is_ready(&p))
        })
        .await;
    cluster
        .until(resources::EVENTS, |events| {
            let events = events.all();
            let has = |reason: &str| events.iter().any(|e| e.text(&["reason"]) == reason);
            has("Scheduled") && has("FailedScheduling")
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_number_of_pods_is_exact_under_churn() {
    let cluster = Cluster::start().await;
    let set = json!({
        "metadata": {"name": "r", "namespace": "default"},
        "spec": {"replicas": 20, "selector": {"matchLabels": {"app": "r"}},
            "template": {"metadata": {"labels": {"app": "r"}},
                "spec": {"schedulerName": "nobody", "containers": [{"name": "c", "image": "app"}]}}},
    });
    let most = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (seen, pods) = (most.clone(), cluster.store(resources::PODS));
    let count = cluster.store(resources::PODS);
    pods.subscribe(move |_| {
        seen.fetch_max(live(&count).len(), std::sync::atomic::Ordering::SeqCst);
    });
    cluster.create(resources::REPLICA_SETS, set).await;
    for _ in 0..5 {
        cluster
            .until(resources::PODS, |pods| live(pods).len() == 20)
            .await;
        let doomed = live(&pods);
        let deletions = doomed.iter().map(|pod| {
            let client = cluster.client.clone();
            let key = pod.key();
            async move {
                let options = crate::client::DeleteOptions::default();
                client
                    .delete(resources::PODS, &key.namespace, &key.name, options)
                    .await
            }
        });
        futures::future::join_all(deletions).await;
    }
    cluster
        .until(resources::PODS, |pods| live(pods).len() == 20)
        .await;
    assert_eq!(most.load(std::sync::atomic::Ordering::SeqCst), 20);
    cluster
        .until(resources::REPLICA_SETS, |sets| {
            sets.get(&key("r"))
                .is_some_and(|rs| rs.number(&["status", "replicas"]) == Some(20))
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_is_furnished_and_emptied() {
    let cluster = Cluster::start().await;
    let namespace = json!({"metadata": {"name": "shop"}});
    cluster.create(resources::NAMESPACES, namespace).await;
    let inside = |name: &str| Key::new("shop", name);
    cluster
        .until(resources::CONFIG_MAPS, |maps| {
            maps.get(&inside("kube-root-ca.crt"))
                .is_some_and(|m| m.text(&["data", "ca.crt"]) == "test certificate")
        })
        .await;
    cluster
        .delete(resources::CONFIG_MAPS, &inside("kube-root-ca.crt"))
        .await;
    cluster
        .until(resources::CONFIG_MAPS, |maps| {
            maps.get(&inside("kube-root-ca.crt")).is_some()
        })
        .await;
    let held = json!({"metadata": {"name": "held", "namespace": "shop",
        "finalizers": ["example.com/hold"]}});
    cluster.create(resources::CONFIG_MAPS, held).await;
    let mut d = deployment("d", 2, "app");
    d["metadata"]["namespace"] = "shop".into();
    cluster.create(resources::DEPLOYMENTS, d).await;
    cluster
        .until(resources::PODS, |pods| pods.in_namespace("shop").len() == 2)
        .await;
    cluster
        .delete(resources::NAMESPACES, &Key::new("", "shop"))
        .await;
    cluster
        .until(resources::NAMESPACES, |all| {
            all.get(&Key::new("", "shop")).is_some_and(|n| {
                n.condition("NamespaceFinalizersRemaining")
                    .is_some_and(|c| c.text(&["status"]) == "True")
            })
        })
        .await;
    cluster
        .until(resources::PODS, |pods| pods.in_namespace("shop").is_empty())
        .await;
    let patch = json!({"metadata": {"finalizers": null}});
    cluster
        .merge(resources::CONFIG_MAPS, &inside("held"), patch)
        .await;
    cluster
        .until(resources::NAMESPACES, |all| {
            all.get(&Key::new("", "shop")).is_none()
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_of_a_namespace_stay_until_its_pods_are_gone() {
    let cluster = Cluster::start().await;
    cluster
        .create(resources::NAMESPACES, json!({"metadata": {"name": "shop"}}))
        .await;
    let metadata = json!({"name": "a", "namespace": "shop"});
    let policy = json!({"metadata": metadata, "spec": {}});
    cluster.create(resources::NETWORK_POLICIES, policy).await;
    let mut pod =
        json!({"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    pod["metadata"]["finalizers"] = json!(["example.com/hold"]);
    cluster.create(resources::PODS, pod).await;
    let key = Key::new("shop", "a");
    cluster
        .delete(resources::NAMESPACES, &Key::new("", "shop"))
        .await;
    // The controller has walked the namespace when it says what remains.
    let remaining = |namespace: &Value| {
        let condition = namespace.condition("NamespaceContentRemaining");
        condition.is_some_and(|c| c.text(&["message"]).contains("pods. has 1"))
    };
    cluster
        .until(resources::NAMESPACES, |all| {
            all.get(&Key::new("", "shop"))
                .is_some_and(|n| remaining(&n))
        })
        .await;
    let policy = cluster
        .get(resources::NETWORK_POLICIES, &key)
        .await
        .unwrap();
    assert!(!policy.is_deleting());
    let patch = json!({"metadata": {"finalizers": null}});
    cluster.merge(resources::PODS, &key, patch).await;
    cluster
        .until(resources::NAMESPACES, |all| {
            all.get(&Key::new("", "shop")).is_none()
        })
        .await;
    assert!(
        cluster
            .get(resources::NETWORK_POLICIES, &key)
            .await
            .is_err()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreground_and_orphan_deletion_do_what_they_say() {
    use crate::client::{DeleteOptions, Propagation};
    let cluster = Cluster::start().await;
    let r = resources::CONFIG_MAPS;
    let map = |name: &str, owner: Option<&Value>, finalizers: Value| {
        let owners: Vec<Value> = owner
            .iter()
            .map(|o| {
                json!({"apiVersion": "v1", "kind": "ConfigMap", "name": o.name(),
                "uid": o.uid(), "blockOwnerDeletion": true})
            })
            .collect();
        json!({"metadata": {"name": name, "namespace": "default", "finalizers": finalizers,
            "ownerReferences": owners}})
    };
    let delete = |name: &'static str, propagation: Propagation| {
        let client = cluster.client.clone();
        let options = DeleteOptions {
            propagation: Some(propagation),
            ..DeleteOptions::default()
        };
        async move { client.delete(r, "default", name, options).await.unwrap() }
    };
    let owner = cluster.create(r, map("owner", None, json!([]))).await;
    cluster
        .create(r, map("child", Some(&owner), json!(["example.com/hold"])))
        .await;
    delete("owner", Propagation::Foreground).await;
    cluster
        .until(r, |maps| {
            maps.get(&key("child")).is_some_and(|c| c.is_deleting())
        })
        .await;
    assert!(
        cluster.get(r, &key("owner")).await.is_ok(),
        "the owner waits for its dependent"
    );
    cluster
        .merge(r, &key("child"), json!({"metadata": {"finalizers": null}}))
        .await;
    cluster
        .until(r, |maps| maps.get(&key("owner")).is_none())
        .await;
    assert!(cluster.get(r, &key("child")).await.is_err());

    let owner = cluster.create(r, map("two", None, json!([]))).await;
    cluster
        .create(r, map("kept", Some(&owner), json!([])))
        .await;
    delete("two", Propagation::Orphan).await;
    cluster
        .until(r, |maps| maps.get(&key("two")).is_none())
        .await;
    let kept = cluster.get(r, &key("kept")).await.unwrap();
    assert!(kept.items(&["metadata", "ownerReferences"]).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_are_exact_although_writes_fail_and_watches_lag() {
    let late = Duration::from_millis(3);
    let cluster =
        Cluster::start_behind(|client| Arc::new(super::faulty::Faulty::new(client, late))).await;
    cluster.nodes(3).await;
    let most = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (seen, pods) = (most.clone(), cluster.store(resources::PODS));
    let count = cluster.store(resources::PODS);
    pods.subscribe(move |_| {
        seen.fetch_max(live(&count).len(), std::sync::atomic::Ordering::SeqCst);
    });
    let mut web = deployment("web", 6, "app:1");
    web["spec"]["strategy"] =
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 0}});
    cluster.create(resources::DEPLOYMENTS, web).await;
    cluster
        .until(resources::PODS, |pods| ready(pods).len() == 6)
        .await;
    for pod in live(&pods).iter().take(3) {
        cluster.delete(resources::PODS, &pod.key()).await;
    }
    cluster
        .until(resources::PODS, |pods| ready(pods).len() == 6)
        .await;
    let patch = json!({"spec": {"template": {"spec": {
        "containers": [{"name": "c", "image": "app:2"}]}}}});
    cluster
        .merge(resources::DEPLOYMENTS, &key("web"), patch)
        .await;
    let image = |pod: &Value| {
        pod.items(&["spec", "containers"])[0]
            .text(&["image"])
            .to_owned()
    };
    cluster
        .until(resources::PODS, |pods| {
            let pods = ready(pods);
            pods.len() == 6 && pods.iter().all(|p| image(p) == "app:2")
        })
        .await;
    let most = most.load(std::sync::atomic::Ordering::SeqCst);
    assert!(most <= 6 + 2, "{most} pods at once with a surge of two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_are_told_that_they_are_accepted_and_no_more_often_than_needed() {
    let cluster = Cluster::start().await;
    let r = resources::CLUSTER_NETWORK_POLICIES;
    let changes = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let seen = changes.clone();
    cluster.store(r).subscribe(move |change| {
        if change.object().name() == "first" {
            seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    });
    let policy = |name: &str| {
        json!({"metadata": {"name": name}, "spec": {
            "tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
            "egress": [{"action": "Accept", "to": [{"domainNames": ["*.example.org"]}]}]}})
    };
    let accepted = |store: &Store, name: &str, generation: i64| {
        store.get(&Key::new("", name)).is_some_and(|policy| {
            policy.condition("Accepted").is_some_and(|condition| {
                condition.text(&["status"]) == "True"
                    && condition.number(&["observedGeneration"]) == Some(generation)
            })
        })
    };
    cluster.create(r, policy("first")).await;
    cluster.until(r, |all| accepted(all, "first", 1)).await;
    let patch = json!({"spec": {"priority": 2}});
    cluster.merge(r, &Key::new("", "first"), patch).await;
    cluster.until(r, |all| accepted(all, "first", 2)).await;
    cluster.create(r, policy("second")).await;
    cluster.until(r, |all| accepted(all, "second", 1)).await;
    let changes = changes.load(std::sync::atomic::Ordering::SeqCst);
    assert_eq!(changes, 4, "made, told, changed, told");
}
