"""Models that ollama quantised to fp4 and fp8, and drafts, in stores that it wrote."""

import json

import mlx.core as mx
import numpy as np
import pytest

import foreign
import readers
from harness import HOST, Mount, Store
from test_loaders import greedy, raw

SCHEMES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def quantised(store, directory, tmp_path, kind, prefix="") -> dict[str, readers.Tensor]:
    """The blobs of a model whose matrices are quantised; its layers are put into `store.layers`."""
    bits, group = SCHEMES[kind]
    expected = {}
    for name, tensor in sorted(readers.safetensors_dir(directory).items()):
        if len(tensor.shape) == 2 and "norm" not in name:
            weight = tensor.array().astype(np.float32)
            store.layers.append(store.quantised(prefix + name, weight, kind, bits, group, tmp_path / "q.safetensors"))
            packed, scales = mx.quantize(mx.array(weight).astype(mx.bfloat16), group, bits, mode=kind)
            expected[name] = readers.Tensor("U32", tuple(packed.shape), raw(packed))
            expected[name.removesuffix("weight") + "scales"] = readers.Tensor("U8", tuple(scales.shape), raw(scales))
        else:
            store.layers.append(store.named({prefix + name: tensor}))
            expected[name] = tensor
    return expected


@pytest.fixture
def store(tmp_path):
    made = foreign.Store(tmp_path / "foreign")
    made.layers = []
    return made


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_model_of_four_or_eight_bit_floats_loads_in_mlx_lm(store, models, tmp_path, kind):
    expected = quantised(store, models / "tiny-llama", tmp_path, kind)
    store.manifest(f"{HOST}/library/tiny/{kind}", store.layers + store.files(models / "tiny-llama"))
    with Mount(Store(store.path), tmp_path / "mnt") as mount:
        directory = mount / f"safetensors/tiny/{kind}"
        bits, group = SCHEMES[kind]
        wanted = {"bits": bits, "group_size": group, "mode": kind}
        assert json.loads((directory / "config.json").read_bytes())["quantization"] == wanted
        assert readers.safetensors_dir(directory) == expected
        assert greedy(directory)
        told = Store(store.path).json("show", f"tiny:{kind}")["layouts"]
        assert told["safetensors"]["shown"] and not told["amb"]["shown"] and "U32" in told["amb"]["reason"]


def test_a_draft_has_a_directory_that_loads_by_itself(store, models, tmp_path):
    llama = models / "tiny-llama"
    whole = quantised(store, llama, tmp_path, "mxfp8")
    files = store.files(llama) + store.files(llama, "draft/")
    draft = quantised(store, llama, tmp_path, "nvfp4", "draft.")
    config = {"draft": {"model_format": "safetensors", "tensor_prefix": "draft.", "config": "draft/config.json"}}
    store.manifest(f"{HOST}/library/tiny/fast", store.layers + files, config)
    with Mount(Store(store.path), tmp_path / "mnt") as mount:
        directory = mount / "safetensors/tiny/fast"
        assert readers.safetensors_dir(directory) == whole
        assert readers.safetensors_dir(directory / "draft") == draft
        modes = [json.loads((it / "config.json").read_bytes())["quantization"]["mode"] for it in (directory, directory / "draft")]
        assert modes == ["mxfp8", "nvfp4"]
        assert greedy(directory) and greedy(directory / "draft")


def test_a_global_scale_keeps_its_name_and_no_loader_overlooks_it(store, models, tmp_path):
    """What ollama multiplies by is not what MLX calls so (its own is larger by 448 * 6), so it is not renamed."""
    quantised(store, models / "tiny-llama", tmp_path, "nvfp4")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = readers.safetensors_dir(models / "tiny-llama")[name].array().astype(np.float32)
    packed, scales = mx.quantize(mx.array(weight), 16, 4, mode="nvfp4")
    scale = foreign.tensor(np.array(0.5, np.float32))
    blob = {
        name: readers.Tensor("U32", tuple(packed.shape), raw(packed)),
        f"{name}.global_scale": scale,
        f"{name}.scale": readers.Tensor("U8", tuple(scales.shape), raw(scales)),
    }
    layers = [layer for layer in store.layers if layer["name"] != name]
    layers += [store.named(blob, name), *store.files(models / "tiny-llama")]
    store.manifest(f"{HOST}/library/tiny/nvidia", layers)
    with Mount(Store(store.path), tmp_path / "mnt") as mount:
        directory = mount / "safetensors/tiny/nvidia"
        tensors = readers.safetensors_dir(directory)
        assert tensors[f"{name}.global_scale"] == scale
        assert tensors[name.replace("weight", "scales")] == blob[f"{name}.scale"]
        with pytest.raises(ValueError, match="global_scale"):
            greedy(directory)


def test_a_dtype_that_nobody_knows_is_told(store, tmp_path):
    one = foreign.tensor(np.zeros(4, np.uint8), "U8")
    known = {"a.weight": readers.Tensor("F4", (8,), one.data), "b": readers.Tensor("F8_E8M0", (4,), one.data)}
    store.manifest(f"{HOST}/library/packed/known", [store.named({name: it}) for name, it in known.items()])
    store.manifest(f"{HOST}/library/packed/new", [store.named({"a.weight": readers.Tensor("F3_E1M1", (4,), one.data)})])
    with Mount(Store(store.path), tmp_path / "mnt") as mount:
        assert readers.safetensors_dir(mount / "safetensors/packed/known") == known
        told = Store(store.path).json("show", "packed:new")
        assert any("F3_E1M1" in what for what in told["damaged"]), told
        assert (mount / f"ollama/manifests/{HOST}/library/packed/new").exists()
        with pytest.raises(OSError):
            (mount / "safetensors/packed/new/model.safetensors").read_bytes()
