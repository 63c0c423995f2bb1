//! Stores on file systems that take `foo` and `Foo` for one name.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/folding.rs"]
mod folding;

use std::fs;

use common::Store;
use folding::Folding;

#[test]
fn names_that_differ_only_in_case_are_not_mixed_up() {
    let store = Store::none();
    let disk = store.dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let _folding = Folding::new(&disk, &store.path());
    let (chat, code) = (store.chat(), store.code());
    store.add("foo", &[&chat]);
    let before = store.listing();
    let same = |said: String, asked: &str, there: &str| {
        let expected = format!("{asked:?} is {there:?} on this file system");
        assert!(said.contains(&expected), "{said}");
    };
    for (name, asked, there) in [
        ("Foo", "Foo", "foo"),
        ("FOO:v2", "FOO", "foo"),
        ("foo:Latest", "Latest", "latest"),
        ("Library/foo:v2", "Library", "library"),
    ] {
        same(store.refused(&["cp", "foo", name]), asked, there);
        let code = code.to_str().unwrap();
        same(store.refused(&["import", code, "-n", name]), asked, there);
        same(store.refused(&["import", code, "-n", name, "--replace"]), asked, there);
        for command in ["rm", "show", "verify"] {
            assert!(store.refused(&[command, name]).contains("not found"), "{command}");
        }
        let other = Store::none();
        other.add(name, &[&other.code()]);
        let said = store.refused(&["import", other.path().to_str().unwrap()]);
        assert!(said.contains("on this file system"), "{name}: {said}");
    }
    assert!(store.refused(&["rm", "Foo"]).contains("which has foo:latest"));
    assert_eq!(store.listing(), before);
    store.run(&["cp", "foo", "bar"]);
    store.run(&["cp", "foo", "bar:V2"]);
    store.run(&["rm", "foo"]);
    let models = store.json(&["ls"]);
    let names: Vec<_> = models.as_array().unwrap().iter().map(|model| model["model"].as_str().unwrap()).collect();
    assert_eq!(names, ["bar:V2", "bar:latest"]);
    store.check();
}

#[test]
fn names_that_differ_only_in_case_are_two_where_the_file_system_has_two() {
    let store = Store::none();
    store.add("foo", &[&store.chat()]);
    store.add("Foo", &[&store.code()]);
    store.run(&["cp", "foo", "fOO"]);
    store.run(&["rm", "foo"]);
    let models = store.json(&["ls"]);
    let names: Vec<_> = models.as_array().unwrap().iter().map(|model| model["model"].as_str().unwrap()).collect();
    assert_eq!(names, ["Foo:latest", "fOO:latest"]);
    store.check();
}
