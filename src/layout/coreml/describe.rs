//! What each shape of a model takes and gives, and which of its constants no other shape has.

use std::collections::HashMap;

use super::super::Files;
use super::package::Package;
use super::shared::{Needed, Program};
use super::{LIMITS, shown_names};
use crate::budget::{Budget, Counted};
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
struct Constant {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    key: super::shared::Key,
}

/// What a package takes and gives.
type Features = (Vec<Feature>, Vec<Feature>);

/// The packages of a model in the order of the imports; compiled ones say nothing of themselves.
pub fn shapes(model: &Model, files: Files<'_>) -> Vec<Shape> {
    let names = shown_names(model);
    let budget = Budget::of(LIMITS);
    let find = |source| Package::find(source, files, &budget);
    let packages: Vec<Package<'_>> = model.programs().filter_map(find).collect();
    let (mut described, mut constants) = (Vec::with_capacity(packages.len()), Vec::with_capacity(packages.len()));
    for package in &packages {
        let read = budget.over().map_or_else(|| contents(package, files, &budget), Err);
        let (features, found) =
            read.map_or_else(|fault| (Err(fault), Vec::new()), |(features, found)| (features, found));
        described.push(features);
        constants.push(found);
    }
    let mut owners: HashMap<super::shared::Key, usize> = HashMap::new();
    for of_one in &constants {
        let mut keys: Vec<_> = of_one.iter().map(|constant| constant.key).collect();
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter().for_each(|key| *owners.entry(key).or_default() += 1);
    }
    let twins = twins(&constants);
    let mut shapes = Vec::with_capacity(packages.len());
    for (index, (package, described)) in packages.iter().zip(described).enumerate() {
        let name = names.get(package.source.name.as_str()).cloned().unwrap_or_default();
        let mut seen = HashMap::new();
        constants[index].iter().for_each(|constant| _ = seen.insert(constant.key, constant.key.1));
        let mine = constants[index].iter().filter(|constant| packages.len() > 1 && owners[&constant.key] == 1);
        let unshared = mine.map(|constant| {
            let twin = twins[&*constant.name].iter().find(|(other, _)| *other != index);
            let twin = twin.and_then(|(other, twin)| Some((names.get(packages[*other].source.name.as_str())?, twin)));
            Unshared {
                name: constant.name.clone(),
                dtype: constant.dtype.name(),
                shape: constant.shape.clone(),
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
        let program_bytes = package.program.content.size();
        let weight_bytes = seen.into_values().fold(0, u64::saturating_add);
        shapes.push(Shape { name, inputs, outputs, program_bytes, weight_bytes, unshared, damaged });
    }
    shapes
}

/// What a package takes and gives, unless that cannot be read, and its constants: of a program no more is kept, since it may
/// be one of many.
fn contents(
    package: &Package<'_>,
    files: Files<'_>,
    budget: &Budget,
) -> Result<(Result<Features, Fault>, Vec<Constant>), Fault> {
    let Program { outline, needed } = Program::read(package, files, budget)?;
    let bytes = Counted(MapBytes { map: &package.program.content, blobs: files.0 }, budget);
    let features = features(&bytes, outline.description.unwrap_or(0..0));
    if let Ok((inputs, outputs)) = &features {
        budget.tensors(inputs.len() + outputs.len())?;
    }
    let references = outline.references.into_iter().map(|it| (it.name, it.dtype, it.shape));
    let inline = outline.inline.into_iter().map(|it| (it.name, it.dtype, it.shape));
    let all = references.chain(inline).zip(needed);
    let constant = |((name, dtype, shape), needed): ((String, Dtype, Vec<u64>), Option<Needed>)| {
        needed.map(|needed| Constant { name, dtype, shape, key: needed.key })
    };
    Ok((features, all.filter_map(constant).collect()))
}

/// The constants of each name, the first of each of the first two packages that have one.
fn twins(constants: &[Vec<Constant>]) -> HashMap<&str, Vec<(usize, &Constant)>> {
    let mut twins: HashMap<&str, Vec<(usize, &Constant)>> = HashMap::new();
    for (index, of_one) in constants.iter().enumerate() {
        for constant in of_one {
            let same = twins.entry(&constant.name).or_default();
            if same.len() < 2 && same.last().is_none_or(|(other, _)| *other != index) {
                same.push((index, constant));
            }
        }
    }
    twins
}
