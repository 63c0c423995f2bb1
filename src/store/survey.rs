//! What is below `manifests/`: the models of a store, and what is none.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::SystemTime;

use super::beneath::Dir;
use super::{Store, children};
use crate::error::{AtPath, Error, Result};
use crate::model::{ModelName, to_unix};

/// A manifest found in the store, not yet read.
#[derive(Debug, Clone)]
pub struct Found {
    /// The model's name, from the manifest's path.
    pub name: ModelName,
    /// When the manifest was written.
    pub written: SystemTime,
    /// The manifest's inode and length: with the times they tell one version of it from the next.
    pub version: (u64, u64),
    /// When the manifest's inode last changed, in seconds and nanoseconds: unlike [`Found::written`] nobody can set it.
    pub changed: (i64, i64),
    /// Whether it was found so long after that time that a later change has another. This is no part of what it is.
    pub settled: bool,
    /// Which versions there are of what was computed for its other [`Form`](crate::format::Form)s, 0 where nothing was.
    pub forms: [u64; 2],
}

/// What is below `manifests/`.
#[derive(Debug, Default)]
pub struct Survey {
    /// The models, in order of name.
    pub models: Vec<Found>,
    /// Why something could not be looked at that may be a model, too.
    pub hidden: Vec<Error>,
    /// Files and directories that no model's manifest can be.
    pub(super) nameless: Vec<PathBuf>,
    /// When names in the directories last came or went.
    pub times: Times,
}

/// Times of `manifests/` and of the directories below it, by their paths in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Times(BTreeMap<String, SystemTime>);

impl Times {
    fn look(&mut self, manifests: &Path, inside: &str) {
        if let Ok(time) = fs::metadata(manifests.join(inside)).and_then(|found| found.modified()) {
            self.0.insert(inside.into(), time);
        }
    }

    /// The newest of all.
    pub fn newest(&self) -> Option<SystemTime> {
        self.0.values().max().copied()
    }

    /// That of a model's host, of the namespace in it, and of the name in that.
    pub fn above(&self, model: &ModelName) -> [Option<SystemTime>; 3] {
        let ModelName { host, namespace, name, .. } = model;
        let inside = [host.clone(), format!("{host}/{namespace}"), format!("{host}/{namespace}/{name}")];
        inside.map(|inside| self.0.get(&inside).copied())
    }
}

impl Found {
    fn identity(&self) -> impl Eq + std::hash::Hash + '_ {
        (&self.name, self.written, self.version, self.changed, self.forms)
    }
}

impl PartialEq for Found {
    fn eq(&self, other: &Found) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Found {}

impl std::hash::Hash for Found {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

impl Store {
    /// Every manifest of the store, in order of name; what is none is passed over with a log line.
    pub fn find(&self) -> Result<Vec<Found>> {
        Ok(self.survey()?.models)
    }

    /// The same for who takes away what no manifest reaches.
    ///
    /// # Errors
    /// Something below `manifests/` cannot be looked at: nobody knows what it reaches.
    pub(super) fn survey_all(&self) -> Result<Survey> {
        let survey = self.survey()?;
        match survey.hidden.first() {
            None => Ok(survey),
            Some(error) => Err(Error::Invalid(format!(
                "{error}; it may be a model, so nothing is removed: mend it, or take it away"
            ))),
        }
    }

