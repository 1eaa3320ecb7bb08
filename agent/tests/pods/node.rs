//! One node for a test: a network namespace, a containerd of its own, and a control plane in memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{EventReport, KeyedData, PodSpec, PodStatus};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use weir_agent::config::Config;
use weir_agent::pods::{ControlPlane, PodRunner, ReportFailure, Update, start_with};

use crate::image::{IMAGE, write_archive};

/// Longest that anything awaited here may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

#[derive(Debug, Default)]
pub(crate) struct Control {
    state: Mutex<Arc<DesiredState>>,
    pods: watch::Sender<BTreeMap<String, (PodStatus, u32)>>,
    events: Mutex<Vec<EventReport>>,
    updates: Mutex<Option<mpsc::Sender<Update>>>,
}

#[async_trait]
impl ControlPlane for Control {
    fn state(&self) -> Arc<DesiredState> {
        Arc::clone(&self.state.lock().unwrap())
    }

    async fn report_pods(&self, pods: Vec<PodStatus>) -> Result<(), ReportFailure> {
        self.pods.send_modify(|known| {
            for status in pods {
                let entry = known.entry(status.name.clone()).or_default();
                *entry = (status, entry.1 + 1);
            }
        });
        Ok(())
    }

    async fn report_events(&self, events: Vec<EventReport>) -> Result<(), ReportFailure> {
        self.events.lock().unwrap().extend(events);
        Ok(())
    }
}

impl Control {
    fn change(&self, edit: impl FnOnce(&mut DesiredState)) {
        let mut state = self.state.lock().unwrap();
        edit(Arc::make_mut(&mut state));
    }

    /// True when an event with this reason was recorded on the pod.
    pub(crate) fn told(&self, pod: &str, reason: &str) -> bool {
        let events = self.events.lock().unwrap();
        events.iter().any(|e| e.name == pod && e.reason == reason)
    }

    pub(crate) fn messages(&self, pod: &str) -> Vec<String> {
        let events = self.events.lock().unwrap();
        events
            .iter()
            .filter(|e| e.name == pod)
            .map(|e| e.message.clone())
            .collect()
    }

    /// How many times the pod's status was reported.
    pub(crate) fn reports(&self, pod: &str) -> u32 {
        self.pods.borrow().get(pod).map_or(0, |p| p.1)
    }
}

