"""AMB files that others wrote."""

import json

import numpy as np
import pytest

import amb_reference as reference
import readers
from amb_reference import File, Record


def example(path, metadata, config, weights):
    """A file as the format's document describes its writer: fp32 tensors, no tokenizer."""
    records = {name: Record(0, array.shape, array.astype("<f4").tobytes()) for name, array in weights.items()}
    sections = [json.dumps(section).encode() for section in (metadata, config)]
    path.write_bytes(reference.write(File(*sections, b"", records)))
    return path


@pytest.fixture
def written(tmp_path):
    rng = np.random.default_rng(5)
    weights = {
        "transformer.wte": rng.standard_normal((100, 33)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float32),
        "scalar": np.float32(1.5).reshape(()),
    }
    metadata = {"name": "phi-3-mini", "family": "Phi", "license": "MIT"}
    return example(tmp_path / "phi.amb", metadata, {"architecture": "phi", "n_vocab": 100}, weights), weights


def test_a_plain_file_round_trips_and_is_a_model(store, tmp_path, written):
    path, weights = written
    report = store.json("import", path)
    assert report["model"] == "phi:latest" and report["added"]["tensors"] == 3
    shown = store.json("show", "phi")
    assert shown["sources"][0]["kind"] == "amb"
    for place in ("original/phi/latest/phi.amb", "amb/phi/latest.amb"):
        assert store.run("cat", place).stdout == path.read_bytes()
    store.run("export", "safetensors/phi/latest", tmp_path / "st")
    found = readers.safetensors_dir(tmp_path / "st")
    for name, array in weights.items():
        assert np.array_equal(found[name].array(), array)
    base = reference.read(path.read_bytes())
    variant = reference.read(store.run("cat", "amb/phi/latest@int4-32.amb").stdout)
    assert json.loads(variant.config) == json.loads(base.config) | {"quant": reference.quant("int4-32")}
    assert variant.metadata == base.metadata
    for name, array in weights.items():
        made = reference.variant(name, array, "int4-32") or (0, base.records[name].data)
        assert (variant.records[name].code, variant.records[name].data) == made


def test_tensors_are_shared_with_other_models(store, models, tmp_path):
    store.add(models / "tiny-llama", name="tiny-llama")
    store.run("export", "amb/tiny-llama/latest.amb", tmp_path / "x.amb")
    before = sum(store.blobs().values())
    report = store.json("import", tmp_path / "x.amb", "-n", "again")
    assert report["added"]["tensors"] == 0 and report["present"]["tensors"] == 21
    assert sum(store.blobs().values()) - before < 0.1 * (tmp_path / "x.amb").stat().st_size
    assert store.run("cat", "original/again/latest/x.amb").stdout == (tmp_path / "x.amb").read_bytes()


@pytest.mark.parametrize("which", reference.VARIANTS)
def test_quantised_files_round_trip(store, models, tmp_path, which):
    store.add(models / "tiny-llama", name="tiny-llama")
    path = tmp_path / "q.amb"
    store.run("export", f"amb/tiny-llama/latest@{which}.amb", path)
    store.add(path, name="q")
    for place in ("original/q/latest/q.amb", "amb/q/latest.amb"):
        assert store.run("cat", place).stdout == path.read_bytes()
    layouts = store.json("show", "q")["layouts"]
    assert layouts["safetensors"]["shown"] is (which == "f16")
    assert store.json("verify")["damaged"] == []
    store.run("rm", "tiny-llama")
    store.run("gc")
    assert store.run("cat", "amb/q/latest.amb").stdout == path.read_bytes()


def test_odd_bytes_survive(store, tmp_path):
    """Flags, white space, an unknown tokenizer, foreign quantised data, order of records, empty tensors."""
    rng = np.random.default_rng(6)
    records = {
        "z": Record(7, (33,), bytes(rng.integers(0, 256, 1001, np.uint8))),
        "a": Record(4, (5,), b""),
        "m": Record(3, (2, 2), b"\1\2\3\4"),
        "": Record(2, (0, 3), b""),
    }
    data = bytearray(reference.write(File(b' {"x": "\\u00e9"}\n\n', b"", b"\x09" + bytes(range(40)), records)))
    data[6:8] = b"\xff\x7f"
    path = tmp_path / "odd.amb"
    path.write_bytes(data)
    store.add(path, name="odd")
    for place in ("original/odd/latest/odd.amb", "amb/odd/latest.amb"):
        assert store.run("cat", place).stdout == bytes(data)
    assert store.json("show", "odd", "--amb")["flags"] == 0x7FFF
    assert not store.json("show", "odd@f16")["layouts"]["amb"]["shown"]


def test_a_model_has_one_set_of_weights(small, written):
    path, _ = written
    done = small.run("import", path, "-n", "tiny-llama", check=False)
    assert done.returncode == 1 and b"already" in done.stderr
    small.json("import", path, "-n", "tiny-llama", "--replace")
    assert small.run("cat", "amb/tiny-llama/latest.amb").stdout == path.read_bytes()
