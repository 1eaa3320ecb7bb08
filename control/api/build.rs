//! Compiles the node feed protocol without an installed protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["weir/node/v1/feed.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .btree_map(".")
        .compile_fds(files)?;
    Ok(())
}
