//! The root file system of a test kernel: busybox, the modules it needs, the test program and an init that runs it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::cpio::Cpio;
use super::kernel::Files;
use crate::run::cmd;

/// Modules that the programs' surroundings need; where one is built in, or does not exist, nothing is loaded.
const MODULES: [&str; 13] = [
    "veth",
    "sch_ingress",
    "cls_bpf",
    "act_bpf",
    "vxlan",
    "bridge",
    "dummy",
    "ipv6",
    "crc32c_generic",
    "hmac",
    "md5",
    "sha1_generic",
    "sctp",
];
const APPLETS: [&str; 8] = [
    "sh", "mount", "mkdir", "insmod", "poweroff", "echo", "uname", "ip",
];

/// Printed by init before the test program runs: the firmware's words end here.
pub(super) const START_MARK: &str = "weir-vm start";
/// Printed by init before the test program's exit code.
pub(super) const EXIT_MARK: &str = "weir-vm exit ";
/// Printed by the init of a probe.
pub(super) const PROBE_MARK: &str = "weir-vm alive";

/// What goes into every kernel's file system.
pub(super) struct Payload {
    pub(super) busybox: Vec<u8>,
    pub(super) test: Vec<u8>,
    /// Path without a leading slash, and content.
    pub(super) libraries: Vec<(String, Vec<u8>)>,
}

/// The file system for the tests.
pub(super) fn build(kernel: &Files, payload: &Payload) -> Result<Vec<u8>> {
    let mut cpio = base(&payload.busybox);
    cpio.file("bin/weir_vmtest", &payload.test, 0o755);
    for (path, content) in &payload.libraries {
        cpio.parents(path);
        cpio.file(path, content, 0o755);
    }
    cpio.folder("modules");
    let mut load = String::new();
    for (i, module) in modules(kernel)?.iter().enumerate() {
        let path = format!("modules/{i}.ko");
        cpio.file(&path, module, 0o644);
        let _ = writeln!(load, "insmod /{path}");
    }
    let init = format!(
        "#!/bin/sh
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
mkdir -p /run/netns
{load}ip link set lo up
echo
echo \"{START_MARK}\"
/bin/weir_vmtest
echo \"{EXIT_MARK}$?\"
poweroff -f
"
    );
    cpio.file("init", init.as_bytes(), 0o755);
    Ok(cpio.finish())
}

/// The smallest file system that shows a kernel runs.
pub(super) fn probe(busybox: &[u8]) -> Vec<u8> {
    let mut cpio = base(busybox);
    let init = format!("#!/bin/sh\necho \"{PROBE_MARK}\"\n/bin/poweroff -f\n");
    cpio.file("init", init.as_bytes(), 0o755);
    cpio.finish()
}

fn base(busybox: &[u8]) -> Cpio {
    let mut cpio = Cpio::default();
    for folder in ["bin", "proc", "sys", "dev", "run", "tmp"] {
        cpio.folder(folder);
    }
    cpio.file("bin/busybox", busybox, 0o755);
    for applet in APPLETS {
        cpio.link(&format!("bin/{applet}"), "busybox");
    }
    cpio
}

/// The wanted modules and what they depend on, in loading order, uncompressed.
fn modules(kernel: &Files) -> Result<Vec<Vec<u8>>> {
    let mut loaded = BTreeSet::new();
    let mut order = Vec::new();
    for name in MODULES {
        add_module(kernel, name, &mut loaded, &mut order)?;
    }
    Ok(order)
}

fn add_module(
    kernel: &Files,
    name: &str,
    loaded: &mut BTreeSet<String>,
    order: &mut Vec<Vec<u8>>,
) -> Result<()> {
    let Some(path) = kernel.modules.get(name) else {
        return Ok(());
    };
    if !loaded.insert(name.to_owned()) {
        return Ok(());
    }
    let bytes = read_module(path)?;
    for dependency in dependencies(&bytes) {
        add_module(kernel, &dependency, loaded, order)?;
    }
    order.push(bytes);
    Ok(())
}

/// Newer suites compress their modules.
fn read_module(path: &Path) -> Result<Vec<u8>> {
    let unpacker = match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return std::fs::read(path).with_context(|| format!("read {}", path.display())),
    };
    let out = crate::run::capture(cmd(unpacker, ["-dc"]).arg(path))?;
    anyhow::ensure!(
        out.status.success(),
        "unpack {}: {}",
        path.display(),
        out.status
    );
    Ok(out.stdout)
}

/// Names in the module's own `depends=` record (section .modinfo, NUL-separated).
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|w| w == KEY) else {
        return Vec::new();
    };
    let value = module.get(at + KEY.len()..).unwrap_or_default();
    let value = value.split(|b| *b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_the_modules_own_record() {
        let module = b"\x7fELF..\0license=GPL\0depends=udp_tunnel,ip6-udp-tunnel\0name=vxlan\0";
        assert_eq!(dependencies(module), ["udp_tunnel", "ip6_udp_tunnel"]);
        assert!(dependencies(b"\0depends=\0").is_empty());
        assert!(dependencies(b"nothing").is_empty());
        assert!(dependencies(b"\0depends=").is_empty());
    }
}
