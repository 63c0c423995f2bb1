"""GGUF files: imported, and shown whole where llama.cpp, LM Studio and ollama look for them."""

import json
import os

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

import foreign
from harness import HOST, Mount, Store, digest
from test_ollama_server import Server
from test_sources import refused

RNG = np.random.default_rng(11)
WEIGHTS = {
    "token_embd.weight": RNG.standard_normal((16, 32), dtype=np.float32),
    "blk.0.attn_norm.weight": np.ones(32, np.float32),
    "output.weight": RNG.standard_normal((16, 32), dtype=np.float32).astype(np.float16),
}


@pytest.fixture
def files(tmp_path):
    """A model, its projector and an adapter."""
    one = {"a.weight": np.ones((4, 32), np.float32)}
    return [
        foreign.gguf(tmp_path / "tiny.gguf", WEIGHTS),
        foreign.gguf(tmp_path / "mmproj-tiny.gguf", one, "mmproj", "clip"),
        foreign.gguf(tmp_path / "lora.gguf", {"b.weight": one["a.weight"]}, "adapter"),
    ]


def read(path):
    """Every tensor and key, as gguf's own reader finds them (it maps the file)."""
    reader = GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in reader.tensors}


def test_an_imported_file_is_one_blob_in_every_tree(store, files, tmp_path):
    store.add(*files, name="me/see:7b")
    with Mount(store, tmp_path / "mnt") as mount:
        for inside, source in [
            ("gguf/me/see/7b.gguf", files[0]),
            ("gguf/me/see/mmproj-7b.gguf", files[1]),
            ("gguf/me/see/adapter-7b.gguf", files[2]),
            ("lmstudio/me/see-7b/see-7b.gguf", files[0]),
            ("lmstudio/me/see-7b/mmproj-see-7b.gguf", files[1]),
            ("original/me/see/7b/tiny.gguf", files[0]),
            ("original/me/see/7b/lora.gguf", files[2]),
            (f"ollama/blobs/sha256-{digest(files[0])}", files[0]),
        ]:
            assert digest(mount / inside) == digest(source), inside
            assert read(mount / inside) == read(source), inside
        assert sorted(os.listdir(mount / "lmstudio/me/see-7b")) == ["mmproj-see-7b.gguf", "see-7b.gguf"]
    assert f"sha256-{digest(files[0])}" in store.blobs()
    assert not store.json("verify")["damaged"]


@pytest.fixture
def parts(tmp_path):
    """The same model in four files, and what it is in one."""
    whole = foreign.gguf(tmp_path / "whole.gguf", WEIGHTS)
    (tmp_path / "split").mkdir()
    foreign.gguf(tmp_path / "split/tiny.gguf", WEIGHTS, split=1)
    return sorted((tmp_path / "split").iterdir()), whole


