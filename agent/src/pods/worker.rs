//! One task per pod: takes news in, asks [`sync_pod`] what comes next, carries out one action at a time, and reports.

use std::sync::Arc;
use std::time::Duration;

use control_api::v1::{Container, PodSpec, PodStatus};
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::backoff::{Backoff, CRASH, START};
use super::memory::{Memory, Probes, Retry, Terminal, Unhealthy};
use super::ops::{Op, Outcome, StartFailure};
use super::probes::{Kind, News, Target, Tasks, What};
use super::shared::{Severity, Shared, now_us};
use super::status::pod_status;
use super::sync::{Action, Which, sync_pod};
use super::view::{ContainerState, Micros, PodView, SECOND_US};
use super::volumes;

/// Inbox of a worker; news beyond it wait at the sender.
pub(crate) const INBOX: usize = 64;
/// How long to wait after the runtime could not be asked.
const RUNTIME_RETRY_US: Micros = SECOND_US;
/// A failed pull shows as such for this long before it shows as backing off.
const PULL_ERROR_SHOWN_US: Micros = 2 * SECOND_US;
/// `gone` is repeated while the control plane still lists the pod.
const REPEAT_GONE_US: Micros = 15 * SECOND_US;

/// News for a worker.
#[derive(Debug)]
pub(crate) enum Input {
    /// The pod as it should be now.
    Spec(Arc<PodSpec>),
    /// Something that the pod may refer to changed (ConfigMaps, Secrets, Services).
    Refresh,
    /// The control plane no longer lists the pod.
    Removed,
    /// The runtime has something new of this pod.
    Dirty,
    Probe(News),
    Finished(Action, Outcome),
}

impl From<News> for Input {
    fn from(news: News) -> Self {
        Self::Probe(news)
    }
}

pub(crate) struct Worker {
    shared: Arc<Shared>,
    spec: Arc<PodSpec>,
    view: PodView,
    view_fresh: bool,
    /// The runtime answered at least once.
    looked: bool,
    memory: Memory,
    inbox: mpsc::Receiver<Input>,
    own: mpsc::Sender<Input>,
    probes: Tasks,
    busy: Option<Action>,
    cancel: CancellationToken,
    grace: watch::Sender<i64>,
    /// False for pods that the control plane does not know: nothing is reported of them.
    listed: bool,
    gone_reported_us: Micros,
    /// A status was handed over since this worker began.
    reported: bool,
}

impl Worker {
    /// `listed` is false for a pod that is only in the runtime or on disk, and must go.
    pub(crate) fn spawn(shared: Arc<Shared>, spec: Arc<PodSpec>, listed: bool) -> Handle {
        let (own, inbox) = mpsc::channel(INBOX);
        let worker = Self {
            shared,
            view: PodView::default(),
            view_fresh: false,
            looked: false,
            memory: Memory::default(),
            inbox,
            own: own.clone(),
            probes: Tasks::default(),
            busy: None,
            cancel: CancellationToken::new(),
            grace: watch::channel(i64::MAX).0,
            listed,
            gone_reported_us: 0,
            reported: false,
            spec,
        };
        let task = tokio::spawn(worker.run());
        Handle { inbox: own, task }
    }

