//! Damage that was met, for the log and the status: told of until the file that was damaged is another one, or the model
//! that it hurt is gone.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Vfs;
use crate::error::Error;
use crate::model::ModelName;
use crate::store::{Found, Seen};

/// Problems that the status remembers.
const MOST: usize = 20;

/// The newest problems.
#[derive(Debug, Default)]
pub(super) struct Problems(Mutex<VecDeque<Problem>>);

#[derive(Debug)]
struct Problem {
    text: String,
    /// The damaged file.
    file: Option<Seen>,
    /// The model that it hurts.
    model: Option<ModelName>,
}

impl Problems {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Problem>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, problem: Problem) {
        let mut problems = self.lock();
        problems.retain(|other| other.text != problem.text);
        problems.push_back(problem);
        while problems.len() > MOST {
            problems.pop_front();
        }
    }

    /// What the status says, the newest last.
    pub fn texts(&self) -> Vec<String> {
        self.lock().iter().map(|problem| problem.text.clone()).collect()
    }

    /// Forgets those whose files are others than they were, and those of models that are gone.
    fn review(&self, is_gone: impl Fn(&ModelName) -> bool) {
        let files: Vec<_> = self.lock().iter().filter_map(|problem| problem.file.clone()).collect();
        // Without the lock: a file system that does not answer holds up nobody who has a problem to tell.
        let changed: Vec<_> = files.into_iter().filter(Seen::is_another).collect();
        let is_mended = |problem: &Problem| problem.file.as_ref().is_some_and(|file| changed.contains(file));
        self.lock().retain(|problem| !is_mended(problem) && !problem.model.as_ref().is_some_and(&is_gone));
    }
}

impl Vfs {
    /// Forgets the problems of files that were mended and of models that are gone; a new one is told of when it is met.
    pub fn review_problems(&self) {
        let tree = self.tree();
        let is_gone = |name: &ModelName| tree.entries().binary_search_by(|entry| entry.found.name.cmp(name)).is_err();
        self.problems.review(is_gone);
    }

    /// Logs damage and remembers it for the status; a name that is not there is no damage. Returns the error with the
    /// model that it hurts, where that is known.
    pub(super) fn note(&self, error: Error, model: impl FnOnce() -> Option<Arc<Found>>) -> Error {
        if matches!(error, Error::NotFound(_) | Error::Refused(_) | Error::NotDir | Error::IsDir | Error::Stale(_)) {
            return error;
        }
        let file = self.store.culprit(&error);
        let found = model();
        let model = found.as_ref().map(|found| found.name.clone());
        let error = match found {
            Some(found) => {
                let (model, holds) = (found.name.to_string(), self.tensors_in(&error, &found));
                Error::Hurts { model, error: Box::new(error), holds }
            }
            None => error,
        };
        tracing::error!("{error}");
        self.problems.add(Problem { text: error.to_string(), file, model });
        error
    }

    /// Which tensors or files of the model a damaged blob holds, in words.
    fn tensors_in(&self, error: &Error, found: &Found) -> String {
        let (Error::Damaged { digest, .. }, Ok(model)) = (error, self.store.load(found)) else { return String::new() };
        let tensors = model.tensors.iter().chain(&model.other_tensors);
        let tensors = tensors.filter(|tensor| tensor.blob == *digest).map(|tensor| format!("tensor {:?}", tensor.name));
        let files = model.files.iter().filter(|file| file.blob == *digest).map(|file| format!("file {:?}", file.path));
        let names: Vec<String> = tensors.chain(files).take(4).collect();
        if names.is_empty() { String::new() } else { format!("; it holds {}", names.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_problem_is_told_until_its_file_is_another() {
        let place = tempfile::tempdir().unwrap();
        let (missing, short) = (place.path().join("missing"), place.path().join("short"));
        fs::write(&short, "x").unwrap();
        let problems = Problems::default();
        let add = |text: &str, file| problems.add(Problem { text: text.into(), file, model: None });
        let review = || problems.review(|_| false);
        for (text, file) in [("a", &missing), ("b", &short), ("a", &missing)] {
            add(text, Some(Seen::now(file.clone())));
        }
        add("c", None);
        review();
        assert_eq!(problems.texts(), ["b", "a", "c"]);
        fs::write(&missing, "there").unwrap();
        review();
        assert_eq!(problems.texts(), ["b", "c"]);
        fs::write(&short, "whole").unwrap();
        review();
        assert_eq!(problems.texts(), ["c"]);
        (0..30).for_each(|number| add(&number.to_string(), None));
        assert_eq!(problems.texts().len(), MOST);
    }
}