def check_tight(path, alignment=32):
    """llama.cpp wants the data of each tensor where that of the one before it ends."""
    reader = GGUFReader(path)
    ends = [tensor.data_offset + -(-tensor.n_bytes // alignment) * alignment for tensor in reader.tensors]
    starts = [tensor.data_offset for tensor in reader.tensors]
    assert starts == [reader.data_offset, *ends[:-1]] and ends[-1] == path.stat().st_size


@pytest.mark.parametrize("given", ["first", "last", "all"])
def test_parts_of_a_split_file_are_merged(store, parts, tmp_path, given):
    paths, whole = parts
    assert [path.name for path in paths] == [f"tiny-0000{number}-of-00004.gguf" for number in range(1, 5)]
    report = store.json("import", *{"first": paths[:1], "last": paths[-1:], "all": paths}[given])
    assert (report["model"], report["formats"]) == ("tiny:latest", ["tiny (gguf)"])
    # The tensors and the many keys are there once: all but a few hundred bytes of each part.
    assert sum(store.blobs().values()) < sum(path.stat().st_size for path in paths) + 8192
    with Mount(store, tmp_path / "mnt") as mount:
        merged = mount / "gguf/tiny/latest.gguf"
        keys, tensors = read(merged)
        expected = read(whole)
        assert tensors == expected[1]
        assert keys["split.count"] == 0 and list(keys)[-1] == "split.count"
        assert all(keys[name] == value for name, value in expected[0].items() if not name.startswith("GGUF."))
        check_tight(merged)
        for path in paths:
            assert (mount / "original/tiny/latest/tiny" / path.name).read_bytes() == path.read_bytes()
        assert digest(mount / f"ollama/blobs/sha256-{digest(merged)}") == digest(merged)
        assert (mount / "lmstudio/library/tiny-latest/tiny-latest.gguf").exists()
        merged_digest = digest(merged)
        with Server(mount / "ollama", tmp_path / "home", OLLAMA_NOPRUNE="1") as server:
            shown = server.ask("POST", "/api/show", {"model": "tiny", "verbose": True})
        assert {tensor["name"] for tensor in shown["tensors"]} == set(WEIGHTS)
    assert not store.json("verify")["damaged"]
    assert store.json("import", paths[0])["added"]["bytes"] == 0
    # Refetched from the parts.
    (store.path / f"blobs/sha256-{merged_digest}").unlink()
    store.run("verify", "--repair", "--from", paths[0].parent)
    assert not store.json("verify")["damaged"]


@pytest.mark.parametrize("first,others", [(64, 32), (32, 64), (64, None), (None, 64)])
def test_parts_of_other_alignments_are_merged_to_that_of_the_first(store, tmp_path, first, others):
    odd = {f"odd.{number}": np.arange(33 * number + 1, dtype=np.float32) for number in range(7)}
    tensors = WEIGHTS | odd
    shares = [{}, WEIGHTS, odd]
    paths = [tmp_path / f"mixed-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, (path, share) in enumerate(zip(paths, shares, strict=True)):
        alignment = others if number else first
        writer = GGUFWriter(str(path), "llama")
        if alignment:
            writer.add_custom_alignment(alignment)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(tensors))
        for name, array in share.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        check = read(path)[1]
        assert check.keys() == share.keys()
    store.add(paths[0], name="mixed")
    with Mount(store, tmp_path / "mnt") as mount:
        merged = mount / "gguf/mixed/latest.gguf"
        expected = {name: tensor for path in paths for name, tensor in read(path)[1].items()}
        assert read(merged)[1] == expected and len(expected) == len(tensors)
        check_tight(merged, first or 32)
        for path in paths:
            assert (mount / "original/mixed/latest/mixed" / path.name).read_bytes() == path.read_bytes()
    assert not store.json("verify")["damaged"]


def test_parts_that_are_not_all_there_are_refused(store, parts, tmp_path):
    paths, whole = parts
    paths[2].unlink()
    refused(store, paths[0], "has no tiny-00003-of-00004.gguf")
    refused_with(store, paths, paths[3], "part 4 of 4, not 3 of 4 as its name does")
    paths[2].unlink()
    (tmp_path / "other.gguf").write_bytes(paths[1].read_bytes())
    refused(store, tmp_path / "other.gguf", "call it as it was, such as name-00001-of-00004.gguf")
    refused_with(store, paths, whole, "part 0 of 0, not 3 of 4")
    assert not store.path.exists() or not store.blobs()


def test_a_part_that_nobody_named_may_not_lead_elsewhere(store, parts, tmp_path):
    paths, _ = parts
    outside = paths[2].rename(tmp_path / "private.gguf")
    paths[2].symlink_to(outside)
    refused(store, paths[0], "leads out of what is imported")
    store.add(*paths, name="named")
    store.json("import", paths[0], "--follow-links")


def test_parts_in_a_hub_cache_are_links_to_its_blobs(store, parts, tmp_path):
    paths, _ = parts
    repository = tmp_path / "hub/models--me--tiny-GGUF"
    snapshot = repository / "snapshots/1234/Q8"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(paths):
        path.rename(repository / f"blobs/{number}")
        (snapshot / path.name).symlink_to(f"../../../blobs/{number}")
    assert store.json("import", snapshot / paths[1].name)["model"] == "tiny-gguf:latest"


def test_names_alone_make_no_parts(store, parts, tmp_path):
    paths, whole = parts
    # Whole files, whatever they are called, and what lies beside the parts under a name that none of them has.
    for name in ("best-1-of-2.gguf", "best-2-of-2.gguf"):
        (tmp_path / name).write_bytes(whole.read_bytes())
        store.add(tmp_path / name, name=name[:8])
    paths[0].with_name("tiny-00005-of-00004.gguf").write_bytes(b"GGUF")
    store.json("import", paths[0])
    for path in paths:
        path.rename(path.with_name(path.name.removeprefix("tiny")))
    words = "is no plain relative path before the numbers: rename all parts"
    refused(store, paths[0].with_name(paths[0].name.removeprefix("tiny")), words, options=["-n", "nameless"])


def refused_with(store, paths, third, words):
    """The parts with this file for the third."""
    paths[2].write_bytes(third.read_bytes())
    refused(store, paths[0], words)


def test_what_ollama_lists_of_an_import_is_what_its_own_create_writes(store, files, tmp_path):
    # It has llama.cpp rewrite a file, unless the projector's tensors are in it, and that program is not there.
    seeing = foreign.gguf(tmp_path / "seeing.gguf", WEIGHTS | {"v.patch_embd.weight": np.ones((4, 32), np.float32)})
    store.add(seeing, name="tiny")
    (tmp_path / "Modelfile").write_text("FROM ./seeing.gguf\n")
    made = tmp_path / "made"
    with Server(made, tmp_path / "home") as server:
        server.command("create", "tiny", "-f", "Modelfile", cwd=tmp_path)
        server.command("cp", "tiny", "me/tiny:v1")
        theirs = server.ask("POST", "/api/show", {"model": "tiny", "verbose": True})
    for directory in (store.path, made):
        with Mount(Store(directory), tmp_path / "mnt") as mount:
            with Server(mount / "ollama", tmp_path / "home", OLLAMA_NOPRUNE="1") as server:
                ours = server.ask("POST", "/api/show", {"model": "tiny", "verbose": True})
            for inside in ("gguf/tiny/latest.gguf", "lmstudio/library/tiny-latest/tiny-latest.gguf"):
                assert digest(mount / inside) == digest(seeing)
            assert (directory == made) == (mount / "gguf/me/tiny/v1.gguf").exists()
        for key in ("model_info", "tensors", "capabilities"):
            assert ours[key] == theirs[key], key
    configs = [json.loads((it / f"manifests/{HOST}/library/tiny/latest").read_bytes())["config"] for it in (made, store.path)]
    assert configs[0] == configs[1]


def test_parts_join_a_model_later(store, files, tmp_path):
    store.add(files[0], name="tiny")
    store.add(files[1], name="tiny")
    with Mount(store, tmp_path / "mnt") as mount:
        assert digest(mount / "gguf/tiny/mmproj-latest.gguf") == digest(files[1])
        assert (mount / f"ollama/manifests/{HOST}/library/tiny/latest").read_bytes().count(b"image.projector") == 1


def test_broken_files_are_refused_by_name_and_leave_nothing(store, files, tmp_path):
    whole = files[0].read_bytes()
    broken = tmp_path / "broken.gguf"
    for data, what in [
        (b"", 'begins with ""'),
        (b"GGML" + whole[4:], "GGML"),
        (whole[:200], "bytes are needed"),
        (whole[:-64], "the tensor here needs"),
        (whole[:4] + (1).to_bytes(4, "little") + whole[8:], "version 1"),
        (whole[:8] + (1 << 60).to_bytes(8, "little") + whole[16:], "do not fit"),
    ]:
        broken.write_bytes(data)
        done = store.run("import", broken, "-n", "broken", check=False)
        words = done.stderr.decode()
        assert done.returncode == 1 and what in words and "broken.gguf" in words, words
        assert len(words.splitlines()) == 1, words
    assert not store.path.exists() or store.json("ls") == []
