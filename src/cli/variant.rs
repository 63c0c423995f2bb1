//! What stands behind the `@` in `MODEL@VARIANT`.

use std::collections::HashSet;
use std::str::FromStr;

use crate::format::Form;
use crate::layout;
use crate::model::ModelName;

/// A variant, or a form that ollama stores models in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    /// Bytes that are computed when they are read; some layout has it by this name.
    Computed(&'static str),
    /// All of the model in this form.
    Form(Form),
}

impl Variant {
    pub fn name(self) -> &'static str {
        match self {
            Variant::Computed(name) => name,
            Variant::Form(form) => form.name(),
        }
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(word: &str) -> Result<Variant, String> {
        let computed = || all().find(|name| *name == word).map(Variant::Computed);
        word.parse().map(Variant::Form).ok().or_else(computed).ok_or_else(|| {
            let forms = Form::ALL.map(Form::name).into_iter();
            format!("{word:?} is no variant; there are {}", forms.chain(all()).collect::<Vec<_>>().join(", "))
        })
    }
}

/// `MODEL[@VARIANT]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    pub model: ModelName,
    pub variant: Option<Variant>,
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Named, String> {
        let (model, variant) = match text.split_once('@') {
            Some((model, variant)) => (model, Some(variant)),
            None => (text, None),
        };
        let model = model.parse().map_err(|error: crate::error::Error| error.to_string())?;
        Ok(Named { model, variant: variant.map(str::parse).transpose()? })
    }
}

/// The names of all variants, each once; one that several layouts have is one word.
fn all() -> impl Iterator<Item = &'static str> {
    let mut seen = HashSet::new();
    let names = layout::all().into_iter().flat_map(|layout| layout.variants()).map(|(name, _)| *name);
    names.filter(move |name| seen.insert(*name))
}

/// What `--variant` takes.
pub(super) fn words() -> clap::builder::PossibleValuesParser {
    all().chain(["all"]).collect::<Vec<_>>().into()
}

/// The variants that these words stand for.
pub(super) fn listed(words: &[String]) -> Vec<String> {
    let every = words.iter().any(|word| word == "all");
    all().filter(|name| every || words.iter().any(|word| word == name)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_of_two_layouts_is_one_word() {
        let names: Vec<_> = all().collect();
        assert_eq!(names.iter().filter(|name| **name == "f16").count(), 1);
        assert_eq!(names.len(), names.iter().collect::<HashSet<_>>().len());
    }

    #[test]
    fn a_model_is_named_with_or_without_a_variant() {
        let variant = |text: &str| text.parse::<Named>().map(|named| named.variant);
        assert_eq!(variant("m:v1"), Ok(None));
        assert_eq!(variant("m@fp8"), Ok(Some(Variant::Computed("fp8"))));
        assert_eq!(variant("m@seed"), Ok(Some(Variant::Form(Form::Seed))));
        assert!(variant("m@").is_err_and(|why| why.contains("there are today, seed, ")));
        assert!(variant("@fp8").is_err_and(|why| why.contains("name of a model")));
    }
}
