//! The CNI API with the real plugin and real links; the eBPF programs are replaced by ones that remember.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use weir_agent::cni_api::ranges::NoRanges;
use weir_agent::cni_api::{Attachments, Server, Settings, Store};
use weir_tests::topology::Namespace;

use super::support::{Remembered, Runtime, addresses, skipped, talk};

/// A node: its namespace, its state, and a CNI API that can end and start anew.
pub(crate) struct Node {
    // Dropped in this order: the server's threads live in the namespace.
    server: Option<Server>,
    pub(crate) programs: Arc<Remembered>,
    cidrs: Arc<Mutex<Vec<String>>>,
    pub(crate) runtime: Runtime,
    pub(crate) namespace: Namespace,
    cool_down: Duration,
    pub(crate) dir: tempfile::TempDir,
}

impl Node {
    pub(crate) fn start(cidrs: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut node = Self {
            server: None,
            programs: Arc::default(),
            cidrs: Arc::new(Mutex::new(cidrs.iter().map(|c| (*c).to_owned()).collect())),
            runtime: Runtime::new(dir.path()),
            namespace: Namespace::new("node").unwrap(),
            cool_down: Duration::ZERO,
            dir,
        };
        for address in NODE_IPS {
            node.namespace
                .ip(&["address", "add", address, "dev", "lo"])
                .unwrap();
        }
        node.start_api();
        node
    }

    fn start_api(&mut self) {
        let settings = Settings {
            mtu: 1450,
            node_ips: NODE_IPS.iter().map(|ip| ip.parse().unwrap()).collect(),
            cool_down: self.cool_down,
        };
        let cidrs = Arc::clone(&self.cidrs);
        let pod_ranges = Arc::new(move || {
            let cidrs = cidrs.lock().unwrap();
            if cidrs.is_empty() {
                return Err(NoRanges::Unknown);
            }
            Ok(cidrs.iter().map(|c| c.parse().unwrap()).collect())
        });
        let (programs, dir) = (Arc::clone(&self.programs), self.dir.path());
        let socket = &self.runtime.socket;
        let server = self.namespace.enter(|| {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
            std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1")?;
            let store = Store::open(dir)?;
            let attachments = Attachments::start(store, programs, settings, pod_ranges)?;
            Ok(Server::start(socket, Arc::new(attachments))?)
        });
        self.server = Some(server.unwrap());
    }

    fn stop_api(&mut self) {
        self.server.take().unwrap().stop();
    }

    /// Nothing of any pod is left: links, routes, neighbours, records, programs.
    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.namespace.links().unwrap(), Vec::<String>::new());
        assert_eq!(
            self.namespace
                .ip(&["route", "show", "proto", "87"])
                .unwrap(),
            ""
        );
        assert_eq!(
            self.namespace
                .ip(&["-6", "route", "show", "proto", "87"])
                .unwrap(),
            ""
        );
        assert_eq!(files(&self.dir.path().join("ipam")), Vec::<String>::new());
        assert_eq!(
            files(&self.dir.path().join("cni-deletes")),
            Vec::<String>::new()
        );
        assert_eq!(
            files(&self.dir.path().join("ipam-resting")),
            Vec::<String>::new()
        );
        assert!(self.programs.pods.lock().unwrap().is_empty());
    }
}

pub(crate) fn files(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap();
    entries
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

/// On `lo`: this node has no network around it.
const NODE_IPS: [&str; 2] = ["192.0.2.11", "2001:db8::11"];
pub(crate) const BOTH: [&str; 2] = ["10.244.1.0/24", "fd00:10:244:1::/64"];

pub(crate) fn code(error: &Value) -> u64 {
    error["code"].as_u64().unwrap()
}

#[test]
fn a_pod_lives_from_add_to_del() {
    if skipped("a_pod_lives_from_add_to_del") {
        return;
    }
    let mut node = Node::start(&BOTH);
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        node.runtime.version = version;
        let pod = Namespace::new("pod").unwrap();
        let result = node.runtime.add("c1", &pod).unwrap();
        assert_eq!(result["cniVersion"], version);
        assert_eq!(
            result["interfaces"][1]["sandbox"],
            pod.path().to_str().unwrap()
        );
        let link = pod.ip(&["-o", "link", "show", "eth0"]).unwrap();
        assert!(link.contains("mtu 1450") && link.contains("UP"), "{link}");
        let shown = pod.ip(&["-o", "address", "show", "eth0"]).unwrap();
        for address in addresses(&result) {
            assert!(shown.contains(&address.to_string()), "{shown}");
        }
        // The link-local one is the kernel's; it settles a moment later and nothing waits for it.
        let mut ours = shown.lines().filter(|line| line.contains("scope global"));
        assert!(!ours.any(|line| line.contains("tentative")), "{shown}");
        assert!(
            pod.ip(&["route"])
                .unwrap()
                .contains("default via 169.254.1.1")
        );
        assert!(
            pod.ip(&["-6", "route"])
                .unwrap()
                .contains("default via fe80::1")
        );
        if version != "0.3.1" {
            node.runtime.check("c1", &pod, &result).unwrap();
        }
        let again = node.runtime.add("c1", &pod).unwrap_err();
        assert_eq!(code(&again), 100, "{again}");
        // The refusal changed nothing.
        assert!(pod.ip(&["link", "show", "eth0"]).is_ok());
        for _ in 0..2 {
            node.runtime.del("c1").unwrap();
        }
        assert_eq!(pod.links().unwrap(), Vec::<String>::new());
        node.assert_empty();
    }
}

