//! Brings a cluster up, or a running one to the wanted shape: only what is missing or changed is started.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::Signal;

use super::process::{Process, wait_for};
use super::supervise::{self, Files, Spec};
use super::{Cluster, MARK, MAX_NODES, Role, api, config, down, network, node, v4, v6};
use crate::artifacts::{self, PROGRAMS, Profile};
use crate::image;
use crate::install::{self, Purpose};
use crate::repo::{Repo, file_version, write_atomically, write_if_changed};
use crate::run::{Steps, in_parallel, quiet};

/// First port that is tried for the API on loopback, and how many after it.
const FIRST_PORT: u16 = 6443;
const PORTS: u16 = 200;
/// Containerd must serve, and the supervisor act, within these times.
const CONTAINERD_LIMIT: Duration = Duration::from_secs(30);
const SUPERVISOR_LIMIT: Duration = Duration::from_secs(5);
/// Oldest kernel that Weir supports.
const KERNEL_FLOOR: (u32, u32) = (5, 10);

/// What `up` is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) nodes: u32,
    pub(crate) profile: Profile,
    /// Use the programs of the last build as they are.
    pub(crate) no_build: bool,
}

/// `cargo xtask up`.
pub(crate) fn up(repo: &Repo, cluster: &Cluster, wanted: &Wanted) -> Result<()> {
    super::require_root("up")?;
    preflight(wanted)?;
    network::require_own(cluster)?;
    let mut steps = Steps::start();
    if install::ensure(repo, &[Purpose::Ebpf, Purpose::Cluster])? {
        steps.done("missing tools installed");
    }
    let (programs, images) = build(repo, wanted, &mut steps)?;
    cluster.claim_dir()?;
    copy_programs(&programs, cluster)?;
    let nodes: Vec<u32> = (1..=wanted.nodes).collect();
    build_network(cluster, &nodes)?;
    steps.done(format!(
        "network: switch, control plane, client, {} nodes",
        nodes.len()
    ));
    retire_nodes(repo, cluster, wanted.nodes, &mut steps)?;

    let mut spec = Spec {
        listen: Some(api_address(cluster)?),
        programs: BTreeMap::new(),
    };
    spec.programs
        .insert("control".into(), config::control_program(cluster)?);
    for index in &nodes {
        spec.programs.insert(
            format!("containerd-n{index}"),
            config::containerd_program(cluster, *index)?,
        );
        // An agent that runs already goes on while the rest is brought up.
        if config::credentials(cluster, *index)
            .join("node.crt")
            .is_file()
        {
            spec.programs.insert(
                format!("agent-n{index}"),
                config::agent_program(cluster, *index)?,
            );
        }
    }
    supervise_programs(cluster, &spec)?;
    let outcome = bring_up(repo, cluster, &nodes, spec, &images, &mut steps);
    outcome.with_context(|| api::diagnosis(cluster))?;
    report(cluster, repo, &steps, wanted);
    Ok(())
}

/// Everything from the control plane's first answer to ready nodes.
fn bring_up(
    repo: &Repo,
    cluster: &Cluster,
    nodes: &[u32],
    mut spec: Spec,
    images: &Path,
    steps: &mut Steps,
) -> Result<()> {
    std::thread::scope(|scope| -> Result<()> {
        let imports =
            scope.spawn(|| in_parallel(nodes, |index| import_images(cluster, *index, images)));
        api::wait_control(repo, cluster, &spec)?;
        steps.done("control plane answers");
        in_parallel(nodes, |index| issue_credentials(cluster, *index))?;
        for index in nodes {
            spec.programs.insert(
                format!("agent-n{index}"),
                config::agent_program(cluster, *index)?,
            );
        }
        supervise_programs(cluster, &spec)?;
        imports
            .join()
            .unwrap_or_else(|_| bail!("the image import panicked"))?;
        steps.done(format!(
            "images on every node: {}",
            image::IMAGES.join(", ")
        ));
        Ok(())
    })?;
    api::wait_ready(repo, cluster, nodes.len())?;
    let pods = api::pod_cidrs(repo, cluster)?;
    network::route_to_pods(cluster, &pods).context("lead the control plane's answers to pods")?;
    steps.done(format!("{} nodes ready", nodes.len()));
    Ok(())
}

fn preflight(wanted: &Wanted) -> Result<()> {
    if wanted.nodes == 0 || wanted.nodes > MAX_NODES {
        bail!(
            "--nodes {}: a local cluster has 1 to {MAX_NODES} nodes",
            wanted.nodes
        );
    }
    let release =
        std::fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel version")?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next())
        && (major, minor) < KERNEL_FLOOR
    {
        let (a, b) = KERNEL_FLOOR;
        bail!(
            "kernel {} is too old: Weir needs {a}.{b} or newer",
            release.trim()
        );
    }
    if !node::unified_root().join("cgroup.procs").is_file() {
        bail!("no cgroup v2 hierarchy is mounted at /sys/fs/cgroup or /sys/fs/cgroup/unified");
    }
    Ok(())
}

