//! The cluster under test: up, kubectl, programs to kill, down.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

pub(crate) type Result<T> = anyhow::Result<T>;

/// Prefix of its namespaces: another cluster of the same machine is not disturbed.
pub(crate) const NAME: &str = "weirtest";
pub(crate) const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// Long enough for a busy machine; a check that waits this long has failed anyway.
pub(crate) const LIMIT: Duration = Duration::from_secs(90);
/// How often a condition without an event is looked at.
const POLL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Cluster {
    root: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) started: Instant,
    pub(crate) up_s: f64,
}

/// Set by `cargo xtask bench cluster`: run the product's optimised programs.
const RELEASE: &str = "WEIR_CLUSTER_RELEASE";

impl Cluster {
    pub(crate) fn up() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("workspace")?
            .to_owned();
        let dir = root.join("target").join(format!("cluster-{NAME}"));
        let mut cluster = Self {
            root,
            dir,
            started: Instant::now(),
            up_s: 0.0,
        };
        // What an interrupted run left would be taken over as it is.
        cluster.xtask(&["down", "--name", NAME])?;
        // The bar is about a warm machine: the programs are built before the clock starts.
        let release = std::env::var_os(RELEASE).is_some();
        let (build, up): (&[&str], &[&str]) = if release {
            (&["build", "--release"], &[])
        } else {
            (&["build"], &["--dev"])
        };
        cluster.xtask(build)?;
        cluster.xtask(&["image"])?;
        cluster.started = Instant::now();
        let said = cluster.xtask(&[&["up", "--name", NAME, "--nodes", "3"], up].concat())?;
        cluster.up_s = cluster.started.elapsed().as_secs_f64();
        println!("{said}");
        Ok(cluster)
    }

    /// Runs the door and returns what it said.
    pub(crate) fn xtask(&self, args: &[&str]) -> Result<String> {
        let mut command = match std::env::var_os("WEIR_XTASK") {
            Some(program) => Command::new(program),
            None => {
                let mut cargo = Command::new(env!("CARGO"));
                cargo.args(["run", "--quiet", "--package", "xtask", "--"]);
                cargo
            }
        };
        // Its own manifest tells xtask where the checkout is; this program's would do as well, but not a foreign one.
        command
            .args(args)
            .current_dir(&self.root)
            .env_remove("CARGO_MANIFEST_DIR");
        let out = command
            .stdin(Stdio::null())
            .output()
            .context("start xtask")?;
        text_of(&format!("xtask {}", args.join(" ")), &out)
    }

    fn kubectl_command(&self) -> Result<Command> {
        let tools = self.root.join("target/tools");
        let program = std::fs::read_dir(&tools)
            .with_context(|| format!("list {}", tools.display()))?
            .flatten()
            .map(|e| e.path().join("kubectl"))
            .find(|p| p.is_file())
            .context("no kubectl: run `cargo xtask install`")?;
        let mut command = Command::new(program);
        command.env("KUBECONFIG", self.dir.join("kubeconfig"));
        Ok(command)
    }

    pub(crate) fn kubectl(&self, args: &[&str]) -> Result<String> {
        let out = self
            .kubectl_command()?
            .args(args)
            .stdin(Stdio::null())
            .output()?;
        text_of(&format!("kubectl {}", args.join(" ")), &out)
    }

    /// kubectl with a manifest on standard input.
    pub(crate) fn kubectl_with(&self, args: &[&str], manifest: &str) -> Result<String> {
        let mut command = self.kubectl_command()?;
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("start kubectl")?;
        child
            .stdin
            .take()
            .context("no stdin")?
            .write_all(manifest.as_bytes())?;
        text_of(
            &format!("kubectl {}", args.join(" ")),
            &child.wait_with_output()?,
        )
    }

    /// A kubectl that goes on running, its output on a pipe.
    pub(crate) fn kubectl_stream(&self, args: &[&str]) -> Result<std::process::Child> {
        let mut command = self.kubectl_command()?;
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command.spawn().context("start kubectl")
    }

    pub(crate) fn get(&self, args: &[&str]) -> Result<Value> {
        let mut all = vec!["get", "-o", "json"];
        all.extend(args);
        serde_json::from_str(&self.kubectl(&all)?).context("kubectl's JSON")
    }

    /// The ClusterIP of a service in the family asked for.
    pub(crate) fn cluster_ip(&self, service: &str, v6: bool) -> Result<String> {
        let object = self.get(&["service", service])?;
        let ips = object["spec"]["clusterIPs"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        ips.iter()
            .filter_map(Value::as_str)
            .find(|ip| ip.contains(':') == v6)
            .map(str::to_owned)
            .with_context(|| format!("service {service} has no such ClusterIP: {ips:?}"))
    }

    pub(crate) fn netns(&self, label: &str) -> PathBuf {
        Path::new("/run/netns").join(format!("{NAME}-{label}"))
    }

    /// Pids of the supervised programs that run now.
    pub(crate) fn programs(&self) -> Result<BTreeMap<String, i32>> {
        let path = self.dir.join("supervisor/state.json");
        let state: Value = serde_json::from_slice(&std::fs::read(path)?)?;
        let programs = state.as_object().context("the supervisor's state")?;
        let pid = |v: &Value| {
            v["process"]["pid"]
                .as_i64()
                .and_then(|p| i32::try_from(p).ok())
        };
        Ok(programs
            .iter()
            .filter_map(|(n, v)| Some((n.clone(), pid(v)?)))
            .collect())
    }

    /// Kills the programs whose names start so, without warning. Returns how many.
    pub(crate) fn kill_programs(&self, prefix: &str) -> Result<usize> {
        let mut killed = 0;
        for (name, pid) in self.programs()? {
            if name.starts_with(prefix) && kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok() {
                killed += 1;
            }
        }
        ensure!(killed > 0, "no program {prefix}* runs");
        Ok(killed)
    }

    /// Waits until as many replicas of the deployment are ready as wanted, and no more pods exist.
    pub(crate) fn rolled_out(&self, deployment: &str) -> Result<()> {
        let target = format!("deployment/{deployment}");
        self.kubectl(&["rollout", "status", &target, "--timeout=90s"])
            .map(drop)
    }

    /// A pod that sleeps on a node, ready to be used as a client.
    pub(crate) fn client_pod(&self, node: &str) -> Result<String> {
        let name = format!("client-{node}");
        let manifest = format!(
            r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}","labels":{{"app":"client"}}}},
"spec":{{"nodeSelector":{{"kubernetes.io/hostname":"{node}"}},"terminationGracePeriodSeconds":0,
"containers":[{{"name":"c","image":"busybox","imagePullPolicy":"IfNotPresent","command":["sleep","{}"]}}]}}}}"#,
            sleep_of(node)
        );
        self.kubectl_with(&["apply", "-f", "-"], &manifest)?;
        self.kubectl(&[
            "wait",
            "--for=condition=Ready",
            &format!("pod/{name}"),
            "--timeout=90s",
        ])?;
        Ok(name)
    }

    /// Network namespace of the client pod of a node.
    pub(crate) fn client_netns(&self, node: &str) -> Result<PathBuf> {
        let wanted = format!("sleep\0{}\0", sleep_of(node));
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if line == wanted.as_bytes() {
                return Ok(entry.path().join("ns/net"));
            }
        }
        bail!("the client pod of {node} does not run")
    }

    /// State and the ends of the logs, for a failed check.
    pub(crate) fn diagnosis(&self) -> String {
        let mut text = String::new();
        for args in [
            &["get", "nodes,pods,svc,endpointslices", "-A", "-o", "wide"][..],
            &["get", "events", "-A"][..],
        ] {
            let said = self.kubectl(args).unwrap_or_else(|e| format!("{e:#}"));
            let lines: Vec<&str> = said.lines().collect();
            text.push_str(&lines[lines.len().saturating_sub(30)..].join("\n"));
            text.push('\n');
        }
        for entry in std::fs::read_dir(self.dir.join("logs"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("containerd") {
                continue;
            }
            let log = std::fs::read_to_string(entry.path()).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            text.push_str(&format!("--- {name}\n"));
            text.push_str(&lines[lines.len().saturating_sub(8)..].join("\n"));
            text.push('\n');
        }
        text
    }

    /// Takes the cluster down and looks with own eyes whether anything is left.
    pub(crate) fn down(&self) -> Result<String> {
        let said = self.xtask(&["down", "--name", NAME])?;
        ensure!(said.contains("clean"), "down did not prove itself: {said}");
        ensure!(!self.dir.exists(), "{} is left", self.dir.display());
        let names = std::fs::read_dir("/run/netns")
            .into_iter()
            .flatten()
            .flatten();
        for entry in names {
            let name = entry.file_name().to_string_lossy().into_owned();
            ensure!(
                !name.starts_with(&format!("{NAME}-")),
                "namespace {name} is left"
            );
        }
        let dir = self.dir.display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        ensure!(!mounts.contains(&dir), "a mount below {dir} is left");
        let cgroup = format!("/{NAME}-n");
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let read = |name: &str| std::fs::read_to_string(entry.path().join(name));
            // A zombie has no command line: it waits for the machine's init, and nothing of it is left but its number.
            let command = read("cmdline").unwrap_or_default();
            let ours = read("cgroup").is_ok_and(|c| c.contains(&cgroup));
            ensure!(!ours || command.is_empty(), "process {command:?} is left");
        }
        Ok(said.lines().next().unwrap_or_default().trim().to_owned())
    }
}

/// A number of seconds that no other process sleeps.
fn sleep_of(node: &str) -> String {
    format!("86431{}", node.trim_start_matches('n'))
}

fn text_of(what: &str, out: &Output) -> Result<String> {
    let stdout = String::from_utf8_lossy(&out.stdout).into_owned();
    if !out.status.success() {
        bail!(
            "`{what}`: {}\n{}{stdout}",
            out.status,
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(stdout)
}

/// Looks until the condition holds; the error names the last reason why it did not.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match look() {
            Ok(value) => return Ok(value),
            Err(e) if Instant::now() > deadline => {
                return Err(e).with_context(|| format!("waited {} s for {what}", LIMIT.as_secs()));
            }
            Err(_) => std::thread::sleep(POLL),
        }
    }
}
