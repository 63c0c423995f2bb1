"""AMB files through the independent reader."""

import json
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

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


def vocabulary(section: bytes) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Merges and tokens of a BPE or WordPiece section, read as the format's page says; the whole section is used up."""
    at = 11

    def number(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", section, at)
        at += struct.calcsize(f"<{form}")
        return value

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return section[at - length : at].decode()

    merges = [tuple(text().split(" ")) for _ in range(number("I"))] if section[0] == 0 else []
    tokens = [(number("I"), text()) for _ in range(number("I"))]
    assert at == len(section), "bytes after the last token"
    assert tokens == sorted(tokens, key=lambda token: (token[0], token[1].encode()))
    return merges, {token: number for number, token in tokens}


SENTENCES = ["Hello, world! 12 + 30 = 42", "der Wald, die B\u00e4ume; na\u00efve", "  tabs\tand\nlines ", "unaffable tokenisation"]


@pytest.mark.parametrize("model, kind", SHOWN)
def test_a_tokenizer_made_from_the_section_gives_the_same_ids(world, model, kind):
    """The vocabulary and merges of the section in place of those of tokenizer.json."""
    from tokenizers import Tokenizer, models

    merges, tokens = vocabulary(readers.amb(world / f"amb/{model}.amb").tokenizer)
    original = Tokenizer.from_file(str(world.sources[model][0] / "tokenizer.json"))
    assert tokens == original.get_vocab(with_added_tokens=True)
    settings = json.loads(original.to_str())
    known = settings["model"]
    if kind == 0:
        assert merges, "a BPE vocabulary without merges"
        rebuilt = models.BPE(vocab=tokens, merges=merges)
    else:
        rebuilt = models.WordPiece(
            vocab=tokens, unk_token=known["unk_token"], continuing_subword_prefix=known["continuing_subword_prefix"]
        )
    expected = [original.encode(sentence).ids for sentence in SENTENCES]
    original.model = rebuilt
    assert [original.encode(sentence).ids for sentence in SENTENCES] == expected
    assert any(len(ids) > 4 for ids in expected)


@pytest.mark.parametrize("kind, file, content", [
    (1, "tokenizer.model", b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02 serialised"),
    (3, "tokenizer.json", json.dumps({"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0}}).encode()),
])
def test_other_tokenizers_are_their_file(store, models, tmp_path, kind, file, content):
    """SentencePiece as it is serialised; what the section cannot take apart is kept whole."""
    source = tmp_path / "model"
    source.mkdir()
    shutil.copy(models / "tiny-llama/config.json", source)
    save_file({"w": np.ones((2, 3), np.float32)}, source / "model.safetensors")
    (source / file).write_bytes(content)
    store.add(source, name="m")
    store.run("export", "amb/m/latest.amb", tmp_path / "m.amb")
    section = readers.amb(tmp_path / "m.amb").tokenizer
    assert section[0] == kind and section[11:] == content


def test_a_vocabulary_of_tiktoken_is_not_taken_for_sentencepiece(store, models, tmp_path):
    """Llama 3's repositories have one by the name that SentencePiece's have."""
    source = tmp_path / "model"
    shutil.copytree(models / "tiny-llama", source)
    store.add(source, name="without")
    (source / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    store.add(source, name="with")
    sections = []
    for name in ("without", "with"):
        store.run("export", f"amb/{name}/latest.amb", tmp_path / f"{name}.amb")
        sections.append(readers.amb(tmp_path / f"{name}.amb").tokenizer)
    assert sections[0] == sections[1] and sections[0][0] == 0


def test_a_dtype_without_a_code_hides_the_file_and_is_named(world):
    """MiniLM's position_ids are I64, which AMB cannot hold."""
    assert not (world / "amb/minilm/latest.amb").exists()
    layout = world.store.json("show", "minilm")["layouts"]["amb"]
    assert layout["shown"] is False
    assert "embeddings.position_ids" in layout["reason"] and "I64" in layout["reason"].upper()
    for model in ("minilm", "minilm@int8"):
        refused = world.store.run("show", model, "--amb", check=False)
        assert refused.returncode == 1 and layout["reason"] in refused.stderr.decode()
    refused = world.store.run("show", "tiny-llama@raw", "--amb", check=False)
    assert refused.returncode == 1 and "no such variant" in refused.stderr.decode()


@pytest.mark.parametrize("name, status", [("nothing.amb", 1), ("./nothing.amb", 2)])
def test_a_file_that_is_not_there_is_told(store, name, status):
    refused = store.run("show", name, check=False)
    assert refused.returncode == status and "file" in refused.stderr.decode()


def test_show_says_where_the_file_is(world):
    layout = world.store.json("show", "tiny-llama")["layouts"]["amb"]
    assert layout["shown"] is True and layout["path"].strip("/") == "amb/tiny-llama/latest.amb"


def test_every_amb_file_of_the_tree_can_be_read(world):
    files = list((world / "amb").rglob("*.amb"))
    assert len(files) >= len(SHOWN)
    for file in files:
        assert readers.amb(file).tensors, file


def test_a_config_with_infinity(store, tmp_path):
    """Python's json writes it so, and layouts take what else the config says."""
    source = tmp_path / "model"
    source.mkdir()
    save_file({"a": np.ones(2, np.float32)}, source / "model.safetensors")
    config = {"model_type": "mamba2", "vocab_size": 5, "time_step_limit": [0.0, float("inf")], "x": float("nan")}
    (source / "config.json").write_text(json.dumps(config))
    store.add(source, name="model")
    (shown,) = store.json("show", "model")["files"]
    assert not shown.get("fault")
    (tmp_path / "model.amb").write_bytes(store.run("cat", "amb/model/latest.amb").stdout)
    config = readers.amb(tmp_path / "model.amb").config
    assert (config["architecture"], config["n_vocab"]) == ("mamba2", 5)


def test_a_config_that_is_too_much_is_told(store, tmp_path):
    """It is kept as it was imported, and layouts do without it."""
    source = tmp_path / "model"
    source.mkdir()
    save_file({"a": np.ones(2, np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text('{"a":[' + "0," * (5 << 20) + "0]}")
    store.add(source, name="model")
    (config,) = store.json("show", "model")["files"]
    assert "more than" in config["fault"]
    assert f"not read: {config['fault']}" in store.run("show", "model").stdout.decode()
    shown = store.run("cat", "amb/model/latest.amb")
    assert "config.json is passed over" in shown.stderr.decode()
    (tmp_path / "model.amb").write_bytes(shown.stdout)
    assert readers.amb(tmp_path / "model.amb").config in (None, {})
