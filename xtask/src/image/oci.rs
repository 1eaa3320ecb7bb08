//! Writer of OCI image archives (image-spec v1): one layer per image, one index over all of them.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use crate::artifacts::hex;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// One image: a full name, its only layer, and how it runs.
pub(crate) struct Image {
    pub(crate) name: String,
    pub(crate) layer: Layer,
    pub(crate) config: Config,
}

/// The part of an image's configuration that these images use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Config {
    pub(crate) entrypoint: Vec<String>,
    pub(crate) cmd: Vec<String>,
    pub(crate) exposed_ports: Vec<&'static str>,
    pub(crate) stop_signal: Option<&'static str>,
}

/// A file tree as a tar stream. Owner is root and times are zero, so equal content gives equal digests.
pub(crate) struct Layer {
    tar: Builder<Vec<u8>>,
    folders: std::collections::BTreeSet<String>,
}

impl Layer {
    pub(crate) fn new() -> Self {
        Self {
            tar: Builder::new(Vec::new()),
            folders: std::collections::BTreeSet::new(),
        }
    }

    /// Adds a folder and the folders above it. A folder that is there already keeps its mode.
    pub(crate) fn folder(&mut self, path: &str, mode: u32) -> Result<()> {
        let path = path.trim_matches('/');
        if path.is_empty() || !self.folders.insert(path.to_owned()) {
            return Ok(());
        }
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above, 0o755)?;
        }
        let mut header = header(EntryType::Directory, 0, mode);
        self.tar
            .append_data(&mut header, format!("{path}/"), std::io::empty())
            .with_context(|| format!("add folder {path} to the layer"))
    }

    pub(crate) fn file(&mut self, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
        self.parents(path)?;
        let mut header = header(EntryType::Regular, bytes.len() as u64, mode);
        self.tar
            .append_data(&mut header, path, bytes)
            .with_context(|| format!("add {path} to the layer"))
    }

    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        self.parents(path)?;
        let mut header = header(EntryType::Symlink, 0, 0o777);
        self.tar
            .append_link(&mut header, path, target)
            .with_context(|| format!("add link {path} to the layer"))
    }

    fn parents(&mut self, path: &str) -> Result<()> {
        match path.rsplit_once('/') {
            Some((above, _)) => self.folder(above, 0o755),
            None => Ok(()),
        }
    }
}

fn header(kind: EntryType, size: u64, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

/// Encodes the images as one archive that `ctr images import` takes.
pub(crate) fn archive(images: &[Image]) -> Result<Vec<u8>> {
    let mut blobs: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut add = |bytes: Vec<u8>| -> (String, usize) {
        let digest = hex(&Sha256::digest(&bytes));
        let size = bytes.len();
        blobs.insert(digest.clone(), bytes);
        (format!("sha256:{digest}"), size)
    };
    let mut manifests = Vec::new();
    for image in images {
        let mut tar = Builder::new(image.layer.tar.get_ref().clone());
        tar.finish().context("finish the layer")?;
        let (layer, layer_size) = add(tar.into_inner().context("finish the layer")?);
        let config = serde_json::to_vec(&config_json(&image.config, &layer))?;
        let (config, config_size) = add(config);
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": config, "size": config_size},
            "layers": [{"mediaType": LAYER, "digest": layer, "size": layer_size}],
        }))?;
        let (manifest, manifest_size) = add(manifest);
        manifests.push(json!({
            "mediaType": MANIFEST, "digest": manifest, "size": manifest_size,
            "annotations": {"io.containerd.image.name": image.name},
        }));
    }
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
    let mut files = Layer::new();
    files.file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
    files.file("index.json", &serde_json::to_vec(&index)?, 0o644)?;
    for (digest, bytes) in &blobs {
        files.file(&format!("blobs/sha256/{digest}"), bytes, 0o644)?;
    }
    files.tar.into_inner().context("finish the archive")
}

fn config_json(config: &Config, layer: &str) -> Value {
    let ports: serde_json::Map<String, Value> = config
        .exposed_ports
        .iter()
        .map(|port| ((*port).to_owned(), json!({})))
        .collect();
    let mut run = json!({
        "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        "Entrypoint": config.entrypoint, "Cmd": config.cmd, "WorkingDir": "/", "ExposedPorts": ports,
    });
    if let Some(signal) = config.stop_signal {
        run["StopSignal"] = json!(signal);
    }
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    // The layer is stored uncompressed, so its diff id is its digest.
    json!({
        "architecture": architecture, "os": "linux", "config": run,
        "rootfs": {"type": "layers", "diff_ids": [layer]},
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    fn entries(bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(bytes);
        let mut found = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().to_string_lossy().into_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            found.insert(path, content);
        }
        found
    }

    #[test]
    fn every_digest_of_the_index_resolves_to_a_blob_with_that_digest() {
        let mut layer = Layer::new();
        layer.file("etc/motd", b"hello", 0o644).unwrap();
        layer.symlink("bin/sh", "busybox").unwrap();
        let image = Image {
            name: "docker.io/library/x:1".into(),
            layer,
            config: Config::default(),
        };
        let files = entries(&archive(&[image]).unwrap());
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        let manifest = &index["manifests"][0];
        assert_eq!(
            manifest["annotations"]["io.containerd.image.name"],
            "docker.io/library/x:1"
        );
        let blob = |digest: &Value| {
            let digest = digest.as_str().unwrap().strip_prefix("sha256:").unwrap();
            let bytes = files[&format!("blobs/sha256/{digest}")].clone();
            assert_eq!(hex(&Sha256::digest(&bytes)), digest);
            bytes
        };
        let manifest: Value = serde_json::from_slice(&blob(&manifest["digest"])).unwrap();
        let config: Value = serde_json::from_slice(&blob(&manifest["config"]["digest"])).unwrap();
        assert_eq!(
            config["rootfs"]["diff_ids"][0],
            manifest["layers"][0]["digest"]
        );
        let tree = entries(&blob(&manifest["layers"][0]["digest"]));
        assert_eq!(tree["etc/motd"], b"hello");
        assert!(tree.contains_key("etc/") && tree.contains_key("bin/sh"));
    }

    #[test]
    fn equal_content_gives_an_equal_archive() {
        let build = || {
            let mut layer = Layer::new();
            layer.file("a/b", b"c", 0o600).unwrap();
            archive(&[Image {
                name: "n".into(),
                layer,
                config: Config::default(),
            }])
            .unwrap()
        };
        assert_eq!(build(), build());
    }
}
