"""Stores that wmount did not write are mounted as they are, and nothing is written into them."""

import json
import os

import mlx.core as mx
import numpy as np
import pytest

import foreign
import readers
from harness import Mount, Store, digest
from test_loaders import greedy

TINY = "registry.ollama.ai/library/tiny/latest"
WHEN = 1_700_000_000


@pytest.fixture(scope="module")
def made(models, tmp_path_factory):
    """A store with every form, mounted: the store, the mount and the tensors of `tiny`."""
    root = tmp_path_factory.mktemp("foreign")
    store, llama = foreign.Store(root / "store"), models / "tiny-llama"
    tensors = readers.safetensors_dir(llama)
    files = store.files(llama)
    blobs = [store.named({name: tensor}) for name, tensor in sorted(tensors.items())]
    store.manifest(TINY, blobs + files, when=WHEN)
    store.manifest("hf.co/someone/tiny/q", blobs + files)
    store.manifest("localhost:5000/me/tiny/v1.0", [store.seeds(n, t) for n, t in sorted(tensors.items())] + files)

    quantised = []
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        if len(tensor.shape) == 2 and "norm" not in name:
            kind, bits = ("int8", 8) if "lm_head" in name else ("int4", 4)
            group = 64 if bits == 4 and tensor.shape[1] % 64 == 0 else 32
            weight = tensor.array().astype(np.float32)
            quantised.append(store.quantised(name, weight, kind, bits, group, root / "q.safetensors"))
        else:
            quantised.append(store.named({name: tensor}))
    store.manifest("registry.ollama.ai/library/tiny/int4", quantised + files)

    rng = np.random.default_rng(5)
    shared = foreign.tensor(rng.standard_normal((8, 4), dtype=np.float32))
    for name in ("a", "b"):
        own = foreign.tensor(rng.standard_normal((4, 4), dtype=np.float32))
        config = {"_class_name": "Transformer", "width": 4}
        store.manifest(
            f"registry.ollama.ai/library/image/{name}",
            [
                store.seeds("text_encoder/embed.weight", shared),
                store.seeds("transformer/x.weight", own),
                store.blob("config", b'{"model_type":"encoder"}', name="text_encoder/config.json"),
                store.blob("config", json.dumps(config).encode(), name="transformer/config.json"),
                store.blob("config", b'{"_class_name":"Pipeline"}', name="model_index.json"),
            ],
        )
    stack = {
        f"m.mlp.experts.{name}_proj.weight": foreign.tensor(rng.standard_normal((2, 4, 4), dtype=np.float32))
        for name in ("down", "up")
    }
    draft = foreign.tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    packed = [
        store.named(stack, "m.mlp.experts"),
        store.named({"draft.w.weight": draft}),
        store.named({"draft.b.bias": draft}),
        store.named({"draft/b.bias": draft}),
        store.blob("json", b'{"model_type":"qwen3_moe"}', name="config.json"),
        store.blob("json", b'{"model_type":"assistant"}', name="draft/config.json"),
        store.blob("license", b"free"),
        store.blob("license", b"as in beer"),
        store.blob("params", b'{"temperature":1}'),
        store.blob("template", b"{{ .Prompt }}"),
    ]
    store.manifest("registry.ollama.ai/library/packed/latest", packed)
    gguf = [store.blob(kind, f"GGUF {kind}".encode()) for kind in ("model", "projector", "adapter")]
    gguf.append(store.blob("system", b"be kind"))
    store.manifest("registry.ollama.ai/library/old/7b", gguf, {"model_format": "gguf"})
    start = (store.path / "manifests" / TINY).read_bytes().split(b'"layers"')[0]
    store.raw("registry.ollama.ai/library/cloud/latest", start + b'"layers":null}')

    (store.path / "blobs/sha256-partial").write_bytes(b"")
    (store.path / f"blobs/sha256-{'0' * 64}-partial-0").write_bytes(b"half")
    (store.path / f"blobs/sha256-{'1' * 64}").write_bytes(b"orphan")
    store.raw("registry.ollama.ai/library/-bad/latest", b"{}")
    store.raw(".DS_Store", b"")
    before = {str(p): (p.stat().st_mtime_ns, digest(p)) for p in store.path.rglob("*") if p.is_file()}
    with Mount(Store(store.path), root / "mnt") as mount:
        yield store, mount, tensors
    assert {str(p): (p.stat().st_mtime_ns, digest(p)) for p in store.path.rglob("*") if p.is_file()} == before


