//! Models that are asked for by name.

use super::{Found, Store};
use crate::error::{Error, Result};
use crate::model::ModelName;
use crate::slips::slips;

/// The most models that an error names.
const NAMED: usize = 8;

impl Store {
    /// The manifest of a model that somebody asks for; where it is missing, the error names those that may be meant.
    pub fn find_asked(&self, name: &ModelName) -> Result<Found> {
        self.find_one(name).map_err(|error| match (error, self.near(name)) {
            (Error::NotFound(what), near) if !near.is_empty() => Error::NotFound(format!("{what}, which has {near}")),
            (error, _) => error,
        })
    }

    /// The models whose names are nearest to one that is missing, in words; empty if there are none.
    fn near(&self, missing: &ModelName) -> String {
        let distance = |name: &ModelName| {
            let elsewhere = (&name.host, &name.namespace) != (&missing.host, &missing.namespace);
            Some((elsewhere, slips(&missing.name, &name.name)?))
        };
        let found = self.find().unwrap_or_default();
        let known: Vec<_> = found.iter().filter_map(|found| Some((distance(&found.name)?, &found.name))).collect();
        let Some(least) = known.iter().map(|(distance, _)| *distance).min() else { return String::new() };
        let near: Vec<String> =
            known.iter().filter(|(distance, _)| *distance == least).map(|(_, name)| name.to_string()).collect();
        let more = match near.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        near[..near.len().min(NAMED)].join(", ") + &more
    }
}
