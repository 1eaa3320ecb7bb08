//! Where things are pinned: `BPFFS/weir/v<ABI>/{maps,programs,links}`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use aya::programs::TcAttachType;
use aya::programs::links::{Link as _, PinnedLink};
use aya::programs::tc::SchedClassifierLink;
use dataplane_common::{ABI_SAME_SINCE, ABI_VERSION};

use super::attach::{CLSACT_HANDLE, CLSACT_PRIORITY};
use super::{Program, SocketHook, driver};
use crate::kernel::KernelError;
use crate::kernel::table::detach_link;

/// All pins of the product lie below this name.
const ROOT: &str = "weir";

/// The folders of one ABI version.
#[derive(Clone, Debug)]
pub(super) struct Pins {
    maps: PathBuf,
    programs: PathBuf,
    links: PathBuf,
    /// Roots of other versions, whose programs handle the packets until this agent's tables are filled.
    others: Vec<PathBuf>,
}

impl Pins {
    /// Folders of this version; those of an earlier one whose tables have the same shapes become them.
    pub(super) fn create(bpffs: &Path) -> Result<Self, KernelError> {
        let failed = |source| KernelError::Pin {
            attempted: "look at",
            path: bpffs.into(),
            source,
        };
        let kind = nix::sys::statfs::statfs(bpffs).map_err(|errno| failed(errno.into()))?;
        if kind.filesystem_type() != nix::sys::statfs::BPF_FS_MAGIC {
            return Err(KernelError::NotBpffs { path: bpffs.into() });
        }
        let root = bpffs.join(ROOT).join(format!("v{ABI_VERSION}"));
        let mut others = versions(&bpffs.join(ROOT)).map_err(failed)?;
        if others.remove(&ABI_VERSION).is_none()
            && let Some((version, same)) = others
                .range(ABI_SAME_SINCE..ABI_VERSION)
                .next_back()
                .map(|(version, path)| (*version, path.clone()))
        {
            std::fs::rename(&same, &root).map_err(|source| KernelError::Pin {
                attempted: "take over",
                path: same,
                source,
            })?;
            others.remove(&version);
            tracing::info!(version, "took over the tables of an earlier version");
        }
        let pins = Self {
            maps: root.join("maps"),
            programs: root.join("programs"),
            links: root.join("links"),
            others: others.into_values().collect(),
        };
        for path in [&pins.maps, &pins.programs, &pins.links] {
            std::fs::create_dir_all(path).map_err(|source| KernelError::Pin {
                attempted: "create",
                path: path.clone(),
                source,
            })?;
        }
        Ok(pins)
    }

    pub(super) fn maps(&self) -> &Path {
        &self.maps
    }

    /// True while programs of another version may be attached.
    pub(super) fn has_others(&self) -> bool {
        !self.others.is_empty()
    }

    /// True when a link of another version is pinned by the name of this one.
    pub(super) fn is_others(&self, link: &Path) -> bool {
        let name = link.file_name().unwrap_or_default();
        let mut links = self.others.iter().map(|other| other.join("links"));
        links.any(|folder| folder.join(name).exists())
    }

