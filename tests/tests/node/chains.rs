//! The plugin in lists with others: Debian's plugins before and after it, IPAM plugins below it, and what runtimes ask
//! for by capabilities. The client does what libcni does.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use weir_tests::topology::Namespace;

use super::cni::{BOTH, Node, code, files};
use super::support::{Call, NO_POD, addresses, skipped};

/// Where Debian has them (package containernetworking-plugins).
const PLUGINS: &str = "/usr/lib/cni";

/// Says why a test is left out, or `false` when Debian's plugins are there.
fn left_out(test: &str) -> bool {
    if skipped(test) {
        return true;
    }
    let there = Path::new(PLUGINS).join("host-local").is_file();
    if !there {
        println!("SKIPPED {test}: {PLUGINS} is empty (Debian package containernetworking-plugins)");
    }
    !there
}

/// A network configuration list and what a runtime remembers of it.
struct List<'a> {
    node: &'a Node,
    version: &'a str,
    plugins: Vec<Value>,
    /// Values by capability.
    asked: Value,
    folders: Vec<PathBuf>,
}

impl<'a> List<'a> {
    fn new(node: &'a Node, version: &'a str, plugins: Vec<Value>) -> Self {
        Self {
            node,
            version,
            plugins,
            asked: json!({}),
            folders: vec![PLUGINS.into()],
        }
    }

    /// Weir's own entry, with `extra` keys.
    fn weir(node: &Node, extra: Value) -> Value {
        let mut plugin = json!({
            "type": "weir-cni",
            "socket": node.runtime.socket,
            "stateDir": node.runtime.state_dir,
            "capabilities": { "mac": true, "bandwidth": true, "ips": true },
        });
        for (key, value) in extra.as_object().unwrap() {
            plugin[key] = value.clone();
        }
        plugin
    }

    fn one(
        &self,
        command: &str,
        plugin: &Value,
        pod: Option<&Namespace>,
        previous: Option<&Value>,
    ) -> Result<Value, Value> {
        let mut config = plugin.clone();
        config["cniVersion"] = json!(self.version);
        config["name"] = json!("weir");
        let capabilities = config["capabilities"].take();
        config.as_object_mut().unwrap().remove("capabilities");
        let asked = self.asked.as_object().unwrap().iter();
        let asked: serde_json::Map<_, _> = asked
            .filter(|(key, _)| capabilities[key.as_str()] == true)
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        if !asked.is_empty() {
            config["runtimeConfig"] = asked.into();
        }
        if let Some(previous) = previous {
            config["prevResult"] = previous.clone();
        }
        let kind = plugin["type"].as_str().unwrap();
        let program = if kind == "weir-cni" {
            self.node.runtime.plugin.clone()
        } else {
            Path::new(PLUGINS).join(kind)
        };
        Call {
            plugin: &program,
            inside: Some(&self.node.namespace),
            folders: &self.folders,
            command,
            container: "c1",
            netns: pod.map(Namespace::path),
            arguments: NO_POD,
            kill_after: None,
        }
        .run(&config)
    }

    fn add(&self, pod: &Namespace) -> Result<Value, Value> {
        let mut result = None;
        for plugin in &self.plugins {
            result = Some(self.one("ADD", plugin, Some(pod), result.as_ref())?);
        }
        Ok(result.unwrap())
    }

    fn check(&self, pod: &Namespace, result: &Value) -> Result<(), Value> {
        // Debian's bandwidth 1.1.1 panics in a CHECK without limits.
        let idle =
            |plugin: &&Value| plugin["type"] == "bandwidth" && plugin["ingressRate"].is_null();
        for plugin in self.plugins.iter().filter(|plugin| !idle(plugin)) {
            self.one("CHECK", plugin, Some(pod), Some(result))?;
        }
        Ok(())
    }

    fn del(&self, pod: Option<&Namespace>, result: Option<&Value>) -> Result<(), Value> {
        for plugin in self.plugins.iter().rev() {
            self.one("DEL", plugin, pod, result)?;
        }
        Ok(())
    }
}

