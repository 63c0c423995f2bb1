"""The tensor libraries see on the mount what they see in the sources."""

from pathlib import Path

import ml_dtypes  # noqa: F401  (gives numpy the name bfloat16)
import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

import readers

IMPORTED = ["minilm/latest", "minilm-float/v1", "tiny-llama/latest", "org/tiny-llama/hub"]
FROM_COREML = ["encoder/latest", "mixed/latest"]


def raw(array: mx.array) -> bytes:
    """The bytes of an MLX array."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array).tobytes()


@pytest.mark.parametrize("model", IMPORTED)
def test_mlx_loads_every_tensor_equal(world, model):
    expected = readers.safetensors_dir(world.sources[model][0])
    loaded = {}
    for file in sorted((world / "safetensors" / model).glob("model*.safetensors")):
        loaded |= mx.load(str(file))
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tuple(loaded[name].shape) == tensor.shape, name
        assert raw(loaded[name]) == tensor.data, name


@pytest.mark.parametrize("model", IMPORTED)
def test_safetensors_maps_every_tensor_equal(world, model):
    expected = readers.safetensors_dir(world.sources[model][0])
    seen = set()
    for file in sorted((world / "safetensors" / model).glob("model*.safetensors")):
        with safe_open(file, "np") as opened:
            for name in opened.keys():
                array = opened.get_tensor(name)
                assert array.shape == expected[name].shape, name
                assert array.tobytes() == expected[name].data, name
                seen.add(name)
    assert seen == expected.keys()


def greedy(path: Path) -> list[int]:
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(path))
    return [r.token for r in mlx_lm.stream_generate(model, tokenizer, "import the models", max_tokens=32)]


@pytest.mark.parametrize("model", ["tiny-llama/latest", "org/tiny-llama/hub"])
def test_mlx_lm_generates_the_same_tokens(world, model):
    expected = greedy(world.models / "tiny-llama")
    assert len(expected) > 4
    assert greedy(world / "safetensors" / model) == expected


@pytest.mark.parametrize("model", IMPORTED)
def test_imported_files_are_shown_as_they_were(world, model):
    source, shown = world.sources[model][0], world / "safetensors" / model
    names = {p.name for p in source.iterdir() if p.suffix in (".safetensors", ".json", ".txt")}
    assert names <= {p.name for p in shown.iterdir()}
    for name in names:
        assert (shown / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.parametrize("model", FROM_COREML)
def test_a_model_from_coreml_has_a_safetensors_file_with_its_blobs(world, model):
    """Every blob of the package is a tensor of the file, and every tensor a blob."""
    file = world / "safetensors" / model / "model.safetensors"
    blobs = readers.milblob(world.sources[model][0] / "Data/com.apple.CoreML/weights/weight.bin")
    tensors = readers.safetensors(file)
    assert {(t.dtype, t.digest()) for t in tensors.values()} == {(b.dtype, b.digest()) for b in blobs.values()}
    loaded = mx.load(str(file))
    assert {name: raw(a) for name, a in loaded.items()} == {name: t.data for name, t in tensors.items()}


@pytest.mark.parametrize("model", FROM_COREML)
def test_a_made_safetensors_file_is_what_the_rust_crate_would_write(world, model):
    """Order, header and padding byte for byte: the crate writes the loaded tensors back to the same file."""
    file = world / "safetensors" / model / "model.safetensors"
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    assert len(metadata or {}) <= 1, "the crate's order of more keys is random"
    data = file.read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert safetensors.numpy.save(safetensors.numpy.load(data), metadata) == data
