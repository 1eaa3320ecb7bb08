//! Real agents with their eBPF programs: routes, pods, services, and agents that die while traffic runs.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use control_api::v1::{Endpoint, ObjectKey, ObjectKind};
use weir_tests::topology::Namespace;

use super::cluster::{Cluster, Pod, SERVICE_V4, SERVICE_V6, no_programs};
use super::support::{skipped, talk};

const PATIENCE: Duration = Duration::from_secs(3);
/// Where servers of these tests listen.
const PORT: u16 = 8080;

pub(crate) fn left_out(test: &str) -> bool {
    if skipped(test) {
        return true;
    }
    if let Some(why) = no_programs() {
        println!("SKIPPED {test}: {why}");
        return true;
    }
    false
}

/// Answers every connection on `address` with the server's and the client's address; a line gets a line back.
pub(crate) fn serve(namespace: &Namespace, address: IpAddr) {
    let listener = namespace
        .enter(|| Ok(TcpListener::bind((address, PORT))?))
        .unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let peer = stream.peer_addr().unwrap().ip();
                let mut byte = [0];
                while stream.read(&mut byte).unwrap_or(0) == 1 {
                    // In one piece: parts would wait for each other's acknowledgement.
                    if stream
                        .write_all(format!("{address} {peer}\n").as_bytes())
                        .is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
}

fn connect(from: &Namespace, target: SocketAddr) -> std::io::Result<TcpStream> {
    connect_within(from, target, PATIENCE)
}

pub(crate) fn connect_within(
    from: &Namespace,
    target: SocketAddr,
    patience: Duration,
) -> std::io::Result<TcpStream> {
    let mut result = None;
    from.enter(|| {
        result = Some(TcpStream::connect_timeout(&target, patience));
        Ok(())
    })
    .unwrap();
    let stream = result.unwrap()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Asks over a connection: the server's address and the client's as the server sees it.
fn ask(stream: &mut TcpStream) -> std::io::Result<(IpAddr, IpAddr)> {
    stream.write_all(b"?")?;
    let mut line = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&line).into_owned();
    let parse = |word: Option<&str>| word.and_then(|w| w.parse().ok());
    let mut words = text.split(' ');
    match (parse(words.next()), parse(words.next())) {
        (Some(server), Some(client)) => Ok((server, client)),
        _ => Err(std::io::Error::other(format!("answer {text:?}"))),
    }
}

fn service(v6: bool) -> SocketAddr {
    SocketAddr::new(
        if v6 { SERVICE_V6 } else { SERVICE_V4 }.parse().unwrap(),
        80,
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_nodes_and_services_reach_each_other() {
    if left_out("pods_nodes_and_services_reach_each_other") {
        return;
    }
    let mut cluster = Cluster::start(2).await;
    let a = cluster.pod(0, "a");
    let b = cluster.pod(0, "b");
    let c = cluster.pod(1, "c");
    for v6 in [false, true] {
        let at = usize::from(v6);
        for (from, to) in [(&a, &b), (&a, &c), (&c, &a)] {
            assert_eq!(
                talk(&from.namespace, &to.namespace, to.ips[at]),
                from.ips[at]
            );
        }
        let node = &cluster.members[0];
        assert_eq!(talk(&node.namespace, &a.namespace, a.ips[at]), node.ips[at]);
        assert_eq!(talk(&node.namespace, &c.namespace, c.ips[at]), node.ips[at]);
        assert_eq!(talk(&a.namespace, &node.namespace, node.ips[at]), a.ips[at]);
        let other = &cluster.members[1];
        assert_eq!(
            talk(&a.namespace, &other.namespace, other.ips[at]),
            a.ips[at]
        );
    }
    for pod in [&a, &b, &c] {
        for ip in &pod.ips {
            serve(&pod.namespace, *ip);
        }
    }
    cluster.serve(&[&b, &c], PORT).await;
    for v6 in [false, true] {
        let at = usize::from(v6);
        for (from, own) in [
            (&a.namespace, a.ips[at]),
            (&cluster.members[0].namespace, cluster.members[0].ips[at]),
            (&cluster.members[1].namespace, cluster.members[1].ips[at]),
        ] {
            let mut servers = std::collections::BTreeSet::new();
            for _ in 0..40 {
                let (server, client) = ask(&mut connect(from, service(v6)).unwrap()).unwrap();
                assert_eq!(client, own, "the client's address arrives");
                servers.insert(server);
            }
            assert_eq!(servers, [b.ips[at], c.ips[at]].into(), "both are used");
        }
    }
    node_as_backend(&cluster).await;
    for member in &cluster.members {
        println!(
            "{}: agent's memory {} KiB",
            member.name,
            member.agent_rss_kib()
        );
    }
    finish(&mut cluster, vec![a, b, c]);
}

/// A process of a node behind the service, asked from the same node and from another.
async fn node_as_backend(cluster: &Cluster) {
    let node = &cluster.members[0];
    for ip in &node.ips {
        serve(&node.namespace, *ip);
    }
    let endpoint = |ip: IpAddr| {
        vec![Endpoint {
            addresses: vec![ip.to_string()],
            ready: true,
            serving: true,
            node_name: node.name.clone(),
            ..Endpoint::default()
        }]
    };
    cluster
        .serve_endpoints(endpoint(node.ips[0]), endpoint(node.ips[1]), PORT)
        .await;
    for v6 in [false, true] {
        for member in &cluster.members {
            let mut stream = connect(&member.namespace, service(v6)).unwrap_or_else(|e| {
                panic!(
                    "{} to a service of n1's own process, IPv6 {v6}: {e}",
                    member.name
                )
            });
            assert_eq!(ask(&mut stream).unwrap().0, node.ips[usize::from(v6)]);
        }
    }
}

/// Takes everything down and proves that nothing is left.
pub(crate) fn finish(cluster: &mut Cluster, pods: Vec<Pod>) {
    for pod in pods {
        let member = cluster.members.iter().find(|m| m.name == pod.node).unwrap();
        member.runtime.del(&pod.container).unwrap();
    }
    for member in &mut cluster.members {
        member.stop_agent();
        let removed = member.cleanup();
        for link in ["weir_host", "weir_vxlan"] {
            assert!(removed.contains(link), "{removed}");
        }
        assert_eq!(member.namespace.links().unwrap(), ["eth0"]);
        for family in ["-4", "-6"] {
            let routes = member
                .namespace
                .ip(&[family, "route", "show", "proto", "87"])
                .unwrap();
            assert_eq!(routes, "");
        }
        assert_eq!(member.pins(), Vec::<std::path::PathBuf>::new());
        assert_eq!(member.cleanup(), "", "a second cleanup finds nothing");
    }
}

/// Sysctls of a namespace that concern routing.
fn sysctls(namespace: &Namespace) -> BTreeMap<String, String> {
    let script = "cd /proc/sys/net && grep -r . ipv4/ip_forward ipv4/ip_local_reserved_ports ipv4/conf ipv6/conf";
    let output = namespace.output("sh", &["-c", script]).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.map(|(k, v)| (k.into(), v.into())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cleanup_gives_back_what_the_agent_changed() {
    if left_out("cleanup_gives_back_what_the_agent_changed") {
        return;
    }
    let mut cluster = Cluster::start(1).await;
    finish(&mut cluster, Vec::new());
    let set = |namespace: &Namespace, key: &str, value: &str| {
        let script = format!("echo {value} > /proc/sys/net/{key}");
        assert!(
            namespace
                .output("sh", &["-c", &script])
                .unwrap()
                .status
                .success()
        );
    };
    let member = &mut cluster.members[0];
    for (key, value) in [
        ("ipv4/ip_forward", "0"),
        // One link forwards although the node does not.
        ("ipv4/conf/eth0/forwarding", "1"),
        ("ipv6/conf/all/forwarding", "0"),
        ("ipv6/conf/eth0/accept_ra", "1"),
        ("ipv4/conf/all/rp_filter", "1"),
        ("ipv4/conf/eth0/rp_filter", "0"),
        ("ipv4/ip_local_reserved_ports", "8080"),
    ] {
        set(&member.namespace, key, value);
    }
    let before = sysctls(&member.namespace);
    assert!(before.len() > 50, "{before:?}");
    for _ in 0..2 {
        member.start_agent();
        let deadline = Instant::now() + Duration::from_secs(60);
        while sysctls(&member.namespace)["ipv4/ip_local_reserved_ports"] == "8080" {
            assert!(Instant::now() < deadline, "{}", member.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        member.kill_agent();
    }
    let during = sysctls(&member.namespace);
    assert_eq!(during["ipv4/ip_forward"], "1");
    assert_eq!(during["ipv6/conf/eth0/accept_ra"], "2");
    assert_ne!(during["ipv4/ip_local_reserved_ports"], "8080");
    // What somebody else has set meanwhile is theirs.
    set(&member.namespace, "ipv4/conf/lo/rp_filter", "2");
    let said = member.cleanup();
    assert!(said.contains("net/ipv4/ip_forward is 0 again"), "{said}");
    let mut after = sysctls(&member.namespace);
    assert_eq!(
        after
            .insert(
                "ipv4/conf/lo/rp_filter".into(),
                before["ipv4/conf/lo/rp_filter"].clone()
            )
            .unwrap(),
        "2"
    );
    assert_eq!(after, before);
    assert_eq!(member.cleanup(), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traffic_goes_on_while_agents_die() {
    if left_out("traffic_goes_on_while_agents_die") {
        return;
    }
    let mut cluster = Cluster::start(2).await;
    let client = cluster.pod(0, "client");
    let servers = [cluster.pod(0, "s0"), cluster.pod(1, "s1")];
    for pod in &servers {
        for ip in &pod.ips {
            serve(&pod.namespace, *ip);
        }
    }
    cluster.serve(&[&servers[0], &servers[1]], PORT).await;
    let stop = Arc::new(AtomicBool::new(false));
    let asked = Arc::new(AtomicU32::new(0));
    let traffic: Vec<_> = [false, true]
        .into_iter()
        .map(|v6| {
            let (stop, asked) = (Arc::clone(&stop), Arc::clone(&asked));
            let path = client.namespace.path();
            std::thread::spawn(move || exchange(&path, v6, &stop, &asked))
        })
        .collect();
    for round in 0..6 {
        let enough = asked.load(Ordering::Relaxed) + 300;
        for member in &mut cluster.members {
            member.kill_agent();
        }
        wait_for(&asked, enough);
        for member in &mut cluster.members {
            member.start_agent();
        }
        if round % 2 == 0 {
            wait_for(&asked, enough + 300);
        }
    }
    cluster.serve(&[&servers[0], &servers[1]], PORT).await;
    stop.store(true, Ordering::Relaxed);
    for thread in traffic {
        thread.join().unwrap();
    }
    println!("{} exchanges, none failed", asked.load(Ordering::Relaxed));
    let pods = std::iter::once(client).chain(servers).collect();
    finish(&mut cluster, pods);
}

fn wait_for(count: &AtomicU32, least: u32) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while count.load(Ordering::Relaxed) < least {
        assert!(Instant::now() < deadline, "traffic stands still");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One long connection and many short ones until told to stop; any failure is a panic.
fn exchange(netns: &std::path::Path, v6: bool, stop: &AtomicBool, asked: &AtomicU32) {
    let file = std::fs::File::open(netns).unwrap();
    nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    let connect = || {
        let stream = TcpStream::connect_timeout(&service(v6), PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    let mut long = connect();
    while !stop.load(Ordering::Relaxed) {
        ask(&mut long).expect("the established connection lives on");
        ask(&mut connect()).expect("a new connection works");
        asked.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_follow_nodes_and_heal() {
    if left_out("routes_follow_nodes_and_heal") {
        return;
    }
    let mut cluster = Cluster::start(3).await;
    let routes = |cluster: &Cluster| {
        let namespace = &cluster.members[0].namespace;
        let show = |family| namespace.ip(&[family, "route"]).unwrap();
        show("-4") + &show("-6")
    };
    let now = routes(&cluster);
    for wanted in [
        "10.244.2.0/24 via 192.0.2.12",
        "10.244.3.0/24 via 192.0.2.13",
        "fd00:10:244:3::/64 via 2001:db8::13",
        "unreachable 10.244.1.0/24",
        "10.96.0.0/16 via 169.254.1.1",
    ] {
        assert!(now.contains(wanted), "{wanted} is not in {now}");
    }
    // Somebody takes a route of ours away, and adds a foreign one that must stay.
    let n1 = cluster.members[0].namespace.name().to_owned();
    let ip = |arguments: &[&str]| {
        let mut all = vec!["-n", n1.as_str()];
        all.extend(arguments);
        weir_tests::topology::ip(&all).unwrap()
    };
    ip(&["route", "add", "198.51.100.0/24", "via", "192.0.2.12"]);
    ip(&[
        "route",
        "add",
        "203.0.113.0/24",
        "via",
        "192.0.2.12",
        "proto",
        "87",
    ]);
    ip(&["route", "del", "10.244.2.0/24"]);
    eventually(|| {
        let now = routes(&cluster);
        now.contains("10.244.2.0/24 via 192.0.2.12") && !now.contains("203.0.113.0/24")
    });
    assert!(routes(&cluster).contains("198.51.100.0/24 via 192.0.2.12"));

    // A node leaves while the agent is away.
    cluster.members[0].kill_agent();
    let key = ObjectKey {
        kind: ObjectKind::Node.into(),
        namespace: String::new(),
        name: "n3".into(),
    };
    let revision = cluster.control.change(Vec::new(), vec![("n3", key)]);
    cluster.members[0].start_agent();
    cluster.control.programmed(&["n1", "n2"], revision).await;
    let now = routes(&cluster);
    assert!(
        !now.contains("10.244.3.0/24") && !now.contains("fd00:10:244:3::/64"),
        "{now}"
    );
    assert!(now.contains("10.244.2.0/24 via 192.0.2.12"), "{now}");
    cluster.members[0].kill_agent();
    let after = routes(&cluster);
    assert_eq!(now, after, "an agent that dies takes no route with it");
    cluster.members[0].start_agent();
    let again = cluster.control.change(Vec::new(), Vec::new());
    cluster.control.programmed(&["n1"], again).await;
    ip(&["route", "del", "198.51.100.0/24"]);
    finish(&mut cluster, Vec::new());
}

fn eventually(check: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !check() {
        assert!(Instant::now() < deadline, "it did not come about");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_that_die_in_the_middle_leave_nothing() {
    if left_out("agents_that_die_in_the_middle_leave_nothing") {
        return;
    }
    const ROUNDS: u32 = 16;
    let mut cluster = Cluster::start(1).await;
    let keeper = cluster.pod(0, "keeper");
    let started = Instant::now();
    let measured = cluster.pod(0, "measured");
    let usual = started.elapsed();
    cluster.members[0].runtime.del(&measured.container).unwrap();
    let mut added = 0;
    for round in 0..ROUNDS {
        let container = format!("c{round}");
        let pod = Namespace::new("pod").unwrap();
        let member = &mut cluster.members[0];
        let outcome = std::thread::scope(|scope| {
            let runtime = &member.runtime;
            let (started, begin) = std::sync::mpsc::channel();
            let (container, pod) = (&container, &pod);
            let thread = scope.spawn(move || {
                started.send(()).unwrap();
                runtime.add(container, pod)
            });
            begin.recv().unwrap();
            // Somewhere between the plugin's start and a little after its answer.
            std::thread::sleep(usual * round * 3 / 2 / ROUNDS);
            let pid = nix::unistd::Pid::from_raw(i32::try_from(member.agent_pid()).unwrap());
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
            thread.join().unwrap()
        });
        member.kill_agent();
        added += u32::from(outcome.is_ok());
        if let Err(error) = &outcome {
            assert_eq!(error["code"], 11, "{error}");
        }
        // What runtimes do after any ADD, sooner or later; half of the time no agent is there.
        if round % 2 == 0 {
            member.runtime.del(&container).unwrap();
            member.start_agent();
        } else {
            member.start_agent();
            while member
                .runtime
                .call("STATUS", "", None, serde_json::Value::Null)
                .is_err()
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            member.runtime.del(&container).unwrap();
        }
        let revision = cluster.control.change(Vec::new(), Vec::new());
        cluster.control.programmed(&["n1"], revision).await;
        let member = &cluster.members[0];
        let links = member.namespace.links().unwrap();
        assert_eq!(
            links.len(),
            7,
            "eth0, the pairs of the host link and of fragments, the overlay's and the keeper's: {links:?}"
        );
        assert_eq!(pod.links().unwrap(), Vec::<String>::new());
    }
    println!("{added} of {ROUNDS} ADDs were answered before their agent died");
    let member = &cluster.members[0];
    assert_eq!(
        talk(&member.namespace, &keeper.namespace, keeper.ips[0]),
        member.ips[0]
    );
    finish(&mut cluster, vec![keeper]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_that_somebody_takes_away_come_back() {
    if left_out("links_that_somebody_takes_away_come_back") {
        return;
    }
    let mut cluster = Cluster::start(2).await;
    let server = cluster.pod(1, "server");
    for ip in &server.ips {
        serve(&server.namespace, *ip);
    }
    cluster.serve(&[&server], PORT).await;
    let node = &cluster.members[0];
    ask(&mut connect(&node.namespace, service(false)).unwrap()).unwrap();
    node.namespace.ip(&["link", "del", "weir_host"]).unwrap();
    eventually(|| {
        node.namespace
            .ip(&["route"])
            .unwrap()
            .contains("10.96.0.0/16 via 169.254.1.1")
    });
    for v6 in [false, true] {
        let (from, _) = ask(&mut connect(&node.namespace, service(v6)).unwrap()).unwrap();
        assert_eq!(from, server.ips[usize::from(v6)]);
    }
    finish(&mut cluster, vec![server]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_boots_without_its_control_plane() {
    if left_out("a_node_boots_without_its_control_plane") {
        return;
    }
    let mut cluster = Cluster::start(2).await;
    let server = cluster.pod(1, "server");
    for ip in &server.ips {
        serve(&server.namespace, *ip);
    }
    cluster.serve(&[&server], PORT).await;
    let old = cluster.pod(0, "old");
    eventually(|| cluster.members[0].remembers(SERVICE_V4));
    cluster.cut_control();
    cluster.members[0].reboot(old.namespace);
    cluster.members[0].start_agent();
    eventually(|| {
        cluster.members[0]
            .runtime
            .call("STATUS", "", None, serde_json::Value::Null)
            .is_ok()
    });
    let new = cluster.pod(0, "new");
    eventually(|| {
        let routes = cluster.members[0].namespace.ip(&["-6", "route"]).unwrap();
        routes.contains("fd00:10:244:2::/64 via")
    });
    for v6 in [false, true] {
        for from in [&new.namespace, &cluster.members[0].namespace] {
            let mut stream = connect(from, service(v6)).unwrap();
            assert_eq!(ask(&mut stream).unwrap().0, server.ips[usize::from(v6)]);
        }
    }
    finish(&mut cluster, vec![server, new]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adding_a_pod_takes_milliseconds() {
    if left_out("adding_a_pod_takes_milliseconds") {
        return;
    }
    const PODS: usize = 31;
    let mut cluster = Cluster::start(1).await;
    let namespaces: Vec<Namespace> = (0..PODS).map(|_| Namespace::new("pod").unwrap()).collect();
    let runtime = &cluster.members[0].runtime;
    let measure = |work: &dyn Fn(usize)| {
        let mut times: Vec<Duration> = (0..PODS)
            .map(|n| {
                let started = Instant::now();
                work(n);
                started.elapsed()
            })
            .collect();
        times.sort();
        (times[PODS / 2], times[PODS - 1])
    };
    let add = measure(&|n| {
        runtime.add(&format!("c{n}"), &namespaces[n]).unwrap();
    });
    let del = measure(&|n| {
        runtime.del(&format!("c{n}")).unwrap();
    });
    println!(
        "ADD median {:?}, slowest {:?}; DEL median {:?}, slowest {:?}",
        add.0, add.1, del.0, del.1
    );
    // Far above any of these; a runtime waits this long without complaint.
    assert!(add.0 < Duration::from_secs(1) && del.0 < Duration::from_secs(1));
    finish(&mut cluster, Vec::new());
}
