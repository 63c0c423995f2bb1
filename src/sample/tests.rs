#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::digest::Digest;
use crate::format::mlprogram::decoded::Program;
use crate::format::mlprogram::{Kind, weight_file};
use crate::format::{milblob, mlpackage};

/// Name, dtype, shape and bytes of the tensors of a safetensors file.
type Tensors = BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

fn safetensors(path: PathBuf) -> Tensors {
    let file = fs::read(path).unwrap();
    let data = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    assert_eq!(data % 8, 0);
    let header: serde_json::Value = serde_json::from_slice(&file[8..data]).unwrap();
    let (mut tensors, mut end) = (BTreeMap::new(), 0);
    for (name, entry) in header.as_object().unwrap().iter().skip(1) {
        let numbers = |key: &str| -> Vec<u64> { serde_json::from_value(entry[key].clone()).unwrap() };
        let range = numbers("data_offsets");
        assert_eq!(range[0], end);
        end = range[1];
        let bytes = file[data + range[0] as usize..data + end as usize].to_vec();
        tensors.insert(name.clone(), (entry["dtype"].as_str().unwrap().to_string(), numbers("shape"), bytes));
    }
    assert_eq!(data + end as usize, file.len());
    tensors
}

#[test]
fn a_language_model_is_the_same_every_time() {
    let dir = TempDir::new().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    write_language_model(&one, 7, 32, 2, 300).unwrap();
    write_language_model(&two, 7, 32, 2, 300).unwrap();
    for file in fs::read_dir(&one).unwrap().map(|entry| entry.unwrap().file_name()) {
        assert_eq!(fs::read(one.join(&file)).unwrap(), fs::read(two.join(&file)).unwrap());
    }
    let tensors = safetensors(one.join("model.safetensors"));
    assert_eq!(tensors.len(), 3 + 2 * 9);
    assert_eq!(tensors["lm_head.weight"].1, [300, 32]);
    let file = Digest::of(&fs::read(one.join("model.safetensors")).unwrap());
    assert_eq!(file.to_string(), "sha256:30f66eb226f722219e52387c0d577e4056fe95de95963502852811d683c97c19");
}

#[test]
fn shards_hold_what_one_file_holds() {
    let dir = TempDir::new().unwrap();
    let model = LanguageModel::new(1, 16, 3, 40);
    model.write(&dir.path().join("one")).unwrap();
    let three = dir.path().join("three");
    LanguageModel { shards: 3, ..model.clone() }.write(&three).unwrap();
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(three.join("model.safetensors.index.json")).unwrap()).unwrap();
    let mut all = BTreeMap::new();
    for shard in 1..=3 {
        let name = format!("model-0000{shard}-of-00003.safetensors");
        let tensors = safetensors(three.join(&name));
        assert!(!tensors.is_empty());
        assert!(tensors.keys().all(|tensor| index["weight_map"][tensor] == name.as_str()));
        all.extend(tensors);
    }
    let size: usize = all.values().map(|(_, _, bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], size);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), all.len());
    assert_eq!(all, safetensors(dir.path().join("one/model.safetensors")));
}

#[test]
fn bf16_is_the_upper_half_of_f32() {
    let dir = TempDir::new().unwrap();
    let model = LanguageModel::new(1, 16, 1, 40);
    model.write(&dir.path().join("wide")).unwrap();
    LanguageModel { dtype: Dtype::BF16, ..model }.write(&dir.path().join("narrow")).unwrap();
    let wide = safetensors(dir.path().join("wide/model.safetensors"));
    for (name, (dtype, shape, bytes)) in safetensors(dir.path().join("narrow/model.safetensors")) {
        assert_eq!(dtype, "BF16");
        assert_eq!(shape, wide[&name].1);
        let upper: Vec<u8> = wide[&name].2.chunks(4).flat_map(|f32| [f32[2], f32[3]]).collect();
        assert_eq!(bytes, upper);
    }
}

#[test]
fn a_fine_tune_differs_in_its_layer_alone() {
    let dir = TempDir::new().unwrap();
    let model = LanguageModel::new(1, 16, 12, 40);
    model.write(&dir.path().join("base")).unwrap();
    model.tune(1).write(&dir.path().join("tuned")).unwrap();
    let tuned = safetensors(dir.path().join("tuned/model.safetensors"));
    for (name, tensor) in safetensors(dir.path().join("base/model.safetensors")) {
        assert_eq!(tuned[&name] != tensor, name.starts_with("model.layers.1."), "{name}");
    }
}

#[test]
fn packages_share_weights_with_each_other_and_with_the_language_model() {
    let dir = TempDir::new().unwrap();
    let language_model = LanguageModel::new(3, 24, 2, 40);
    language_model.write(dir.path()).unwrap();
    let tensors = safetensors(dir.path().join("model.safetensors"));
    let weights = language_model.feed_forward();
    let mut files = Vec::new();
    for length in [1, 8, 64] {
        let package = dir.path().join(format!("s{length}.mlpackage"));
        write_package(&package, length, &weights).unwrap();
        let manifest = mlpackage::parse(&fs::read(package.join("Manifest.json")).unwrap()).unwrap();
        let model = fs::read(package.join("Data").join(manifest.model_path().unwrap())).unwrap();
        let program = Program::parse(&model).unwrap();
        assert_eq!(program.kind(), Kind::MlProgram);
        assert_eq!(program.to_bytes(), Ok(model));

        let references = program.references().unwrap();
        let file = weight_file(&references[0].file).unwrap();
        let file = fs::read(package.join("Data").join(mlpackage::WEIGHTS_PATH).join(file)).unwrap();
        let blobs = milblob::parse(&file[..]).unwrap();
        assert_eq!(blobs.len(), weights.len());
        for ((reference, blob), weight) in references.iter().zip(blobs).zip(&weights) {
            assert_eq!(reference.offset, blob.metadata);
            assert_eq!(reference.name, weight.name.replace('.', "_"));
            let bytes = &file[blob.offset as usize..blob.end() as usize];
            let same = ("F32".to_string(), reference.shape.clone(), bytes.to_vec());
            assert_eq!(tensors[&weight.name], same);
        }
        files.push(file);
    }
    assert!(files.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn what_cannot_be_made_is_refused() {
    let dir = TempDir::new().unwrap();
    let refused = |model: LanguageModel| matches!(model.write(dir.path()), Err(Error::Invalid(_)));
    let model = LanguageModel::new(1, 16, 1, 40);
    assert!(refused(LanguageModel { hidden: 0, ..model.clone() }));
    assert!(refused(LanguageModel { hidden: 15, ..model.clone() }));
    assert!(refused(LanguageModel { vocabulary: 3, ..model.clone() }));
    assert!(refused(LanguageModel { shards: 0, ..model.clone() }));
    assert!(refused(LanguageModel { dtype: Dtype::I8, ..model.clone() }));
    assert!(refused(LanguageModel { hidden: 1 << 62, ..model.clone() }));

    let package = |weights: &[Tensor]| matches!(write_package(dir.path(), 1, weights), Err(Error::Invalid(_)));
    let weights = model.feed_forward();
    assert!(package(&[]));
    assert!(package(&[weights[0].clone(), weights[0].clone()]));
    assert!(package(&LanguageModel { dtype: Dtype::BF16, ..model.clone() }.tensors()[..1]));
    assert!(package(&model.tensors()[1..2]));
}