pub(crate) struct Node {
    name: String,
    pub(crate) dir: tempfile::TempDir,
    containerd: Option<Child>,
    agent: Option<(tokio::runtime::Runtime, PodRunner)>,
    pub(crate) control: Arc<Control>,
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Node {
    /// Moves the calling thread, and all it spawns, into a new network namespace and starts containerd there.
    pub(crate) fn start(test: &str) -> Self {
        let name = format!("podsT-{test}-{}", std::process::id());
        run("ip", &["netns", "add", &name]);
        let netns = std::fs::File::open(format!("/run/netns/{name}")).unwrap();
        nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        run("ip", &["link", "set", "lo", "up"]);
        let dir = tempfile::Builder::new().prefix(&name).tempdir().unwrap();
        let mut node = Self {
            name,
            dir,
            containerd: None,
            agent: None,
            control: Arc::default(),
        };
        node.write_files();
        node.start_containerd();
        let archive = node.path("image.tar");
        write_archive(&archive);
        let socket = node.socket();
        run(
            "ctr",
            &[
                "-a",
                &socket,
                "-n",
                "k8s.io",
                "images",
                "import",
                archive.to_str().unwrap(),
            ],
        );
        node.control.change(|state| {
            state.config.cluster_domain = "cluster.local".into();
            state.config.dns_ips = vec!["10.96.0.10".into()];
        });
        node.start_agent();
        node
    }

    pub(crate) fn path(&self, relative: &str) -> PathBuf {
        self.dir.path().join(relative)
    }

    fn socket(&self) -> String {
        self.path("containerd.sock").to_string_lossy().into_owned()
    }

    fn write_files(&self) {
        let at = |p: &str| self.path(p).to_string_lossy().into_owned();
        std::fs::create_dir_all(self.path("cni")).unwrap();
        let containerd = format!(
            "version = 2\nroot = \"{root}\"\nstate = \"{state}\"\n[grpc]\naddress = \"{socket}\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{IMAGE}\"\nrestrict_oom_score_adj = true\nnetns_mounts_under_state_dir = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/usr/lib/cni\"\nconf_dir = \"{cni}\"\n",
            root = at("root"),
            state = at("state"),
            socket = at("containerd.sock"),
            cni = at("cni"),
        );
        std::fs::write(self.path("containerd.toml"), containerd).unwrap();
        let network = serde_json::json!({
            "cniVersion": "1.0.0", "name": "podtest",
            "plugins": [{
                "type": "bridge", "bridge": "podtest0", "isGateway": true,
                "ipam": {
                    "type": "host-local", "dataDir": at("ipam"),
                    "ranges": [[{"subnet": "10.88.0.0/24"}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }],
        });
        std::fs::write(self.path("cni/10-podtest.conflist"), network.to_string()).unwrap();
        std::fs::write(self.path("resolv.conf"), "nameserver 192.0.2.53\n").unwrap();
        let agent = format!(
            "node_name = \"podtest\"\nnode_ips = [\"127.0.0.1\"]\nuplinks = [\"lo\"]\nstate_dir = \"{state}\"\n\
             run_dir = \"{run}\"\n[feed]\nservers = []\nca = \"x\"\ncert = \"x\"\nkey = \"x\"\n\
             [dns]\nresolv_conf = \"{resolv}\"\n\
             [pods]\ncri = \"unix://{socket}\"\ncgroup_parent = \"/{name}\"\nlog_dir = \"{logs}\"\n\
             prefer_present_images = true\n",
            state = at("agent"),
            run = at("run"),
            resolv = at("resolv.conf"),
            socket = at("containerd.sock"),
            name = self.name,
            logs = at("logs"),
        );
        std::fs::write(self.path("agent.toml"), agent).unwrap();
    }

    pub(crate) fn start_containerd(&mut self) {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("containerd.log"))
            .unwrap();
        let child = Command::new("containerd")
            .arg("-c")
            .arg(self.path("containerd.toml"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.containerd = Some(child);
        let begun = Instant::now();
        let socket = self.socket();
        while !Command::new("ctr")
            .args(["-a", &socket, "version"])
            .output()
            .is_ok_and(|o| o.status.success())
        {
            assert!(begun.elapsed() < PATIENCE, "containerd does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn kill_containerd(&mut self) {
        if let Some(mut child) = self.containerd.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn start_agent(&mut self) {
        let config = Config::load(&self.path("agent.toml")).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (sender, receiver) = mpsc::channel(4);
        let control: Arc<dyn ControlPlane> = Arc::clone(&self.control) as _;
        let runner = runtime.block_on(async {
            start_with(&config, control, receiver, CancellationToken::new()).unwrap()
        });
        *self.control.updates.lock().unwrap() = Some(sender);
        self.agent = Some((runtime, runner));
        self.announce(Changes {
            everything: true,
            ..Changes::default()
        });
    }

    /// Ends every task of the agent at whatever it was doing.
    pub(crate) fn kill_agent(&mut self) {
        *self.control.updates.lock().unwrap() = None;
        if let Some((runtime, _)) = self.agent.take() {
            runtime.shutdown_background();
        }
    }

    pub(crate) fn runner(&self) -> PodRunner {
        self.agent.as_ref().unwrap().1.clone()
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.agent.as_ref().unwrap().0.block_on(future)
    }

    fn announce(&self, changes: Changes) {
        let updates = self.control.updates.lock().unwrap().clone();
        if let Some(updates) = updates {
            self.block_on(async {
                updates
                    .send(Update {
                        changes,
                        authoritative: true,
                    })
                    .await
                    .unwrap();
            });
        }
    }

    pub(crate) fn apply(&self, pod: PodSpec) {
        self.apply_all(vec![pod]);
    }

    pub(crate) fn apply_all(&self, pods: Vec<PodSpec>) {
        let mut changes = Changes::default();
        self.control.change(|state| {
            for pod in pods {
                let name = Name::new(&pod.namespace, &pod.name);
                changes.pods.insert(name.clone());
                state.pods.insert(name, pod);
            }
        });
        self.announce(changes);
    }

    pub(crate) fn config_map(&self, name: &str, data: &[(&str, &str)]) {
        let name = Name::new("default", name);
        let data = data
            .iter()
            .map(|(k, v)| ((*k).to_owned(), v.as_bytes().to_vec()))
            .collect();
        let object = KeyedData {
            namespace: "default".into(),
            name: name.name.clone(),
            data,
        };
        self.control.change(|state| {
            state.config_maps.insert(name.clone(), object.clone());
            state.secrets.insert(name.clone(), object);
        });
        let mut changes = Changes::default();
        changes.config_maps.insert(name);
        self.announce(changes);
    }

    /// Asks for deletion as the API does.
    pub(crate) fn delete(&self, pod: &str, grace_s: i64) {
        let name = Name::new("default", pod);
        let mut changes = Changes::default();
        changes.pods.insert(name.clone());
        self.control.change(|state| {
            if let Some(pod) = state.pods.get_mut(&name) {
                pod.deleting = true;
                pod.deletion_grace_s = grace_s;
            }
        });
        self.announce(changes);
    }

    /// Takes the object out of the state at once.
    pub(crate) fn forget(&self, pod: &str) {
        let name = Name::new("default", pod);
        let mut changes = Changes::default();
        changes.pods.insert(name.clone());
        self.control.change(|state| {
            state.pods.remove(&name);
        });
        if self.agent.is_some() {
            self.announce(changes);
        }
    }

    /// Waits until the reported status of the pod fits.
    pub(crate) fn wait(
        &self,
        pod: &str,
        what: &str,
        fits: impl Fn(&PodStatus) -> bool,
    ) -> PodStatus {
        let mut pods = self.control.pods.subscribe();
        let waited = self.block_on(async {
            let fits = pods.wait_for(|pods| pods.get(pod).is_some_and(|(s, _)| fits(s)));
            let found = tokio::time::timeout(PATIENCE, fits).await.ok()?.ok()?;
            Some(found[pod].0.clone())
        });
        match waited {
            Some(status) => status,
            None => panic!(
                "pod {pod} is not {what}: {:#?}\nevents: {:#?}",
                self.control.pods.borrow().get(pod),
                self.control.messages(pod)
            ),
        }
    }

    pub(crate) fn status(&self, pod: &str) -> PodStatus {
        self.control
            .pods
            .borrow()
            .get(pod)
            .map(|p| p.0.clone())
            .unwrap_or_default()
    }

    /// Text that a container wrote, without the log format's prefixes.
    pub(crate) fn log(&self, uid: &str, pod: &str, container: &str, attempt: u32) -> String {
        let path = self.path(&format!(
            "logs/default_{pod}_{uid}/{container}/{attempt}.log"
        ));
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines()
            .filter_map(|l| l.splitn(4, ' ').nth(3))
            .map(|l| format!("{l}\n"))
            .collect()
    }

    /// What containerd lists: sandboxes and containers.
    pub(crate) fn containers(&self) -> Vec<String> {
        let output = Command::new("ctr")
            .args([
                "-a",
                &self.socket(),
                "-n",
                "k8s.io",
                "containers",
                "ls",
                "-q",
            ])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// Waits for something that is not reported.
    pub(crate) fn eventually(&self, what: &str, holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < PATIENCE, "never: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Mounts and cgroups of pods that are still there.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let pods = self.path("agent/pods").to_string_lossy().into_owned();
        let mut left: Vec<String> = mounts
            .lines()
            .filter(|l| l.contains(&pods))
            .map(str::to_owned)
            .collect();
        for folder in cgroups(&self.name) {
            let pods = std::fs::read_dir(&folder).into_iter().flatten().flatten();
            left.extend(
                pods.filter(|e| e.path().is_dir())
                    .map(|e| e.path().to_string_lossy().into_owned()),
            );
        }
        for folder in ["agent/pods", "logs"] {
            let entries = std::fs::read_dir(self.path(folder))
                .into_iter()
                .flatten()
                .flatten();
            left.extend(entries.map(|e| e.path().to_string_lossy().into_owned()));
        }
        left
    }
}

fn cgroups(name: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = std::fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path());
    std::iter::once(root.to_path_buf())
        .chain(hierarchies)
        .map(|h| h.join(name))
        .filter(|p| p.is_dir())
        .collect()
}

fn remove_cgroup(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_cgroup(&entry.path());
        }
    }
    for pid in std::fs::read_to_string(folder.join("cgroup.procs"))
        .unwrap_or_default()
        .lines()
    {
        let _ = Command::new("kill").args(["-9", pid]).output();
    }
    for _ in 0..50 {
        if std::fs::remove_dir(folder).is_ok() || !folder.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill_agent();
        self.kill_containerd();
        for folder in cgroups(&self.name) {
            remove_cgroup(&folder);
        }
        // Shims carry the socket of their containerd on the command line.
        let socket = self.socket();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&command).contains(&socket)
                && let Some(pid) = entry.file_name().to_str()
                && pid.parse::<u32>().is_ok_and(|p| p != std::process::id())
            {
                let _ = Command::new("kill").args(["-9", pid]).output();
            }
        }
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mut points: Vec<&str> = mounts.lines().filter_map(|l| l.split(' ').nth(4)).collect();
        points.retain(|p| Path::new(p).starts_with(self.dir.path()));
        for point in points.iter().rev() {
            let _ = Command::new("umount").args(["-l", point]).output();
        }
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .output();
        if std::thread::panicking() && std::env::var_os("WEIR_KEEP").is_some() {
            eprintln!("kept {}", self.dir.path().display());
            self.dir.disable_cleanup(true);
        }
    }
}
