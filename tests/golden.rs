//! What is synthesised stays the same to the byte: page caches, compiled models and ollama's records live by it.
//!
//! If a test here fails, either a fault crept in, or the change must be one that users are told of.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Store, facts_of_vfs};
use wmount::digest::Digest;
use wmount::vfs::Vfs;

fn digest(vfs: &Vfs, path: &str) -> String {
    let attr = vfs.resolve(path).unwrap();
    let mut bytes = vec![0; attr.size as usize];
    assert_eq!(vfs.read(attr.ino, 0, &mut bytes).unwrap(), bytes.len());
    Digest::of(&bytes).to_string()
}

/// Checks a table of paths and digests, and prints what would be true.
fn check(vfs: &Vfs, golden: &[(&str, &str)]) {
    let found: Vec<(&str, String)> = golden.iter().map(|(path, _)| (*path, digest(vfs, path))).collect();
    assert!(found.iter().zip(golden).all(|(a, b)| a.1 == b.1), "found {found:#?}");
}

#[test]
fn synthesised_files_have_the_digests_that_they_always_had() {
    let store = Store::of_two();
    let vfs = store.vfs();
    check(
        &vfs,
        &[
            ("amb/llama/chat.amb", "sha256:e025b8be020b277c55d350d549132da50891d90612a1792b9ff54d866ad99031"),
            ("amb/llama/code.amb", "sha256:6603cab0d72f97c31cdd6cb299d431616310264ac8088edd8e9ee81684ce0260"),
            (
                "ollama/manifests/registry.ollama.ai/library/llama/chat",
                "sha256:b40a1170fd0b37d53df0a96ecb57961e37a220943d701fbe099937203b80b482",
            ),
            (
                "coreml/llama/chat/s8.mlpackage/Data/com.apple.CoreML/model.mlmodel",
                "sha256:71d577a15ee4dd00d25f22296ca3fc4c875681c5337910d5d19e73f70e2ada7d",
            ),
            (
                "coreml/llama/chat/s8.mlpackage/Data/com.apple.CoreML/weights/weight.bin",
                "sha256:e2e8ffc304032492e230999aa7fd87704ad1da213f64c5e210af401afd7f6dea",
            ),
        ],
    );
}

#[test]
fn a_model_from_coreml_alone_has_the_safetensors_file_that_it_always_had() {
    let store = Store::none();
    let package = store.package("s1", 1, &wmount::sample::LanguageModel::new(7, 32, 2, 300));
    store.add("encoder", &[&package]);
    check(
        &store.vfs(),
        &[
            (
                "safetensors/encoder/latest/model.safetensors",
                "sha256:aca4868c37acb6228c4925f60c9b8d6fdb5af120533366d61d050b84d258d6c9",
            ),
            ("amb/encoder/latest.amb", "sha256:97f893eff7d19a54693b0cec8525528b35346eb315e5463584c896dc1bb7dc7c"),
        ],
    );
}

#[test]
fn blobs_of_the_mounted_ollama_directory_have_the_digests_in_their_names() {
    let store = Store::of_two();
    let vfs = store.vfs();
    let blobs = vfs.entries(vfs.resolve("ollama/blobs").unwrap().ino).unwrap();
    assert!(blobs.children.len() > 20);
    for blob in blobs.children.iter() {
        let named = Digest::from_file_name(&blob.name).unwrap();
        assert_eq!(digest(&vfs, &format!("ollama/blobs/{}", blob.name)), named.to_string());
    }
}

#[test]
fn inode_numbers_are_those_of_every_version() {
    let facts = facts_of_vfs(&Store::of_two().vfs());
    let golden = [
        ("amb", 2_363_314_753_941_715_076),
        ("amb/llama/chat.amb", 6_101_641_232_620_547_018),
        ("coreml/llama/chat/s8.mlpackage/Data/com.apple.CoreML/weights/weight.bin", 7_856_848_066_176_079_461),
        ("original/llama/code/code", 3_882_114_179_873_531_093),
        ("safetensors/llama/code/model.safetensors", 6_809_272_597_364_686_898),
    ];
    let found: Vec<(&str, u64)> = golden.iter().map(|(path, _)| (*path, facts[*path].0)).collect();
    assert_eq!(found, golden);
}
