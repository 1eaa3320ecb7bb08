//! What becomes of a request in the model: which server answers, and whom it sees. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rand::Rng as _;
use rand::rngs::StdRng;
use serde_json::Value;

use super::view::{Class, Frontend, Hit, Pool, View};
use super::world::{Found, World};
use crate::actor::command::Outcome;
use crate::cases::cluster::spec::cidr_holds;

/// Where a request begins.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) ip: IpAddr,
    /// The node that the client is on, as a pod or a process.
    pub(super) node: Option<String>,
    /// A process of the node's own network.
    pub(super) host: bool,
    /// The node that the way to the target is led through.
    pub(super) via: Option<String>,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub(super) struct Verdict {
    pub(super) outcome: Outcome,
    pub(super) served: Option<Served>,
}

#[derive(Clone, Debug)]
pub(super) struct Served {
    pub(super) name: String,
    pub(super) life: u64,
    pub(super) at: SocketAddr,
    pub(super) sees: IpAddr,
    /// A Service chose it.
    pub(super) chosen: bool,
}

fn failed(outcome: Outcome) -> Verdict {
    Verdict {
        outcome,
        served: None,
    }
}

/// Who a client was led to, and when it last came (session affinity).
type Affinity = BTreeMap<(String, (String, String), u64, IpAddr), (SocketAddr, f64)>;

/// View, node, side and family; Service port; kind of address.
type PoolKey = (
    (u64, String, bool, bool),
    ((String, String), u64, String),
    Class,
);

/// Choices and what is remembered of them.
#[derive(Debug)]
pub(super) struct Traffic {
    pub(super) rng: StdRng,
    affinity: Affinity,
    last_pool: Option<(PoolKey, Arc<Pool>)>,
    /// Seconds since the case began.
    pub(super) now: f64,
    pub(super) direct_return: bool,
    pub(super) exempt: Vec<String>,
}

impl Traffic {
    pub(super) fn new(rng: StdRng, direct_return: bool, exempt: Vec<String>) -> Self {
        Self {
            rng,
            affinity: Affinity::new(),
            last_pool: None,
            now: 0.0,
            direct_return,
            exempt,
        }
    }

    /// A new connection, or the first datagram of a socket.
    pub(super) fn open(
        &mut self,
        world: &World,
        views: &BTreeMap<String, Arc<View>>,
        client: &Client,
        to: SocketAddr,
        protocol: &str,
    ) -> Verdict {
        if to.ip().is_loopback() {
            return loopback(world, client, to, protocol);
        }
        let entry = entry(world, client, to.ip());
        let view = entry.as_ref().and_then(|n| Some((n, views.get(n)?)));
        if let Some((node, view)) = view {
            match look_up(view, client, node, to, protocol) {
                Hit::Port(frontend) => {
                    return self.balance(world, view, node, client, &frontend, to.is_ipv6());
                }
                Hit::Address => return failed(Outcome::Refused),
                Hit::Nothing => {}
            }
        }
        if let Some(pod) = world.host_port(to, protocol) {
            return deliver(world, pod, protocol, client.ip, false);
        }
        let sees = self.leaving(world, client, to.ip());
        deliver(world, to, protocol, sees, false)
    }

    /// The source of what a client sends to an address that is no Service's.
    fn leaving(&self, world: &World, client: &Client, to: IpAddr) -> IpAddr {
        let exempt = world.is_inside(to) || self.exempt.iter().any(|c| cidr_holds(c, to));
        match &client.node {
            Some(node) if !client.host && !exempt => own(world, node, to).unwrap_or(client.ip),
            _ => client.ip,
        }
    }

    fn balance(
        &mut self,
        world: &World,
        view: &View,
        node: &str,
        client: &Client,
        frontend: &Frontend<'_>,
        v6: bool,
    ) -> Verdict {
        if !View::admits(frontend, client.ip) {
            return failed(Outcome::Timeout);
        }
        let pool = match &*self.pool(view, node, client, frontend, v6) {
            Pool::Usable(pool) => pool.clone(),
            Pool::Elsewhere => return failed(Outcome::Timeout),
            Pool::Empty => return failed(Outcome::Refused),
        };
        let backend = self.choose(node, client.ip, frontend, &pool);
        let sees = self.seen(world, node, client, frontend, backend.ip());
        let protocol = frontend.port["protocol"].as_str().unwrap_or("TCP");
        deliver(world, backend, protocol, sees, true)
    }

    /// The pool of a frontend. The last one is remembered: probes ask for the same one again and again.
    fn pool(
        &mut self,
        view: &View,
        node: &str,
        client: &Client,
        frontend: &Frontend<'_>,
        v6: bool,
    ) -> Arc<Pool> {
        let inside = client.node.is_some();
        let port = frontend.port["port"].as_u64().unwrap_or(0);
        let protocol = frontend.port["protocol"].as_str().unwrap_or("TCP");
        let key = (
            (view.edition, node.to_owned(), inside, v6),
            (frontend.name.clone(), port, protocol.to_owned()),
            frontend.class,
        );
        if let Some((known, pool)) = &self.last_pool
            && *known == key
        {
            return Arc::clone(pool);
        }
        let pool = Arc::new(view.pool(frontend, v6, node, inside));
        self.last_pool = Some((key, Arc::clone(&pool)));
        pool
    }

