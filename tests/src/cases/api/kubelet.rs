//! The simulated kubelet of the `node` step: registers a Node, keeps it alive, and acts on its pods by annotation.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::server::Server;

/// How often pods are looked at: the format asks for a reaction within a second.
const PODS_EVERY: Duration = Duration::from_millis(300);
const HEARTBEAT_EVERY: Duration = Duration::from_secs(5);
const RUNS_FOR: Duration = Duration::from_secs(1);
const JSON: &str = "application/json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// A running (or stopped) simulated kubelet.
#[derive(Debug)]
pub(super) struct Kubelet {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Kubelet {
    /// Registers the node when missing and starts acting.
    ///
    /// # Errors
    /// When the API server refuses the Node.
    pub(super) fn start(server: &Arc<Server>, name: &str, step: &Value) -> anyhow::Result<Self> {
        let worker = Worker {
            server: Arc::clone(server),
            name: name.to_owned(),
            step: step.clone(),
            seen: HashMap::new(),
            address: format!(
                "10.200.{}.{}",
                rand::random_range(0..250),
                rand::random_range(1..250)
            ),
            next_ip: 1,
        };
        worker.register()?;
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || worker.run(&stopped));
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Silences it.
    pub(super) fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What was reported of one pod.
struct Reported {
    outcome: String,
    ip: String,
    started: Instant,
    finished: bool,
}

struct Worker {
    server: Arc<Server>,
    name: String,
    step: Value,
    seen: HashMap<String, Reported>,
    address: String,
    next_ip: u32,
}

impl Worker {
    fn register(&self) -> anyhow::Result<()> {
        let path = format!("/api/v1/nodes/{}", self.name);
        let (status, _) = self.server.json("GET", &path, JSON, None)?;
        if status == 404 {
            let mut labels = Map::new();
            labels.insert("kubernetes.io/hostname".into(), self.name.clone().into());
            labels.insert("kubernetes.io/os".into(), "linux".into());
            labels.insert("kubernetes.io/arch".into(), "amd64".into());
            if let Some(more) = self.step["labels"].as_object() {
                labels.extend(more.clone());
            }
            let mut node = json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": self.name, "labels": labels}, "spec": {},
            });
            if !self.step["taints"].is_null() {
                node["spec"]["taints"] = self.step["taints"].clone();
            }
            let (status, body) = self
                .server
                .json("POST", "/api/v1/nodes", JSON, Some(&node))?;
            anyhow::ensure!(
                status == 201 || status == 409,
                "create node: {status} {body}"
            );
        }
        self.heartbeat()
    }

