//! What the node tests share: the built programs, a CNI runtime, and programs that only remember.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use weir_agent::kernel::{AttachError, PodLink, PodPrograms};
use weir_tests::topology::{self, Namespace};

/// A connection inside one machine that takes longer has lost its SYN.
const CONNECT_PATIENCE: Duration = Duration::from_secs(3);

/// Says why a test is left out, or `false` when it can run.
pub(crate) fn skipped(test: &str) -> bool {
    if let Some(why) = topology::missing() {
        println!("SKIPPED {test}: {why}");
        return true;
    }
    false
}

/// A program of this workspace: from the folder WEIR_BIN_DIR where that is set, else built when first asked for.
pub(crate) fn program(package: &str, name: &str) -> PathBuf {
    if let Some(folder) = std::env::var_os("WEIR_BIN_DIR") {
        return PathBuf::from(folder).join(name);
    }
    static BUILT: OnceLock<Mutex<BTreeMap<String, PathBuf>>> = OnceLock::new();
    let built = BUILT.get_or_init(Mutex::default);
    let mut built = built
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(path) = built.get(name) {
        return path.clone();
    }
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", package, "--bin", name])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap())
        .status()
        .unwrap();
    assert!(status.success(), "build {name}");
    // target/PROFILE/deps/node-HASH -> target/PROFILE/NAME. A copy, since another build may replace the file.
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join(name);
    let copy = path.with_file_name(format!("node-tier-{name}"));
    let fresh = path.with_file_name(format!(".node-tier-{name}.{}", std::process::id()));
    std::fs::copy(&path, &fresh).unwrap();
    std::fs::rename(&fresh, &copy).unwrap();
    built.insert(name.into(), copy.clone());
    copy
}

/// CNI_ARGS of a container that is no pod of a cluster, which would have policies to wait for.
pub(crate) const NO_POD: &str = "IgnoreUnknown=1";

/// One call of a CNI plugin.
pub(crate) struct Call<'a> {
    pub(crate) plugin: &'a Path,
    /// Where the plugin runs; here when unset.
    pub(crate) inside: Option<&'a Namespace>,
    /// CNI_PATH.
    pub(crate) folders: &'a [PathBuf],
    pub(crate) command: &'a str,
    pub(crate) container: &'a str,
    pub(crate) netns: Option<PathBuf>,
    /// CNI_ARGS.
    pub(crate) arguments: &'a str,
    /// SIGKILL for the plugin, where it still runs by then; the result is then the error `null`.
    pub(crate) kill_after: Option<Duration>,
}

impl Call<'_> {
    /// As a runtime does it; errors carry the error object of the specification.
    pub(crate) fn run(&self, config: &Value) -> Result<Value, Value> {
        let program = self.plugin.to_str().unwrap();
        let mut command = self
            .inside
            .map_or_else(|| Command::new(program), |inside| inside.command(program));
        let mut child = command
            .env_clear()
            // Plugins of others start iptables.
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("CNI_COMMAND", self.command)
            .env("CNI_CONTAINERID", self.container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_NETNS", self.netns.as_deref().unwrap_or(Path::new("")))
            .env("CNI_PATH", std::env::join_paths(self.folders).unwrap())
            .env("CNI_ARGS", self.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let _ = child
            .stdin
            .take()
            .unwrap()
            .write_all(config.to_string().as_bytes());
        if let Some(moment) = self.kill_after {
            std::thread::sleep(moment);
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let value = if output.stdout.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&output.stdout).unwrap()
        };
        match output.status.code() {
            Some(0) => Ok(value),
            Some(1) => Err(value),
            None if self.kill_after.is_some() => Err(Value::Null),
            other => panic!("{program} ended with {other:?}"),
        }
    }
}

/// Plays the container runtime of one node.
#[derive(Clone)]
pub(crate) struct Runtime {
    pub(crate) plugin: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) state_dir: PathBuf,
    pub(crate) version: &'static str,
}

impl Runtime {
    pub(crate) fn new(dir: &Path) -> Self {
        Self {
            plugin: program("weir-cni", "weir-cni"),
            socket: dir.join("cni.sock"),
            state_dir: dir.to_path_buf(),
            version: "1.1.0",
        }
    }