    fn choose(
        &mut self,
        node: &str,
        client: IpAddr,
        frontend: &Frontend<'_>,
        pool: &[SocketAddr],
    ) -> SocketAddr {
        let spec = &frontend.service["spec"];
        let quiet = spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"].as_f64();
        let quiet = quiet.filter(|_| spec["sessionAffinity"] == "ClientIP");
        let port = frontend.port["port"].as_u64().unwrap_or(0);
        let key = (node.to_owned(), frontend.name.clone(), port, client);
        let known = self.affinity.get(&key).copied();
        let kept = known.filter(|(backend, last)| {
            quiet.is_some_and(|q| self.now - last < q) && pool.contains(backend)
        });
        let backend = match kept {
            Some((backend, _)) => backend,
            None => pool[self.rng.random_range(0..pool.len())],
        };
        if quiet.is_some() {
            self.affinity.insert(key, (backend, self.now));
        }
        backend
    }

    fn seen(
        &self,
        world: &World,
        node: &str,
        client: &Client,
        frontend: &Frontend<'_>,
        backend: IpAddr,
    ) -> IpAddr {
        if client.node.is_some() {
            return self.leaving(world, client, backend);
        }
        let keeps = frontend.class != Class::ClusterIp
            && (self.direct_return || frontend.service["spec"]["externalTrafficPolicy"] == "Local");
        let here = world.node_of_pod(backend) == Some(node);
        if keeps || here {
            return client.ip;
        }
        own(world, node, backend).unwrap_or(client.ip)
    }
}

/// Does a UDP flow stay with the backend that was chosen for it?
pub(super) fn stays(
    views: &BTreeMap<String, Arc<View>>,
    world: &World,
    client: &Client,
    to: SocketAddr,
    backend: SocketAddr,
) -> bool {
    let Some(node) = entry(world, client, to.ip()) else {
        return false;
    };
    let Some(view) = views.get(&node) else {
        return false;
    };
    match look_up(view, client, &node, to, "UDP") {
        Hit::Port(frontend) => view.serving(&frontend, to.is_ipv6()).contains(&backend),
        _ => false,
    }
}

fn look_up<'v>(
    view: &'v View,
    client: &Client,
    node: &str,
    to: SocketAddr,
    protocol: &str,
) -> Hit<'v> {
    let has = |name: &String| {
        let known = view.nodes.get(name);
        known.is_some_and(|n| n.addresses.contains(&to.ip()))
    };
    // Clients inside are served at their own node, whatever node's address they dial.
    let everywhere = client.node.is_some();
    let node_address = view
        .nodes
        .keys()
        .any(|n| (everywhere || n == node) && has(n));
    view.hit(to, protocol, node_address)
}

/// The node where a request is looked at first.
fn entry(world: &World, client: &Client, to: IpAddr) -> Option<String> {
    let named = client.node.clone().or_else(|| client.via.clone());
    named.or_else(|| world.node_at(to).map(str::to_owned))
}

/// Loopback is the node's own: no Service is met there, but its processes are.
fn loopback(world: &World, client: &Client, to: SocketAddr, protocol: &str) -> Verdict {
    let node = client.node.as_ref().filter(|_| client.host);
    let address = node.and_then(|n| own(world, n, to.ip()));
    let at = address.map(|ip| world.at(SocketAddr::new(ip, to.port()), protocol));
    let Some(Found::Server(name, life)) = at else {
        return failed(Outcome::Refused);
    };
    Verdict {
        outcome: Outcome::Reply,
        served: Some(Served {
            name,
            life,
            at: to,
            sees: to.ip(),
            chosen: false,
        }),
    }
}

fn own(world: &World, node: &str, like: IpAddr) -> Option<IpAddr> {
    let ips = &world.nodes.get(node)?.ips;
    ips.iter()
        .copied()
        .find(|ip| ip.is_ipv4() == like.is_ipv4())
}

fn deliver(world: &World, to: SocketAddr, protocol: &str, sees: IpAddr, chosen: bool) -> Verdict {
    match world.at(to, protocol) {
        Found::Server(name, life) => Verdict {
            outcome: Outcome::Reply,
            served: Some(Served {
                name,
                life,
                at: to,
                sees,
                chosen,
            }),
        },
        Found::Closed => failed(Outcome::Refused),
        Found::Silent => failed(Outcome::Timeout),
        Found::Nobody => failed(Outcome::Unreachable),
    }
}

/// What the health check of a balancer answers at a node (core/v1 spec.healthCheckNodePort).
pub(super) fn health(view: &View, node: &str, port: u16) -> Option<(u16, Value)> {
    let is = |s: &Value| {
        let spec = &s["spec"];
        spec["healthCheckNodePort"] == port
            && spec["type"] == "LoadBalancer"
            && spec["externalTrafficPolicy"] == "Local"
    };
    let (name, _) = view.services.iter().find(|(_, s)| is(s))?;
    let ready = view.local_ready(name, node);
    let body = serde_json::json!({
        "service": {"namespace": name.0, "name": name.1}, "localEndpoints": ready,
    });
    Some((if ready > 0 { 200 } else { 503 }, body))
}
