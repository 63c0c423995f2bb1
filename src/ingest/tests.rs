use super::*;
use crate::store::Store;

struct World {
    place: tempfile::TempDir,
    vfs: Arc<Vfs>,
    ingest: Ingest,
}

fn world() -> World {
    let place = tempfile::tempdir().expect("a directory");
    let store = Arc::new(Store::create(place.path()).expect("a store"));
    let vfs = Arc::new(Vfs::new(store).expect("a tree"));
    let ingest = Ingest::new(vfs.clone()).expect("writable");
    World { place, vfs, ingest }
}

impl World {
    fn write(&self, dir: &str, name: &str, bytes: &[u8]) -> Result<()> {
        let (_, handle) = self.ingest.create(dir, name, false)?;
        let written = self.ingest.set(0, Some(handle), Some(0), None).and_then(|_| self.ingest.write(handle, 0, bytes));
        let flushed = self.ingest.flush(handle);
        self.ingest.release(handle);
        written.and(flushed)
    }

    fn blob(&self, bytes: &[u8]) -> String {
        let digest = Digest::of(bytes);
        self.write(BLOBS, "sha256-1", bytes).expect("written");
        self.ingest.rename((BLOBS, "sha256-1"), (BLOBS, &digest.file_name()), true).expect("its content");
        digest.to_string()
    }

    fn manifest(&self, bytes: &[u8]) -> Vec<u8> {
        let layer = |bytes: &[u8]| {
            serde_json::json!({"mediaType": "application/vnd.ollama.image.license", "digest": self.blob(bytes),
                "size": bytes.len()})
        };
        let manifest = serde_json::json!({"schemaVersion": 2, "config": layer(b"{}"), "layers": [layer(bytes)]});
        serde_json::to_vec(&manifest).expect("JSON")
    }

    /// The directory of the manifests of `name`, made as ollama makes it.
    fn model_dir(&self, name: &str) -> String {
        ["registry.ollama.ai", "library", name].iter().fold(MANIFESTS.to_owned(), |dir, part| {
            let _exists = self.ingest.make_dir(&dir, part);
            format!("{dir}/{part}")
        })
    }

    fn names(&self, dir: &str) -> Vec<String> {
        let ino = self.ingest.lookup("", ROOT).expect("the root").ino;
        let names = self.ingest.entries(ino, dir).expect("a directory");
        names.from(2).map(|(_, name, ..)| name.into()).collect()
    }

    fn stored(&self) -> usize {
        std::fs::read_dir(self.place.path().join("blobs")).expect("blobs").count()
    }
}

#[test]
fn a_manifest_makes_a_model_and_its_removal_removes_it() {
    let world = world();
    let (manifest, dir) = (world.manifest(b"one"), world.model_dir("made"));
    assert_eq!((world.stored(), world.names(BLOBS).len()), (0, 2), "no blob without a manifest");
    world.write(&dir, "latest", &manifest).expect("a model");
    assert_eq!((world.stored(), world.names(BLOBS).len()), (2, 2));
    assert_eq!(world.vfs.tree().entries().len(), 1);
    assert!(world.ingest.dir.names().expect("listed").is_empty() && world.ingest.state().names.is_empty());
    // Another model in its place: what ollama saw of the old one is there until ollama removes it.
    let old = Digest::of(b"one").file_name();
    world.write(&dir, "latest", &world.manifest(b"two")).expect("a model");
    assert_eq!((world.stored(), world.names(BLOBS).len()), (3, 3));
    world.ingest.unlink(BLOBS, &old).expect("nobody needs it");
    assert!(world.ingest.unlink(BLOBS, &old).is_err());
    let needed = Digest::of(b"two").file_name();
    world.ingest.unlink(BLOBS, &needed).expect("taken for done");
    assert_eq!((world.stored(), world.names(BLOBS).len()), (2, 2));
    world.ingest.unlink(&dir, "latest").expect("removed");
    assert!(world.vfs.tree().entries().is_empty() && world.names(&dir).is_empty());
    assert!(world.ingest.remove_dir(MANIFESTS, "registry.ollama.ai").is_err(), "it is not empty");
    for name in world.names(BLOBS) {
        world.ingest.unlink(BLOBS, &name).expect("nobody needs it");
    }
    assert_eq!((world.stored(), world.names(BLOBS).len()), (0, 0));
}

