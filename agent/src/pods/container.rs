//! A container as the runtime should make it. [pure]

use control_api::v1::{Container, ContainerSecurity, PodSpec, Resources};

use super::cri::v1;
use super::env::{ConfigError, Context, environment, expand};
use super::node::NodeFacts;
use super::sandbox::{groups, namespaces, pod_labels};
use super::view::label;

const CPU_PERIOD_US: i64 = 100_000;
/// The kernel's floors.
const MIN_CPU_QUOTA_US: i64 = 1_000;
const MIN_CPU_SHARES: i64 = 2;
const MAX_CPU_SHARES: i64 = 262_144;

/// Out-of-memory scores by quality of service: the higher, the sooner a process is killed.
const OOM_GUARANTEED: i64 = -997;
const OOM_BEST_EFFORT: i64 = 1000;

/// Paths of /proc and /sys that an unprivileged container does not see, or only reads.
const MASKED_PATHS: [&str; 11] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READONLY_PATHS: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// What the edge found out for this start.
#[derive(Clone, Debug, Default)]
pub(crate) struct StartFacts {
    pub(crate) attempt: u32,
    /// The image as the runtime identifies it.
    pub(crate) image_id: String,
    pub(crate) mounts: Vec<v1::Mount>,
    /// Host path of the file that is mounted at the termination message path.
    pub(crate) termination_log: String,
}

pub(crate) fn container_config(
    context: Context<'_>,
    container: &Container,
    facts: StartFacts,
) -> Result<v1::ContainerConfig, ConfigError> {
    let spec = context.spec;
    let envs = environment(context, container)?;
    let lookup = |name: &str| {
        envs.iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.clone())
    };
    let expand_all = |words: &[String]| words.iter().map(|w| expand(w, lookup)).collect();
    let mut labels: v1_labels::Labels = pod_labels(spec).into();
    labels.insert(label::CONTAINER_NAME.into(), container.name.clone());
    let annotations = v1_labels::Labels::from([
        (label::IMAGE.into(), container.image.clone()),
        (label::TERMINATION_LOG.into(), facts.termination_log.clone()),
    ]);
    Ok(v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata {
            name: container.name.clone(),
            attempt: facts.attempt,
        }),
        image: Some(v1::ImageSpec {
            image: facts.image_id,
            ..Default::default()
        }),
        command: expand_all(&container.command),
        args: expand_all(&container.args),
        working_dir: container.working_dir.clone(),
        mounts: facts.mounts,
        labels,
        annotations,
        log_path: log_path(&container.name, facts.attempt),
        stdin: container.stdin,
        stdin_once: container.stdin_once,
        tty: container.tty,
        linux: Some(v1::LinuxContainerConfig {
            resources: Some(resources(spec, container, context.node)),
            security_context: Some(security(spec, container)),
        }),
        envs: envs
            .into_iter()
            .map(|(key, value)| v1::KeyValue { key, value })
            .collect(),
    })
}

mod v1_labels {
    pub(super) type Labels = std::collections::BTreeMap<String, String>;
}

/// Relative to the pod's log folder.
pub(crate) fn log_path(container: &str, attempt: u32) -> String {
    format!("{container}/{attempt}.log")
}

fn resources(
    spec: &PodSpec,
    container: &Container,
    node: &NodeFacts,
) -> v1::LinuxContainerResources {
    let wanted = container.resources.unwrap_or_default();
    let cpu = if wanted.request_cpu_millis == 0 && wanted.limit_cpu_millis > 0 {
        wanted.limit_cpu_millis
    } else {
        wanted.request_cpu_millis
    };
    let quota = if wanted.limit_cpu_millis > 0 {
        (wanted.limit_cpu_millis.saturating_mul(CPU_PERIOD_US) / 1000).max(MIN_CPU_QUOTA_US)
    } else {
        0
    };
    v1::LinuxContainerResources {
        cpu_period: CPU_PERIOD_US,
        cpu_quota: quota,
        cpu_shares: (cpu.saturating_mul(1024) / 1000).clamp(MIN_CPU_SHARES, MAX_CPU_SHARES),
        memory_limit_in_bytes: wanted.limit_memory_bytes,
        oom_score_adj: oom_score(spec, wanted, node.memory_bytes),
    }
}

fn oom_score(spec: &PodSpec, wanted: Resources, node_memory: i64) -> i64 {
    let all = || {
        let each = spec.containers.iter().chain(&spec.init_containers);
        each.map(|c| c.resources.unwrap_or_default())
    };
    let guaranteed = all().all(|r| {
        let same = |request, limit| limit > 0 && (request == 0 || request == limit);
        same(r.request_cpu_millis, r.limit_cpu_millis)
            && same(r.request_memory_bytes, r.limit_memory_bytes)
    });
    if guaranteed {
        return OOM_GUARANTEED;
    }
    if all().all(|r| r == Resources::default()) {
        return OOM_BEST_EFFORT;
    }
    let share = i128::from(wanted.request_memory_bytes) * 1000 / i128::from(node_memory.max(1));
    let share = i64::try_from(share.min(1000)).unwrap_or(1000);
    // Above every guaranteed container, below best effort.
    (1000 - share).clamp(1000 + OOM_GUARANTEED, OOM_BEST_EFFORT - 1)
}

