//! Compiles the protocols of outside systems (CRI, gRPC health) without an installed protoc, and embeds the eBPF object.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    embed_object()?;
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["cri.proto", "health.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_server(false)
        .btree_map(".")
        .compile_fds(files)?;
    Ok(())
}

/// Copies `$WEIR_BPF_OBJECT`, or the workspace's own build, to where the crate includes it. Without one an empty file
/// takes its place: the agent compiles, and says at its start what is missing.
fn embed_object() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-env-changed=WEIR_BPF_OBJECT");
    let default = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../target/bpf/weir.bpf.o");
    let given = env::var_os("WEIR_BPF_OBJECT").map(PathBuf::from);
    let object = given.clone().unwrap_or(default);
    println!("cargo::rerun-if-changed={}", object.display());
    let bytes = match fs::read(&object) {
        Ok(bytes) => bytes,
        Err(_) if given.is_none() => Vec::new(),
        Err(error) => {
            return Err(format!("read WEIR_BPF_OBJECT={}: {error}", object.display()).into());
        }
    };
    fs::write(Path::new(&env::var("OUT_DIR")?).join("weir.bpf.o"), bytes)?;
    Ok(())
}
