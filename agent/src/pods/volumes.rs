//! A pod's folder on the node: volumes, hosts file, termination logs. Safe to repeat, and removable without a trace.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use control_api::v1::{Container, EmptyDir, HostPath, Volume, volume::Source};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::cri::v1;
use super::env::{ConfigError, Context};
use super::files::{File, Files, absent_tokens, files, is_secret};
use super::node::{NodeFacts, is_component, join_inside};
use super::sandbox::hosts_file;

/// The link inside a file volume that is switched when contents change, so that readers see all files change at once.
const CURRENT: &str = "..data";
const NEXT: &str = "..data_next";

/// Termination messages are cut here, as Kubernetes does.
const MAX_TERMINATION_MESSAGE: u64 = 4096;

/// A volume could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    #[error("{action} {path}: {source}")]
    Io {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("volume {volume:?}: {source}")]
    Config { volume: String, source: ConfigError },
    #[error("volume {volume:?}: hostPath type check failed: {path} is not a {kind}")]
    HostPathType {
        volume: String,
        path: PathBuf,
        kind: String,
    },
    #[error("{0}")]
    Invalid(String),
}

fn io<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(std::io::Error) -> VolumeError + use<'a> {
    move |source| VolumeError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

fn errno<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(nix::Error) -> VolumeError + use<'a> {
    move |source| VolumeError::Io {
        action,
        path: path.to_owned(),
        source: source.into(),
    }
}

fn volume_path(pod_dir: &Path, volume: &Volume) -> PathBuf {
    match &volume.source {
        Some(Source::HostPath(host)) => PathBuf::from(&host.path),
        Some(Source::Files(_)) => pod_dir.join("volumes/files").join(&volume.name),
        Some(Source::EmptyDir(_)) | None => pod_dir.join("volumes/empty-dir").join(&volume.name),
    }
}

/// Makes or refreshes every volume of the pod.
pub(crate) fn ensure(context: Context<'_>) -> Result<(), VolumeError> {
    let spec = context.spec;
    let pod_dir = context.node.pod_dir(&spec.uid);
    make_dir(&pod_dir, 0o750)?;
    let group = spec.security.as_ref().and_then(|s| s.fs_group);
    let group = group.and_then(|g| u32::try_from(g).ok());
    for volume in &spec.volumes {
        if !is_component(&volume.name) {
            return Err(VolumeError::Invalid(format!(
                "volume name {:?} is not valid",
                volume.name
            )));
        }
        let path = volume_path(&pod_dir, volume);
        match &volume.source {
            Some(Source::HostPath(host)) => host_path(volume, host)?,
            Some(Source::EmptyDir(dir)) => empty_dir(&path, dir, group)?,
            None => {
                return Err(VolumeError::Invalid(format!(
                    "volume {:?} is of a type that this node does not mount: use emptyDir, hostPath, configMap, \
                     secret, downwardAPI or projected",
                    volume.name
                )));
            }
            Some(Source::Files(set)) => {
                let mut wanted = files(context, set).map_err(|source| VolumeError::Config {
                    volume: volume.name.clone(),
                    source,
                })?;
                make_dir(&path, 0o755)?;
                if is_secret(set) && !is_mount_point(&path) {
                    mount_tmpfs(&path, "mode=0755")?;
                }
                for token in absent_tokens(set) {
                    keep_file(&path, token, &mut wanted);
                }
                write_files(&path, &wanted, group)?;
            }
        }
    }
    Ok(())
}

fn make_dir(path: &Path, mode: u32) -> Result<(), VolumeError> {
    if path.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path).map_err(io("create folder", path))?;
    set_mode(path, mode)
}

fn set_mode(path: &Path, mode: u32) -> Result<(), VolumeError> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(io("set mode of", path))
}

fn is_mount_point(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |p: &Path| fs::symlink_metadata(p).map(|m| m.dev()).ok();
    path.parent()
        .is_some_and(|parent| device(parent) != device(path))
}

