//! From a path to a [`SourcePlan`]: every file parsed and cut into pieces, before a byte is written.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use super::amb;
use super::bounds::Bounds;
use super::coreml;
use super::gds;
use super::gguf;
use super::piece::{Content, FileBytes, Piece, TensorName, read_small, whole};
use super::scan::{FoundFile, Scan, first, name_of, scan};
use super::shard::Shard;
use super::source::SourcePlan;
use super::split::{self, Given};
use crate::budget::Budget;
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::{json, safetensors};
use crate::model::SourceKind;

/// The weights of a model that is not sharded, which transformers looks for before it looks for an index.
const WHOLE: &str = "model.safetensors";
/// Says in which shard each tensor of a model is.
const INDEX: &str = "model.safetensors.index.json";
/// How the names of safetensors files end.
pub(super) const ENDING: &str = ".safetensors";
/// How those of Core ML's directories do.
const PACKAGES: [&str; 2] = [".mlpackage", ".mlmodelc"];
/// How those of its bare models do.
const BARE: &str = ".mlmodel";

/// The headers of safetensors files by path.
type Headers<'a> = BTreeMap<&'a str, safetensors::Header>;

/// Finds out what each path is and plans it; a directory of packages stands for all of them and for what lies beside them.
pub(super) fn plan_all(
    given: &Given,
    bounds: &Bounds,
    blob_threshold: u64,
    budget: &Budget,
) -> Result<Vec<SourcePlan>> {
    let mut plans = given.split.iter().map(|parts| split::plan(parts, bounds)).collect::<Result<Vec<_>>>()?;
    for path in &given.others {
        let found = scan(path, bounds)?;
        let packages: BTreeSet<String> = packages_in(path, &found)?.into_iter().map(str::to_owned).collect();
        if packages.is_empty() {
            plans.push(plan_scan(path, found, blob_threshold, budget)?);
            continue;
        }
        for package in packages.iter().map(|package| path.join(package)) {
            plans.push(plan_scan(&package, scan(&package, bounds)?, blob_threshold, budget)?);
        }
        let mut beside = found.without(path, packages);
        match plans.last_mut() {
            Some(last) if beside.is_empty() => last.scan.skipped.append(&mut beside.skipped),
            _ => plans.push(plan_beside(path, beside)?),
        }
    }
    let mut names: Vec<&str> = plans.iter().map(|plan| plan.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::Invalid(format!("two of the paths are called {:?}: rename one", pair[0]))),
        None => Ok(plans),
    }
}

/// The names of the packages at the top of a directory; bare and compiled models count as such.
///
/// None if the directory is a package itself, or has what is another model's outside of them.
fn packages_in<'a>(path: &Path, scan: &'a Scan) -> Result<Vec<&'a str>> {
    let is_package = |name: &&str| !name.contains('/') && PACKAGES.iter().any(|end| name.ends_with(end));
    let dirs = scan.dirs.iter().map(|dir| &*dir.path).filter(is_package);
    let bare = scan.files.iter().map(|file| &*file.path).filter(|name| !name.contains('/') && name.ends_with(BARE));
    let packages: Vec<&str> = dirs.chain(bare).collect();
    if !path.is_dir() || packages.is_empty() || coreml::kind(path, &name_of(path)?, scan).is_some() {
        return Ok(Vec::new());
    }
    let is_outside = |file: &&FoundFile| !packages.contains(&first(&file.path));
    let of_another = |file: &FoundFile| {
        let ends = [ENDING, ".gguf", ".amb", BARE];
        ends.iter().any(|end| file.path.ends_with(end)) || package(&file.path).is_some()
    };
    let is_alone = gds::manifest_in(scan).is_none() && !scan.files.iter().filter(is_outside).any(of_another);
    Ok(if is_alone { packages } else { Vec::new() })
}

/// What lies beside packages: a README, configs, a tokenizer.
fn plan_beside(path: &Path, scan: Scan) -> Result<SourcePlan> {
    let pieces = scan.files.iter().map(whole).collect();
    Ok(SourcePlan {
        places: vec![path.to_owned()],
        name: name_of(path)?,
        kind: SourceKind::Files,
        scan,
        pieces,
        merged: None,
    })
}

/// The outermost package or compiled model that a path is in.
fn package(path: &str) -> Option<&str> {
    let dirs = path.match_indices('/').map(|(at, _)| &path[..at]);
    dirs.into_iter().find(|dir| PACKAGES.iter().any(|end| dir.ends_with(end)))
}