#[test]
fn debians_plugins_work_before_and_after_us() {
    if left_out("debians_plugins_work_before_and_after_us") {
        return;
    }
    let node = Node::start(&BOTH);
    let tuning = json!({ "type": "tuning", "sysctl": { "net.core.somaxconn": "500" } });
    let mut plugins = vec![
        json!({ "type": "loopback" }),
        json!({ "type": "portmap", "capabilities": { "portMappings": true } }),
        json!({ "type": "bandwidth", "capabilities": { "bandwidth": false } }),
        tuning.clone(),
    ];
    let before = plugins.len();
    plugins.push(List::weir(&node, json!({})));
    plugins.extend([
        json!({ "type": "portmap", "capabilities": { "portMappings": true } }),
        json!({ "type": "bandwidth", "ingressRate": 800_000_000, "ingressBurst": 8_000_000,
                "egressRate": 800_000_000, "egressBurst": 8_000_000 }),
        json!({ "type": "tuning", "sysctl": { "net.ipv4.conf.eth0.arp_filter": "1" } }),
    ]);
    for version in ["0.3.1", "0.4.0", "1.0.0"] {
        let list = List::new(&node, version, plugins.clone());
        let pod = Namespace::new("pod").unwrap();
        let result = list.add(&pod).unwrap();
        assert_eq!(result["cniVersion"], version);
        let interfaces = result["interfaces"].as_array().unwrap();
        let names: Vec<&str> = interfaces
            .iter()
            .filter_map(|i| i["name"].as_str())
            .collect();
        assert_eq!((names[0], names[2]), ("lo", "eth0"), "{names:?}");
        let ours =
            |ip: &&Value| interfaces[ip["interface"].as_u64().unwrap() as usize]["name"] == "eth0";
        assert_eq!(
            result["ips"]
                .as_array()
                .unwrap()
                .iter()
                .filter(ours)
                .count(),
            2
        );
        let sysctl = |key: &str| {
            let output = pod.output("cat", &[&format!("/proc/sys/{key}")]).unwrap();
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(sysctl("net/core/somaxconn"), "500");
        assert_eq!(sysctl("net/ipv4/conf/eth0/arp_filter"), "1");
        if version != "0.3.1" {
            list.check(&pod, &result).unwrap();
        }
        let other = Namespace::new("other").unwrap();
        node.runtime.add("c2", &other).unwrap();
        for address in addresses(&result).into_iter().filter(|a| !a.is_loopback()) {
            super::support::talk(&other, &pod, address);
        }
        node.runtime.del("c2").unwrap();
        list.del(Some(&pod), Some(&result)).unwrap();
        // Again, and without namespace and result.
        list.del(None, None).unwrap();
        // Debian's bandwidth plugin keeps its device until its own DEL has seen the namespace.
        assert_eq!(node.namespace.links().unwrap(), Vec::<String>::new());
        node.assert_empty();
    }
    // What made the pod's own interface cannot come before.
    let mut list = List::new(&node, "1.0.0", plugins[before..].to_vec());
    list.plugins.insert(
        0,
        json!({ "type": "ptp", "ipam": {
        "type": "static", "addresses": [{ "address": "192.0.2.77/24", "gateway": "192.0.2.1" }] } }),
    );
    let pod = Namespace::new("pod").unwrap();
    let error = list.add(&pod).unwrap_err();
    assert_eq!(code(&error), 7, "{error}");
    assert!(error["msg"].as_str().unwrap().contains("eth0"), "{error}");
    list.del(Some(&pod), None).unwrap();
    node.assert_empty();
}

#[test]
fn source_based_routing_after_us_leaves_the_pod_reachable() {
    if left_out("source_based_routing_after_us_leaves_the_pod_reachable") {
        return;
    }
    let node = Node::start(&BOTH[..1]);
    let plugins = vec![List::weir(&node, json!({})), json!({ "type": "sbr" })];
    let list = List::new(&node, "1.0.0", plugins);
    let (pod, other) = (
        Namespace::new("pod").unwrap(),
        Namespace::new("other").unwrap(),
    );
    let result = list.add(&pod).unwrap();
    node.runtime.add("c2", &other).unwrap();
    super::support::talk(&other, &pod, addresses(&result)[0]);
    list.check(&pod, &result).unwrap();
    list.del(Some(&pod), Some(&result)).unwrap();
    node.runtime.del("c2").unwrap();
    node.assert_empty();
}

#[test]
fn a_runtime_may_choose_the_mac_address() {
    if left_out("a_runtime_may_choose_the_mac_address") {
        return;
    }
    let node = Node::start(&BOTH);
    let mut list = List::new(&node, "1.1.0", vec![List::weir(&node, json!({}))]);
    let pod = Namespace::new("pod").unwrap();
    for (mac, what) in [("01:00:5e:00:00:01", "multicast"), ("here", "no address")] {
        list.asked = json!({ "mac": mac });
        let error = list.add(&pod).unwrap_err();
        assert_eq!(code(&error), 7, "{what}: {error}");
        node.assert_empty();
    }
    list.asked = json!({ "mac": "02:57:45:49:52:77" });
    let result = list.add(&pod).unwrap();
    assert_eq!(result["interfaces"][1]["mac"], "02:57:45:49:52:77");
    let shown = pod.ip(&["link", "show", "eth0"]).unwrap();
    assert!(shown.contains("02:57:45:49:52:77"), "{shown}");
    list.check(&pod, &result).unwrap();
    let other = Namespace::new("other").unwrap();
    node.runtime.add("c2", &other).unwrap();
    super::support::talk(&other, &pod, addresses(&result)[0]);
    node.runtime.del("c2").unwrap();
    list.del(Some(&pod), Some(&result)).unwrap();
    node.assert_empty();
}

/// Seconds that so many bytes need from one namespace to an address in another.
pub(crate) fn seconds_for(
    bytes: usize,
    from: &Namespace,
    to: &Namespace,
    address: std::net::IpAddr,
) -> f64 {
    let listener = to.enter(|| Ok(TcpListener::bind((address, 0))?)).unwrap();
    let target = SocketAddr::new(address, listener.local_addr().unwrap().port());
    let receiver = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        (all.len(), Instant::now())
    });
    let started = Instant::now();
    from.enter(|| {
        let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(3))?;
        stream.write_all(&vec![7; bytes])?;
        Ok(())
    })
    .unwrap();
    let (received, ended) = receiver.join().unwrap();
    assert_eq!(received, bytes);
    (ended - started).as_secs_f64()
}

