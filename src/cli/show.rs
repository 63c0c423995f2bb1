//! `wmount show MODEL` and `wmount show FILE.amb`.

use std::str::FromStr;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::StoreArgs;
use super::output::{count, print, print_json, size, table};
use super::variant::{Named, Variant};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::extent::Blobs;
use crate::layout::{self, Files, Layout};
use crate::model::Model;
use crate::tree::Tree;

/// Show a model: its tensors, files and shapes, and in which layouts it appears or why not
#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    /// The model, as [[HOST/]NAMESPACE/]NAME[:TAG][@VARIANT], or an AMB file
    model: Shown,
    /// Show the model's AMB file: header, sections and tensors
    #[arg(long)]
    amb: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// What is to be shown.
#[derive(Debug, Clone)]
enum Shown {
    /// The AMB file at this path.
    File(String),
    Model(Named),
}

impl FromStr for Shown {
    type Err = String;

    fn from_str(text: &str) -> Result<Shown, String> {
        if super::amb::is_file(text) {
            return Ok(Shown::File(text.into()));
        }
        let no_file = |why| if text.ends_with(".amb") { format!("there is no such file, and {why}") } else { why };
        text.parse().map(Shown::Model).map_err(no_file)
    }
}

pub(super) fn run(args: &ShowArgs) -> Result<()> {
    let Named { model: name, variant } = match &args.model {
        Shown::File(path) => return super::amb::show_file(path, args.json),
        Shown::Model(named) => named,
    };
    let store = Arc::new(args.store.open()?);
    let found = store.find_asked(name).map_err(|error| match error {
        Error::NotFound(what) if name.name.ends_with(".amb") => {
            Error::NotFound(format!("a file of this name, or {what}"))
        }
        other => other,
    });
    let model = store.load(&found?)?;
    // Only the whole tree knows the path of a model whose short one another model has.
    let tree = Tree::new(&store, store.survey()?, None, [].into());
    let entry = tree.entries().iter().find(|entry| entry.found.name == *name);
    let path = entry.map_or_else(|| name.tree_path(), |entry| entry.path.clone());
    let files = Files(store.blobs());
    let mut description = describe(&model, &path, *variant, files)?;
    if args.amb {
        let place = &description["layouts"]["amb"];
        let why =
            || format!("{name} has no AMB file: {}", place["reason"].as_str().unwrap_or("there is no such variant"));
        let path = place["path"].as_str().ok_or_else(|| Error::Invalid(why()))?;
        return super::amb::show_model(store.clone(), path, args.json);
    }
    if model.defects.is_empty() {
        description["damaged"] = json!(Vec::from_iter(super::ls::damage(&store, &model)));
    }
    description["shapes"] = json!(layout::shapes(&model, files));
    if args.json { print_json(&description) } else { print(&text(&description)) }
}

fn describe(model: &Model, path: &str, variant: Option<Variant>, files: Files<'_>) -> Result<Value> {
    let tensors: Vec<Value> = [&model.tensors, &model.other_tensors]
        .into_iter()
        .flatten()
        .map(|tensor| {
            json!({"name": tensor.name, "dtype": tensor.dtype.name(), "shape": tensor.shape, "bytes": tensor.len,
                "digest": tensor.blob})
        })
        .collect();
    let file = |(file, fault): (&crate::model::SmallFile, Option<String>)| json!({"name": file.path, "bytes": file.len, "digest": file.blob, "fault": fault});
    let weights = model
        .weights
        .iter()
        .map(|file| json!({"role": file.role, "bytes": file.len, "digest": file.blob, "fault": file.fault}));
    let source = |source: &crate::model::Source| {
        let bytes: u64 = source.files.iter().map(|file| file.content.size()).fold(0, u64::saturating_add);
        json!({"name": source.name, "kind": source.kind.name(), "files": source.files.len(), "bytes": bytes})
    };
    let programs = model.programs().map(|source| json!(source.name)).collect::<Vec<_>>();
    let mut layouts = Map::new();
    if let Some(Variant::Form(form)) = variant {
        let layout = layout::of_form(form);
        layouts.insert(layout.name().into(), place_in(layout, model, path));
    }
    for base in layout::all() {
        match variant {
            Some(Variant::Form(_)) => {}
            Some(Variant::Computed(variant)) => {
                let place = match base.variants().iter().find(|(name, _)| *name == variant) {
                    Some((name, layout)) => variant_in(*layout, model, &format!("{path}@{name}"), files)?,
                    None => json!({"shown": false, "reason": "it has no such variant"}),
                };
                layouts.insert(base.name().into(), place);
            }
            None => {
                let remembered = Remembered(files.0);
                for (name, layout) in base.variants() {
                    let path = format!("{path}@{name}");
                    let place = variant_in(*layout, model, &path, Files(&remembered)).unwrap_or_else(|_| {
                        let mut place = place_in(*layout, model, &path);
                        place["unless"] =
                            json!(format!("values would become infinite: wmount show {}@{name}", model.name));
                        place
                    });
                    layouts.insert(format!("{}@{name}", base.name()), place);
                }
                layouts.insert(base.name().into(), place_in(base, model, path));
            }
        }
    }
    layouts.sort_keys();
    Ok(json!({
        "model": model.name.to_string(),
        "variant": variant.map(Variant::name),
        "path": path,
        "sources": model.sources.iter().map(source).collect::<Vec<_>>(),
        "programs": programs,
        "layouts": layouts,
        "damaged": model.defects.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "files": model.files.iter().zip(files.faults(model)).map(file).collect::<Vec<_>>(),
        "weights": weights.collect::<Vec<_>>(),
        "tensors": tensors,
    }))
}