    /// The network configuration, with `extra` keys.
    pub(crate) fn config(&self, extra: Value) -> Value {
        let mut config = json!({
            "cniVersion": self.version,
            "name": "weir",
            "type": "weir-cni",
            "socket": self.socket,
            "stateDir": self.state_dir,
        });
        if let (Some(config), Value::Object(extra)) = (config.as_object_mut(), extra) {
            config.extend(extra);
        }
        config
    }

    /// Calls the plugin as a runtime does; errors carry the error object of the specification.
    pub(crate) fn call(
        &self,
        command: &str,
        container: &str,
        netns: Option<&Path>,
        extra: Value,
    ) -> Result<Value, Value> {
        self.call_for(command, container, netns, extra, NO_POD)
    }

    fn call_for(
        &self,
        command: &str,
        container: &str,
        netns: Option<&Path>,
        extra: Value,
        arguments: &str,
    ) -> Result<Value, Value> {
        let config = self.config(extra);
        Call {
            plugin: &self.plugin,
            inside: None,
            folders: &["/opt/cni/bin".into()],
            command,
            container,
            netns: netns.map(Path::to_owned),
            arguments,
            kill_after: None,
        }
        .run(&config)
    }

    pub(crate) fn add(&self, container: &str, pod: &Namespace) -> Result<Value, Value> {
        self.call("ADD", container, Some(&pod.path()), Value::Null)
    }

    /// ADD for a pod of the cluster.
    pub(crate) fn add_named(
        &self,
        container: &str,
        pod: &Namespace,
        namespace: &str,
        name: &str,
    ) -> Result<Value, Value> {
        let arguments =
            format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}");
        let path = pod.path();
        self.call_for("ADD", container, Some(&path), Value::Null, &arguments)
    }

    pub(crate) fn del(&self, container: &str) -> Result<Value, Value> {
        self.call("DEL", container, None, Value::Null)
    }

    pub(crate) fn check(
        &self,
        container: &str,
        pod: &Namespace,
        previous: &Value,
    ) -> Result<Value, Value> {
        self.call(
            "CHECK",
            container,
            Some(&pod.path()),
            json!({ "prevResult": previous }),
        )
    }
}

/// Addresses of an ADD result, without prefix length.
pub(crate) fn addresses(result: &Value) -> Vec<IpAddr> {
    result["ips"]
        .as_array()
        .unwrap()
        .iter()
        .map(|ip| {
            ip["address"]
                .as_str()
                .unwrap()
                .split('/')
                .next()
                .unwrap()
                .parse()
                .unwrap()
        })
        .collect()
}

/// Remembers what is attached; refuses when told to. Packets then go by the kernel's routes alone.
#[derive(Debug, Default)]
pub(crate) struct Remembered {
    pub(crate) pods: Mutex<BTreeMap<u32, PodLink>>,
    pub(crate) refuse: Mutex<bool>,
}

impl PodPrograms for Remembered {
    fn attach_pod(&self, link: &PodLink) -> Result<(), AttachError> {
        if *self.refuse.lock().unwrap() {
            return Err(AttachError {
                step: "attach from_pod",
                link: link.host_name.clone(),
                source: "refused by the test".into(),
            });
        }
        self.pods.lock().unwrap().insert(link.ifindex, link.clone());
        Ok(())
    }

    /// By index and address both, like the real ones: the address may have gone to another pod.
    fn detach_pod(&self, ifindex: u32, _: &[IpAddr]) -> Result<(), AttachError> {
        self.pods.lock().unwrap().remove(&ifindex);
        Ok(())
    }

    fn is_attached(&self, link: &PodLink) -> bool {
        self.pods.lock().unwrap().get(&link.ifindex) == Some(link)
    }
}

/// One TCP exchange from one namespace to an address in another; the client's address as the server saw it.
pub(crate) fn talk(from: &Namespace, to: &Namespace, address: IpAddr) -> IpAddr {
    let (listener, port) = to
        .enter(|| {
            let listener = TcpListener::bind((address, 0))?;
            let port = listener.local_addr()?.port();
            Ok((listener, port))
        })
        .unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, peer) = listener.accept().unwrap();
        stream.write_all(b"hello").unwrap();
        peer.ip()
    });
    from.enter(|| {
        let target = SocketAddr::new(address, port);
        let mut stream = TcpStream::connect_timeout(&target, CONNECT_PATIENCE)
            .with_context(|| format!("connect to {target}"))?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        assert_eq!(answer, "hello");
        Ok(())
    })
    .unwrap();
    server.join().unwrap()
}