    fn heartbeat(&self) -> anyhow::Result<()> {
        let mut capacity = json!({"cpu": "8", "memory": "16Gi", "pods": "110"});
        if let (Some(all), Some(own)) =
            (capacity.as_object_mut(), self.step["capacity"].as_object())
        {
            all.extend(own.clone());
        }
        let now = now();
        let condition = |kind: &str, status: &str, reason: &str| {
            json!({"type": kind, "status": status, "reason": reason, "message": "simulated",
                   "lastHeartbeatTime": now, "lastTransitionTime": now})
        };
        let status = json!({"status": {
            "capacity": capacity, "allocatable": capacity,
            "addresses": [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.name}],
            "conditions": [
                condition("Ready", "True", "KubeletReady"),
                condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
                condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
                condition("PIDPressure", "False", "KubeletHasSufficientPID"),
            ],
            "nodeInfo": {"kubeletVersion": "v1.36.4", "osImage": "simulated", "kernelVersion": "6.1.0",
                "containerRuntimeVersion": "simulated://1", "architecture": "amd64", "operatingSystem": "linux",
                "machineID": "", "systemUUID": "", "bootID": "", "kubeProxyVersion": ""},
        }});
        let path = format!("/api/v1/nodes/{}/status", self.name);
        self.server.json("PATCH", &path, STRATEGIC, Some(&status))?;
        self.renew_lease()
    }

    fn renew_lease(&self) -> anyhow::Result<()> {
        let base = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
        let spec = json!({"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": now_micros()});
        let path = format!("{base}/{}", self.name);
        let (status, _) = self
            .server
            .json("PATCH", &path, MERGE, Some(&json!({"spec": spec})))?;
        if status == 404 {
            let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": self.name, "namespace": "kube-node-lease"}, "spec": spec});
            self.server.json("POST", base, JSON, Some(&lease))?;
        }
        Ok(())
    }

    fn run(mut self, stopped: &Receiver<()>) {
        let mut beat = Instant::now();
        loop {
            match stopped.recv_timeout(PODS_EVERY) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
            // A request that fails is tried again in the next round, as a kubelet does.
            if beat.elapsed() >= HEARTBEAT_EVERY {
                beat = Instant::now();
                let _again = self.heartbeat();
            }
            let _again = self.look_at_pods();
        }
    }

    fn look_at_pods(&mut self) -> anyhow::Result<()> {
        let path = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{}", self.name);
        let (status, list) = self.server.json("GET", &path, JSON, None)?;
        anyhow::ensure!(status == 200, "list pods: {status}");
        for pod in list["items"].as_array().into_iter().flatten() {
            self.act(pod)?;
        }
        Ok(())
    }

    fn act(&mut self, pod: &Value) -> anyhow::Result<()> {
        let meta = &pod["metadata"];
        let annotations = &meta["annotations"];
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}",
            text(&meta["namespace"]),
            text(&meta["name"])
        );
        if !meta["deletionTimestamp"].is_null() {
            if annotations["fake-kubelet/linger"] == "true" {
                return Ok(());
            }
            let options = json!({"kind": "DeleteOptions", "apiVersion": "v1",
                "gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}});
            self.server.json("DELETE", &path, JSON, Some(&options))?;
            return Ok(());
        }
        if matches!(
            pod["status"]["phase"].as_str(),
            Some("Succeeded" | "Failed")
        ) {
            return Ok(());
        }
        let outcome = annotations["fake-kubelet/outcome"]
            .as_str()
            .unwrap_or("ready")
            .to_owned();
        if outcome == "hold" {
            return Ok(());
        }
        self.report(pod, &path, &text(&meta["uid"]), outcome)
    }

    fn report(
        &mut self,
        pod: &Value,
        path: &str,
        uid: &str,
        outcome: String,
    ) -> anyhow::Result<()> {
        let next_ip = &mut self.next_ip;
        let network = self.address.clone();
        let known = self.seen.contains_key(uid);
        let reported = self.seen.entry(uid.to_owned()).or_insert_with(|| {
            *next_ip += 1;
            let ip = format!(
                "{}.{}",
                network.rsplit_once('.').map_or("10.200.0", |p| p.0),
                *next_ip % 250 + 1
            );
            Reported {
                outcome: String::new(),
                ip,
                started: Instant::now(),
                finished: false,
            }
        });
        let ends = matches!(outcome.as_str(), "succeed" | "fail");
        let finish = ends && known && reported.started.elapsed() >= RUNS_FOR && !reported.finished;
        if reported.outcome == outcome && !finish {
            return Ok(());
        }
        let body = status_of(pod, &outcome, &reported.ip, finish);
        let (status, answer) =
            self.server
                .json("PATCH", &format!("{path}/status"), STRATEGIC, Some(&body))?;
        anyhow::ensure!(
            status == 200 || status == 404,
            "report pod: {status} {answer}"
        );
        reported.outcome = outcome;
        reported.finished |= finish;
        Ok(())
    }
}

fn status_of(pod: &Value, outcome: &str, ip: &str, finished: bool) -> Value {
    let now = now();
    let ready = outcome != "unready" && !finished;
    let exit = i32::from(outcome == "fail");
    let phase = match (finished, outcome) {
        (false, _) => "Running",
        (true, "fail") => "Failed",
        (true, _) => "Succeeded",
    };
    let state = if finished {
        json!({"terminated": {"exitCode": exit, "startedAt": now, "finishedAt": now,
            "reason": if exit == 0 { "Completed" } else { "Error" }}, "running": null})
    } else {
        json!({"running": {"startedAt": now}})
    };
    let containers: Vec<Value> = pod["spec"]["containers"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|c| {
            json!({"name": c["name"], "image": c["image"], "imageID": "", "ready": ready,
                "restartCount": 0, "started": !finished, "state": state})
        })
        .collect();
    let flag = |b: bool| if b { "True" } else { "False" };
    let condition =
        |kind: &str, on: bool| json!({"type": kind, "status": flag(on), "lastTransitionTime": now});
    json!({"status": {
        "phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now,
        "containerStatuses": containers,
        "conditions": [condition("Initialized", true), condition("ContainersReady", ready), condition("Ready", ready)],
    }})
}

/// RFC 3339, whole seconds.
fn now() -> String {
    jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string()
}

/// RFC 3339 with microseconds (meta/v1 MicroTime).
fn now_micros() -> String {
    jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%S.%6fZ")
        .to_string()
}