/// Blobs of which only what was found out before is known: for who does not ask for one variant it is not worth a read of
/// all tensors.
struct Remembered<'a>(&'a dyn Blobs);

impl Blobs for Remembered<'_> {
    fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.0.read_exact(digest, offset, buf)
    }

    fn memo(&self, key: &str, digest: &Digest, _: &dyn Fn() -> Result<Vec<u8>>) -> Result<Arc<[u8]>> {
        self.0.memo(key, digest, &|| Err(Error::NotFound(key.into())))
    }
}

/// Where a variant shows the model, or why not; finding out may read all tensors.
fn variant_in(layout: &dyn Layout, model: &Model, path: &str, files: Files<'_>) -> Result<Value> {
    let place = place_in(layout, model, path);
    if place["shown"] != true {
        return Ok(place);
    }
    Ok(match layout.overflow(model, files)? {
        Some(reason) => json!({"shown": false, "reason": reason}),
        None => place,
    })
}

/// Where a layout or variant shows the model, or why not.
fn place_in(layout: &dyn Layout, model: &Model, path: &str) -> Value {
    match layout.expresses(model) {
        Err(reason) => json!({"shown": false, "reason": reason}),
        Ok(()) => {
            let anchor = layout.anchors(&model.name, path).swap_remove(0);
            json!({"shown": true, "path": format!("{}/{}", layout.name(), anchor.path)})
        }
    }
}

fn text(model: &Value) -> String {
    let list = |key: &str| model[key].as_array().cloned().unwrap_or_default();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let bytes = |value: &Value| size(value["bytes"].as_u64().unwrap_or(0));
    let variant = model["variant"].as_str().map(|name| format!("@{name}")).unwrap_or_default();
    let mut text = format!("{}{variant}\n\nimported\n", word(&model["model"]));
    let indent = |rows: Vec<Vec<String>>, right: &[usize]| {
        table(&rows, right).lines().map(|line| format!("  {line}\n")).collect::<String>()
    };
    let sources = list("sources").into_iter().map(|source| {
        let files = count(source["files"].as_u64().unwrap_or(0), "file");
        vec![word(&source["name"]), word(&source["kind"]), files, bytes(&source)]
    });
    text += &indent(sources.collect(), &[2, 3]);
    list("damaged").iter().for_each(|defect| text += &format!("  damaged: {}\n", word(defect)));
    text += "\nlayouts\n";
    let layouts = model["layouts"].as_object().into_iter().flatten().map(|(name, layout)| {
        let place = match (layout["shown"] == true, layout["unless"].as_str()) {
            (true, None) => word(&layout["path"]),
            (true, Some(unless)) => format!("{}, unless {unless}", word(&layout["path"])),
            (false, _) => format!("no: {}", word(&layout["reason"])),
        };
        vec![name.clone(), place]
    });
    text += &indent(layouts.collect(), &[]);
    text += &shapes(&list("shapes"));
    let files = list("files");
    if !files.is_empty() {
        text += "\nfiles\n";
        let fault = |file: &Value| file["fault"].as_str().map(|why| format!("not read: {why}")).unwrap_or_default();
        let row = |file: &Value| vec![word(&file["name"]), bytes(file), fault(file)];
        text += &indent(files.iter().map(row).collect(), &[1]);
    }
    let weights = list("weights");
    if !weights.is_empty() {
        text += "\nweights\n";
        let row = |file: &Value| vec![word(&file["role"]), bytes(file), word(&file["fault"])];
        text += &indent(weights.iter().map(row).collect(), &[1]);
    }
    let tensors = list("tensors");
    if !tensors.is_empty() {
        let row = |tensor: &Value| {
            vec![word(&tensor["name"]), word(&tensor["dtype"]), tensor["shape"].to_string(), bytes(tensor)]
        };
        text += "\ntensors\n";
        text += &indent(tensors.iter().map(row).collect(), &[3]);
    }
    text
}

/// The shapes of the model's packages, and what they do not share.
fn shapes(shapes: &[Value]) -> String {
    if shapes.is_empty() {
        return String::new();
    }
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let bytes = |value: &Value| size(value.as_u64().unwrap_or(0));
    let features = |features: &Value| {
        let one = |feature: &Value| {
            let sizes: Vec<String> = list(&feature["shape"]).iter().map(ToString::to_string).collect();
            format!("{} {}[{}]", word(&feature["name"]), word(&feature["dtype"]), sizes.join(", "))
        };
        list(features).iter().map(one).collect::<Vec<_>>().join(", ")
    };
    let (mut rows, mut alone) = (Vec::new(), Vec::new());
    for shape in shapes {
        let sizes = format!("{} + {}", bytes(&shape["program_bytes"]), bytes(&shape["weight_bytes"]));
        let flow = match shape["damaged"].as_str() {
            Some(why) => format!("damaged: {why}"),
            None => format!("{} -> {}", features(&shape["inputs"]), features(&shape["outputs"])),
        };
        rows.push(vec![format!("  {}", word(&shape["name"])), sizes, flow]);
        for constant in list(&shape["unshared"]) {
            let name = format!("  {}: {}", word(&shape["name"]), word(&constant["name"]));
            let ty = format!("{} {}", word(&constant["dtype"]), constant["shape"]);
            alone.push(vec![name, ty, bytes(&constant["bytes"]), word(&constant["why"])]);
        }
    }
    let mut text = format!("\nshapes\n{}", table(&rows, &[1]));
    if !alone.is_empty() {
        text += &format!("\nnot shared\n{}", table(&alone, &[2]));
    }
    text
}
