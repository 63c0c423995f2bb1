//! A manifest in brief against the whole one: every layout judges both alike.

#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::fs;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use wmount::digest::Digest;
use wmount::format::ollama::{CONFIG, JSON, MODEL, Manifest, OWN_FILE, OWN_FRAGMENT, OWN_TENSOR, TENSOR};
use wmount::layout;
use wmount::model::Model;
use wmount::store::Store;

const NAMES: [&str; 15] = [
    "a.weight",
    "b.weight",
    "a.bias",
    "x_y-1.Z",
    "a_.b",
    "a._b",
    "a__b",
    "draft.x",
    "draft.",
    "__metadata__",
    "up/down",
    "",
    ".",
    "a\u{e9}",
    "quo\"te",
];
const DTYPES: [&str; 9] = ["BF16", "F32", "I64", "U32", "F8_E4M3", "I4", "F4", "bf16", ""];
const FILES: [&str; 5] = ["config.json", "draft/config.json", "up/config.json", "tokenizer.json", "a/../b"];

fn layer(kind: &str, name: &str, size: u64) -> Value {
    let mut layer = json!({"mediaType": kind, "digest": Digest::of(name.as_bytes()).to_string(), "size": size});
    if !name.is_empty() {
        layer["name"] = name.into();
    }
    layer
}

fn tensor() -> impl Strategy<Value = Value> {
    let kind = prop_oneof![9 => Just(TENSOR), 2 => Just(OWN_TENSOR)];
    // Mostly a name of its own: of twenty tensors two would be called the same.
    let odd = prop_oneof![select(&NAMES[..]).prop_map(String::from), Just("long".repeat(40))];
    let name = prop_oneof![20 => "[a-d]\\.[0-9]{1,4}\\.(weight|bias)", 1 => odd];
    let dtype = prop_oneof![20 => select(&DTYPES[..2]), 1 => select(&DTYPES[..])];
    let odd = select(vec![vec![], vec![0_u64], vec![1 << 32, 0], vec![1; 9], vec![1 << 40], vec![7, 7, 7]]);
    let shape = prop_oneof![20 => Just(vec![2, 2]), 1 => odd];
    (kind, name, dtype, shape, select(vec!["none", "other", "other", "same"]), 0..40_u8).prop_map(
        |(kind, name, dtype, shape, named, odd)| {
            let mut layer = layer(kind, &name, if odd == 1 { 3 } else { 1000 });
            if odd != 2 {
                (layer["dtype"], layer["shape"]) = (dtype.into(), shape.into());
            }
            match named {
                "other" => layer["named"] = Digest::of(format!("named {name}").as_bytes()).to_string().into(),
                "same" => layer["named"] = layer["digest"].clone(),
                _ => {}
            }
            layer
        },
    )
}

fn whole(layers: Vec<Value>) -> Value {
    json!({"schemaVersion": 2, "mediaType": "", "config": layer(CONFIG, "", 9), "layers": layers})
}

fn manifest() -> impl Strategy<Value = String> {
    let file = (select(&[JSON, OWN_FILE, OWN_FRAGMENT][..]), select(&FILES[..]));
    let weights = prop_oneof![9 => Just(0), 1 => Just(1)];
    let named = prop_oneof![3 => Just(true), 1 => Just(false)];
    let list = (named, prop::collection::vec(tensor(), 0..12), prop::collection::vec(file, 0..4), weights);
    (list, select(vec!["", "\n", " ", "}"]), 0..20_u8).prop_map(|((named, mut layers, files, weights), end, form)| {
        if named {
            layers.iter_mut().for_each(|layer| layer["named"] = Digest::of(b"named").to_string().into());
        }
        layers.extend(files.into_iter().map(|(kind, path)| layer(kind, path, 0)));
        layers.extend((0..weights).map(|_| layer(MODEL, "", 4)));
        let whole = whole(layers);
        match form {
            0 => serde_json::to_string_pretty(&whole).unwrap(),
            1 => whole.to_string().replace(":\"", ": \"") + end,
            2 => whole.to_string().replacen("sha256:", "sha256:A", 1),
            3 => whole.to_string().replacen("\"size\":1000", "\"size\":01000", 1),
            _ => whole.to_string() + end.trim_end_matches('}'),
        }
    })
}

