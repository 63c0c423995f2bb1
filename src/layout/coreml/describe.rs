//! What each shape of a model takes and gives, and which of its constants no other shape has.

use std::collections::HashMap;

use super::super::Files;
use super::bounded::Bounded;
use super::package::Package;
use super::shared::Program;
use super::shown_names;
use crate::dtype::Dtype;
use crate::error::Fault;
use crate::format::mlprogram::{Feature, features};
use crate::layout::MapBytes;
use crate::model::Model;

/// One package of a model.
#[derive(Debug, serde::Serialize)]
pub struct Shape {
    /// What the package is called in `coreml/`.
    pub name: String,
    /// What it takes.
    pub inputs: Vec<Feature>,
    /// What it gives.
    pub outputs: Vec<Feature>,
    /// Bytes of the program, as it was imported.
    pub program_bytes: u64,
    /// Bytes of the constants in weight files, each counted once.
    pub weight_bytes: u64,
    /// The constants that no other package of the model has.
    pub unshared: Vec<Unshared>,
    /// Why the package could not be looked into.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub damaged: Option<String>,
}

/// A constant that only one package has.
#[derive(Debug, serde::Serialize)]
pub struct Unshared {
    /// Its name in the program.
    pub name: String,
    /// Type of its elements.
    pub dtype: &'static str,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: u64,
    /// Why it is not shared.
    pub why: String,
}

/// A constant by its name in the program, with what makes it the same as another.
struct Constant<'a> {
    name: &'a str,
    dtype: Dtype,
    shape: &'a [u64],
    key: super::shared::Key,
}

/// The packages of a model in the order of the imports; compiled ones say nothing of themselves.
pub fn shapes(model: &Model, files: Files<'_>) -> Vec<Shape> {
    let bounded = Bounded::new(files.0);
    let files = Files(&bounded);
    let names = shown_names(model);
    let packages: Vec<Package<'_>> = model.programs().filter_map(|source| Package::find(source, files)).collect();
    let programs: Vec<Result<Program, Fault>> = packages.iter().map(|package| Program::read(package, files)).collect();
    let constants: Vec<Vec<Constant<'_>>> =
        programs.iter().map(|program| program.as_ref().map(constants).unwrap_or_default()).collect();
    let mut owners: HashMap<super::shared::Key, usize> = HashMap::new();
    for of_one in &constants {
        let mut keys: Vec<_> = of_one.iter().map(|constant| constant.key).collect();
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter().for_each(|key| *owners.entry(key).or_default() += 1);
    }
    let twins = twins(&constants);
    let mut shapes = Vec::with_capacity(packages.len());
    for (index, (package, program)) in packages.iter().zip(&programs).enumerate() {
        let name = names.get(package.source.name.as_str()).cloned().unwrap_or_default();
        let map = &package.program.content;
        let described = program.as_ref().map_err(Clone::clone).and_then(|program| {
            features(&MapBytes { map, blobs: files.0 }, program.outline.description.clone().unwrap_or(0..0))
        });
        let mut seen = HashMap::new();
        constants[index].iter().for_each(|constant| _ = seen.insert(constant.key, constant.key.1));
        let mine = constants[index].iter().filter(|constant| packages.len() > 1 && owners[&constant.key] == 1);
        let unshared = mine.map(|constant| {
            let twin = twins[constant.name].iter().find(|(other, _)| *other != index);
            let twin = twin.and_then(|(other, twin)| Some((names.get(packages[*other].source.name.as_str())?, twin)));
            Unshared {
                name: constant.name.into(),
                dtype: constant.dtype.name(),
                shape: constant.shape.to_vec(),
                bytes: constant.key.1,
                why: match twin {
                    None => "no other package has one of this name".into(),
                    Some((other, twin)) if twin.dtype != constant.dtype => format!("{} in {other}", twin.dtype),
                    Some((other, twin)) if twin.shape != constant.shape => format!("{:?} in {other}", twin.shape),
                    Some((other, _)) => format!("other values in {other}"),
                },
            }
        });
        let unshared = unshared.collect();
        let damaged = described.as_ref().err().map(ToString::to_string);
        let (inputs, outputs) = described.unwrap_or_default();
        let (program_bytes, weight_bytes) = (map.size(), seen.into_values().fold(0, u64::saturating_add));
        shapes.push(Shape { name, inputs, outputs, program_bytes, weight_bytes, unshared, damaged });
    }
    shapes
}

/// The constants of each name, the first of each of the first two packages that have one.
fn twins<'a>(constants: &'a [Vec<Constant<'a>>]) -> HashMap<&'a str, Vec<(usize, &'a Constant<'a>)>> {
    let mut twins: HashMap<&str, Vec<(usize, &Constant<'_>)>> = HashMap::new();
    for (index, of_one) in constants.iter().enumerate() {
        for constant in of_one {
            let same = twins.entry(constant.name).or_default();
            if same.len() < 2 && same.last().is_none_or(|(other, _)| *other != index) {
                same.push((index, constant));
            }
        }
    }
    twins
}

fn constants(program: &Program) -> Vec<Constant<'_>> {
    let references = program.outline.references.iter().map(|it| (it.name.as_str(), it.dtype, &it.shape[..]));
    let inline = program.outline.inline.iter().map(|it| (it.name.as_str(), it.dtype, &it.shape[..]));
    let all = references.chain(inline).zip(&program.needed);
    all.filter_map(|((name, dtype, shape), needed)| Some(Constant { name, dtype, shape, key: needed.as_ref()?.key }))
        .collect()
}