fn security(spec: &PodSpec, container: &Container) -> v1::LinuxContainerSecurityContext {
    let pod = spec.security.clone().unwrap_or_default();
    let own = container.security.clone().unwrap_or_default();
    let user = own.run_as_user.or(pod.run_as_user);
    let group = own.run_as_group.or(pod.run_as_group);
    let paths = |list: &[&str]| -> Vec<String> {
        if own.privileged {
            Vec::new()
        } else {
            list.iter().map(|p| (*p).to_owned()).collect()
        }
    };
    let masked_paths = paths(&MASKED_PATHS);
    let readonly_paths = paths(&READONLY_PATHS);
    v1::LinuxContainerSecurityContext {
        capabilities: Some(capabilities(&own)),
        privileged: own.privileged,
        namespace_options: Some(namespaces(spec)),
        run_as_user: user.map(|value| v1::Int64Value { value }),
        // The runtime refuses a group without a user.
        run_as_group: group
            .filter(|_| user.is_some())
            .map(|value| v1::Int64Value { value }),
        readonly_rootfs: own.read_only_root,
        supplemental_groups: groups(spec),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths,
        readonly_paths,
    }
}

fn capabilities(own: &ContainerSecurity) -> v1::Capability {
    let plain = |list: &[String]| -> Vec<String> {
        list.iter()
            .map(|c| c.strip_prefix("CAP_").unwrap_or(c).to_owned())
            .collect()
    };
    v1::Capability {
        add_capabilities: plain(&own.add_capabilities),
        drop_capabilities: plain(&own.drop_capabilities),
    }
}

/// Refuses a container that must not run as root but would.
pub(crate) fn check_user(
    spec: &PodSpec,
    container: &Container,
    image: &v1::Image,
) -> Result<(), ConfigError> {
    let pod = spec.security.clone().unwrap_or_default();
    let own = container.security.clone().unwrap_or_default();
    if !(own.run_as_non_root || pod.run_as_non_root) {
        return Ok(());
    }
    match own.run_as_user.or(pod.run_as_user) {
        Some(0) => Err(ConfigError::Invalid(
            "container's runAsUser breaks non-root policy: it asks for root".into(),
        )),
        Some(_) => Ok(()),
        None if !image.username.is_empty() => Err(ConfigError::Invalid(format!(
            "container has runAsNonRoot and image has non-numeric user ({}), cannot verify user is non-root",
            image.username
        ))),
        None if image.uid.is_some_and(|uid| uid.value != 0) => Ok(()),
        None => Err(ConfigError::Invalid(
            "container has runAsNonRoot and image will run as root".into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::v1::PodSecurity;

    fn pod(resources: Resources) -> PodSpec {
        let container = Container {
            resources: Some(resources),
            ..Container::default()
        };
        PodSpec {
            containers: vec![container],
            ..PodSpec::default()
        }
    }

    #[test]
    fn resources_become_cgroup_values() {
        let node = NodeFacts {
            memory_bytes: 1000 << 20,
            ..NodeFacts::default()
        };
        let burstable = Resources {
            request_cpu_millis: 250,
            request_memory_bytes: 100 << 20,
            limit_cpu_millis: 500,
            ..Resources::default()
        };
        let spec = pod(burstable);
        let got = resources(&spec, &spec.containers[0], &node);
        assert_eq!(
            (got.cpu_shares, got.cpu_quota, got.oom_score_adj),
            (256, 50_000, 900)
        );

        let none = pod(Resources::default());
        let got = resources(&none, &none.containers[0], &node);
        assert_eq!(
            (got.cpu_shares, got.cpu_quota, got.oom_score_adj),
            (2, 0, 1000)
        );

        let full = Resources {
            limit_cpu_millis: 1000,
            limit_memory_bytes: 1 << 20,
            ..Resources::default()
        };
        let spec = pod(full);
        let got = resources(&spec, &spec.containers[0], &node);
        assert_eq!((got.cpu_shares, got.oom_score_adj), (1024, -997));
        assert_eq!(got.memory_limit_in_bytes, 1 << 20);
    }

    #[test]
    fn root_is_refused_where_the_pod_says_so() {
        let security = PodSecurity {
            run_as_non_root: true,
            ..PodSecurity::default()
        };
        let mut spec = PodSpec {
            security: Some(security),
            ..PodSpec::default()
        };
        let container = Container::default();
        let root = v1::Image::default();
        let numeric = v1::Image {
            uid: Some(v1::Int64Value { value: 7 }),
            ..root.clone()
        };
        let named = v1::Image {
            username: "www".into(),
            ..root.clone()
        };
        assert!(check_user(&spec, &container, &root).is_err());
        assert!(check_user(&spec, &container, &named).is_err());
        assert!(check_user(&spec, &container, &numeric).is_ok());
        spec.security = Some(PodSecurity {
            run_as_user: Some(5),
            ..security_of(&spec)
        });
        assert!(check_user(&spec, &container, &root).is_ok());
    }

    fn security_of(spec: &PodSpec) -> PodSecurity {
        spec.security.clone().unwrap_or_default()
    }

    #[test]
    fn privileged_containers_see_everything() {
        let own = ContainerSecurity {
            privileged: true,
            ..ContainerSecurity::default()
        };
        let container = Container {
            security: Some(own),
            ..Container::default()
        };
        assert!(
            security(&PodSpec::default(), &container)
                .masked_paths
                .is_empty()
        );
        assert!(
            !security(&PodSpec::default(), &Container::default())
                .masked_paths
                .is_empty()
        );
    }
}