/// For each layout and each of its variants whether it shows a model.
fn shown(model: &Model) -> Vec<(&'static str, bool)> {
    let views = layout::all().into_iter().flat_map(|layout| {
        let variants = layout.variants().iter().map(|(_, view)| *view);
        std::iter::once(layout).chain(variants)
    });
    views.map(|view| (view.name(), view.expresses(model).is_ok())).collect()
}

#[test]
fn every_layout_judges_a_manifest_in_brief_as_the_whole_one() {
    let place = tempfile::tempdir().unwrap();
    let store = Store::create(place.path()).unwrap();
    let path = place.path().join("manifests/registry.ollama.ai/library/model/latest");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // GGUF to the eye of who looks at its beginning.
    fs::write(store.blob_path(&Digest::of(b"")), "GGUF").unwrap();
    let (briefs, shorter) = (Cell::new(0), Cell::new(0));
    let same = |text: String| {
        fs::write(&path, &text).unwrap();
        let found = store.find_one(&"model".parse().unwrap()).unwrap();
        if let Some(brief) = store.load_brief(&found, &mut Vec::new()).unwrap() {
            let whole = store.load(&found).unwrap();
            prop_assert_eq!(shown(&brief), shown(&whole));
            prop_assert_eq!(brief.is_settled(), whole.is_settled());
            briefs.set(briefs.get() + 1);
            shorter.set(shorter.get() + usize::from(brief.tensors.len() < whole.tensors.len()));
        }
        Ok(())
    };
    for names in NAMES.iter().flat_map(|first| NAMES.map(|second| [*first, second])) {
        let tensor = |name| {
            let mut layer = layer(TENSOR, name, 1000);
            (layer["dtype"], layer["shape"]) = ("BF16".into(), json!([2]));
            layer["named"] = Digest::of(b"named").to_string().into();
            layer
        };
        let files = ["config.json", "draft/config.json"].map(|path| layer(JSON, path, 0));
        same(whole(names.map(tensor).into_iter().chain(files).collect()).to_string()).unwrap();
    }
    let cases = Config { cases: 1500, failure_persistence: None, ..Config::default() };
    TestRunner::new(cases).run(&manifest(), same).unwrap();
    assert!(briefs.get() > 150 && shorter.get() > 50, "{briefs:?} {shorter:?}");
}

#[test]
fn what_is_read_in_brief_can_be_read_whole() {
    let briefs = Cell::new(0);
    let changed = (manifest(), any::<prop::sample::Index>(), select(b"\"\\{}[],:.0aA \n\x7f\xc3".to_vec()), 0..3_u8);
    let whole = |(text, at, byte, how): (String, prop::sample::Index, u8, u8)| {
        let mut text = text.into_bytes();
        let at = at.index(text.len());
        match how {
            0 => text[at] = byte,
            1 => text.insert(at, byte),
            _ => drop(text.remove(at)),
        }
        if let Some(brief) = Manifest::brief(&text) {
            let whole = Manifest::parse(&text).unwrap();
            prop_assert_eq!((brief.media_type, brief.config), (whole.media_type, whole.config));
            let mut rest = whole.layers.iter();
            prop_assert!(brief.layers.iter().all(|layer| rest.any(|other| other == layer)));
            prop_assert!(
                whole
                    .layers
                    .iter()
                    .filter(|layer| !layer.is_tensor())
                    .eq(brief.layers.iter().filter(|layer| !layer.is_tensor()))
            );
            briefs.set(briefs.get() + 1);
        }
        Ok(())
    };
    let cases = Config { cases: 4000, failure_persistence: None, ..Config::default() };
    TestRunner::new(cases).run(&changed, whole).unwrap();
    assert!(briefs.get() > 40, "{briefs:?}");
}