fn plan_scan(path: &Path, scan: Scan, blob_threshold: u64, budget: &Budget) -> Result<SourcePlan> {
    let name = name_of(path)?;
    let is_safetensors = |file: &FoundFile| file.path.ends_with(".safetensors");
    let (kind, pieces) = if let Some(kind) = coreml::kind(path, &name, &scan) {
        (kind, coreml::plan(path, kind, &scan, blob_threshold, budget)?)
    } else if scan.files.iter().any(is_safetensors) {
        (SourceKind::Safetensors, plan_safetensors(&scan, budget)?)
    } else if path.is_dir()
        && let Some(manifest) = gds::manifest_in(&scan)
    {
        (SourceKind::GdsExport, gds::plan(&scan, manifest)?)
    } else if let [file] = &scan.files[..]
        && !path.is_dir()
        && amb::is_amb(file)?
    {
        (SourceKind::Amb, vec![amb::plan(file)?])
    } else if let [file] = &scan.files[..]
        && !path.is_dir()
        && gguf::is_gguf(file)?
    {
        let (kind, piece) = gguf::plan(file)?;
        (kind, vec![vec![piece]])
    } else {
        return Err(no_source(path, &scan));
    };
    Ok(SourcePlan { places: vec![path.to_owned()], name, kind, scan, pieces, merged: None })
}

/// The error of a path that is nothing to import: what lies in it may be.
fn no_source(path: &Path, scan: &Scan) -> Error {
    let place = path.display();
    let is_one = |path: &&str| [".gguf", ".amb", BARE].iter().any(|end| path.ends_with(end));
    let models = scan.files.iter().filter_map(|file| package(&file.path).or(Some(&*file.path).filter(is_one)));
    Error::Invalid(match models.min() {
        Some(model) if path.is_dir() => {
            format!("{place}: is no model, but has models in it: import them, such as {}", path.join(model).display())
        }
        _ => format!(
            "{place}: is nothing that can be imported: no .mlpackage, .mlmodel or .mlmodelc, no .amb or .gguf file, \
             and no .safetensors file or gds_export manifest in it"
        ),
    })
}

/// A Hugging Face style directory, or one safetensors file.
fn plan_safetensors(scan: &Scan, budget: &Budget) -> Result<Vec<Vec<Piece>>> {
    let indexed = indexed(scan)?;
    let mut headers = Headers::new();
    for file in scan.files.iter().filter(|file| file.path.ends_with(ENDING)) {
        if file.len == 0 {
            let what =
                "8 bytes are needed but the file has 0 in all: a download may have been cut short; fetch it again";
            return Err(Error::format(&file.place, Fault::new(0, what)));
        }
        let header = safetensors::parse(&FileBytes::open_container(file)?).at(&file.place)?;
        budget.text(header.data_start).and_then(|()| budget.file(1 + header.tensors.len())).at(&file.place)?;
        headers.insert(&file.path, header);
    }
    let own = own_weights(scan, &headers, &indexed);
    let mut exported = gds::beside_weights(scan);
    let mut seen: BTreeMap<String, &Path> = BTreeMap::new();
    let mut pieces = Vec::with_capacity(scan.files.len());
    for file in &scan.files {
        let (Some(stem), Some(header)) = (file.path.strip_suffix(ENDING), headers.remove(&*file.path)) else {
            pieces.push(match exported.remove(&file.path) {
                Some(entry) => gds::tensor(file, format!("gds_export/{}", entry.name), false, entry)?,
                None => whole(file),
            });
            continue;
        };
        let own = own.contains(&*file.path);
        // Components of a model keep their tensors apart by the component's name, as ollama's importer does it.
        let prefix = match (own, stem.rsplit_once('/')) {
            (true, None) => String::new(),
            (true, Some((component, _))) => format!("{component}/"),
            (false, _) => format!("{stem}/"),
        };
        let mut parts = vec![Piece { offset: 0, len: header.data_start, content: Content::Between }];
        for tensor in header.tensors {
            let name = prefix.clone() + &tensor.name;
            if let Some(other) = seen.insert(name.clone(), &file.place) {
                let what = format!("tensor {name:?} is in {} too", other.display());
                return Err(Error::format(&file.place, Fault::new(tensor.offset, what)));
            }
            let names = vec![TensorName { name, own, other_type: None }];
            let content = Content::Tensor { dtype: tensor.dtype, shape: tensor.shape, names };
            parts.push(Piece { offset: tensor.offset, len: tensor.len, content });
        }
        pieces.push(parts);
    }
    Ok(pieces)
}

