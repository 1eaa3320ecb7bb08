//! The sockets of health checks. One task owns them; a port that is taken is tried again until it is free.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use control_api::desired::Name;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{NodeHealth, ServiceHealth};
use crate::observe::http::connection;

/// Connections at once on each port; the next ones wait to be accepted.
const MAX_CONNECTIONS: usize = 32;
/// Pause before a port that is taken is tried again.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Where health checks listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// On every address.
    Everywhere,
    /// On these and on loopback.
    On(BTreeSet<IpAddr>),
}

/// The door to the task with the sockets.
#[derive(Clone, Debug)]
pub struct HealthServer {
    commands: mpsc::Sender<Command>,
    failures: Arc<Mutex<BTreeMap<Name, String>>>,
}

#[derive(Debug)]
enum Command {
    Services {
        everything: bool,
        services: BTreeMap<Name, Option<ServiceHealth>>,
        done: oneshot::Sender<()>,
    },
    Listen(Listen),
}

impl HealthServer {
    /// Starts the task. `node_port` is the port for the node's own health; zero for none.
    #[must_use]
    pub fn start(node: NodeHealth, node_port: u16, shutdown: CancellationToken) -> Self {
        let (commands, receiver) = mpsc::channel(16);
        let failures = Arc::default();
        let sockets = Sockets {
            node,
            node_port,
            listen: Listen::Everywhere,
            services: BTreeMap::new(),
            open: BTreeMap::new(),
            failures: Arc::clone(&failures),
        };
        tokio::spawn(sockets.run(receiver, shutdown));
        Self { commands, failures }
    }

    /// Takes what services want. When it returns, ports answer accordingly and those given up are closed, apart from
    /// ports that somebody else has.
    pub async fn set_services(
        &self,
        everything: bool,
        services: BTreeMap<Name, Option<ServiceHealth>>,
    ) {
        let (done, wait) = oneshot::channel();
        let command = Command::Services {
            everything,
            services,
            done,
        };
        // The task ends only with the agent.
        if self.commands.send(command).await.is_ok() {
            let _ = wait.await;
        }
    }

    /// Changes where health checks listen.
    pub async fn set_listen(&self, listen: Listen) {
        let _ = self.commands.send(Command::Listen(listen)).await;
    }

    /// Services whose port cannot be had now, and why.
    #[must_use]
    pub fn failures(&self) -> BTreeMap<Name, String> {
        self.failures
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// What a port is for.
#[derive(Clone, Debug)]
enum Purpose {
    Node,
    /// The current answer; the sockets stay while it changes.
    Service(Arc<Mutex<ServiceHealth>>),
}

struct Sockets {
    node: NodeHealth,
    node_port: u16,
    listen: Listen,
    services: BTreeMap<Name, ServiceHealth>,
    open: BTreeMap<u16, Open>,
    failures: Arc<Mutex<BTreeMap<Name, String>>>,
}

/// An open port.
struct Open {
    owner: Option<Name>,
    purpose: Purpose,
    /// One for each address that is listened on.
    tasks: BTreeMap<SocketAddr, JoinHandle<()>>,
}

impl Sockets {
    async fn run(mut self, mut commands: mpsc::Receiver<Command>, shutdown: CancellationToken) {
        let mut complete = self.settle().await;
        loop {
            let command = tokio::select! {
                () = shutdown.cancelled() => break,
                command = commands.recv() => match command {
                    Some(command) => Some(command),
                    None => break,
                },
                () = tokio::time::sleep(RETRY_PERIOD), if !complete => None,
            };
            let mut done = None;
            match command {
                Some(Command::Services {
                    everything,
                    services,
                    done: sender,
                }) => {
                    self.take(everything, services);
                    done = Some(sender);
                }
                Some(Command::Listen(listen)) => self.listen = listen,
                None => {}
            }
            complete = self.settle().await;
            if let Some(done) = done {
                // Whoever asked may have gone.
                let _ = done.send(());
            }
        }
        for (_, open) in std::mem::take(&mut self.open) {
            open.close().await;
        }
    }

    fn take(&mut self, everything: bool, services: BTreeMap<Name, Option<ServiceHealth>>) {
        if everything {
            self.services.clear();
        }
        for (name, health) in services {
            match health {
                Some(health) => self.services.insert(name, health),
                None => self.services.remove(&name),
            };
        }
    }

    /// Makes the open ports equal to the wanted ones; false when one could not be had.
    async fn settle(&mut self) -> bool {
        let mut wanted: BTreeMap<u16, Option<&ServiceHealth>> = BTreeMap::new();
        let mut failed: BTreeMap<Name, String> = BTreeMap::new();
        if self.node_port != 0 {
            wanted.insert(self.node_port, None);
        }
        for (name, health) in &self.services {
            if let Some(other) = wanted.get(&health.port) {
                let other = other.map_or("the node".into(), |other| other.name.to_string());
                let why = format!("health check port {} is that of {other}", health.port);
                failed.insert(name.clone(), why);
                continue;
            }
            wanted.insert(health.port, Some(health));
        }
        let stale: Vec<u16> = self
            .open
            .iter()
            .filter(|(port, open)| {
                let owner = wanted
                    .get(port)
                    .map(|health| health.map(|h| h.name.clone()));
                owner != Some(open.owner.clone())
            })
            .map(|(port, _)| *port)
            .collect();
        for port in stale {
            if let Some(open) = self.open.remove(&port) {
                open.close().await;
            }
        }
        let mut complete = true;
        for (port, health) in wanted {
            let open = self.open.entry(port).or_insert_with(|| Open::new(health));
            open.answer(health);
            if let Err(e) = open.listen(&self.listen, port, &self.node).await {
                complete = false;
                let why = format!("listen on health check port {port}: {e}; trying again");
                match health {
                    Some(health) => failed.insert(health.name.clone(), why),
                    None => failed.insert(Name::default(), why),
                };
            }
        }
        let mut told = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, why) in &failed {
            if told.get(name) != Some(why) {
                tracing::warn!(service = %name, %why, "no health check for balancers");
            }
        }
        *told = failed;
        complete
    }
}

impl Open {
    fn new(health: Option<&ServiceHealth>) -> Self {
        let purpose = match health {
            None => Purpose::Node,
            Some(health) => Purpose::Service(Arc::new(Mutex::new(health.clone()))),
        };
        Self {
            owner: health.map(|health| health.name.clone()),
            purpose,
            tasks: BTreeMap::new(),
        }
    }