    async fn run(mut self) {
        self.recall();
        loop {
            self.look().await;
            let wake_at = self.decide();
            if self.is_over() {
                return;
            }
            let sleep = async {
                match wake_at {
                    Some(at) => {
                        let wait = u64::try_from(at.saturating_sub(now_us())).unwrap_or(0);
                        tokio::time::sleep(Duration::from_micros(wait)).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                input = self.inbox.recv() => match input {
                    Some(input) => self.take(input),
                    None => return,
                },
                () = sleep => {}
            }
            while let Ok(input) = self.inbox.try_recv() {
                self.take(input);
            }
        }
    }

    /// What was reported before a restart of the agent.
    fn recall(&mut self) {
        let saved = volumes::load_status(&self.shared.node, &self.spec.uid);
        let saved = saved.and_then(|bytes| PodStatus::decode(bytes.as_slice()).ok());
        self.memory.started_us = saved
            .as_ref()
            .map_or_else(now_us, |s| s.started_at_us)
            .max(1);
        if let Some(saved) = saved {
            let phase = match saved.phase.as_str() {
                "Succeeded" => Some("Succeeded"),
                "Failed" => Some("Failed"),
                _ => None,
            };
            self.memory.terminal = phase.map(|phase| Terminal {
                phase,
                reason: saved.reason.clone(),
                message: saved.message.clone(),
            });
            self.memory.reported = Some(saved);
        }
        if self.spec.deleting {
            self.begin_deletion();
        }
    }

    /// Reads the runtime when something may have changed there.
    async fn look(&mut self) {
        if self.view_fresh {
            return;
        }
        match self.shared.lister.pod(&self.spec.uid).await {
            Ok(view) => {
                self.view = view;
                self.view_fresh = true;
                self.looked = true;
            }
            Err(error) => tracing::debug!(pod = %self.spec.name, %error, "runtime not readable"),
        }
    }

    fn is_over(&self) -> bool {
        !self.listed && self.memory.removed && self.busy.is_none()
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Spec(spec) => {
                let deleting = spec.deleting && !self.spec.deleting;
                if spec.deleting {
                    self.shorten_grace(spec.deletion_grace_s);
                }
                self.spec = spec;
                if deleting {
                    self.begin_deletion();
                }
                self.refresh();
            }
            Input::Refresh => self.refresh(),
            Input::Removed => {
                self.listed = false;
                if !self.spec.deleting {
                    let mut spec = PodSpec::clone(&self.spec);
                    spec.deleting = true;
                    spec.deletion_grace_s = FORCED_GRACE_S;
                    self.spec = Arc::new(spec);
                    self.shorten_grace(FORCED_GRACE_S);
                    self.begin_deletion();
                }
            }
            Input::Dirty => self.view_fresh = false,
            Input::Probe(news) => self.probed(news),
            Input::Finished(action, outcome) => self.finished(action, outcome),
        }
    }

    /// Configuration that was missing may be there now; files may have new contents.
    fn refresh(&mut self) {
        self.memory.setup.not_before = None;
        for container in self.memory.containers.values_mut() {
            let config = container
                .waiting
                .as_ref()
                .is_some_and(|(reason, _)| reason == "CreateContainerConfigError");
            if config {
                container.start.not_before = None;
            }
        }
        let has_files = !self.spec.volumes.is_empty() && !self.spec.deleting;
        if has_files && self.busy.is_none() && !self.view.sandboxes.is_empty() {
            let (shared, spec) = (Arc::clone(&self.shared), Arc::clone(&self.spec));
            let pod_ips = self.view.sandboxes[0].ips.clone();
            tokio::task::spawn_blocking(move || {
                let desired = shared.control.state();
                let node = &shared.node;
                let context = super::env::Context {
                    spec: &spec,
                    desired: &desired,
                    node,
                    pod_ips: &pod_ips,
                };
                if let Err(error) = volumes::ensure(context) {
                    let message = format!("MountVolume.SetUp failed: {error}");
                    shared.event(&spec, Severity::Warning, "FailedMount", message);
                }
            });
        }
    }

    fn begin_deletion(&mut self) {
        self.memory.setup = Retry::default();
        self.cancel.cancel();
        self.shorten_grace(self.spec.deletion_grace_s);
    }

    fn shorten_grace(&self, grace_s: i64) {
        self.grace.send_if_modified(|now| {
            let shorter = grace_s < *now;
            *now = (*now).min(grace_s);
            shorter
        });
    }

    /// Starts the next action when there is one, keeps probes in step, reports. Returns when to look again at the latest.
    fn decide(&mut self) -> Option<Micros> {
        let now = now_us();
        self.adopt();
        self.keep_probes();
        let mut wake_at = None;
        if self.busy.is_none() {
            if self.view_fresh {
                wake_at = self.plan(now);
            } else {
                wake_at = Some(now + RUNTIME_RETRY_US);
            }
        }
        if let Some(at) = self.age_pull_errors(now) {
            wake_at = Some(wake_at.map_or(at, |w: Micros| w.min(at)));
        }
        if let Some(at) = self.report(now) {
            wake_at = Some(wake_at.map_or(at, |w| w.min(at)));
        }
        wake_at
    }

    fn plan(&mut self, now: Micros) -> Option<Micros> {
        let plan = sync_pod(&self.spec, &self.view, &self.memory, now);
        if let Some(terminal) = plan.terminal {
            if !terminal.reason.is_empty() {
                let (spec, message) = (&self.spec, terminal.message.clone());
                self.shared
                    .event(spec, Severity::Normal, "DeadlineExceeded", message);
            }
            self.memory.terminal = Some(terminal);
            self.cancel.cancel();
        }
        for wait in plan.waits {
            let memory = self.memory.container(&wait.container);
            memory.waiting = Some((wait.reason.into(), wait.message));
            if memory.announced != wait.crashed_us {
                memory.announced = wait.crashed_us;
                let (spec, name) = (&self.spec, &wait.container);
                let message = format!(
                    "Back-off restarting failed container {name} in pod {}_{}({})",
                    spec.name, spec.namespace, spec.uid
                );
                self.shared
                    .event(spec, Severity::Warning, "BackOff", message);
            }
        }
        if let Some(action) = plan.action {
            self.start(action, now);
        }
        plan.wake_at
    }

    fn start(&mut self, action: Action, now: Micros) {
        tracing::debug!(pod = %self.spec.name, namespace = %self.spec.namespace, ?action, "pod action");
        if let Action::StartContainer { container, .. } = &action
            && let Some(name) = container.of(&self.spec).map(|c| c.name.clone())
            && let Some(last) = self.view.latest(&name)
        {
            let (attempt, begun, finished) = (last.attempt, last.begun_us(), last.finished_us);
            let crash = &mut self.memory.container(&name).crash;
            crash
                .get_or_insert_with(|| Backoff::after(CRASH, attempt, begun))
                .next(CRASH, finished, now);
        }
        if matches!(action, Action::StopPod { .. } | Action::RemovePod) {
            self.probes.retain(|_, _, kind| {
                kind == Kind::Readiness && matches!(action, Action::StopPod { .. })
            });
        }
        let op = Op {
            shared: Arc::clone(&self.shared),
            spec: Arc::clone(&self.spec),
            view: self.view.clone(),
            cancel: self.cancel.clone(),
            grace: self.grace.subscribe(),
        };
        self.busy = Some(action.clone());
        let own = self.own.clone();
        tokio::spawn(async move {
            let outcome = op.perform(action.clone()).await;
            // The worker is gone only when the agent is: nobody is left to tell.
            let _ = own.send(Input::Finished(action, outcome)).await;
        });
    }

    fn finished(&mut self, action: Action, outcome: Outcome) {
        self.busy = None;
        self.view_fresh = false;
        let now = now_us();
        match outcome {
            Outcome::Done => self.memory.setup = Retry::default(),
            Outcome::Removed => {
                self.memory.setup = Retry::default();
                self.memory.removed = true;
            }
            Outcome::PodFailed { reason, message } => {
                tracing::warn!(pod = %self.spec.name, namespace = %self.spec.namespace, ?action, message, "pod action failed");
                self.shared
                    .event(&self.spec, Severity::Warning, reason, message);
                retry_later(&mut self.memory.setup, START, now);
            }
            Outcome::Started {
                which,
                container_id,
                hook_failure,
            } => {
                self.started(which, container_id, hook_failure);
            }
            Outcome::StartFailed { which, failure } => self.start_failed(which, failure, now),
        }
    }

    fn started(&mut self, which: Which, container_id: String, hook_failure: Option<String>) {
        let Some(container) = which.of(&self.spec).cloned() else {
            return;
        };
        let memory = self.memory.container(&container.name);
        memory.waiting = None;
        memory.start = Retry::default();
        let started = container.startup.is_none();
        memory.probes = Probes {
            container_id,
            started,
            ready: container.readiness.is_none(),
            unhealthy: hook_failure.map(|_| Unhealthy {
                message: format!(
                    "FailedPostStartHook: container {} is killed",
                    container.name
                ),
                grace_s: None,
            }),
        };
    }

    fn start_failed(&mut self, which: Which, failure: StartFailure, now: Micros) {
        let Some(name) = which.of(&self.spec).map(|c| c.name.clone()) else {
            return;
        };
        let policy = if failure.reason == "ErrImagePull" {
            CRASH
        } else {
            START
        };
        let memory = self.memory.container(&name);
        memory.waiting = Some((failure.reason.into(), failure.message));
        // A container that was made but did not run counts as crashed: its back-off rules.
        if failure.reason != "RunContainerError" {
            retry_later(&mut memory.start, policy, now);
        }
    }

    /// Failed pulls show as back-off after a moment.
    fn age_pull_errors(&mut self, now: Micros) -> Option<Micros> {
        let mut wake_at: Option<Micros> = None;
        let spec = Arc::clone(&self.spec);
        for container in spec.init_containers.iter().chain(&spec.containers) {
            let Some(memory) = self.memory.containers.get_mut(&container.name) else {
                continue;
            };
            let Some((reason, message)) = &mut memory.waiting else {
                continue;
            };
            if reason != "ErrImagePull" {
                continue;
            }
            let since = memory.start.failed_at;
            if now < since + PULL_ERROR_SHOWN_US {
                let at = since + PULL_ERROR_SHOWN_US;
                wake_at = Some(wake_at.map_or(at, |w| w.min(at)));
                continue;
            }
            let image = &container.image;
            *message = format!("Back-off pulling image {image:?}: ErrImagePull: {message}");
            *reason = "ImagePullBackOff".into();
            let text = format!("Back-off pulling image {image:?}");
            self.shared.event(&spec, Severity::Normal, "BackOff", text);
            self.shared.event(
                &spec,
                Severity::Warning,
                "Failed",
                "Error: ImagePullBackOff".into(),
            );
        }
        wake_at
    }

    /// Running containers that this worker did not start: from before a restart of the agent.
    fn adopt(&mut self) {
        let spec = Arc::clone(&self.spec);
        for container in spec.init_containers.iter().chain(&spec.containers) {
            let Some(latest) = self.view.latest(&container.name) else {
                continue;
            };
            if latest.state != ContainerState::Running
                || self.is_starting(&container.name)
                || self.memory.probes(&container.name, &latest.id).is_some()
            {
                continue;
            }
            let id = format!("containerd://{}", latest.id);
            let reported = self.memory.reported.as_ref().and_then(|r| {
                let mut all = r.containers.iter().chain(&r.init_containers);
                all.find(|c| c.container_id == id)
            });
            let probes = Probes {
                container_id: latest.id.clone(),
                ready: container.readiness.is_none() || reported.is_some_and(|r| r.ready),
                started: container.startup.is_none() || reported.is_some_and(|r| r.started),
                unhealthy: None,
            };
            self.memory.container(&container.name).probes = probes;
        }
    }

    fn is_starting(&self, name: &str) -> bool {
        match &self.busy {
            Some(Action::StartContainer { container, .. }) => {
                container.of(&self.spec).is_some_and(|c| c.name == name)
            }
            _ => false,
        }
    }

    fn keep_probes(&mut self) {
        let spec = Arc::clone(&self.spec);
        let (view, memory) = (&self.view, &self.memory);
        let stopping = spec.deleting || memory.terminal.is_some();
        self.probes.retain(|name, id, kind| {
            let lives = view
                .latest(name)
                .is_some_and(|c| c.id == id && c.state == ContainerState::Running);
            lives && (!stopping || kind == Kind::Readiness)
        });
        let probed = spec
            .init_containers
            .iter()
            .filter(|c| c.sidecar)
            .chain(&spec.containers);
        for container in probed {
            let Some(latest) = self.view.latest(&container.name) else {
                continue;
            };
            let Some(known) = self.memory.probes(&container.name, &latest.id) else {
                continue;
            };
            if latest.state != ContainerState::Running || known.unhealthy.is_some() {
                continue;
            }
            let kinds: &[Kind] = match (known.started, stopping) {
                (false, false) => &[Kind::Startup],
                (true, false) => &[Kind::Readiness, Kind::Liveness],
                (true, true) => &[Kind::Readiness],
                (false, true) => &[],
            };
            for kind in kinds {
                let target = self.target(container, &latest.id, latest.started_us, known.ready);
                self.probes.ensure(*kind, target, self.own.clone());
            }
        }
    }

    fn target(&self, container: &Container, id: &str, started: Micros, ready: bool) -> Target {
        let own = self
            .view
            .sandboxes
            .first()
            .and_then(|s| s.ips.first().cloned());
        let node = || self.shared.node.ips.first().map(ToString::to_string);
        Target {
            runtime: Arc::clone(&self.shared.runtime),
            container: container.clone(),
            container_id: id.to_owned(),
            started_us: started,
            pod_ip: own.or_else(node).unwrap_or_else(|| "127.0.0.1".into()),
            was_ready: ready,
        }
    }

    fn probed(&mut self, news: News) {
        let spec = Arc::clone(&self.spec);
        let mut all = spec.containers.iter().chain(&spec.init_containers);
        let Some(container) = all.find(|c| c.name == news.container) else {
            return;
        };
        let memory = self.memory.container(&news.container);
        if memory.probes.container_id != news.container_id {
            return;
        }
        let title = news.kind.title();
        match (news.kind, news.what) {
            (_, What::Complaint(message)) => {
                let text = format!("{title} probe failed: {message}");
                self.shared
                    .event(&spec, Severity::Warning, "Unhealthy", text);
            }
            (Kind::Readiness, What::Passed) => memory.probes.ready = true,
            (Kind::Readiness, What::Failed(_)) => memory.probes.ready = false,
            (Kind::Startup, What::Passed) => memory.probes.started = true,
            (Kind::Liveness, What::Passed) => {}
            (Kind::Startup | Kind::Liveness, What::Failed(_)) => {
                let probe = match news.kind {
                    Kind::Startup => container.startup.as_ref(),
                    _ => container.liveness.as_ref(),
                };
                let kind = title.to_ascii_lowercase();
                memory.probes.unhealthy = Some(Unhealthy {
                    message: format!(
                        "Container {} failed {kind} probe, will be restarted",
                        news.container
                    ),
                    grace_s: probe
                        .map(|p| p.termination_grace_period_s)
                        .filter(|g| *g > 0),
                });
            }
        }
    }

    /// Reports the status when it changed. Returns when to repeat the report.
    fn report(&mut self, now: Micros) -> Option<Micros> {
        if !self.listed {
            return None;
        }
        let mut status = pod_status(
            &self.spec,
            &self.view,
            &self.memory,
            &self.shared.node.ips,
            now,
        );
        if self.memory.removed && self.spec.deleting {
            return self.report_gone(status, now);
        }
        // Before the first look nothing is known: silence, not a wrong status.
        if !self.looked {
            return None;
        }
        status.gone = false;
        // What was saved before a restart may not have arrived: the first status is sent in any case.
        if !std::mem::replace(&mut self.reported, true)
            || self.memory.reported.as_ref() != Some(&status)
        {
            let bytes = status.encode_to_vec();
            if let Err(error) = volumes::save_status(&self.shared.node, &self.spec.uid, &bytes) {
                tracing::warn!(%error, "pod status not saved");
            }
            self.shared.outbox.pod(status.clone());
            self.memory.reported = Some(status);
        }
        None
    }

    fn report_gone(&mut self, mut status: PodStatus, now: Micros) -> Option<Micros> {
        if now < self.gone_reported_us + REPEAT_GONE_US {
            return Some(self.gone_reported_us + REPEAT_GONE_US);
        }
        if let Some(reported) = &self.memory.reported {
            status.clone_from(reported);
        }
        status.gone = true;
        self.shared.outbox.pod(status);
        self.gone_reported_us = now;
        Some(now + REPEAT_GONE_US)
    }
}

/// Grace period of a pod whose object was removed without one.
const FORCED_GRACE_S: i64 = 1;

fn retry_later(retry: &mut Retry, policy: super::backoff::Policy, now: Micros) {
    retry.backoff.next(policy, now, now);
    retry.not_before = retry.backoff.until(policy, now);
    retry.failed_at = now;
}

/// The outside of a worker.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) inbox: mpsc::Sender<Input>,
    pub(crate) task: tokio::task::JoinHandle<()>,
}

impl Drop for Handle {
    /// The runner ended, or the worker did: pods are left as they are.
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