/// Which files hold the model's own weights: `model*.safetensors` at the top where there are any (what mlx-lm loads),
/// else every one at the top, else those of the component directories, which are all that a pipeline of Diffusers loads.
///
/// Of files that have tensors of the same names those are chosen that loaders take when they are told nothing else: the
/// whole model before the shards of the index, which are taken all or none, and these before variants and what the index
/// does not name.
fn own_weights<'a>(scan: &Scan, headers: &Headers<'a>, indexed: &BTreeSet<String>) -> HashSet<&'a str> {
    let is_pipeline = scan.file("model_index.json").is_some() && headers.keys().any(|path| path.contains('/'));
    let top = |path: &str| !path.contains('/') && !is_pipeline;
    let model = |path: &str| top(path) && path.starts_with("model");
    let any = |test: &dyn Fn(&str) -> bool| headers.keys().any(|path| test(path));
    let is_own: &dyn Fn(&str) -> bool = match (any(&model), any(&top)) {
        (true, _) => &model,
        (false, true) => &top,
        (false, false) => &|path| path.contains('/') || !is_pipeline,
    };
    let sets: HashSet<String> = headers.keys().map(|path| plain(path)).collect();
    let choice = |path: &str| match () {
        () if is_variant(path, &sets) => 2,
        () if indexed.is_empty() || path.contains('/') || path == WHOLE => 0,
        () if indexed.contains(path) => 1,
        () => 2,
    };
    let dir = |path: &'a str| path.rsplit_once('/').map_or("", |(dir, _)| dir);
    let names_of = |path: &'a str| headers[path].tensors.iter().map(move |tensor| (dir(path), tensor.name.as_str()));
    let (mut own, mut names) = (HashSet::new(), HashSet::new());
    for which in 0..=2 {
        let all: Vec<&str> = headers.keys().copied().filter(|path| is_own(path) && choice(path) == which).collect();
        let mut new: Vec<&str> =
            all.iter().copied().filter(|path| !names_of(path).any(|it| names.contains(&it))).collect();
        if which == 1 && new.len() < all.len() {
            new.clear();
        }
        names.extend(new.iter().flat_map(|path| names_of(path)));
        own.extend(new);
    }
    own
}

/// The name that all shards of a set have in common, which is that of a file that is no shard.
fn plain(path: &str) -> String {
    Shard::of(path, ENDING).map_or_else(|| path.to_owned(), |shard| shard.plain())
}

/// Whether a file is what Diffusers calls a variant, such as `model.fp16.safetensors`, of what is there as well.
fn is_variant(path: &str, sets: &HashSet<String>) -> bool {
    let plain = plain(path);
    let without = plain.strip_suffix(ENDING).and_then(|stem| stem.rsplit_once('.'));
    without.is_some_and(|(plain, word)| !word.contains('/') && sets.contains(&format!("{plain}{ENDING}")))
}

/// The shards that the index names, none if there is no index.
///
/// One that names nothing that is there, beside a whole model, is that of the model which this one was made of: writers of
/// quantised models left it behind.
///
/// # Errors
/// The index names a shard that is not there: the rest would load as a model with holes.
pub(super) fn indexed(scan: &Scan) -> Result<BTreeSet<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Some(file) = scan.file(INDEX) else { return Ok(BTreeSet::new()) };
    let text = read_small(file, safetensors::MAX_HEADER)?;
    let index: Index = json::loose(&text)
        .map_err(|fault| Fault::new(fault.at, format!("is no index of shards: {}", fault.what)))
        .at(&file.place)?;
    let Some((tensor, shard)) = index.weight_map.iter().find(|(_, shard)| scan.file(shard).is_none()) else {
        return Ok(index.weight_map.into_values().collect());
    };
    let is_shard = |path: &str| path.starts_with("model") && !path.contains('/') && Shard::of(path, ENDING).is_some();
    let is_model = |path: &str| path == WHOLE || is_shard(path);
    if scan.files.iter().any(|file| is_model(&file.path))
        && !index.weight_map.values().any(|shard| scan.file(shard).is_some())
    {
        return Ok(BTreeSet::new());
    }
    let what = format!("tensor {tensor:?} is in {shard:?}, which is missing: fetch it, or the whole directory again");
    Err(Error::format(&file.place, Fault::new(0, what)))
}