fn build(repo: &Repo, wanted: &Wanted, steps: &mut Steps) -> Result<(PathBuf, PathBuf)> {
    if !wanted.no_build && artifacts::ebpf(repo)? {
        steps.done("eBPF programs compiled");
    }
    let programs = if wanted.no_build {
        artifacts::product_dir(repo, wanted.profile)
    } else {
        artifacts::product(repo, wanted.profile)?
    };
    steps.done("weir-control, weir-agent, weirctl and weir-cni built");
    let (images, made) = image::archive(repo, false)?;
    if made {
        steps.done("images made from Debian packages");
    }
    Ok((programs, images))
}

/// The cluster runs copies: a build in the checkout must not change a running program's file.
fn copy_programs(from: &Path, cluster: &Cluster) -> Result<()> {
    for (_, program) in PROGRAMS {
        let source = from.join(program);
        let bytes = std::fs::read(&source).with_context(|| format!("read {}", source.display()))?;
        let to = cluster.bin().join(program);
        if std::fs::read(&to).ok().as_deref() != Some(&bytes) {
            write_atomically(&to, &bytes, 0o755)?;
        }
    }
    Ok(())
}

fn build_network(cluster: &Cluster, nodes: &[u32]) -> Result<()> {
    let mut roles = vec![Role::Control, Role::Client];
    roles.extend(nodes.iter().map(|i| Role::Node(*i)));
    network::build(cluster, &roles)?;
    node::prepare_mount_ns_dir(cluster)?;
    std::fs::create_dir_all(cluster.dir.join("logs")).context("create the folder of logs")?;
    config::write_control(cluster)?;
    for index in nodes {
        node::prepare(cluster, *index)?;
        config::write_node(cluster, *index)?;
        install_plugins(cluster, *index)?;
    }
    Ok(())
}

/// Copies a program into a folder, unless the same bytes are there.
fn install_program(source: &Path, folder: &Path) -> Result<()> {
    let bytes = std::fs::read(source).with_context(|| format!("read {}", source.display()))?;
    let to = folder.join(source.file_name().context("a program has a name")?);
    write_if_changed(&to, &bytes, 0o755)
}

/// Puts the CNI plugins where the node's runtime looks for them.
fn install_plugins(cluster: &Cluster, index: u32) -> Result<()> {
    let loopback = Path::new(install::CNI_PLUGINS).join("loopback");
    for source in [cluster.bin().join("weir-cni"), loopback] {
        install_program(&source, &cluster.node_dir(index).join("cni/bin"))?;
    }
    Ok(())
}

/// Removes nodes beyond the wanted number from a running cluster.
fn retire_nodes(repo: &Repo, cluster: &Cluster, wanted: u32, steps: &mut Steps) -> Result<()> {
    let extra: Vec<u32> = cluster
        .present_nodes()
        .into_iter()
        .filter(|i| *i > wanted)
        .collect();
    if extra.is_empty() {
        return Ok(());
    }
    let files = Files::of(&cluster.dir);
    if let Some(mut spec) = read_spec(&files) {
        spec.programs
            .retain(|name, _| !extra.iter().any(|i| name.ends_with(&format!("-n{i}"))));
        supervise_programs(cluster, &spec)?;
        // It may have been down, with its supervisor, until now.
        api::wait_control(repo, cluster, &spec)?;
        let names: Vec<String> = extra.iter().map(|i| Role::Node(*i).label()).collect();
        let mut delete = api::kubectl(repo, cluster)?;
        delete
            .args(["delete", "node", "--ignore-not-found", "--wait=false"])
            .args(&names);
        quiet(&mut delete).context("delete the nodes from the API")?;
    }
    for index in &extra {
        down::remove_node(cluster, *index)?;
    }
    steps.done(format!("{} nodes removed", extra.len()));
    Ok(())
}

fn read_spec(files: &Files) -> Option<Spec> {
    serde_json::from_slice(&std::fs::read(&files.spec).ok()?).ok()
}

/// The loopback address of the API: the one that a running supervisor holds, or the first free port.
fn api_address(cluster: &Cluster) -> Result<SocketAddr> {
    let files = Files::of(&cluster.dir);
    let before = read_spec(&files).and_then(|spec| spec.listen);
    let supervised = Process::load(&files.pid).is_some_and(Process::alive);
    if let (Some(address), true) = (before, supervised) {
        return Ok(address);
    }
    // A kubeconfig that was handed out stays good when its port is still free.
    let again = before.map(|a| a.port());
    again
        .into_iter()
        .chain(FIRST_PORT..FIRST_PORT + PORTS)
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .find(|address| TcpListener::bind(address).is_ok())
        .with_context(|| format!("no free port on 127.0.0.1 from {FIRST_PORT} on"))
}

