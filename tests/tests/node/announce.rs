//! Load-balancer addresses on the local segment: a client finds the node that answers for them, and the next one when
//! that is lost.

use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant};

use control_api::v1::{
    Announcement, LoadBalancerIngress, Object, Protocol, Service, ServicePort, ServiceType, object,
};
use weir_tests::topology::Namespace;

use super::agents::{finish, left_out};
use super::cluster::{Cluster, SERVICE_V4, SERVICE_V6};

const ADDRESSES: [&str; 2] = ["192.0.2.77", "2001:db8::77"];
/// Longest time between the word of the control plane and the first frame of the new node.
const TAKEOVER: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(5);

fn mac(namespace: &Namespace) -> String {
    let shown = namespace.ip(&["-o", "link", "show", "eth0"]).unwrap();
    let mut words = shown.split_whitespace().skip_while(|w| *w != "link/ether");
    words.nth(1).unwrap().to_owned()
}

/// What the client knows about an address, without asking.
fn known(client: &Namespace, address: &str) -> Option<String> {
    let shown = client.ip(&["neigh", "show", address]).unwrap();
    let mut words = shown.split_whitespace().skip_while(|w| *w != "lladdr");
    words.nth(1).map(str::to_owned)
}

/// Forgets the address and asks the segment for it.
fn resolve(client: &Namespace, address: &str) -> Option<String> {
    let _ = client.ip(&["neigh", "flush", "to", address]);
    let ip: IpAddr = address.parse().unwrap();
    let any: IpAddr = if ip.is_ipv4() {
        [0; 4].into()
    } else {
        [0_u16; 8].into()
    };
    client
        .enter(|| {
            let socket = UdpSocket::bind((any, 0))?;
            socket.send_to(b"?", (ip, 9))?;
            Ok(())
        })
        .unwrap();
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(found) = known(client, address) {
            return Some(found);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    None
}

fn balanced() -> Object {
    let ingress = ADDRESSES.map(|ip| LoadBalancerIngress {
        ip: ip.into(),
        proxy: false,
    });
    let service = Service {
        namespace: "default".into(),
        name: "web".into(),
        uid: "web".into(),
        r#type: ServiceType::LoadBalancer.into(),
        cluster_ips: vec![SERVICE_V4.into(), SERVICE_V6.into()],
        load_balancer_ingress: ingress.into(),
        ports: vec![ServicePort {
            protocol: Protocol::Tcp.into(),
            port: 80,
            ..ServicePort::default()
        }],
        ..Service::default()
    };
    Object {
        kind: Some(object::Kind::Service(service)),
    }
}

fn announced(address: &str, node: &str) -> Object {
    let announcement = Announcement {
        address: address.into(),
        node: node.into(),
        service_namespace: "default".into(),
        service_name: "web".into(),
        service_uid: "web".into(),
    };
    Object {
        kind: Some(object::Kind::Announcement(announcement)),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node_answers_for_an_address_and_the_next_takes_over() {
    if left_out("one_node_answers_for_an_address_and_the_next_takes_over") {
        return;
    }
    let mut cluster = Cluster::start(2).await;
    let client = cluster.outsider(99);
    let macs: Vec<String> = cluster.members.iter().map(|m| mac(&m.namespace)).collect();
    let give = |node: &str| ADDRESSES.map(|a| (a, announced(a, node))).into();
    cluster
        .control
        .change(vec![("web", balanced())], Vec::new());
    let revision = cluster.control.change(give("n1"), Vec::new());
    cluster.programmed(revision).await;
    for address in ADDRESSES {
        assert_eq!(
            resolve(&client, address).as_ref(),
            Some(&macs[0]),
            "{address}"
        );
    }

    // The first node is lost: the client's knowledge of it is wrong until the second one speaks up.
    cluster.members[0].kill_agent();
    cluster.members[0]
        .namespace
        .ip(&["link", "set", "eth0", "down"])
        .unwrap();
    let told = Instant::now();
    cluster.control.change(give("n2"), Vec::new());
    while !ADDRESSES
        .iter()
        .all(|a| known(&client, a).as_ref() == Some(&macs[1]))
    {
        assert!(told.elapsed() < TAKEOVER, "{}", cluster.members[1].log());
        std::thread::sleep(Duration::from_millis(5));
    }
    println!(
        "the client knew the next node {:?} after it was told",
        told.elapsed()
    );

    // Nothing of it needs the control plane, or the agent that was told.
    let deadline = Instant::now() + 2 * PATIENCE;
    // Address and node as the file has them, one field after the other.
    let kept = format!("{}\u{12}\u{2}n2", ADDRESSES[0]);
    while !cluster.members[1].remembers(&kept) {
        assert!(
            Instant::now() < deadline,
            "the announcement is kept on disk"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    cluster.cut_control();
    cluster.members[1].kill_agent();
    cluster.members[1].start_agent();
    for address in ADDRESSES {
        assert_eq!(
            resolve(&client, address).as_ref(),
            Some(&macs[1]),
            "{address}"
        );
    }
    cluster.members[0]
        .namespace
        .ip(&["link", "set", "eth0", "up"])
        .unwrap();
    finish(&mut cluster, Vec::new());
}