#[test]
fn pods_of_a_node_reach_each_other_and_the_node() {
    if skipped("pods_of_a_node_reach_each_other_and_the_node") {
        return;
    }
    let node = Node::start(&BOTH);
    let (a, b) = (Namespace::new("a").unwrap(), Namespace::new("b").unwrap());
    let first = node.runtime.add("a", &a).unwrap();
    let result = node.runtime.add("b", &b).unwrap();
    for address in addresses(&result) {
        assert_eq!(
            talk(&a, &b, address),
            addresses(&first)[usize::from(address.is_ipv6())]
        );
        // The node's own processes, and back from a pod to the node's stack.
        talk(&node.namespace, &b, address);
    }
    for container in ["a", "b"] {
        node.runtime.del(container).unwrap();
    }
    node.assert_empty();
}

#[test]
fn check_names_what_is_broken() {
    if skipped("check_names_what_is_broken") {
        return;
    }
    let node = Node::start(&BOTH);
    let pod = Namespace::new("pod").unwrap();
    let unknown = node.runtime.check("c1", &pod, &json!({})).unwrap_err();
    assert_eq!(code(&unknown), 102);
    type Change = fn(&str, &str) -> (bool, String);
    let changes: [Change; 6] = [
        |_, v4| (true, format!("address del {v4}/32 dev eth0")),
        |_, _| (true, "route del default".into()),
        |_, _| (true, "neighbour del 169.254.1.1 dev eth0".into()),
        |_, v4| (false, format!("route del {v4}")),
        |host, v4| (false, format!("neighbour del {v4} dev {host}")),
        |host, _| (false, format!("link set {host} down")),
    ];
    for change in changes {
        let result = node.runtime.add("c1", &pod).unwrap();
        let host = result["interfaces"][0]["name"].as_str().unwrap();
        let v4 = addresses(&result)[0].to_string();
        node.runtime.check("c1", &pod, &result).unwrap();
        let (inside, change) = change(host, &v4);
        let words: Vec<&str> = change.split(' ').collect();
        let namespace = if inside { &pod } else { &node.namespace };
        namespace.ip(&words).unwrap();
        let error = node.runtime.check("c1", &pod, &result).unwrap_err();
        assert_eq!(code(&error), 102, "{change}: {error}");
        node.runtime.del("c1").unwrap();
    }
    node.runtime.add("c1", &pod).unwrap();
    let wrong = json!({ "ips": [{ "address": "192.0.2.9/32" }] });
    assert_eq!(
        code(&node.runtime.check("c1", &pod, &wrong).unwrap_err()),
        102
    );
    node.programs.pods.lock().unwrap().clear();
    let now = node
        .runtime
        .check("c1", &pod, &json!({ "ips": [] }))
        .unwrap_err();
    assert!(now["msg"].as_str().unwrap().contains("programs"), "{now}");
    node.runtime.del("c1").unwrap();
    node.assert_empty();
}

