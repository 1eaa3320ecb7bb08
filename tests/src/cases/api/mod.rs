//! API cases: kubectl and raw HTTP against a live control plane. The folder's README describes the format.

mod expect;
mod kubectl;
mod kubelet;
mod launch;
mod request;
mod run;
mod server;
mod vars;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

use super::{Outcome, Summary};
use run::{Branch, Shared, lock};
use server::Server;
use vars::Vars;

/// What a run needs to know.
#[derive(Clone, Debug)]
pub struct Options {
    pub folder: PathBuf,
    pub only: Option<String>,
    pub kubectl: PathBuf,
    /// Starts this weir-control on loopback, with data in a temporary folder.
    pub control: Option<PathBuf>,
    /// Or uses a server that runs.
    pub kubeconfig: Option<PathBuf>,
    /// Cases run at once.
    pub jobs: usize,
    /// Also run cases that need more than about a minute.
    pub slow: bool,
}

/// Needs that the runner and the control plane can meet.
const MET: &[&str] = &["controllers", "scheduler", "fake-node", "dual-stack"];
const SERVICE_ACCOUNT_WITHIN: Duration = Duration::from_secs(5);
const NAMESPACES_GONE_WITHIN: Duration = Duration::from_secs(60);

struct Case {
    file: String,
    body: Value,
}

impl Case {
    fn needs(&self) -> Vec<&str> {
        self.body["needs"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect()
    }

    fn alone(&self) -> bool {
        self.needs()
            .iter()
            .any(|n| *n == "fake-node" || *n == "compact")
    }

    fn unmet(&self, slow: bool) -> Option<String> {
        let needs = self.needs();
        let unmet = needs
            .iter()
            .find(|n| !(MET.contains(n) || (slow && **n == "slow")));
        unmet.map(|n| format!("needs {n}"))
    }
}

/// Runs a folder of cases: one line per case, then the counts.
///
/// # Errors
/// When the folder or the server cannot be used; failing cases are in the summary.
pub fn run_folder(
    options: &Options,
    mut print: impl FnMut(&str) + Send,
) -> anyhow::Result<Summary> {
    let mut cases = Vec::new();
    for path in super::case_files(&options.folder, options.only.as_deref())? {
        let text = std::fs::read_to_string(&path)?;
        let body = serde_yaml_ng::from_str(&text)
            .with_context(|| format!("parse case {}", path.display()))?;
        let file = path
            .file_stem()
            .map(|s| s.to_string_lossy().into_owned())
            .unwrap_or_default();
        cases.push(Case { file, body });
    }
    let launched = match (&options.kubeconfig, &options.control) {
        (None, Some(binary)) => Some(launch::Launched::start(binary)?),
        _ => None,
    };
    let kubeconfig = match (&options.kubeconfig, &launched) {
        (Some(path), _) => path.clone(),
        (None, Some(launched)) => launched.kubeconfig.clone(),
        (None, None) => {
            anyhow::bail!("name a server: --kubeconfig FILE, or --control BINARY to start one")
        }
    };
    let server = Arc::new(Server::from_kubeconfig(&kubeconfig, &options.kubectl)?);
    let (alone, together): (Vec<_>, Vec<_>) = cases.iter().partition(|c| c.alone());
    let report = Mutex::new((Summary::default(), &mut print));
    for (group, jobs) in [(together, options.jobs.max(1)), (alone, 1)] {
        run_group(&server, &group, jobs, options.slow, |case, outcome| {
            let (summary, print) = &mut *lock(&report);
            summary.count(outcome);
            print(&line(case, outcome));
        });
    }
    let summary = lock(&report).0;
    drop(launched);
    Ok(summary)
}

fn line(case: &str, outcome: &Outcome) -> String {
    match outcome {
        Outcome::Passed => format!("ok      {case}"),
        Outcome::Failed(why) => format!("FAILED  {case}: {why}"),
        Outcome::Skipped(why) => format!("skipped {case}: {why}"),
    }
}

/// Runs the cases of a group, `jobs` at a time; each is reported as it ends.
fn run_group(
    server: &Arc<Server>,
    cases: &[&Case],
    jobs: usize,
    slow: bool,
    report: impl Fn(&str, &Outcome) + Sync,
) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let outcome = match case.unmet(slow) {
                        Some(why) => Outcome::Skipped(why),
                        None => run_case(server, case),
                    };
                    report(&case.file, &outcome);
                }
            });
        }
    });
}