    /// What to answer from now on.
    fn answer(&self, health: Option<&ServiceHealth>) {
        if let (Purpose::Service(slot), Some(health)) = (&self.purpose, health) {
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = health.clone();
        }
    }

    /// Opens the sockets that are missing, and closes those that are no longer wanted. All that can be opened are, the
    /// first error is told.
    async fn listen(&mut self, listen: &Listen, port: u16, node: &NodeHealth) -> io::Result<()> {
        let wanted = addresses(listen, port);
        let stale: Vec<SocketAddr> = self
            .tasks
            .keys()
            .filter(|address| !wanted.contains(address))
            .copied()
            .collect();
        for address in stale {
            if let Some(task) = self.tasks.remove(&address) {
                close(task).await;
            }
        }
        let mut result = Ok(());
        for address in wanted {
            if self.tasks.contains_key(&address) {
                continue;
            }
            match bind(address) {
                Ok(listener) => {
                    let task = accept(listener, self.purpose.clone(), node.clone());
                    self.tasks.insert(address, tokio::spawn(task));
                }
                // Without IPv6 on this machine there is nobody to ask.
                Err(e) if address.is_ipv6() && no_family(&e) => {}
                Err(e) => {
                    let e = io::Error::new(e.kind(), format!("{}: {e}", address.ip()));
                    result = result.and(Err(e));
                }
            }
        }
        result
    }

    async fn close(self) {
        for task in self.tasks.into_values() {
            close(task).await;
        }
    }
}

/// When this returns the socket is closed.
async fn close(task: JoinHandle<()>) {
    task.abort();
    let _ = task.await;
}

fn addresses(listen: &Listen, port: u16) -> BTreeSet<SocketAddr> {
    let all: BTreeSet<IpAddr> = match listen {
        Listen::Everywhere => [
            IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        ]
        .into(),
        Listen::On(addresses) => addresses
            .iter()
            .copied()
            .chain([
                IpAddr::V4(Ipv4Addr::LOCALHOST),
                IpAddr::V6(Ipv6Addr::LOCALHOST),
            ])
            .collect(),
    };
    all.into_iter()
        .map(|address| SocketAddr::new(address, port))
        .collect()
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let domain = socket2::Domain::for_address(address);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
    // Connections of an agent that has just ended must not keep the port.
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    TcpSocket::from_std_stream(socket.into()).listen(128)
}

fn no_family(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL)
    )
}

async fn accept(listener: TcpListener, purpose: Purpose, node: NodeHealth) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_RETRY).await;
            continue;
        };
        let (purpose, node) = (purpose.clone(), node.clone());
        connection(stream, permit, move |request| match &purpose {
            Purpose::Node => node.answer(request.method(), request.uri().path()),
            Purpose::Service(slot) => slot
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .answer(&node, request.method()),
        });
    }
}