#[test]
fn a_failed_add_leaves_nothing() {
    if skipped("a_failed_add_leaves_nothing") {
        return;
    }
    let node = Node::start(&BOTH);
    let pod = Namespace::new("pod").unwrap();
    *node.programs.refuse.lock().unwrap() = true;
    let error = node.runtime.add("c1", &pod).unwrap_err();
    assert_eq!(code(&error), 101, "{error}");
    assert!(
        error["msg"].as_str().unwrap().contains("from_pod"),
        "{error}"
    );
    assert_eq!(pod.links().unwrap(), Vec::<String>::new());
    node.assert_empty();
    *node.programs.refuse.lock().unwrap() = false;

    pod.ip(&[
        "link", "add", "eth0", "type", "veth", "peer", "name", "other",
    ])
    .unwrap();
    let error = node.runtime.add("c1", &pod).unwrap_err();
    assert_eq!(code(&error), 100, "{error}");
    assert!(
        pod.links().unwrap().contains(&"eth0".to_owned()),
        "the pod's own link stays"
    );
    node.assert_empty();

    let own = node
        .runtime
        .call("ADD", "c1", Some(&node.namespace.path()), Value::Null);
    assert_eq!(code(&own.unwrap_err()), 8);
    let gone = node
        .runtime
        .call("ADD", "c1", Some(Path::new("/run/netns/none")), Value::Null);
    assert_eq!(code(&gone.unwrap_err()), 4);
    let file = node
        .runtime
        .call("ADD", "c1", Some(Path::new("/etc/hostname")), Value::Null);
    assert_eq!(code(&file.unwrap_err()), 101);
    node.assert_empty();
}

#[test]
fn an_address_that_cannot_be_made_durable_is_not_given() {
    if skipped("an_address_that_cannot_be_made_durable_is_not_given") {
        return;
    }
    let node = Node::start(&["10.244.1.8/32"]);
    let pod = Namespace::new("pod").unwrap();
    let records = node.dir.path().join("ipam");
    std::fs::remove_dir(&records).unwrap();
    for _ in 0..2 {
        let error = node.runtime.add("c1", &pod).unwrap_err();
        assert_eq!(code(&error), 5, "{error}");
        assert!(error["msg"].as_str().unwrap().contains("ipam"), "{error}");
    }
    assert_eq!(node.namespace.links().unwrap(), Vec::<String>::new());
    std::fs::create_dir(&records).unwrap();
    node.runtime.add("c1", &pod).unwrap();
    node.runtime.del("c1").unwrap();
    node.assert_empty();
}

#[test]
fn no_range_yet_means_try_again() {
    if skipped("no_range_yet_means_try_again") {
        return;
    }
    let node = Node::start(&[]);
    let pod = Namespace::new("pod").unwrap();
    assert_eq!(code(&node.runtime.add("c1", &pod).unwrap_err()), 11);
    let status = node
        .runtime
        .call("STATUS", "", None, Value::Null)
        .unwrap_err();
    assert_eq!(code(&status), 50);
    *node.cidrs.lock().unwrap() = vec![BOTH[0].into()];
    node.runtime.call("STATUS", "", None, Value::Null).unwrap();
    let result = node.runtime.add("c1", &pod).unwrap();
    assert_eq!(addresses(&result).len(), 1, "one family is enough");
    node.runtime.del("c1").unwrap();
    node.assert_empty();
}

#[test]
fn a_full_range_says_so_and_dead_containers_do_not_fill_it() {
    if skipped("a_full_range_says_so_and_dead_containers_do_not_fill_it") {
        return;
    }
    let node = Node::start(&["10.244.1.0/29", BOTH[1]]);
    let mut pods: Vec<Namespace> = (0..5).map(|_| Namespace::new("pod").unwrap()).collect();
    for (n, pod) in pods.iter().enumerate() {
        node.runtime.add(&format!("c{n}"), pod).unwrap();
    }
    let one_more = Namespace::new("pod").unwrap();
    let error = node.runtime.add("c9", &one_more).unwrap_err();
    assert_eq!(code(&error), 11, "{error}");
    assert!(
        error["msg"].as_str().unwrap().contains("10.244.1.0/29"),
        "{error}"
    );
    let status = node
        .runtime
        .call("STATUS", "", None, Value::Null)
        .unwrap_err();
    assert_eq!(code(&status), 50);
    assert_eq!(one_more.links().unwrap(), Vec::<String>::new());

    // The namespace goes without a DEL; the kernel removes the link soon after.
    let gone = pods.remove(0);
    let links = node.namespace.links().unwrap().len();
    drop(gone);
    let deadline = Instant::now() + Duration::from_secs(10);
    while node.namespace.links().unwrap().len() == links {
        assert!(
            Instant::now() < deadline,
            "the kernel keeps the link of a deleted namespace"
        );
        std::thread::yield_now();
    }
    node.runtime.add("c9", &one_more).unwrap();

    let keep = json!({ "cni.dev/valid-attachments": [{ "containerID": "c9", "ifname": "eth0" }] });
    node.runtime.call("GC", "", None, keep).unwrap();
    assert_eq!(node.namespace.links().unwrap().len(), 1);
    node.runtime.del("c9").unwrap();
    node.assert_empty();
}

