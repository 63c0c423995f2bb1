//! Programs made of literal messages.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::decoded::Program;
use super::*;

mod outline;

/// A length-delimited field.
fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    [varint(number << 3 | 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

/// A varint field.
fn number(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A field that nobody knows, to be put into every message.
fn unknown() -> Vec<u8> {
    [field(9999, b"kept"), number(9998, 7)].concat()
}

fn entry(key: &str, value: &[u8]) -> Vec<u8> {
    [field(1, key.as_bytes()), field(2, value), unknown()].concat()
}

fn tensor_type(dtype: u64, dimensions: &[u64]) -> Vec<u8> {
    let dimensions = dimensions.iter().flat_map(|&size| {
        let size = if size == 0 { Vec::new() } else { number(1, size) };
        field(3, &[field(1, &[size, unknown()].concat()), unknown()].concat())
    });
    let rank = number(2, dimensions.clone().count() as u64);
    let tensor = [number(1, dtype), rank, dimensions.collect(), unknown()].concat();
    [field(1, &tensor), unknown()].concat()
}

fn blob(ty: &[u8], offset: u64) -> Vec<u8> {
    let file = [field(1, b"@model_path/weights/weight.bin"), number(2, offset), unknown()].concat();
    [field(2, ty), field(5, &file), unknown()].concat()
}

fn f32_blob(offset: u64) -> Vec<u8> {
    blob(&tensor_type(11, &[2, 3]), offset)
}

/// A value of the message's own bytes: a tuple, a list or a dictionary.
fn immediate(number: u64, value: &[u8]) -> Vec<u8> {
    field(3, &[field(number, &[value.to_vec(), unknown()].concat()), unknown()].concat())
}

fn named_type(name: &str, ty: &[u8]) -> Vec<u8> {
    [field(1, name.as_bytes()), field(2, ty), unknown()].concat()
}

fn operation(name: &str, ty: &str, fields: &[Vec<u8>]) -> Vec<u8> {
    let output = field(3, &named_type(name, &tensor_type(11, &[1])));
    [field(1, ty.as_bytes()), fields.concat(), output, unknown()].concat()
}

fn constant(name: &str, offset: u64) -> Vec<u8> {
    operation(name, "const", &[field(5, &entry("val", &f32_blob(offset)))])
}

fn block(operations: &[Vec<u8>]) -> Vec<u8> {
    let operations: Vec<u8> = operations.iter().flat_map(|operation| field(3, operation)).collect();
    [field(2, b"out"), operations, unknown()].concat()
}

fn function(blocks: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let blocks: Vec<u8> = blocks.iter().flat_map(|(key, block)| field(3, &entry(key, block))).collect();
    [field(2, b"CoreML6"), blocks, unknown()].concat()
}

fn program(functions: &[(&str, Vec<u8>)]) -> Vec<u8> {
    functions.iter().flat_map(|(key, function)| field(2, &entry(key, function))).chain(unknown()).collect()
}

fn model(program: &[u8]) -> Vec<u8> {
    [number(1, 7), field(2, b""), field(502, program), unknown()].concat()
}

fn one_block(operations: &[Vec<u8>]) -> Vec<u8> {
    model(&program(&[("main", function(&[("CoreML6", block(operations))]))]))
}

/// A model with references in every place that can hold one.
fn everywhere() -> Vec<u8> {
    let argument = |bindings: &[Vec<u8>]| -> Vec<u8> { bindings.iter().flat_map(|it| field(1, it)).collect() };
    let name = field(1, b"x");
    let value = |offset| [field(2, &f32_blob(offset)), unknown()].concat();
    let list = [field(1, &f32_blob(5)), field(1, &[immediate(2, &field(1, &f32_blob(6)))].concat())].concat();
    let pair = [field(1, &f32_blob(7)), field(2, &f32_blob(8)), unknown()].concat();
    let typed = field(2, &field(1, &[number(1, 11), field(4, &entry("a", &f32_blob(9)))].concat()));
    let wrapped = |number: u64, ty: &[u8]| field(number, &field(1, ty));
    let typed_type = field(1, &[number(1, 11), field(4, &entry("a", &f32_blob(10)))].concat());
    let types = [wrapped(2, &typed_type), wrapped(3, &typed_type), wrapped(5, &typed_type), {
        field(4, &[field(1, &typed_type), field(2, &typed_type)].concat())
    }];
    let inputs: Vec<u8> = types.iter().flat_map(|ty| field(1, &named_type("in", ty))).collect();
    let operations = [
        constant("w", 1),
        operation(
            "y",
            "linear",
            &[
                field(2, &entry("weight", &argument(&[value(2)]))),
                field(2, &entry("many", &argument(&[value(3), name, value(4)]))),
                field(5, &entry("list", &immediate(3, &list))),
                field(5, &entry("dictionary", &immediate(4, &field(1, &pair)))),
                field(5, &entry("typed", &typed)),
            ],
        ),
        operation("c", "cond", &[field(4, &block(&[constant("then", 11)])), field(4, &block(&[constant("else", 12)]))]),
        [field(1, b"write"), field(2, &entry("data", &argument(&[value(13)])))].concat(),
    ];
    let inner =
        [block(&operations), field(1, &named_type("b", &typed_type)), field(4, &entry("attribute", &f32_blob(14)))];
    let main =
        [inputs, function(&[("CoreML6", inner.concat())]), field(4, &entry("of_function", &f32_blob(15)))].concat();
    let two = function(&[("CoreML7", block(&[constant("w", 17)])), ("CoreML6", block(&[constant("w", 16)]))]);
    model(&[program(&[("two", two), ("main", main)]), field(4, &entry("of_program", &f32_blob(18)))].concat())
}

fn found(model: &[u8]) -> Vec<(String, u64)> {
    let references = Program::parse(model).unwrap().references().unwrap();
    references.into_iter().map(|reference| (reference.name, reference.offset)).collect()
}

#[test]
fn every_reference_is_found_and_named() {
    let expected = [
        ("of_program", 18),
        ("in.type.a", 10),
        ("in.0.type.a", 10),
        ("in.type.a", 10),
        ("in.key.type.a", 10),
        ("in.value.type.a", 10),
        ("of_function", 15),
        ("b.type.a", 10),
        ("attribute", 14),
        ("w", 1),
        ("y.many.0", 3),
        ("y.many.2", 4),
        ("y.weight", 2),
        ("y.dictionary.0.key", 7),
        ("y.dictionary.0.value", 8),
        ("y.list.0", 5),
        ("y.list.1.0", 6),
        ("y.typed.type.a", 9),
        ("then", 11),
        ("else", 12),
        ("write.data", 13),
        ("two/CoreML6/w", 16),
        ("two/CoreML7/w", 17),
    ];
    assert_eq!(found(&everywhere()), expected.map(|(name, offset)| (name.to_string(), offset)));
}

#[test]
fn a_reference_has_type_shape_and_file() {
    let model =
        one_block(&[operation("w", "const", &[field(5, &entry("val", &blob(&tensor_type(39, &[4, 0, 9]), 64)))])]);
    let program = Program::parse(&model).unwrap();
    assert_eq!(program.kind(), Kind::MlProgram);
    let file = "@model_path/weights/weight.bin".to_string();
    let reference = Reference { name: "w".into(), dtype: Dtype::U3, shape: vec![4, 0, 9], file, offset: 64 };
    assert_eq!(weight_file(&reference.file), Ok("weight.bin"));
    assert_eq!(program.references(), Ok(vec![reference]));
}

#[test]
fn pipelines_are_searched() {
    let inner = one_block(&[constant("w", 1)]);
    let pipeline = [field(1, &inner), field(1, &inner), field(2, b"first"), unknown()].concat();
    for ty in [200, 201, 202] {
        let pipeline = if ty == 202 { pipeline.clone() } else { [field(1, &pipeline), unknown()].concat() };
        let model = [number(1, 7), field(ty, &pipeline)].concat();
        assert_eq!(Program::parse(&model).unwrap().kind(), Kind::Pipeline);
        assert_eq!(found(&model), [("first/w".to_string(), 1), ("1/w".to_string(), 1)]);
        let outer = [number(1, 7), field(202, &[field(1, &model), field(2, b"outer")].concat())].concat();
        assert_eq!(found(&outer)[0].0, "outer/first/w");
        assert_eq!(Program::parse(&outer).unwrap().to_bytes().unwrap().len(), outer.len());
    }
}

#[test]
fn kinds_are_told_by_the_field() {
    for (number_of_field, kind) in
        [(500, Kind::NeuralNetwork), (403, Kind::NeuralNetwork), (303, Kind::NeuralNetwork), (3000, Kind::Other)]
    {
        let model = [number(1, 1), field(number_of_field, &unknown())].concat();
        let program = Program::parse(&model).unwrap();
        assert_eq!(program.kind(), kind);
        assert_eq!(program.references(), Ok(Vec::new()));
        assert_eq!(program.to_bytes(), Ok(model));
    }
}

#[test]
fn nothing_that_is_not_understood_is_lost() {
    let model = everywhere();
    let again = Program::parse(&model).unwrap().to_bytes().unwrap();
    // Known fields come in the order of their numbers, so the bytes are the same ones in another order.
    let sorted = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes.sort_unstable();
        bytes
    };
    assert_eq!(sorted(&again), sorted(&model));
    assert_eq!(Program::parse(&again), Program::parse(&model));
    assert_eq!(Program::parse(&again).unwrap().to_bytes(), Ok(again));
}

#[test]
fn messages_in_pieces_are_merged_and_the_last_entry_of_a_key_counts() {
    let first = program(&[("main", function(&[("CoreML6", block(&[constant("old", 1)]))]))]);
    let second = program(&[("main", function(&[("CoreML6", block(&[constant("new", 2)]))]))]);
    let model = [number(1, 7), field(502, &first), field(502, &second)].concat();
    assert_eq!(found(&model), [("new".to_string(), 2)]);

    let mut program = Program::parse(&model).unwrap();
    program.relocate(&mut |file, offset| (offset == 2).then(|| (file.into(), 3)).ok_or(Fault::new(0, "dead"))).unwrap();
    assert_eq!(found(&program.to_bytes().unwrap()), [("new".to_string(), 3)]);
}

#[test]
fn relocation_goes_wherever_references_are() {
    let mut program = Program::parse(&everywhere()).unwrap();
    let before = program.references().unwrap();
    let mut offsets = Vec::new();
    program
        .relocate(&mut |file, offset| {
            assert_eq!(file, "@model_path/weights/weight.bin");
            offsets.push(offset);
            Ok((weight_file_reference("shared.bin"), offset << 40))
        })
        .unwrap();
    let after = Program::parse(&program.to_bytes().unwrap()).unwrap().references().unwrap();
    assert_eq!(before.len(), offsets.len());
    for (before, after) in before.into_iter().zip(after) {
        assert_eq!(
            Reference { file: "@model_path/weights/shared.bin".into(), offset: before.offset << 40, ..before },
            after
        );
    }
}

#[test]
fn weight_files_are_plain_names_in_one_directory() {
    assert_eq!(weight_file("@model_path/weights/0-weight.bin"), Ok("0-weight.bin"));
    assert_eq!(weight_file(&weight_file_reference("a b")), Ok("a b"));
    for bad in ["", "weight.bin", "/weights/w", "@model_path/w", "@model_path/weights/"] {
        assert!(weight_file(bad).is_err(), "{bad:?}");
    }
    for bad in [".", "..", "../w", "a/b", "/w", "a\0"] {
        assert!(weight_file(&weight_file_reference(bad)).is_err(), "{bad:?}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Program::parse(&bytes).and_then(|program| program.references());
    }

    #[test]
    fn any_change_is_read_or_refused(at in 0usize..4000, with in any::<u8>()) {
        let mut model = everywhere();
        let at = at % model.len();
        model[at] = with;
        if let Ok(program) = Program::parse(&model) {
            let _ = program.references();
            let bytes = program.to_bytes().unwrap();
            prop_assert_eq!(Program::parse(&bytes), Ok(program));
        }
    }
}
