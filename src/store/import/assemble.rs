//! From stored pieces to recipes, layers and the manifest.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::piece::{Content, Piece, TensorName};
use super::pieces::{Place, Stored};
use super::source::SourcePlan;
use super::told;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::extent::{ExtentBytes, ExtentMap};
use crate::format::ollama::{self, Layer, Manifest};
use crate::format::recipe;
use crate::model::{Model, ModelName, Source, SourceDir, SourceFile, SourceKind};
use crate::store::stage::Stage;

/// The manifest of the model with the new sources in it; recipes and the config are staged on the way. An error says that
/// `dropped` would go if the model was replaced.
pub(super) fn manifest(
    stage: &Stage,
    name: &ModelName,
    plans: Vec<SourcePlan>,
    stored: &Stored,
    existing: Option<(Manifest, Model)>,
    dropped: &[String],
) -> Result<Vec<u8>> {
    let merged = plans.iter().filter_map(|plan| Some(&plan.merged.as_ref()?.piece));
    let pieces = plans.iter().flat_map(|plan| plan.pieces.iter().flatten());
    let weights = pieces.chain(merged).find_map(|piece| match &piece.content {
        Content::Weights(weights) if weights.media_type == ollama::MODEL => Some(&weights.header),
        _ => None,
    });
    let config = weights.map_or_else(|| ollama::safetensors_config(&[]), ollama::gguf_config);
    let (digest, _) = stage.add_bytes(&config)?;
    let config = Layer::new(ollama::CONFIG, digest, config.len() as u64, "");
    let (mut manifest, model) = match existing {
        // Only who has the weights can say what they are.
        Some((manifest, model)) if weights.is_some() => (Manifest { config, ..manifest }, Some(model)),
        Some((manifest, model)) => (manifest, Some(model)),
        None => (Manifest::new(config, Vec::new()), None),
    };
    let mut layers = Layers::of(manifest.layers);
    for ((plan, places), merged) in plans.into_iter().zip(&stored.places).zip(&stored.merged) {
        let (source, new, lens) = source(plan, places, merged.as_ref());
        let mut maps = Vec::new();
        let recipe = recipe::render(&source, &|digest| lens[digest], &mut |map| {
            let (digest, _) = stage.add_bytes(&map)?;
            maps.push((digest, map.len() as u64));
            Ok::<_, Error>(digest)
        })?;
        let old = model.iter().flat_map(|model| &model.sources).find(|old| old.name == source.name);
        if let Some(old) = old {
            if !same_content(old, &source) {
                return Err(Error::Invalid(format!(
                    "{:?}, with other content, is in model {name} already: rename what you import, give another name or tag, \
                     or {}",
                    source.name,
                    told::replace_it(dropped)
                )));
            }
            continue;
        }
        layers.add(new, &source)?;
        for extent in source.files.iter().flat_map(|file| file.content.extents()) {
            if let ExtentBytes::Blob { digest, .. } = extent.bytes {
                layers.add_fragment(digest, lens[&digest]);
            }
        }
        maps.into_iter().for_each(|(digest, len)| layers.add_fragment(digest, len));
        let (digest, _) = stage.add_bytes(&recipe)?;
        layers.push(Layer::new(ollama::OWN_RECIPE, digest, recipe.len() as u64, &source.name));
    }
    manifest.layers = layers.list;
    Ok(manifest.to_bytes())
}

fn same_content(old: &Source, new: &Source) -> bool {
    old.files.len() == new.files.len()
        && old.files.iter().zip(&new.files).all(|(old, new)| old.path == new.path && old.content == new.content)
        && old.dirs.iter().map(|dir| &dir.path).eq(new.dirs.iter().map(|dir| &dir.path))
}

/// The recipe of a source, the layers of its tensors and small files, and the length of every blob it names.
fn source(
    plan: SourcePlan,
    places: &[Vec<Place>],
    merged: Option<&Place>,
) -> (Source, Vec<Layer>, HashMap<Digest, u64>) {
    let (mut files, mut layers, mut lens) = (Vec::new(), Vec::new(), HashMap::new());
    if let (Some(whole), Some(Place::Blob { digest, len, named, .. })) = (&plan.merged, merged) {
        layers.extend(layers_of(&whole.piece, *digest, *len, *named, &plan.name));
    }
    for ((found, pieces), places) in plan.scan.files.iter().zip(&plan.pieces).zip(places) {
        let mut content = ExtentMap::new();
        for (piece, place) in pieces.iter().zip(places) {
            match place {
                Place::Zeros => content.push_zeros(piece.len),
                Place::Inline(bytes) => content.push_inline(bytes),
                Place::Blob { digest, len, offset, named } => {
                    lens.insert(*digest, *len);
                    content.push_blob(*digest, *len, *offset, piece.len).expect("the piece is in its blob");
                    layers.extend(layers_of(piece, *digest, *len, *named, &layer_path(&plan, &found.path)));
                }
            }
        }
        files.push(SourceFile { path: found.path.clone(), mtime: found.mtime, content: Arc::new(content) });
    }
    let dirs = plan.scan.dirs.into_iter().map(|dir| SourceDir { path: dir.path, mtime: dir.mtime }).collect();
    (Source { name: plan.name, kind: plan.kind, files, dirs }, layers, lens)
}

