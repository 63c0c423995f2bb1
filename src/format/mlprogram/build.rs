//! Makes the Rust types of `coreml.proto`, without protoc.

use std::error::Error;
use std::path::PathBuf;
use std::{env, fs};

const DIRECTORY: &str = "src/format/mlprogram";
const FILE: &str = "coreml.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={DIRECTORY}/{FILE}");
    println!("cargo::rerun-if-changed={DIRECTORY}/build.rs");

    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let descriptors = out.join("coreml.descriptors");
    let mut compiler = protox::Compiler::new([DIRECTORY])?;
    fs::write(&descriptors, compiler.open_file(FILE)?.encode_file_descriptor_set())?;
    buffa_build::Config::new()
        .descriptor_set(descriptors)
        .files(&[FILE])
        .includes(&[DIRECTORY])
        .generate_views(false)
        .compile()
}
