"""The ollama tree as today's ollama reads it."""

import json
import os
import re

import mlx.core as mx
import pytest

import readers
from harness import HOST, digest
from test_loaders import IMPORTED, raw

TENSOR = "application/vnd.ollama.image.tensor"
JSON = "application/vnd.ollama.image.json"
CONFIG = "application/vnd.docker.container.image.v1+json"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_KEYS = [
    "model_format", "model_family", "model_families", "model_type", "file_type", "renderer", "parser", "requires",
    "remote_host", "remote_model", "capabilities", "context_length", "embedding_length", "base_name", "draft",
    "architecture", "os",
]  # fmt: skip


def manifest_path(world, model: str):
    space = "" if model.count("/") == 2 else "library/"
    return world / f"ollama/manifests/{HOST}/{space}{model}"


def manifest(world, model: str) -> dict:
    return json.loads(manifest_path(world, model).read_bytes())


def blob(world, layer: dict):
    return world / "ollama/blobs" / layer["digest"].replace(":", "-")


def manifests(world) -> list[dict]:
    root = world / "ollama/manifests"
    return [json.loads(p.read_bytes()) for p in root.rglob("*") if p.is_file()]


@pytest.mark.parametrize("model", IMPORTED)
def test_the_manifest_has_todays_form(world, model):
    """Go's compact JSON with a newline, keys in Go's order, only media types that ollama knows or ours."""
    data, parsed = manifest_path(world, model).read_bytes(), manifest(world, model)
    assert data == readers.go_json(parsed) + b"\n"
    assert list(parsed) == ["schemaVersion", "mediaType", "config", "layers"]
    assert (parsed["schemaVersion"], parsed["mediaType"]) == (2, MANIFEST)
    assert list(parsed["config"])[:3] == ["mediaType", "digest", "size"]
    assert parsed["config"]["mediaType"] == CONFIG
    for layer in parsed["layers"]:
        assert list(layer)[:3] == ["mediaType", "digest", "size"]
        assert layer["mediaType"] in (TENSOR, JSON) or layer["mediaType"].startswith("application/vnd.wmount.")


def test_there_is_a_manifest_for_every_model(world):
    for model in world.sources:
        if model in IMPORTED:
            assert manifest_path(world, model).is_file(), model


def test_the_config_is_config_v2_in_gos_order(world):
    for model in IMPORTED:
        config = json.loads(blob(world, manifest(world, model)["config"]).read_bytes())
        assert list(config) == [k for k in CONFIG_KEYS if k in config], model
        assert {"model_format", "model_family", "model_families", "model_type", "file_type"} <= config.keys()
        assert config["model_format"] == "safetensors"
        assert "completion" in config["capabilities"]


def test_every_digest_and_size_is_true_and_every_blob_is_referenced(world):
    found = {p.name: p for p in (world / "ollama/blobs").iterdir()}
    wanted = {}
    for parsed in manifests(world):
        for layer in [parsed["config"], *parsed["layers"]]:
            wanted[layer["digest"].replace(":", "-")] = layer["size"]
    assert found.keys() == wanted.keys()
    for name, path in found.items():
        assert re.fullmatch("sha256-[0-9a-f]{64}", name)
        assert path.stat().st_size == wanted[name], name
        assert digest(path) == name[7:], name


@pytest.mark.parametrize("model", IMPORTED)
def test_layers_are_the_sorted_tensors_then_the_json_files(world, model):
    layers = [x for x in manifest(world, model)["layers"] if not x["mediaType"].startswith("application/vnd.wmount.")]
    tensors = [x["name"] for x in layers if x["mediaType"] == TENSOR]
    files = [x["name"] for x in layers if x["mediaType"] == JSON]
    assert [x["mediaType"] for x in layers] == [TENSOR] * len(tensors) + [JSON] * len(files)
    assert tensors == sorted(set(tensors))
    source = world.sources[model][0]
    assert set(readers.safetensors_dir(source)) <= set(tensors)
    assert files == sorted(p.name for p in source.glob("*.json") if p.name != "model.safetensors.index.json")
    for layer in layers:
        if layer["mediaType"] == JSON:
            assert blob(world, layer).read_bytes() == (source / layer["name"]).read_bytes()


@pytest.mark.parametrize("model", IMPORTED)
def test_tensor_blobs_are_byte_exact_and_load_with_mlx(world, model):
    """One tensor under its full name, the header as ollama's own writer makes it."""
    layers = {x["name"]: x for x in manifest(world, model)["layers"] if x["mediaType"] == TENSOR}
    for name, tensor in readers.safetensors_dir(world.sources[model][0]).items():
        path = blob(world, layers[name])
        offsets = [0, len(tensor.data)]
        header = readers.go_json({name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}})
        header += b" " * (-len(header) % 8)
        assert path.read_bytes() == len(header).to_bytes(8, "little") + header + tensor.data, name
        loaded = mx.load(str(path), format="safetensors")
        assert list(loaded) == [name]
        assert tuple(loaded[name].shape) == tensor.shape and raw(loaded[name]) == tensor.data, name


def test_ollama_finds_nothing_to_tidy(world):
    """Both directories exist; below manifests no directory is empty, files are four levels deep."""
    assert (world / "ollama/blobs").is_dir()
    root = world / "ollama/manifests"
    for here, directories, files in os.walk(root):
        assert directories or files, f"{here} is empty"
        depth = len(os.path.relpath(here, root).split(os.sep)) if here != str(root) else 0
        assert depth == 3 or not files, here


def test_an_empty_store_still_has_ollamas_directories(store, models, tmp_path):
    from harness import Mount

    store.add(models / "inline.mlpackage", name="inline")
    store.run("rm", "inline")
    with Mount(store, tmp_path / "mnt") as mount:
        assert (mount / "ollama/blobs").is_dir() and (mount / "ollama/manifests").is_dir()