fn run_case(server: &Arc<Server>, case: &Case) -> Outcome {
    let result = prepare(server, case).and_then(|mut branch| {
        let done = branch.steps(&case.body["steps"]);
        // Cleanup always runs, and its failures do not count.
        for step in case.body["cleanup"].as_array().into_iter().flatten() {
            let _ignored = branch.steps(&json!([step]));
        }
        finish(server, &branch);
        done.map_err(|f| anyhow::anyhow!(f.message))
    });
    match result {
        Ok(()) => Outcome::Passed,
        Err(e) => Outcome::Failed(format!("{e:#}")),
    }
}

fn prepare(server: &Arc<Server>, case: &Case) -> anyhow::Result<Branch> {
    if case.alone() {
        namespaces_gone(server)?;
    }
    let number: String = case.file.chars().take_while(char::is_ascii_digit).collect();
    let ns = format!("c{number}-{:06x}", rand::random_range(0..0x0100_0000));
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ns, "labels": {"weir-cases": "1"}}});
    let (status, body) = server.json(
        "POST",
        "/api/v1/namespaces",
        "application/json",
        Some(&namespace),
    )?;
    anyhow::ensure!(status == 201, "create namespace {ns}: {status} {body}");
    await_service_account(server, &ns)?;
    let home = tempfile::tempdir()?;
    let kubeconfig = home.path().join("kubeconfig");
    std::fs::write(&kubeconfig, with_namespace(&server.kubeconfig, &ns)?)?;
    let mut vars = Vars::new();
    vars.insert("ns".into(), ns.clone().into());
    vars.insert("core".into(), format!("/api/v1/namespaces/{ns}").into());
    vars.insert(
        "apps".into(),
        format!("/apis/apps/v1/namespaces/{ns}").into(),
    );
    let shared = Shared {
        server: Arc::clone(server),
        home,
        kubeconfig,
        watches: Mutex::default(),
        kubelets: Mutex::default(),
    };
    Ok(Branch {
        shared: Arc::new(shared),
        vars,
        statuses: Vec::new(),
    })
}

/// Tells kubectl the case's namespace through the kubeconfig's context.
fn with_namespace(kubeconfig: &Path, ns: &str) -> anyhow::Result<String> {
    let mut config: Value = serde_yaml_ng::from_str(&std::fs::read_to_string(kubeconfig)?)?;
    config["contexts"][0]["context"]["namespace"] = ns.into();
    Ok(config.to_string())
}

fn await_service_account(server: &Arc<Server>, ns: &str) -> anyhow::Result<()> {
    let base = format!("/api/v1/namespaces/{ns}/serviceaccounts");
    let deadline = std::time::Instant::now() + SERVICE_ACCOUNT_WITHIN;
    while std::time::Instant::now() < deadline {
        if server.json("GET", &format!("{base}/default"), "", None)?.0 == 200 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    server.json("POST", &base, "application/json", Some(&account))?;
    Ok(())
}

/// Cases that run alone start when the namespaces of earlier cases are gone.
fn namespaces_gone(server: &Arc<Server>) -> anyhow::Result<()> {
    let deadline = std::time::Instant::now() + NAMESPACES_GONE_WITHIN;
    loop {
        let (_, list) = server.json(
            "GET",
            "/api/v1/namespaces?labelSelector=weir-cases%3D1",
            "",
            None,
        )?;
        let left = list["items"].as_array().map_or(0, Vec::len);
        if left == 0 {
            return Ok(());
        }
        anyhow::ensure!(
            std::time::Instant::now() < deadline,
            "{left} namespaces of earlier cases are still there"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn finish(server: &Arc<Server>, branch: &Branch) {
    let mut kubelets = std::mem::take(&mut *lock(&branch.shared.kubelets));
    let ns = vars::as_text(&branch.vars["ns"]);
    // The namespace goes without waiting; its pods need their kubelet no more once the node is gone.
    let _ignored = server.json("DELETE", &format!("/api/v1/namespaces/{ns}"), "", None);
    for (name, kubelet) in &mut kubelets {
        kubelet.stop();
        let _ignored = server.json("DELETE", &format!("/api/v1/nodes/{name}"), "", None);
    }
}