fn mount_tmpfs(path: &Path, options: &str) -> Result<(), VolumeError> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options))
        .map_err(errno("mount tmpfs at", path))
}

fn empty_dir(path: &Path, dir: &EmptyDir, group: Option<u32>) -> Result<(), VolumeError> {
    let fresh = !path.is_dir();
    make_dir(path, 0o777)?;
    if dir.medium == "Memory" && !is_mount_point(path) {
        let mut options = String::from("mode=0777");
        if dir.size_limit_bytes > 0 {
            options.push_str(&format!(",size={}", dir.size_limit_bytes));
        }
        mount_tmpfs(path, &options)?;
    } else if !fresh {
        return Ok(());
    }
    if let Some(group) = group {
        chown(path, None, Some(group)).map_err(io("give to the pod's group", path))?;
        set_mode(path, 0o2777)?;
    }
    Ok(())
}

fn host_path(volume: &Volume, host: &HostPath) -> Result<(), VolumeError> {
    let path = Path::new(&host.path);
    let found = fs::metadata(path).ok().map(|m| m.file_type());
    let right = match host.r#type.as_str() {
        "" => return Ok(()),
        "DirectoryOrCreate" if found.is_none() => return make_dir(path, 0o755),
        "FileOrCreate" if found.is_none() => {
            return fs::write(path, b"").map_err(io("create file", path));
        }
        "Directory" | "DirectoryOrCreate" => found.is_some_and(|f| f.is_dir()),
        "File" | "FileOrCreate" => found.is_some_and(|f| f.is_file()),
        "Socket" => found.is_some_and(|f| f.is_socket()),
        "CharDevice" => found.is_some_and(|f| f.is_char_device()),
        "BlockDevice" => found.is_some_and(|f| f.is_block_device()),
        _ => false,
    };
    if right {
        return Ok(());
    }
    let kind = host.r#type.clone();
    Err(VolumeError::HostPathType {
        volume: volume.name.clone(),
        path: path.into(),
        kind,
    })
}

/// Takes a file of the volume over into its next contents.
fn keep_file(volume: &Path, name: &str, wanted: &mut Files) {
    let Some(path) = join_inside(&volume.join(CURRENT), name) else {
        return;
    };
    if let (Ok(data), Ok(metadata)) = (fs::read(&path), fs::metadata(&path)) {
        let mode = metadata.permissions().mode() & 0o777;
        wanted.insert(name.to_owned(), File { data, mode });
    }
}

/// Puts the files in a new folder and switches the volume's link to it; does nothing when the contents are the same.
fn write_files(volume: &Path, wanted: &Files, group: Option<u32>) -> Result<(), VolumeError> {
    let current = volume.join(CURRENT);
    if is_current(&current, wanted) {
        return Ok(());
    }
    let old = fs::read_link(&current).ok();
    let number = old
        .as_ref()
        .and_then(|o| o.to_str()?.strip_prefix("..v")?.parse::<u64>().ok())
        .map_or(0, |n| n.wrapping_add(1));
    let name = format!("..v{number}");
    let folder = volume.join(&name);
    remove_tree(&folder)?;
    make_dir(&folder, 0o755)?;
    for (path, file) in wanted {
        let target = folder.join(path);
        if let Some(parent) = target.parent() {
            make_dir(parent, 0o755)?;
        }
        fs::write(&target, &file.data).map_err(io("write", &target))?;
        let mut mode = file.mode;
        if let Some(group) = group {
            chown(&target, None, Some(group)).map_err(io("give to the pod's group", &target))?;
            mode |= 0o440;
        }
        set_mode(&target, mode)?;
    }
    let next = volume.join(NEXT);
    let _ = fs::remove_file(&next);
    symlink(&name, &next).map_err(io("link", &next))?;
    fs::rename(&next, &current).map_err(io("switch", &current))?;
    link_entries(volume, wanted)?;
    if let Some(old) = old.filter(|o| o.as_os_str() != name.as_str()) {
        remove_tree(&volume.join(old))?;
    }
    Ok(())
}