#[test]
fn a_model_stays_what_it_was_until_the_new_manifest_is_whole() {
    let world = world();
    let (manifest, dir) = (world.manifest(b"one"), world.model_dir("made"));
    world.write(&dir, "latest", &manifest).expect("a model");
    let shown = world.ingest.lookup(&dir, "latest").expect("there");
    let second = world.manifest(b"second");
    let handle = world.ingest.open(shown.ino, true).expect("writable").expect("a handle");
    world.ingest.set(shown.ino, None, Some(0), None).expect("truncated by its inode");
    world.ingest.write(handle, 0, &second[..50]).expect("a half");
    assert_eq!(world.ingest.attr(shown.ino).expect("known").expect("ours").size, 50);
    assert_eq!(std::fs::read(world.place.path().join(&dir["ollama/".len()..]).join("latest")).expect("read"), manifest);
    world.ingest.write(handle, 50, &second[50..]).expect("the other half");
    assert_eq!(std::fs::read(world.place.path().join(&dir["ollama/".len()..]).join("latest")).expect("read"), second);
    world.ingest.release(handle);
    assert_ne!(world.ingest.lookup(&dir, "latest").expect("there").ino, shown.ino);
    // One that names what is not there changes nothing and is not there afterwards.
    let text = String::from_utf8(second.clone()).expect("text").replace("\"size\":6", "\"size\":7");
    assert!(
        world.write(&dir, "latest", text.as_bytes()).is_err() && world.write(&dir, "other", text.as_bytes()).is_err()
    );
    assert!(world.write(&dir, "latest", b"{").is_err());
    assert_eq!((world.names(&dir), world.vfs.tree().entries().len()), (vec!["latest".into()], 1));
    assert_eq!(std::fs::read(world.place.path().join(&dir["ollama/".len()..]).join("latest")).expect("read"), second);
}

#[test]
fn a_manifest_that_is_renamed_makes_a_model_or_stays_where_it_is() {
    let world = world();
    let (manifest, dir) = (world.manifest(b"one"), world.model_dir("made"));
    let text = String::from_utf8(manifest.clone()).expect("text");
    let to = (dir.as_str(), "latest");
    for bad in [text.replace("\"size\":3", "\"size\":4"), "{".into()] {
        world.write(BLOBS, "new-manifest", bad.as_bytes()).expect("written");
        assert!(world.ingest.rename((BLOBS, "new-manifest"), to, true).is_err(), "{bad}");
        assert!(world.names(BLOBS).contains(&"new-manifest".into()) && world.names(&dir).is_empty());
        world.ingest.unlink(BLOBS, "new-manifest").expect("removed");
    }
    world.write(BLOBS, "new-manifest", &manifest).expect("written");
    world.ingest.rename((BLOBS, "new-manifest"), to, true).expect("a model");
    assert_eq!((world.names(&dir), world.vfs.tree().entries().len()), (vec!["latest".into()], 1));
    assert!(!world.names(BLOBS).contains(&"new-manifest".into()) && world.ingest.state().names.is_empty());
}

#[test]
fn content_decides_whether_it_is_a_blob() {
    let world = world();
    let wrong = Digest::of(b"other").file_name();
    world.write(BLOBS, "sha256-9", b"some").expect("written");
    assert!(matches!(world.ingest.rename((BLOBS, "sha256-9"), (BLOBS, &wrong), true), Err(Error::Damaged { .. })));
    assert_eq!(world.names(BLOBS), ["sha256-9"]);
    let (_, handle) = world.ingest.create(BLOBS, "sha256-9", false).expect("opened again");
    world.ingest.write(handle, 0, b"other").expect("longer");
    world.ingest.rename((BLOBS, "sha256-9"), (BLOBS, &wrong), true).expect("the content now");
    assert!(world.ingest.write(handle, 0, b"x").is_err(), "it is finished");
    world.ingest.release(handle);
    // The same again is the same blob.
    world.blob(b"other");
    assert_eq!(world.names(BLOBS), std::slice::from_ref(&wrong));
    assert_eq!(world.ingest.dir.names().expect("listed"), std::slice::from_ref(&wrong));
    assert!(world.ingest.rename((BLOBS, &wrong), (BLOBS, "x"), true).is_err());
    let renamed = world.ingest.rename((BLOBS, &wrong), (BLOBS, &Digest::of(b"").file_name()), true);
    assert!(renamed.is_err() && world.names(BLOBS) == [wrong]);
}

#[test]
fn a_file_that_is_open_stays_readable() {
    let world = world();
    let (stat, handle) = world.ingest.create(BLOBS, "x-partial", true).expect("made");
    assert!(world.ingest.create(BLOBS, "x-partial", true).is_err());
    world.ingest.write(handle, 2, b"yz").expect("written");
    world.ingest.unlink(BLOBS, "x-partial").expect("removed");
    let mut buf = [1; 9];
    assert_eq!(world.ingest.read(handle, 0, &mut buf).expect("read"), 4);
    assert_eq!(&buf[..4], b"\0\0yz");
    assert_eq!(world.ingest.attr(stat.ino).expect("known").map(|stat| (stat.size, stat.nlink)), Some((4, 0)));
    world.ingest.release(handle);
    assert!(world.ingest.state().files.is_empty() && world.ingest.dir.names().expect("listed").is_empty());
}