def test_every_manifest_and_blob_is_shown_as_it_is(made):
    store, mount, _ = made
    names = [str(p.relative_to(store.path / "manifests")) for p in (store.path / "manifests").rglob("*") if p.is_file()]
    names = [name for name in names if "-bad" not in name and not name.startswith(".")]
    root = mount / "ollama/manifests"
    assert sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) == sorted(names)
    wanted = set()
    for name in names:
        data = (store.path / "manifests" / name).read_bytes()
        assert (root / name).read_bytes() == data
        assert (root / name).stat().st_mtime_ns == (store.path / "manifests" / name).stat().st_mtime_ns
        document = json.loads(data)
        wanted |= {x["digest"].replace(":", "-") for x in [document["config"], *(document["layers"] or [])]}
    assert os.stat(root / TINY).st_mtime == WHEN
    assert {p.name for p in (mount / "ollama/blobs").iterdir()} == wanted
    for name in wanted:
        assert digest(mount / "ollama/blobs" / name) == name[7:]


@pytest.mark.parametrize("model", ["tiny/latest", "hf.co/someone/tiny/q", "localhost:5000/me/tiny/v1.0"])
def test_the_tensors_are_those_of_any_model(made, models, model):
    _, mount, tensors = made
    assert readers.safetensors_dir(mount / "safetensors" / model) == tensors
    assert greedy(mount / "safetensors" / model) == greedy(models / "tiny-llama")
    assert (mount / f"amb/{model}.amb").stat().st_size > sum(len(t.data) for t in tensors.values())


def test_the_seeds_form_is_shown_for_models_that_have_it(made):
    _, mount, tensors = made
    seed = mount / "ollama@seed/manifests"
    shown = sorted(str(p.relative_to(seed)) for p in seed.rglob("*") if p.is_file())
    images = [f"registry.ollama.ai/library/image/{name}" for name in "ab"]
    assert shown == ["localhost:5000/me/tiny/v1.0", *images]
    for layer in json.loads((seed / "localhost:5000/me/tiny/v1.0").read_bytes())["layers"]:
        if layer["mediaType"].endswith("tensor"):
            blob = mount / "ollama@seed/blobs" / layer["digest"].replace(":", "-")
            assert readers.safetensors(blob)["data"] == tensors[layer["name"]]


def test_a_quantised_model_loads_in_mlx_lm(made):
    store, mount, tensors = made
    directory = mount / "safetensors/tiny/int4"
    config = json.loads((directory / "config.json").read_bytes())
    assert config["quantization"]["bits"] == 4 and config["quantization"]["group_size"] == 64
    assert config["quantization"]["lm_head"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert greedy(directory)
    loaded = mx.load(str(directory / "model.safetensors"))
    expected = {f"lm_head.{part}" for part in ("weight", "scales", "biases")}
    assert {name for name in loaded if name.startswith("lm_head")} == expected


def test_components_have_directories_and_share_their_blobs(made):
    store, mount, _ = made
    found = {}
    for name in "ab":
        root = mount / f"safetensors/image/{name}"
        files = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
        assert files == [
            "model_index.json", "text_encoder/config.json", "text_encoder/model.safetensors",
            "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors",
        ]  # fmt: skip
        assert list(readers.safetensors(root / "transformer/diffusion_pytorch_model.safetensors")) == ["x.weight"]
        found[name] = (root / "text_encoder/model.safetensors").read_bytes()
    assert found["a"] == found["b"]


def test_packed_experts_and_drafts_are_tensors(made):
    _, mount, _ = made
    root = mount / "safetensors/packed/latest"
    experts = [f"m.mlp.switch_mlp.{name}_proj.weight" for name in ("down", "up")]
    # One name is that of one tensor.
    assert sorted(readers.safetensors(root / "model.safetensors")) == ["draft.b.bias", *experts]
    drafts = readers.safetensors(root / "draft/model.safetensors")
    assert {name: tensor.shape for name, tensor in drafts.items()} == {"b.bias": (2, 3), "w.weight": (2, 3)}


def test_what_has_no_tensors_is_told(made):
    store, _, _ = made
    layouts = Store(store.path).json("show", "old:7b")["layouts"]
    assert layouts["ollama"]["shown"] and not layouts["safetensors"]["shown"]
    assert "tensors" in layouts["safetensors"]["reason"]