/// Gives the wanted programs to the supervisor, starting it when it does not run.
fn supervise_programs(cluster: &Cluster, spec: &Spec) -> Result<()> {
    let files = Files::of(&cluster.dir);
    let bytes = serde_json::to_vec_pretty(spec).context("encode the programs")?;
    write_atomically(&files.spec, &bytes, 0o644)?;
    if let Some(running) = Process::load(&files.pid).filter(|p| p.alive()) {
        running.signal(Signal::SIGHUP);
    } else {
        start_supervisor(cluster, &files)?;
    }
    // The state names exactly the wanted programs once the supervisor has acted on the file.
    let taken = || {
        let state = supervise::read_state(&files);
        state.keys().eq(spec.programs.keys())
    };
    if !wait_for(SUPERVISOR_LIMIT + Duration::from_secs(3), taken) {
        bail!(
            "the supervisor does not start the programs: see {}",
            files.log.display()
        );
    }
    Ok(())
}

fn start_supervisor(cluster: &Cluster, files: &Files) -> Result<()> {
    let _ = std::fs::remove_file(&files.pid);
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&files.log)
        .with_context(|| format!("open {}", files.log.display()))?;
    let program = cluster.bin().join("weir-supervisor");
    let own = std::env::current_exe().context("find this program")?;
    write_atomically(
        &program,
        &std::fs::read(&own).context("read this program")?,
        0o755,
    )?;
    Command::new(&program)
        .arg("supervise")
        .arg(&cluster.dir)
        .current_dir("/")
        .env(MARK, &cluster.dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("copy the log's descriptor")?)
        .stderr(log)
        .spawn()
        .context("start the supervisor")?;
    if !wait_for(SUPERVISOR_LIMIT, || {
        Process::load(&files.pid).is_some_and(Process::alive)
    }) {
        bail!("the supervisor did not start: see {}", files.log.display());
    }
    Ok(())
}

/// Imports and unpacks the images as soon as the node's containerd serves.
fn import_images(cluster: &Cluster, index: u32, archive: &Path) -> Result<()> {
    let socket = cluster
        .node_dir(index)
        .join("run/containerd/containerd.sock");
    if !wait_for(CONTAINERD_LIMIT, || socket.exists()) {
        bail!(
            "containerd of n{index} does not serve: see {}",
            cluster.log(&format!("containerd-n{index}")).display()
        );
    }
    let imported = cluster.node_dir(index).join("imported-images");
    let version = file_version(archive)?;
    if std::fs::read_to_string(&imported).is_ok_and(|v| v == version) {
        return Ok(());
    }
    let mut ctr = Command::new("nsenter");
    ctr.args(node::enter(cluster, index).into_iter().skip(1));
    ctr.args([
        "ctr",
        "--address",
        config::CONTAINERD_SOCKET,
        "--namespace",
        "k8s.io",
    ]);
    quiet(ctr.args(["images", "import"]).arg(archive))
        .with_context(|| format!("import the images into n{index}"))?;
    write_atomically(&imported, version.as_bytes(), 0o644)
}

fn issue_credentials(cluster: &Cluster, index: u32) -> Result<()> {
    let dir = config::credentials(cluster, index);
    if dir.join("node.crt").is_file() {
        return Ok(());
    }
    let host = Role::Node(index).host().context("a node has an address")?;
    let mut issue = Command::new(cluster.bin().join("weir-control"));
    issue
        .arg("issue-node")
        .arg("--config")
        .arg(config::control_config(cluster));
    issue.args(["--name", &Role::Node(index).label()]);
    issue
        .args(["--ip", &v4(host), "--ip", &v6(host), "--out"])
        .arg(&dir);
    quiet(&mut issue).context("issue a node's certificate")
}

fn report(cluster: &Cluster, repo: &Repo, steps: &Steps, wanted: &Wanted) {
    let extra = if cluster.name == "weir" {
        String::new()
    } else {
        format!(" --name {}", cluster.name)
    };
    let kubectl = install::kubectl(repo)
        .map(|p| p.display().to_string())
        .unwrap_or_default();
    println!(
        " ✓ up in {:.1} s with {} nodes",
        steps.total_s(),
        wanted.nodes
    );
    println!(
        "
Next:
  export KUBECONFIG={}
  alias kubectl={kubectl}
  kubectl create deployment web --image=nginx --replicas=3
  kubectl expose deployment web --port=80
  kubectl run try --image=busybox --restart=Never -- wget -qO- http://web.default.svc.cluster.local
  kubectl wait pod/try --for=jsonpath='{{.status.phase}}'=Succeeded && kubectl logs try
  cargo xtask on n1{extra} -- weirctl status     what the agent of a node knows and does
  cargo xtask status{extra}     what runs, where its logs are
  cargo xtask down{extra}       stop it all and prove that nothing is left",
        cluster.kubeconfig().display()
    );
}