#[test]
fn bandwidth_is_shaped_in_each_direction() {
    if left_out("bandwidth_is_shaped_in_each_direction") {
        return;
    }
    const BYTES: usize = 1_500_000;
    let node = Node::start(&BOTH);
    let mut list = List::new(&node, "1.0.0", vec![List::weir(&node, json!({}))]);
    let other = Namespace::new("other").unwrap();
    let peer = addresses(&node.runtime.add("c2", &other).unwrap())[0];
    // 8 Mbit/s are a megabyte a second, beyond the burst.
    let limit = |way: &str| json!({ "bandwidth": { format!("{way}Rate"): 8_000_000, format!("{way}Burst"): 800_000 } });
    for limited in ["ingress", "egress"] {
        list.asked = limit(limited);
        let pod = Namespace::new("pod").unwrap();
        let result = list.add(&pod).unwrap();
        let own = addresses(&result)[0];
        let (received, sent) = (
            seconds_for(BYTES, &other, &pod, own),
            seconds_for(BYTES, &pod, &other, peer),
        );
        println!("{limited} limited: {received:.3} s to receive, {sent:.3} s to send");
        let (slow, fast) = if limited == "ingress" {
            (received, sent)
        } else {
            (sent, received)
        };
        assert!(slow > 1.2 && slow < 6.0, "{slow} s for what takes 1.4 s");
        assert!(fast < slow / 2.0, "{fast} s without a limit");
        list.check(&pod, &result).unwrap();
        list.del(Some(&pod), Some(&result)).unwrap();
        assert_eq!(pod.links().unwrap(), Vec::<String>::new());
    }
    list.asked = json!({ "bandwidth": { "ingressBurst": 8 } });
    let pod = Namespace::new("pod").unwrap();
    assert_eq!(code(&list.add(&pod).unwrap_err()), 7);
    node.runtime.del("c2").unwrap();
    node.assert_empty();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_for_packets_that_programs_carry() {
    if super::agents::left_out("limits_hold_for_packets_that_programs_carry") {
        return;
    }
    const BYTES: usize = 1_500_000;
    let mut cluster = super::cluster::Cluster::start(1).await;
    let free = cluster.pod(0, "free");
    let limited = Namespace::new("limited").unwrap();
    let limits = json!({ "runtimeConfig": { "bandwidth": {
        "ingressRate": 8_000_000, "ingressBurst": 800_000,
        "egressRate": 8_000_000, "egressBurst": 800_000,
    } } });
    let runtime = &cluster.members[0].runtime;
    let result = runtime
        .call("ADD", "limited", Some(&limited.path()), limits)
        .unwrap();
    let own = addresses(&result)[0];
    let received = seconds_for(BYTES, &free.namespace, &limited, own);
    let sent = seconds_for(BYTES, &limited, &free.namespace, free.ips[0]);
    println!("{received:.3} s to receive, {sent:.3} s to send");
    assert!(
        received > 1.2 && sent > 1.2,
        "{received} and {sent} s for what takes 1.4 s"
    );
    runtime.del("limited").unwrap();
    assert_eq!(limited.links().unwrap(), Vec::<String>::new());
    super::agents::finish(&mut cluster, vec![free]);
}

#[test]
fn addresses_come_from_ipam_plugins() {
    if left_out("addresses_come_from_ipam_plugins") {
        return;
    }
    // No range of its own is needed.
    let node = Node::start(&[]);
    let data = node.dir.path().join("host-local");
    let host_local = json!({ "ipam": {
        "type": "host-local",
        "dataDir": data,
        "ranges": [[{ "subnet": "10.9.0.0/24" }], [{ "subnet": "fd00:9::/64" }]],
    } });
    let fixed = json!({ "ipam": {
        "type": "static",
        "addresses": [{ "address": "10.8.0.8/24", "gateway": "10.8.0.1" }],
        "dns": { "nameservers": ["192.0.2.53"] },
    } });
    let reserved = || {
        let names = files(&data.join("weir"));
        names
            .into_iter()
            .filter(|name| name.starts_with(|c: char| c.is_ascii_digit()))
            .count()
    };
    let (pod, other) = (
        Namespace::new("pod").unwrap(),
        Namespace::new("other").unwrap(),
    );
    let list = List::new(&node, "1.0.0", vec![List::weir(&node, host_local.clone())]);
    let result = list.add(&pod).unwrap();
    let given: Vec<String> = addresses(&result).iter().map(ToString::to_string).collect();
    assert_eq!(given, ["10.9.0.2", "fd00:9::2"]);
    assert_eq!(reserved(), 1);
    list.check(&pod, &result).unwrap();
    let second = List::new(&node, "1.0.0", vec![List::weir(&node, fixed)]);
    let plugin = &second.plugins[0];
    let told = second.one("ADD", plugin, Some(&other), None).unwrap_err();
    assert_eq!(code(&told), 100, "the same container twice: {told}");
    list.del(None, Some(&result)).unwrap();
    list.del(None, None).unwrap();
    assert_eq!(reserved(), 0);
    let result = second.add(&other).unwrap();
    assert_eq!(result["ips"][0]["address"], "10.8.0.8/32");
    assert_eq!(result["dns"]["nameservers"][0], "192.0.2.53");
    second.del(Some(&other), None).unwrap();
    // An ADD that fails after the plugin gave an address gives it back.
    *node.programs.refuse.lock().unwrap() = true;
    assert_eq!(code(&list.add(&pod).unwrap_err()), 101);
    assert_eq!(reserved(), 0);
    node.assert_empty();
}

#[test]
fn an_ipam_plugin_is_called_by_the_contract() {
    if left_out("an_ipam_plugin_is_called_by_the_contract") {
        return;
    }
    let node = Node::start(&[]);
    let folder = node.dir.path().join("bin");
    std::fs::create_dir(&folder).unwrap();
    let log = node.dir.path().join("calls");
    // Speaks like the client of a DHCP daemon; knows neither STATUS nor GC.
    let script = format!(
        "#!/bin/sh\ncat > {0}.stdin\necho \"$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS\" >> {0}\n\
         case $CNI_COMMAND in\nADD) echo '{{\"cniVersion\":\"1.1.0\",\"ips\":[{{\"address\":\"10.7.0.7/16\"}}]}}';;\n\
         DEL|CHECK) ;;\n*) echo '{{\"cniVersion\":\"1.1.0\",\"code\":4,\"msg\":\"unknown\"}}'; exit 1;;\nesac\n",
        log.display()
    );
    std::fs::write(folder.join("dhcp"), script).unwrap();
    std::fs::set_permissions(folder.join("dhcp"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let ipam = json!({ "ipam": { "type": "dhcp", "daemonSocketPath": "/run/cni/dhcp.sock" } });
    let mut list = List::new(&node, "1.1.0", vec![List::weir(&node, ipam)]);
    list.folders = vec!["/none".into(), folder];
    let pod = Namespace::new("pod").unwrap();
    let result = list.add(&pod).unwrap();
    assert_eq!(addresses(&result)[0].to_string(), "10.7.0.7");
    let stdin: Value =
        serde_json::from_slice(&std::fs::read(log.with_extension("stdin")).unwrap()).unwrap();
    assert_eq!(stdin["ipam"]["daemonSocketPath"], "/run/cni/dhcp.sock");
    assert_eq!(stdin["type"], "weir-cni");
    list.check(&pod, &result).unwrap();
    list.one("STATUS", &list.plugins[0], None, None).unwrap();
    let mut gc = list.plugins[0].clone();
    gc["cni.dev/valid-attachments"] = json!([{ "containerID": "c1", "ifname": "eth0" }]);
    list.one("GC", &gc, None, None).unwrap();
    list.del(Some(&pod), Some(&result)).unwrap();
    let calls = std::fs::read_to_string(&log).unwrap();
    let path = pod.path();
    let whole = |command: &str| format!("{command} c1 eth0 {}", path.display());
    let commands: Vec<&str> = calls
        .lines()
        .map(|l| l.split(' ').next().unwrap())
        .collect();
    assert_eq!(commands, ["ADD", "CHECK", "STATUS", "GC", "DEL"]);
    assert!(
        calls.contains(&whole("ADD")) && calls.contains(&whole("DEL")),
        "{calls}"
    );
    node.assert_empty();
}
