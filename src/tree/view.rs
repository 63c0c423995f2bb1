//! What of a model is shown.

use crate::layout::{self, Anchor, Layout};
use crate::model::ModelName;

/// A layout, or one of its variants, by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct View {
    pub layout: usize,
    pub variant: Option<usize>,
}

impl View {
    pub fn layout(self) -> &'static dyn Layout {
        let layout = layout::all()[self.layout];
        self.variant.map_or(layout, |variant| layout.variants()[variant].1)
    }

    /// Where a model at `path` stands.
    pub fn anchors(self, name: &ModelName, path: &str) -> Vec<Anchor> {
        match self.variant {
            None => self.layout().anchors(name, path),
            Some(variant) => {
                let (suffix, view) = layout::all()[self.layout].variants()[variant];
                view.anchors(name, &format!("{path}@{suffix}"))
            }
        }
    }
}
