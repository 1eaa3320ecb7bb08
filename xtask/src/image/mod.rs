//! Container images made here, because a cluster on a machine without a registry still has to run pods: nginx and a
//! tools image (busybox) from Debian packages, and the sandbox image from a static program of ours.
//!
//! Each image is one uncompressed layer (nodes unpack it at once). All of them travel in a single OCI archive, so a
//! node needs one import.

mod deb;
mod nginx;
mod oci;
mod tools;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use crate::artifacts::{hex, static_program};
use crate::repo::{Repo, write_atomically};
use oci::{Image, Layer};

/// Name of the sandbox image in every node's containerd configuration.
pub(crate) const PAUSE_IMAGE: &str = "docker.io/library/weir-pause:1";
/// What `docker.io/library/NAME:TAG` is called by people.
pub(crate) const IMAGES: [&str; 3] = ["nginx:latest", "busybox:latest", "weir-pause:1"];

/// Bumped when the recipes below change, so that cached archives are made anew.
const RECIPE: &str = "3";

/// Returns the archive with all images, building it when sources or recipes changed.
pub(crate) fn archive(repo: &Repo, refresh: bool) -> Result<(PathBuf, bool)> {
    let path = repo.images().join("images.oci.tar");
    let pause = static_program(repo, "weir-pause", "weir-pause")?;
    let pause = std::fs::read(&pause).with_context(|| format!("read {}", pause.display()))?;
    let stamp = path.with_extension("recipe");
    let recipe = format!("{RECIPE} pause {}", hex(&Sha256::digest(&pause)));
    let fresh = path.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|s| s == recipe);
    if fresh && !refresh {
        return Ok((path, false));
    }
    let packages = deb::Packages::open(repo.images().join("packages"))?;
    let images = [
        nginx::image(&packages)?,
        tools::image(&packages)?,
        pause_image(&pause)?,
    ];
    let bytes = oci::archive(&images)?;
    write_atomically(&path, &bytes, 0o644)?;
    write_atomically(&stamp, recipe.as_bytes(), 0o644)?;
    Ok((path, true))
}

/// Debian's static busybox: the root file system of a test kernel has no libraries.
pub(crate) fn static_busybox(repo: &Repo) -> Result<Vec<u8>> {
    let packages = deb::Packages::open(repo.images().join("packages"))?;
    tools::program(&packages, "busybox-static")
}

fn pause_image(program: &[u8]) -> Result<Image> {
    let mut layer = Layer::new();
    layer.file("pause", program, 0o755)?;
    Ok(Image {
        name: PAUSE_IMAGE.into(),
        layer,
        config: oci::Config {
            entrypoint: vec!["/pause".into()],
            ..oci::Config::default()
        },
    })
}
