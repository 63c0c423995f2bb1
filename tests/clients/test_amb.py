"""AMB files through the independent reader."""

import json
import struct

import pytest

import readers

SHOWN = [("tiny-llama/latest", 0), ("org/tiny-llama/hub", 0), ("minilm-float/v1", 2)]


@pytest.mark.parametrize("model, _", SHOWN)
def test_every_tensor_is_equal(world, model, _):
    read = readers.amb(world / f"amb/{model}.amb")
    assert read.flags == 0
    assert read.tensors == readers.safetensors_dir(world.sources[model][0])


@pytest.mark.parametrize("model, _", SHOWN)
def test_metadata_and_config_are_json_objects(world, model, _):
    read = readers.amb(world / f"amb/{model}.amb")
    assert isinstance(read.metadata, dict) and read.metadata["name"]
    assert isinstance(read.config, dict) and read.config
    source = json.loads((world.sources[model][0] / "config.json").read_bytes())
    assert source["vocab_size"] in read.config.values()


@pytest.mark.parametrize("model, kind", SHOWN)
def test_the_tokenizer_section_is_eleven_bytes_and_the_vocabulary(world, model, kind):
    section = readers.amb(world / f"amb/{model}.amb").tokenizer
    found, bos, eos, *_ = struct.unpack_from("<B5H", section)
    assert found == kind
    assert len(section) > 11
    if "llama" in model:
        assert (bos, eos) == (0, 1)


def test_a_dtype_without_a_code_hides_the_file_and_is_named(world):
    """MiniLM's position_ids are I64, which AMB cannot hold."""
    assert not (world / "amb/minilm/latest.amb").exists()
    layout = world.store.json("show", "minilm")["layouts"]["amb"]
    assert layout["shown"] is False
    assert "embeddings.position_ids" in layout["reason"] and "I64" in layout["reason"].upper()


def test_show_says_where_the_file_is(world):
    layout = world.store.json("show", "tiny-llama")["layouts"]["amb"]
    assert layout["shown"] is True and layout["path"].strip("/") == "amb/tiny-llama/latest.amb"


def test_every_amb_file_of_the_tree_can_be_read(world):
    files = list((world / "amb").rglob("*.amb"))
    assert len(files) >= len(SHOWN)
    for file in files:
        assert readers.amb(file).tensors, file