fn is_current(current: &Path, wanted: &Files) -> bool {
    fn count(folder: &Path) -> Option<usize> {
        let mut files = 0;
        for entry in fs::read_dir(folder).ok()? {
            let entry = entry.ok()?;
            files += if entry.file_type().ok()?.is_dir() {
                count(&entry.path())?
            } else {
                1
            };
        }
        Some(files)
    }
    count(current) == Some(wanted.len())
        && wanted
            .iter()
            .all(|(path, file)| fs::read(current.join(path)).is_ok_and(|data| data == file.data))
}

/// One visible link per top-level name, through the current folder.
fn link_entries(volume: &Path, wanted: &Files) -> Result<(), VolumeError> {
    let tops: std::collections::BTreeSet<&str> = wanted
        .keys()
        .filter_map(|path| path.split('/').next())
        .collect();
    for entry in fs::read_dir(volume).map_err(io("list", volume))?.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if !name.starts_with("..") && !tops.contains(name) {
            fs::remove_file(entry.path()).map_err(io("remove", &entry.path()))?;
        }
    }
    for top in tops {
        let link = volume.join(top);
        match symlink(Path::new(CURRENT).join(top), &link) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(VolumeError::Io {
                    action: "link",
                    path: link,
                    source: error,
                });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Mounts of one container, and the host path of its termination log.
pub(crate) fn mounts(
    context: Context<'_>,
    container: &Container,
    attempt: u32,
) -> Result<(Vec<v1::Mount>, String), VolumeError> {
    let (spec, node) = (context.spec, context.node);
    let pod_dir = node.pod_dir(&spec.uid);
    let mut mounts = Vec::new();
    for wanted in &container.volume_mounts {
        let volume = spec
            .volumes
            .iter()
            .find(|v| v.name == wanted.name)
            .ok_or_else(|| {
                VolumeError::Invalid(format!(
                    "container {:?} mounts volume {:?}, which the pod does not have",
                    container.name, wanted.name
                ))
            })?;
        let base = volume_path(&pod_dir, volume);
        let files = matches!(volume.source, Some(Source::Files(_)));
        let host_path = if wanted.sub_path.is_empty() {
            base
        } else {
            sub_path(&base, &wanted.sub_path, !files)?
        };
        mounts.push(v1::Mount {
            container_path: wanted.mount_path.clone(),
            host_path: host_path.to_string_lossy().into_owned(),
            readonly: wanted.read_only || files,
        });
    }
    let mut add = |host: &Path, inside: &str| {
        if !mounts.iter().any(|m| m.container_path == inside) {
            mounts.push(v1::Mount {
                container_path: inside.into(),
                host_path: host.to_string_lossy().into_owned(),
                readonly: false,
            });
        }
    };
    let hosts = pod_dir.join("etc-hosts");
    let node_hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    let text = hosts_file(
        spec,
        &context.desired.config,
        node,
        context.pod_ips,
        &node_hosts,
    );
    if fs::read_to_string(&hosts).ok().as_deref() != Some(&text) {
        fs::write(&hosts, text).map_err(io("write", &hosts))?;
        set_mode(&hosts, 0o644)?;
    }
    add(&hosts, "/etc/hosts");
    let log = termination_log(&pod_dir, container, attempt)?;
    let inside = if container.termination_message_path.is_empty() {
        "/dev/termination-log"
    } else {
        &container.termination_message_path
    };
    add(&log, inside);
    Ok((mounts, log.to_string_lossy().into_owned()))
}

/// An empty file that the container may write its last words to.
fn termination_log(
    pod_dir: &Path,
    container: &Container,
    attempt: u32,
) -> Result<PathBuf, VolumeError> {
    if !is_component(&container.name) {
        let message = format!("container name {:?} is not valid", container.name);
        return Err(VolumeError::Invalid(message));
    }
    let folder = pod_dir.join("termination");
    make_dir(&folder, 0o750)?;
    let log = folder.join(format!("{}-{attempt}", container.name));
    fs::write(&log, b"").map_err(io("create termination log", &log))?;
    // The container may run as any user.
    set_mode(&log, 0o666)?;
    Ok(log)
}

/// A path inside a volume, following links but never out of the volume.
fn sub_path(base: &Path, relative: &str, create: bool) -> Result<PathBuf, VolumeError> {
    let escape = || VolumeError::Invalid(format!("subPath {relative:?} leads out of its volume"));
    let path = join_inside(base, relative).ok_or_else(escape)?;
    if create && !path.exists() {
        make_dir(&path, 0o755)?;
    }
    let root = base.canonicalize().map_err(io("resolve", base))?;
    let real = path.canonicalize().map_err(io("resolve subPath", &path))?;
    if real.starts_with(&root) {
        Ok(real)
    } else {
        Err(escape())
    }
}

/// What a container left in its termination log.
pub(crate) fn termination_message(path: &str) -> String {
    use std::io::Read;
    let mut bytes = Vec::new();
    if path.is_empty() {
        return String::new();
    }
    if let Ok(file) = fs::File::open(path) {
        let _ = file.take(MAX_TERMINATION_MESSAGE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Unmounts and removes everything of a pod; absence is fine.
pub(crate) fn remove(node: &NodeFacts, uid: &str, logs: &Path) -> Result<(), VolumeError> {
    if !is_component(uid) {
        return Err(VolumeError::Invalid(format!(
            "pod uid {uid:?} is not valid"
        )));
    }
    let pod_dir = node.pod_dir(uid);
    unmount_below(&pod_dir)?;
    remove_tree(&pod_dir)?;
    remove_tree(logs)?;
    remove_cgroups(&node.pod_cgroup(uid));
    Ok(())
}

fn remove_tree(path: &Path) -> Result<(), VolumeError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(VolumeError::Io {
            action: "remove",
            path: path.into(),
            source: error,
        }),
        _ => Ok(()),
    }
}

fn unmount_below(folder: &Path) -> Result<(), VolumeError> {
    let table = Path::new("/proc/self/mountinfo");
    let text = fs::read_to_string(table).map_err(io("read", table))?;
    let mut points: Vec<PathBuf> = text
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|p| PathBuf::from(p.replace("\\040", " ")))
        .filter(|p| p.starts_with(folder))
        .collect();
    points.sort();
    for point in points.iter().rev() {
        umount2(point, MntFlags::MNT_DETACH).map_err(errno("unmount", point))?;
    }
    Ok(())
}

/// The runtime removes the containers' cgroups, not their parent's. Best effort: an empty cgroup costs next to nothing.
fn remove_cgroups(parent: &str) {
    let root = Path::new("/sys/fs/cgroup");
    let relative = parent.trim_start_matches('/');
    let _ = fs::remove_dir(root.join(relative));
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let _ = fs::remove_dir(entry.path().join(relative));
    }
}

/// Keeps the last reported status over a restart of the agent.
pub(crate) fn save_status(node: &NodeFacts, uid: &str, bytes: &[u8]) -> Result<(), VolumeError> {
    let dir = node.pod_dir(uid);
    make_dir(&dir, 0o750)?;
    let (next, path) = (dir.join("status.next"), dir.join("status"));
    fs::write(&next, bytes).map_err(io("write", &next))?;
    fs::rename(&next, &path).map_err(io("replace", &path))
}

pub(crate) fn load_status(node: &NodeFacts, uid: &str) -> Option<Vec<u8>> {
    fs::read(node.pod_dir(uid).join("status")).ok()
}

/// UIDs of pods that have a folder here.
pub(crate) fn known_pods(node: &NodeFacts) -> Vec<String> {
    let entries = fs::read_dir(&node.pods_dir).into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.file_name().into_string().ok())
        .collect()
}

#[cfg(test)]
#[path = "volumes_tests.rs"]
mod tests;