#[test]
fn an_address_rests_before_another_pod_gets_it_and_over_restarts() {
    if skipped("an_address_rests_before_another_pod_gets_it_and_over_restarts") {
        return;
    }
    let mut node = Node::start(&["10.244.1.0/30", "10.244.7.8/32"]);
    node.stop_api();
    node.cool_down = Duration::from_secs(3600);
    node.start_api();
    let pod = Namespace::new("pod").unwrap();
    let given = |result: &Value| addresses(result)[0].to_string();
    let first = node.runtime.add("c1", &pod).unwrap();
    assert_eq!(given(&first), "10.244.1.2");
    node.runtime.del("c1").unwrap();
    // The second range goes on where the first has nothing that may be given.
    let second = node.runtime.add("c2", &pod).unwrap();
    assert_eq!(given(&second), "10.244.7.8");
    node.runtime.del("c2").unwrap();
    for _ in 0..2 {
        let error = node.runtime.add("c3", &pod).unwrap_err();
        assert_eq!(code(&error), 11, "{error}");
        assert!(error["msg"].as_str().unwrap().contains("rest"), "{error}");
        node.stop_api();
        node.start_api();
    }
    // A shorter rest, and what has rested leaves no file.
    node.stop_api();
    node.cool_down = Duration::from_millis(1);
    node.start_api();
    node.runtime.add("c3", &pod).unwrap();
    node.stop_api();
    node.cool_down = Duration::ZERO;
    node.start_api();
    node.runtime.del("c3").unwrap();
    node.assert_empty();
}

#[test]
fn a_new_agent_adopts_what_lives_and_finishes_what_was_left() {
    if skipped("a_new_agent_adopts_what_lives_and_finishes_what_was_left") {
        return;
    }
    let mut node = Node::start(&BOTH);
    let pods: Vec<Namespace> = (0..4).map(|_| Namespace::new("pod").unwrap()).collect();
    let results: Vec<Value> = (0..3)
        .map(|n| node.runtime.add(&format!("c{n}"), &pods[n]).unwrap())
        .collect();
    node.stop_api();
    assert_eq!(code(&node.runtime.add("c3", &pods[3]).unwrap_err()), 11);
    // c1 goes while no agent runs; c2's link is gone without a DEL; a link of no record appears.
    node.runtime.del("c1").unwrap();
    let host = results[2]["interfaces"][0]["name"].as_str().unwrap();
    node.namespace.ip(&["link", "del", host]).unwrap();
    let stray = [
        "link",
        "add",
        "weir0123456789a",
        "type",
        "veth",
        "peer",
        "name",
        "strayp",
    ];
    node.namespace.ip(&stray).unwrap();
    node.programs.pods.lock().unwrap().clear();
    std::fs::write(node.dir.path().join("ipam/.c9@eth0.json"), "{").unwrap();

    node.start_api();
    node.runtime.check("c0", &pods[0], &results[0]).unwrap();
    assert_eq!(node.namespace.links().unwrap().len(), 1);
    assert_eq!(files(&node.dir.path().join("ipam")), ["c0@eth0.json"]);
    assert_eq!(node.programs.pods.lock().unwrap().len(), 1);
    // The sandbox of c1 may come back under the same id.
    node.runtime.add("c1", &pods[1]).unwrap();
    for container in ["c0", "c1", "c2"] {
        node.runtime.del(container).unwrap();
    }
    node.assert_empty();
}

#[test]
fn many_pods_at_once_get_addresses_of_their_own() {
    if skipped("many_pods_at_once_get_addresses_of_their_own") {
        return;
    }
    const PODS: usize = 24;
    let node = Node::start(&BOTH);
    let pods: Vec<Namespace> = (0..PODS).map(|_| Namespace::new("pod").unwrap()).collect();
    let started = Instant::now();
    let results: Vec<Value> = std::thread::scope(|scope| {
        let runtime = &node.runtime;
        let threads: Vec<_> = pods
            .iter()
            .enumerate()
            .map(|(n, pod)| scope.spawn(move || runtime.add(&format!("c{n}"), pod).unwrap()))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    println!("{PODS} ADDs at once took {:?}", started.elapsed());
    let mut all: Vec<_> = results.iter().flat_map(addresses).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 2 * PODS);
    let started = Instant::now();
    for n in 0..PODS {
        node.runtime.del(&format!("c{n}")).unwrap();
    }
    println!("{PODS} DELs in a row took {:?}", started.elapsed());
    let started = Instant::now();
    for (n, pod) in pods.iter().enumerate() {
        node.runtime.add(&format!("d{n}"), pod).unwrap();
    }
    println!("{PODS} ADDs in a row took {:?}", started.elapsed());
    for n in 0..PODS {
        node.runtime.del(&format!("d{n}")).unwrap();
    }
    node.assert_empty();
}
