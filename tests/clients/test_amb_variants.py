"""Variants of AMB files against the quantiser in numpy, byte for byte."""

import os
import random

import numpy as np
import pytest
from safetensors.numpy import save_file

import amb_reference as reference
import readers
from harness import Mount, digest, run, unmount


def arrays(directory):
    return {name: tensor.array() for name, tensor in readers.safetensors_dir(directory).items()}


@pytest.mark.parametrize("which", reference.VARIANTS)
@pytest.mark.parametrize("model", ["minilm-float/v1", "tiny-llama/latest"])
def test_a_variant_is_what_the_page_says(world, model, which):
    base = reference.load(world / f"amb/{model}.amb")
    path = world / f"amb/{model}@{which}.amb"
    whole = reference.expected(base, arrays(world.sources[model][0]), which)
    assert os.stat(path).st_size == len(whole), "the size before a byte is read"
    assert path.read_bytes() == whole


def test_odd_values_and_sizes(store, tmp_path):
    rng = np.random.default_rng(3)
    odd = rng.standard_normal((7, 45)).astype(np.float32)
    odd[0, :8] = [np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, 3e38, 1e5]
    tensors = {
        "odd": odd,
        "zeros": np.zeros((33, 2), np.float32),
        "tiny": (rng.standard_normal((40, 40)) * 1e-7).astype(np.float32),
        "large": (rng.standard_normal((11, 13)) * 1e6).astype(np.float32),
        "half": rng.standard_normal((64, 31)).astype(np.float16),
        "one": np.full((1, 1), -2.5, np.float32),
        "flat": rng.standard_normal(100).astype(np.float32),
        "scalar": np.float32(3),
        "empty": np.zeros((0, 4), np.float32),
        "q_norm.weight": rng.standard_normal((4, 4)).astype(np.float32),
        "bytes": rng.integers(-128, 128, (5, 5)).astype(np.int8),
    }
    tensors = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    (tmp_path / "odd").mkdir()
    save_file(tensors, tmp_path / "odd/model.safetensors")
    store.add(tmp_path / "odd", name="odd")
    at = tmp_path / "mnt"
    at.mkdir()
    run("--allow-overflow", store.path, at)
    try:
        base = reference.load(at / "amb/odd/latest.amb")
        made_by = {which: reference.load(at / f"amb/odd/latest@{which}.amb") for which in reference.VARIANTS}
    finally:
        unmount(at)
    for which, found in made_by.items():
        for name, array in tensors.items():
            made = reference.variant(name, array, which) if array.dtype != np.int8 else None
            record = found.records[name]
            want = (base.records[name].code, base.records[name].data) if made is None else made
            assert (record.code, record.data) == want, (which, name)


@pytest.mark.parametrize("which", ["int5-32", "int8", "adaptive-32"])
def test_any_range_is_that_of_the_whole(world, which):
    path = world / f"amb/tiny-llama/latest@{which}.amb"
    whole = path.read_bytes()
    chance = random.Random(4)
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for _ in range(300):
            at, length = chance.randrange(len(whole)), chance.choice([1, 3, 100, 5000])
            assert os.pread(file.fileno(), length, at) == whole[at : at + length]


def test_export_writes_the_variant(world, tmp_path):
    world.store.run("export", "amb/minilm-float/v1@int4-128.amb", tmp_path / "out.amb")
    assert digest(tmp_path / "out.amb") == digest(world / "amb/minilm-float/v1@int4-128.amb")


def test_only_listed_variants_are_entries(small, tmp_path):
    def names(at, *options):
        mount = Mount(small, at)
        at.mkdir(exist_ok=True)
        run(*options, small.path, at)
        try:
            assert (at / "amb/tiny-llama/latest@int8.amb").is_file()
            assert not (at / "amb/tiny-llama/latest@int3.amb").exists()
            return sorted(os.listdir(at / "amb/tiny-llama"))
        finally:
            mount.__exit__()

    assert names(tmp_path / "a") == ["latest.amb"]
    assert names(tmp_path / "b", "--variant", "f16", "--variant", "int4-32") == [
        "latest.amb", "latest@f16.amb", "latest@int4-32.amb",
    ]  # fmt: skip
    assert len(names(tmp_path / "c", "--variant", "all")) == 1 + len(reference.VARIANTS)
    done = run("--variant", "int3", small.path, tmp_path / "a", check=False)
    assert done.returncode == 2 and b"int4-128" in done.stderr


def test_inode_and_size_survive_a_remount(small, tmp_path):
    def status():
        with Mount(small, tmp_path / "m") as mount:
            found = os.stat(mount / "amb/tiny-llama/latest@adaptive-32.amb")
            return found.st_ino, found.st_size, found.st_mtime_ns

    assert status() == status()


def test_memos_are_made_anew(small):
    path = "amb/tiny-llama/latest@adaptive-32.amb"
    first = small.run("cat", path).stdout
    memos = sorted((small.path / ".wmount/memo").iterdir())
    assert memos
    for index, memo in enumerate(memos):
        whole = memo.read_bytes()
        memo.write_bytes(whole[: len(whole) // 2] if index % 2 else bytes([whole[0] ^ 1]) + whole[1:])
    assert small.run("cat", path).stdout == first
    for memo in memos:
        memo.unlink()
    assert small.run("cat", path).stdout == first


def test_show_names_header_sections_and_tensors(world, tmp_path):
    shown = world.store.json("show", "minilm-float:v1@int4-128", "--amb")
    assert (shown["version"], shown["flags"]) == (1, 0)
    assert shown["config"]["quant"] == {"type": "int4_block", "block_size": 128, "scale_type": "fp16"}
    data = (world / "amb/minilm-float/v1@int4-128.amb").read_bytes()
    records = reference.read(data).records
    assert [tensor["name"] for tensor in shown["tensors"]] == list(records)
    for tensor in shown["tensors"]:
        record = records[tensor["name"]]
        assert (tensor["code"], tuple(tensor["shape"])) == (record.code, record.shape)
        assert data[tensor["offset"] : tensor["offset"] + tensor["bytes"]] == record.data
    file = tmp_path / "x.amb"
    file.write_bytes(data)
    text = run("show", file).stdout.decode()
    assert "INT4BLOCK" in text and "int4_block" in text and "WordPiece" in text
