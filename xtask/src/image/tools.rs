//! The tools image: Debian's busybox with a link per applet and the libraries that it needs.
//!
//! Not the static busybox: its shell runs its own applets whatever PATH says, so that `wget` could not be mended.

use anyhow::Result;

use super::deb::{Packages, is_library};
use super::oci::{Config, Image, Layer};
use crate::run::{cmd, output};

const BUSYBOX: &str = "bin/busybox";

/// Debian builds busybox without wget's time limit, which examples for Kubernetes use all the time.
const WGET: &str = r#"#!/bin/sh
limit=
left=$#
while [ "$left" -gt 0 ]; do
    word=$1
    shift
    left=$((left - 1))
    case $word in
    -T | --timeout)
        limit=$1
        shift
        left=$((left - 1))
        ;;
    -T*) limit=${word#-T} ;;
    --timeout=*) limit=${word#--timeout=} ;;
    --quiet) set -- "$@" -q ;;
    *) set -- "$@" "$word" ;;
    esac
done
[ -n "$limit" ] || exec busybox wget "$@"
busybox timeout "$limit" busybox wget "$@"
code=$?
[ "$code" -lt 124 ] && exit "$code"
echo "wget: download timed out" >&2
exit 1
"#;

pub(super) fn image(packages: &Packages) -> Result<Image> {
    let mut layer = Layer::new();
    packages
        .files(&["libc6"], is_needed_library)?
        .add_to(&mut layer)?;
    add_busybox(packages, &mut layer, |_| true)?;
    base_files(&mut layer)?;
    Ok(Image {
        name: "docker.io/library/busybox:latest".into(),
        layer,
        config: Config {
            cmd: vec!["sh".into()],
            ..Config::default()
        },
    })
}

/// Adds busybox and links for the wanted applets to a layer that has a C library.
pub(super) fn add_busybox(
    packages: &Packages,
    layer: &mut Layer,
    wanted: impl Fn(&str) -> bool,
) -> Result<()> {
    let busybox = program(packages, "busybox")?;
    layer.file(BUSYBOX, &busybox, 0o755)?;
    for applet in applets(&busybox)?
        .iter()
        .filter(|a| *a != "wget" && wanted(a))
    {
        layer.symlink(&format!("bin/{applet}"), "busybox")?;
    }
    layer.file("bin/wget", WGET.as_bytes(), 0o755)
}

/// The busybox program of a package.
pub(super) fn program(packages: &Packages, package: &str) -> Result<Vec<u8>> {
    let mut files = packages.files(&[package], |p| p == BUSYBOX || p == "usr/bin/busybox")?;
    files
        .take(BUSYBOX)
        .or_else(|_| files.take("usr/bin/busybox"))
}

/// Of the C library's package, what busybox loads.
fn is_needed_library(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    let needed = ["ld-linux", "libc.so", "libresolv.so", "libnss_"];
    is_library(path) && needed.iter().any(|n| name.starts_with(n))
}

/// Asks the program itself which applets it carries.
fn applets(busybox: &[u8]) -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let program = dir.path().join("busybox");
    crate::repo::write_atomically(&program, busybox, 0o755)?;
    let said = output(&mut cmd(&program.to_string_lossy(), ["--list"]))?;
    Ok(said
        .lines()
        .filter(|a| !a.is_empty() && *a != "busybox")
        .map(str::to_owned)
        .collect())
}

/// What programs expect of any root file system.
pub(super) fn base_files(layer: &mut Layer) -> Result<()> {
    layer.file(
        "etc/passwd",
        b"root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/bin/false\nnobody:x:65534:65534:nobody:/:/bin/false\n",
        0o644,
    )?;
    layer.file(
        "etc/group",
        b"root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n",
        0o644,
    )?;
    layer.file(
        "etc/nsswitch.conf",
        b"passwd: files\ngroup: files\nhosts: files dns\n",
        0o644,
    )?;
    layer.folder("root", 0o700)?;
    layer.folder("tmp", 0o1777)?;
    layer.folder("var/tmp", 0o1777)?;
    layer.folder("run", 0o755)
}
