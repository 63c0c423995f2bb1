"""CoreML packages through coremltools: specs, blobs, and one weight file for all shapes."""

import logging
import os

import numpy as np
import pytest

import models as made
import readers

logging.getLogger("coremltools").setLevel(logging.ERROR)
PACKAGES = [
    *(("minilm/latest", f"minilm-s{n}.mlpackage") for n in made.SHAPES),
    ("minilm/latest", "minilm-other.mlpackage"),
    ("encoder/latest", "minilm-s32.mlpackage"),
    ("mixed/latest", "mixed.mlpackage"),
    ("subbyte/latest", "subbyte.mlpackage"),
    ("inline/latest", "inline.mlpackage"),
]


def source_spec(package):
    """The source's spec, parsed from its file: coremltools would rewrite the source's Manifest.json."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((package / made.PACKAGE / "model.mlmodel").read_bytes())
    return spec


def blob_offsets(message) -> list[int]:
    """The offsets of all BlobFileValues anywhere below a protobuf message."""
    if message.DESCRIPTOR.name == "BlobFileValue":
        assert message.fileName == "@model_path/weights/weight.bin"
        return [message.offset]
    found = []
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                continue
            value = [value[key] for key in sorted(value)]
        elif hasattr(value, "DESCRIPTOR"):
            value = [value]
        for part in value:
            found += blob_offsets(part)
    return found


READ = {"F32": "float", "F16": "fp16", "U8": "uint8", "I8": "int8", "INT4": "int4", "UINT4": "uint4", "I32": "int32"}


def read_blob(reader, dtype: str, offset: int) -> bytes:
    return np.array(getattr(reader, f"read_{READ[dtype]}_data")(offset)).tobytes()


def forget_offsets(message):
    """The same message with every BlobFileValue at 0: a shared weight file has its blobs elsewhere."""
    if message.DESCRIPTOR.name == "BlobFileValue":
        message.offset = 0
        return message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                continue
            value = value.values()
        for part in [value] if hasattr(value, "DESCRIPTOR") else value:
            forget_offsets(part)
    return message


@pytest.mark.parametrize("model, package", PACKAGES)
def test_coremltools_loads_the_spec_equal(world, model, package):
    import coremltools as ct

    shown = ct.models.utils.load_spec(str(world / "coreml" / model / package))
    source = source_spec(world.models / package)
    if package == "minilm-other.mlpackage":
        assert shown != source
        shown, source = forget_offsets(shown), forget_offsets(source)
    assert shown == source


@pytest.mark.parametrize("model, package", PACKAGES)
def test_apples_reader_reads_every_blob_equal(world, model, package):
    from coremltools.libmilstoragepython import _BlobStorageReader

    shown, source = world / "coreml" / model / package, world.models / package
    here, there = blob_offsets(source_spec(shown)), blob_offsets(source_spec(source))
    assert len(here) == len(there)
    if not there:
        return
    blobs = readers.milblob(made.weight_bin(source))
    mine = _BlobStorageReader(str(made.weight_bin(shown)))
    theirs = _BlobStorageReader(str(made.weight_bin(source)))
    for a, b in zip(here, there):
        assert read_blob(mine, blobs[b].dtype, a) == read_blob(theirs, blobs[b].dtype, b), f"blob at {b}"


def test_all_packages_share_one_inode(world):
    """One weight.bin with a link for each package, although one of them was written with another."""
    packages = [*(f"minilm-s{n}.mlpackage" for n in made.SHAPES), "minilm-other.mlpackage", "all.mlpackage"]
    files = [made.weight_bin(world / "coreml/minilm/latest" / package) for package in packages]
    assert len({f.stat().st_ino for f in files}) == 1
    assert {f.stat().st_nlink for f in files} == {len(packages)}


def test_what_differs_is_appended(world):
    """The first package's file, with the position table that only one package has behind it."""
    shown = made.weight_bin(world / "coreml/minilm/latest/minilm-s32.mlpackage")
    first = made.weight_bin(world.models / "minilm-s32.mlpackage")
    other = made.weight_bin(world.models / "minilm-other.mlpackage")
    blobs, before, others = (readers.milblob(path) for path in (shown, first, other))
    assert shown.read_bytes()[4 : first.stat().st_size] == first.read_bytes()[4:]
    assert list(blobs)[: len(before)] == list(before)
    added = [blobs[offset].data for offset in list(blobs)[len(before) :]]
    known = {blob.data for blob in before.values()}
    assert added == [blob.data for blob in others.values() if blob.data not in known]
    # A model whose packages have the same weights shows the file as it was imported.
    assert made.weight_bin(world / "coreml/encoder/latest/minilm-s32.mlpackage").read_bytes() == first.read_bytes()


def test_a_package_without_blobs_has_an_empty_weights_directory(world):
    assert os.listdir(made.weight_bin(world / "coreml/inline/latest/inline.mlpackage").parent) == []


def test_every_package_has_the_files_of_its_source(world):
    for model, package in PACKAGES:
        source, shown = world.models / package, world / "coreml" / model / package
        for path in source.rglob("*"):
            twin = shown / path.relative_to(source)
            assert twin.is_dir() if path.is_dir() else twin.is_file(), twin