    /// Moves the pinned links of other versions to this one's. One that is there already stays.
    pub(super) fn take_links(&self) -> Result<(), KernelError> {
        for other in &self.others {
            let links = other.join("links");
            let failed = |source| KernelError::Pin {
                attempted: "take over the links in",
                path: links.clone(),
                source,
            };
            let entries = match std::fs::read_dir(&links) {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed(error)),
            };
            for entry in entries {
                let entry = entry.map_err(failed)?;
                let own = self.links.join(entry.file_name());
                if !own.exists() {
                    std::fs::rename(entry.path(), own).map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    /// Removes what is left of other versions: their tables go with the last program that uses them.
    pub(super) fn forget_others(&mut self) -> Result<(), KernelError> {
        while let Some(other) = self.others.last() {
            remove_below(other, &mut Vec::new())?;
            self.others.pop();
        }
        Ok(())
    }

    pub(super) fn program(&self, program: Program) -> PathBuf {
        self.programs.join(program.name())
    }

    /// A link's pin. Names in a bpffs have no dots.
    pub(super) fn link(&self, ifindex: u32, program: Program) -> PathBuf {
        self.links.join(format!("{ifindex}-{program}"))
    }

    /// The pin of a socket hook's link. No interface's number starts like this.
    pub(super) fn socket(&self, hook: SocketHook) -> PathBuf {
        self.links.join(format!("socket-{}", hook.name()))
    }

    /// The pin of a driver's link.
    pub(super) fn driver(&self, ifindex: u32) -> PathBuf {
        self.links.join(driver::pin_name(ifindex))
    }

    /// Interfaces whose drivers' links are pinned.
    pub(super) fn drivers(&self) -> io::Result<Vec<u32>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.links)? {
            let name = entry?.file_name();
            found.extend(name.to_str().and_then(driver::pinned_ifindex));
        }
        Ok(found)
    }

    /// Links that are pinned, by interface and program.
    pub(super) fn links(&self) -> io::Result<Vec<(u32, Program)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.links)? {
            let name = entry?.file_name();
            let parsed = name
                .to_str()
                .and_then(|name| name.split_once('-'))
                .and_then(|(ifindex, program)| {
                    Some((ifindex.parse().ok()?, Program::from_name(program)?))
                });
            found.extend(parsed);
        }
        Ok(found)
    }
}

/// The folders of all versions.
fn versions(root: &Path) -> io::Result<BTreeMap<u32, PathBuf>> {
    let entries = match std::fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let mut found = BTreeMap::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let version = name.to_str().and_then(|name| name.strip_prefix('v'));
        if let Some(version) = version.and_then(|number| number.parse().ok()) {
            found.insert(version, entry.path());
        }
    }
    Ok(found)
}

/// Removes all pins, and with them the attachments; filters of kernels without TCX are removed from every interface.
pub(in crate::kernel) fn cleanup(bpffs: &Path) -> Result<Vec<PathBuf>, KernelError> {
    let root = bpffs.join(ROOT);
    let mut removed = Vec::new();
    if root.exists() {
        remove_below(&root, &mut removed)?;
    }
    for interface in nix::net::if_::if_nameindex().into_iter().flat_map(|all| {
        all.iter()
            .filter_map(|i| i.name().to_str().ok().map(str::to_owned))
            .collect::<Vec<_>>()
    }) {
        for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
            let link = SchedClassifierLink::attached(
                &interface,
                direction,
                CLSACT_PRIORITY,
                CLSACT_HANDLE,
                None,
            );
            // An interface without the filter refuses, which is what is wanted.
            if link.is_ok_and(|link| link.detach().is_ok()) {
                removed.push(PathBuf::from(format!("tc/{interface}/{direction:?}")));
            }
        }
    }
    Ok(removed)
}

fn remove_below(path: &Path, removed: &mut Vec<PathBuf>) -> Result<(), KernelError> {
    let failed = |attempted, path: &Path| {
        let path = path.to_path_buf();
        move |source| KernelError::Pin {
            attempted,
            path,
            source,
        }
    };
    for entry in std::fs::read_dir(path).map_err(failed("list", path))? {
        let entry = entry.map_err(failed("list", path))?;
        let child = entry.path();
        if entry
            .file_type()
            .map_err(failed("look at", &child))?
            .is_dir()
        {
            remove_below(&child, removed)?;
        } else {
            // Refused for maps and programs, which need no detaching.
            let _ = detach_link(&child);
            std::fs::remove_file(&child).map_err(failed("remove", &child))?;
            removed.push(child);
        }
    }
    std::fs::remove_dir(path).map_err(failed("remove", path))?;
    removed.push(path.to_path_buf());
    Ok(())
}

/// Opens a pinned link.
pub(super) fn open_link(path: &Path) -> Option<PinnedLink> {
    PinnedLink::from_pin(path).ok()
}
