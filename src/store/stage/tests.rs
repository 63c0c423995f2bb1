use super::super::OWN;
use super::*;

fn manifest(digests: &[Digest]) -> Vec<u8> {
    let mut layers = digests.iter().map(|digest| Layer::new(ollama::JSON, *digest, 1, &digest.hex()));
    Manifest::new(layers.next().expect("a config"), layers.collect()).to_bytes()
}

fn names(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

#[test]
fn a_model_whose_blob_another_program_removed_meanwhile_is_taken_back() {
    let place = tempfile::tempdir().expect("a directory");
    let store = Store::create(place.path()).expect("a store");
    let name: ModelName = "model".parse().expect("a name");
    let lock = store.lock().expect("locked");
    for (turn, replace) in [false, true, false].into_iter().enumerate() {
        let old = fs::read(store.manifest_path(&name)).ok();
        let stage = Stage::new(&store, &lock).expect("begun");
        let shared = stage.add_bytes(b"s").expect("taken").0;
        let own = stage.add_bytes(&[turn as u8]).expect("taken").0;
        stage.flush().expect("named");
        let manifest = manifest(&[shared, own]);
        fs::remove_file(store.blob_path(&shared)).expect("removed");
        let error = stage.publish(&name, &manifest, replace).expect_err("a blob is missing").to_string();
        assert!(error.contains(&shared.hex()) && error.contains("run the import again"), "{error}");
        assert_eq!(fs::read(store.manifest_path(&name)).ok(), old);
        if old.is_none() {
            assert_eq!(names(&store.manifests_dir()), 0);
        }
        drop(stage);
        // It can be done again, and one that is there already is no proof of its blobs.
        let stage = Stage::new(&store, &lock).expect("begun");
        assert_eq!(stage.add_bytes(b"s").expect("taken"), (shared, true));
        stage.flush().expect("named");
        stage.publish(&name, &manifest, replace).expect("whole");
        fs::remove_file(store.blob_path(&shared)).expect("removed");
        assert!(stage.publish(&name, &manifest, replace).is_err());
    }
}

#[test]
fn a_writer_whose_lock_was_removed_stops_and_removes_nothing() {
    for moves in [false, true] {
        let place = tempfile::tempdir().expect("a directory");
        let root = place.path().join("store");
        let store = Store::create(&root).expect("a store");
        let lock = store.lock().expect("locked");
        let stage = Stage::new(&store, &lock).expect("begun");
        let early = stage.add_bytes(b"e").expect("taken").0;
        stage.flush().expect("named");
        let late = stage.add_bytes(b"l").expect("taken").0;
        if moves {
            fs::rename(&root, place.path().join("moved")).expect("moved");
        } else {
            fs::remove_dir_all(root.join(OWN)).expect("removed");
        }
        // Another writer counts on what it finds.
        let other_store = Store::create(&root).expect("a store");
        let other_lock = other_store.lock().expect("it is another lock");
        let other = Stage::new(&other_store, &other_lock).expect("begun");
        assert_eq!(other.add_bytes(b"e").expect("taken").1, moves);
        other.add_bytes(b"l").expect("taken");
        let name: ModelName = "model".parse().expect("a name");
        assert!(stage.flush().is_err());
        assert!(stage.publish(&name, &manifest(&[early, late]), false).is_err());
        drop(stage);
        other.flush().expect("its files are there");
        other.publish(&name, &manifest(&[early, late]), false).expect("whole");
        assert!([early, late].iter().all(|digest| other_store.blob_path(digest).is_file()));
    }
}
