//! Where a serving process may write: by Landlock, in the store's `.wmount/`, and with `--ingest` in the store.
//!
//! Root's process can write none but root's files, having given up all capabilities for more. But those are the files that
//! make root; and an ordinary user's are the programs that his shell starts with. So all other writing is denied to the
//! threads that serve: opening for writing, truncating, making, removing and renaming. Files that are open, such as the log,
//! stay so, and reading is not restricted: a store's directories may be moved to another disk while it is mounted, and what
//! is read could be given to none but those who read the mount, since there are no sockets ([`filter`](super::filter)).
//!
//! A `.wmount/` that is made after the mount is not written to until the next one; memos are then kept in memory.

use std::path::Path;

/// The key of the status under which it says whether writing is restricted.
pub const FACT: &str = "landlock";

/// Denies this thread, and those that it starts from now on, to write outside of the store. Says "on", or why not: a mount
/// goes on without, where the kernel has no Landlock.
#[cfg(target_os = "linux")]
pub fn begin(store: &Path, ingest: bool) -> String {
    use landlock::RulesetStatus::{FullyEnforced, NotEnforced, PartiallyEnforced};

    let fact = match linux::restrict(store, ingest) {
        Ok(FullyEnforced) => return "on".into(),
        Ok(PartiallyEnforced) => "in part: this kernel does not know it all".into(),
        Ok(NotEnforced) => "off: not in this kernel".into(),
        Err(error) => format!("off: {error}"),
    };
    tracing::warn!("keeping this process from writing outside of the store by Landlock: {fact}");
    fact
}

/// There is no Landlock on this system.
#[cfg(not(target_os = "linux"))]
pub fn begin(_store: &Path, _ingest: bool) -> String {
    "off: not on this system".into()
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs;
    use std::path::{Path, PathBuf};

    use landlock::{
        ABI, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus,
        path_beneath_rules,
    };

    /// The first kernel that can deny all ways to write, 6.2.
    const KERNEL: ABI = ABI::V3;

    pub fn restrict(store: &Path, ingest: bool) -> Result<RulesetStatus, RulesetError> {
        let mut rules = Ruleset::default();
        if ingest {
            // Before Linux 5.19, Landlock denied all renaming from one directory to another.
            rules = rules.set_compatibility(CompatLevel::HardRequirement).handle_access(AccessFs::Refer)?;
        }
        let writing = AccessFs::from_write(KERNEL);
        let restricted = rules
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(writing)?
            .create()?
            .add_rules(path_beneath_rules(places(store, ingest), writing))?
            // What stdout is once all is said.
            .add_rules(path_beneath_rules(["/dev/null"], AccessFs::WriteFile))?
            .restrict_self()?;
        Ok(restricted.ruleset)
    }

    fn places(store: &Path, ingest: bool) -> Vec<PathBuf> {
        let own = store.join(".wmount");
        // Nothing is written through a link in its place.
        let own = fs::symlink_metadata(&own).is_ok_and(|found| found.is_dir()).then_some(own);
        // Both may be links to another disk.
        let parts = ["blobs", "manifests"].map(|part| store.join(part));
        if ingest {
            own.into_iter().chain(parts).chain([store.to_owned()]).collect()
        } else {
            own.into_iter().collect()
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs::{self, File};
    use std::io;
    use std::thread;

    use super::super::deputy::Deputy;
    use super::*;

    /// A fence is that of a thread and of those that it starts.
    fn fenced<T: Send>(store: &Path, ingest: bool, work: impl FnOnce() -> T + Send) -> T {
        let fenced = || {
            assert_eq!(begin(store, ingest), "on");
            thread::scope(|scope| scope.spawn(work).join().expect("the work panicked"))
        };
        thread::scope(|scope| scope.spawn(fenced).join().expect("it is fenced"))
    }

    #[test]
    fn only_the_store_is_written_to() {
        let place = tempfile::tempdir().unwrap();
        let (store, beside, moved) =
            (place.path().join("store"), place.path().join("beside"), place.path().join("moved"));
        for dir in [store.join(".wmount/deep"), store.join("blobs"), moved.clone(), beside.clone()] {
            fs::create_dir_all(dir).unwrap();
        }
        std::os::unix::fs::symlink(&moved, store.join("manifests")).unwrap();
        fs::write(beside.join("there"), "there").unwrap();
        let all = |dir: &Path| {
            let file = dir.join("file");
            fs::write(&file, "x").and_then(|()| fs::rename(&file, dir.join("other"))).and_then(|()| {
                fs::create_dir(&file)
                    .and_then(|()| fs::remove_dir(&file))
                    .and_then(|()| fs::remove_file(dir.join("other")))
            })
        };
        let refused = |outcome: io::Result<()>| outcome.unwrap_err().kind() == io::ErrorKind::PermissionDenied;
        let elsewhere = || {
            let there = beside.join("there");
            assert!(refused(all(&beside)) && refused(fs::write(&there, "")) && refused(fs::remove_file(&there)));
            assert!(refused(fs::create_dir(beside.join("new"))) && refused(fs::rename(&there, beside.join("new"))));
            assert!(refused(File::options().append(true).open(&there).map(drop)));
            assert!(refused(std::os::unix::fs::symlink("x", beside.join("new"))));
            assert_eq!(fs::read(&there).unwrap(), b"there");
            fs::write("/dev/null", "x").unwrap();
        };
        fenced(&store, false, || {
            elsewhere();
            all(&store.join(".wmount/deep")).unwrap();
            assert!(refused(all(&store.join("blobs"))) && refused(all(&store)) && refused(all(&moved)));
        });
        fenced(&store, true, || {
            elsewhere();
            for dir in [".wmount", "blobs", "manifests", "."] {
                all(&store.join(dir)).unwrap();
            }
            fs::write(store.join(".wmount/new"), "x").unwrap();
            fs::rename(store.join(".wmount/new"), store.join("blobs/new")).unwrap();
        });
        fs::write(beside.join("there"), "changed").unwrap();
    }

    #[test]
    fn a_link_in_place_of_our_directory_opens_no_way_out() {
        let place = tempfile::tempdir().unwrap();
        let (store, beside) = (place.path().join("store"), place.path().join("beside"));
        for dir in [&store, &beside] {
            fs::create_dir(dir).unwrap();
        }
        std::os::unix::fs::symlink(&beside, store.join(".wmount")).unwrap();
        fenced(&store, false, || assert!(fs::write(beside.join("file"), "x").is_err()));
    }

    #[test]
    fn the_deputy_is_outside() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        let work = || {
            let deputy = Deputy::start().unwrap();
            fenced(place.path(), false, || {
                let written = file.clone();
                assert!(fs::write(&written, "x").is_err());
                deputy.run(move || fs::write(written, "x")).unwrap().unwrap();
            });
        };
        work();
        assert!(file.exists());
    }
}