/// The files of the model proper keep their paths; those of packages stand below the package's name.
fn layer_path(plan: &SourcePlan, path: &str) -> String {
    match plan.kind {
        SourceKind::Safetensors | SourceKind::GdsExport | SourceKind::Mlmodel | SourceKind::Amb => path.into(),
        SourceKind::Gguf | SourceKind::GgufProjector | SourceKind::GgufAdapter | SourceKind::Files => path.into(),
        SourceKind::Mlpackage | SourceKind::Mlmodelc => format!("{}/{path}", plan.name),
    }
}

fn layers_of(piece: &Piece, digest: Digest, len: u64, named: Option<Digest>, path: &str) -> Vec<Layer> {
    match &piece.content {
        Content::Between | Content::Merged(_) => Vec::new(),
        Content::Weights(weights) => vec![Layer::new(weights.media_type, digest, len, "")],
        Content::File => {
            // The index of shards speaks of files that only this source has.
            let json = path.ends_with(".json") && len > 0 && !path.ends_with(".safetensors.index.json");
            let in_package = path.contains(".mlpackage/") || path.contains(".mlmodelc/");
            let media_type = if json && !in_package { ollama::JSON } else { ollama::OWN_FILE };
            vec![Layer::new(media_type, digest, len, path)]
        }
        Content::Tensor { dtype, shape, names } => {
            let layer = |name: &TensorName| {
                let media_type = if name.own { ollama::TENSOR } else { ollama::OWN_TENSOR };
                let mut layer = Layer::new(media_type, digest, len, &name.name);
                let (dtype, shape) = name.other_type.as_ref().map_or((dtype, shape), |(dtype, shape)| (dtype, shape));
                layer.dtype = dtype.name().into();
                layer.shape = Some(shape.clone());
                layer.named = named.filter(|_| name.own);
                layer
            };
            names.iter().map(layer).collect()
        }
    }
}

/// The layers of a manifest in the making, and what tells whether one is there already.
struct Layers {
    list: Vec<Layer>,
    /// The digest of each media type and name.
    taken: HashMap<(String, String), Digest>,
    digests: HashSet<Digest>,
}

impl Layers {
    fn of(list: Vec<Layer>) -> Layers {
        let mut layers = Layers { list: Vec::new(), taken: HashMap::new(), digests: HashSet::new() };
        list.into_iter().for_each(|layer| layers.push(layer));
        layers
    }

    fn push(&mut self, layer: Layer) {
        self.taken.insert((layer.media_type.clone(), layer.name.clone()), layer.digest);
        self.digests.insert(layer.digest);
        self.list.push(layer);
    }

    /// Adds layers in order of name, so that the same import always gives the same manifest.
    ///
    /// Programs of several shapes use the same names: equal content is one tensor, other content stands below the name
    /// of its package, so that names that are there never change.
    ///
    /// # Errors
    /// Very many have one name: each would be compared with all others.
    fn add(&mut self, mut new: Vec<Layer>, source: &Source) -> Result<()> {
        const NAMESAKES: usize = 256;
        new.sort_by(|a, b| (&a.media_type, &a.name).cmp(&(&b.media_type, &b.name)));
        // Files of weights have no names that could clash.
        let (nameless, new): (Vec<Layer>, Vec<Layer>) = new.into_iter().partition(|layer| layer.name.is_empty());
        for layer in nameless {
            if !self.list.contains(&layer) {
                self.push(layer);
            }
        }
        for mut layer in new {
            let plain = layer.name.clone();
            let stem = source.kind.stem(&source.name);
            let others = (2..=NAMESAKES).map(|number| format!("{stem}/{plain}#{number}"));
            let mut candidates = [plain.clone(), format!("{stem}/{plain}")].into_iter().chain(others);
            let is_new = loop {
                layer.name = candidates.next().ok_or_else(|| {
                    Error::Invalid(format!("{}: more than {NAMESAKES} tensors are called {plain:?}", source.name))
                })?;
                match self.taken.get(&(layer.media_type.clone(), layer.name.clone())) {
                    Some(digest) if *digest == layer.digest => break false,
                    Some(_) => {}
                    None => break true,
                }
            };
            if is_new {
                self.push(layer);
            }
        }
        Ok(())
    }

    /// Names a blob that only a recipe knows: one that no layer names is one that `gc` may take.
    fn add_fragment(&mut self, digest: Digest, len: u64) {
        if !self.digests.contains(&digest) {
            self.push(Layer::new(ollama::OWN_FRAGMENT, digest, len, ""));
        }
    }
}