    /// Looks through `manifests/`.
    pub fn survey(&self) -> Result<Survey> {
        let (mut found, mut hidden, mut nameless) = (Vec::new(), Vec::new(), Vec::new());
        let mut pass_over = |path: PathBuf, error: Error| {
            self.ignore(path.clone(), &error);
            match may_hide_a_model(&error) {
                true => hidden.push(error),
                false => nameless.push(path),
            }
        };
        let root = self.manifests_dir();
        let manifests = Dir::open(&root).at(&root)?;
        let forms = self.form_files();
        // Each before what is in it: a name that comes meanwhile is then newer than the time.
        let mut times = Times::default();
        times.look(&root, "");
        for host in children(&root)? {
            times.look(&root, &host);
            for namespace in below(&root.join(&host), &mut pass_over) {
                times.look(&root, &format!("{host}/{namespace}"));
                for name in below(&root.join(&host).join(&namespace), &mut pass_over) {
                    times.look(&root, &format!("{host}/{namespace}/{name}"));
                    let dir = root.join(&host).join(&namespace).join(&name);
                    for tag in below(&dir, &mut pass_over) {
                        match found_in(&manifests, &dir.join(&tag), [&host, &namespace, &name, &tag]) {
                            Ok(model) => found.push(Found { forms: forms.of(&model.name), ..model }),
                            Err(error) => pass_over(dir.join(&tag), error),
                        }
                    }
                }
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Survey { models: found, hidden, nameless, times })
    }

    /// These models, or what a survey finds if none is named.
    pub fn survey_of(&self, names: &[ModelName]) -> Result<Survey> {
        if names.is_empty() {
            return self.survey();
        }
        let models = names.iter().map(|name| self.find_asked(name)).collect::<Result<_>>()?;
        Ok(Survey { models, ..Survey::default() })
    }

    /// Says once that something below `manifests/` is no manifest.
    fn ignore(&self, path: PathBuf, why: &Error) {
        let path_text = path.display().to_string();
        if self.ignored.lock().unwrap_or_else(PoisonError::into_inner).insert(path) {
            let why = why.to_string();
            let why = why.strip_prefix(&format!("{path_text}: ")).unwrap_or(&why);
            tracing::warn!("{path_text} is ignored: {why}");
        }
    }

    /// The manifest of one model.
    ///
    /// # Errors
    /// [`Error::NotFound`] if the store does not have it; others if nobody can tell.
    pub fn find_one(&self, name: &ModelName) -> Result<Found> {
        let path = self.manifest_path(name);
        let found = Dir::open(&self.manifests_dir())
            .at(&path)
            .and_then(|manifests| found_in(&manifests, &path, [&name.host, &name.namespace, &name.name, &name.tag]));
        match found {
            Ok(model) if self.respelled(name).is_none() => {
                Ok(Found { forms: self.form_files_of(&model.name), ..model })
            }
            Err(error) if may_hide_a_model(&error) => Err(error),
            _ => Err(Error::NotFound(format!("model {name} in the store {}", self.root.display()))),
        }
    }

    /// The same where there need not be one, but could be.
    pub(super) fn find_any(&self, name: &ModelName) -> Result<Option<Found>> {
        if let Some(respelled) = self.respelled(name) {
            return Err(respelled.refusal(name));
        }
        match self.find_one(name) {
            Err(Error::NotFound(_)) => Ok(None),
            found => found.map(Some),
        }
    }
}

/// The names in a directory below `manifests/`; none in what is no directory or cannot be read.
fn below(dir: &Path, pass_over: &mut impl FnMut(PathBuf, Error)) -> Vec<String> {
    children(dir).unwrap_or_else(|error| {
        pass_over(dir.to_owned(), error);
        Vec::new()
    })
}

/// Whether what cannot be looked at is, or holds, a manifest for all that is known.
fn may_hide_a_model(error: &Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    let Error::Io { path, source } = error else { return false };
    match source.kind() {
        NotADirectory => false,
        // It is gone by now, or a link to what is not there just now, such as a disk.
        NotFound => fs::symlink_metadata(path).is_ok(),
        _ => true,
    }
}

/// No file system counts time in longer steps, in seconds.
const COARSEST: i64 = 2;

fn found_in(manifests: &Dir, path: &Path, [host, namespace, name, tag]: [&str; 4]) -> Result<Found> {
    use std::os::unix::fs::MetadataExt;
    let name = ModelName::new(host, namespace, name, tag)?;
    let metadata = manifests.metadata(&name.manifest_path()).at(path)?;
    if !metadata.is_file() {
        return Err(Error::Invalid("is no regular file".into()));
    }
    let written = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    let settled = to_unix(SystemTime::now()).0 - changed.0 > COARSEST;
    Ok(Found { name, written, version: (metadata.ino(), metadata.len()), changed, settled, forms: [0; 2] })
}
