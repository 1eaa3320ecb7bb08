//! Compiles the protocols of outside systems (CRI, gRPC health) without an installed protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["cri.proto", "health.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_server(false)
        .btree_map(".")
        .compile_fds(files)?;
    Ok(())
}
