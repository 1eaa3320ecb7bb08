//! An OCI archive with busybox, made by hand: one layer, run as pod image and as sandbox image.

use std::path::Path;

use sha2::{Digest, Sha256};

pub(crate) const IMAGE: &str = "docker.io/library/podtest:latest";

const BUSYBOX: &str = "/bin/busybox";

const APPLETS: [&str; 16] = [
    "sh", "sleep", "cat", "echo", "ls", "test", "touch", "rm", "httpd", "env", "kill", "head",
    "id", "seq", "stat", "wget",
];

fn file(tar: &mut tar::Builder<Vec<u8>>, path: &str, data: &[u8], mode: u32) {
    let mut header = tar::Header::new_ustar();
    header.set_size(data.len() as u64);
    header.set_mode(mode);
    header.set_cksum();
    tar.append_data(&mut header, path, data).unwrap();
}

/// What a busybox that is not static needs beside it.
fn libraries() -> Vec<String> {
    let output = std::process::Command::new("ldd")
        .arg(BUSYBOX)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.split_whitespace().filter(|w| w.starts_with('/'));
    words
        .filter(|w| !w.ends_with(':'))
        .map(str::to_owned)
        .collect()
}

fn layer() -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    let busybox = std::fs::read(BUSYBOX).expect("package busybox or busybox-static is installed");
    file(&mut tar, "bin/busybox", &busybox, 0o755);
    for library in libraries() {
        let data = std::fs::read(&library).unwrap();
        file(&mut tar, library.trim_start_matches('/'), &data, 0o755);
    }
    for applet in APPLETS {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        tar.append_link(&mut header, format!("bin/{applet}"), "/bin/busybox")
            .unwrap();
    }
    for dir in ["tmp/", "etc/", "dev/"] {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_size(0);
        header.set_mode(0o1777);
        tar.append_data(&mut header, dir, &[][..]).unwrap();
    }
    tar.into_inner().unwrap()
}

fn digest(bytes: &[u8]) -> String {
    let sum = Sha256::digest(bytes);
    sum.iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes the archive for `ctr images import`.
pub(crate) fn write_archive(path: &Path) {
    let layer = layer();
    let layer_digest = digest(&layer);
    let config = serde_json::json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": {
            "Env": ["PATH=/bin"],
            "Entrypoint": ["/bin/sleep", "2147483647"],
        },
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer_digest}")]},
    })
    .to_string();
    let config_digest = digest(config.as_bytes());
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": format!("sha256:{config_digest}"),
            "size": config.len(),
        },
        "layers": [{
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": format!("sha256:{layer_digest}"),
            "size": layer.len(),
        }],
    })
    .to_string();
    let manifest_digest = digest(manifest.as_bytes());
    let index = serde_json::json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": format!("sha256:{manifest_digest}"),
            "size": manifest.len(),
            "annotations": {"io.containerd.image.name": IMAGE},
        }],
    })
    .to_string();
    let mut tar = tar::Builder::new(Vec::new());
    file(
        &mut tar,
        "oci-layout",
        br#"{"imageLayoutVersion":"1.0.0"}"#,
        0o644,
    );
    file(&mut tar, "index.json", index.as_bytes(), 0o644);
    for (digest, bytes) in [
        (&manifest_digest, manifest.as_bytes()),
        (&config_digest, config.as_bytes()),
        (&layer_digest, layer.as_slice()),
    ] {
        file(&mut tar, &format!("blobs/sha256/{digest}"), bytes, 0o644);
    }
    std::fs::write(path, tar.into_inner().unwrap()).unwrap();
}
