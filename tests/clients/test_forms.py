"""A foreign store's models in ollama's other form: there when their digests are computed, and then true."""

import json
import os
import shutil

import numpy as np
import pytest

import foreign
import readers
from harness import HOST, Mount, Store, digest, eventually
from test_ollama_server import Server

OLD, NEW = f"{HOST}/library/old/latest", f"{HOST}/library/new/latest"


@pytest.fixture
def made(models, tmp_path):
    """A store of another program with `old` in the first form and `new` in today's, and their tensors."""
    store, llama = foreign.Store(tmp_path / "foreign"), models / "tiny-llama"
    tensors = readers.safetensors_dir(llama)
    others = [store.blob("license", b"free"), store.blob("template", b"{{ .Prompt }}")]
    config = {"capabilities": ["completion"]}
    first = [store.seeds(name, tensor) for name, tensor in tensors.items()]
    store.manifest(OLD, first + store.files(llama) + others, config)
    today = [store.named({name: tensor}) for name, tensor in tensors.items()]
    store.manifest(NEW, today + store.files(llama) + others, config)
    return Store(store.path), tensors


def model(mount, directory, name) -> dict[str, readers.Tensor]:
    """The tensors that a manifest names; every digest and size in it is checked."""
    manifest = json.loads((mount / directory / "manifests" / name).read_bytes())
    tensors = {}
    for layer in [manifest["config"], *manifest["layers"]]:
        blob = mount / directory / "blobs" / layer["digest"].replace(":", "-")
        assert f"sha256:{digest(blob)}" == layer["digest"] and blob.stat().st_size == layer["size"]
        if layer["mediaType"].endswith("image.tensor"):
            (key, tensor), = readers.safetensors(blob).items()
            assert key == (layer["name"] if directory != "ollama@seed" else "data")
            if directory == "ollama@seed":
                assert (layer["dtype"], tuple(layer["shape"])) == (tensor.dtype, tensor.shape)
            tensors[layer["name"]] = tensor
    return tensors


def kinds(path) -> list:
    return [layer["mediaType"] for layer in json.loads(path.read_bytes())["layers"]]


def test_the_other_form_is_there_when_it_is_prepared(made, tmp_path):
    store, tensors = made
    before = store.listing()
    with Mount(store, tmp_path / "mnt") as mount:
        for name, form, other in [("old", "today", OLD), ("new", "seed", NEW)]:
            told = store.json("show", name)["layouts"][f"ollama@{form}"]
            assert not told["shown"] and f"wmount prepare {name}:latest@{form}" in told["reason"]
            path = mount / f"ollama@{form}/manifests" / other
            assert not path.exists()
            done = store.json("prepare", f"{name}@{form}")
            assert (done["tensors"], done["variant"]) == (len(tensors), form)
            # The mount that is there notices it.
            assert eventually(path.exists)
            shown = store.json("show", f"{name}@{form}")
            assert (shown["variant"], list(shown["layouts"])) == (form, [f"ollama@{form}"])
            assert shown["layouts"][f"ollama@{form}"]["shown"]
            assert store.run("show", f"{name}@{form}").stdout.decode().startswith(f"{name}:latest@{form}\n")
            assert model(mount, f"ollama@{form}", other) == tensors
            assert kinds(path) == kinds(mount / "ollama/manifests" / other)
            assert store.json("prepare", f"{name}@{form}")["tensors"] == 0
        # The form of its own is shown as it is.
        for directory, name in [("ollama", OLD), ("ollama", NEW), ("ollama@seed", OLD)]:
            inside = store.path / "manifests" / name
            assert (mount / directory / "manifests" / name).read_bytes() == inside.read_bytes()
        assert "ollama/" in store.json("show", "new")["layouts"]["ollama@today"]["reason"]
        facts = {p: (mount / p).stat().st_ino for p in (f"ollama@today/manifests/{OLD}", f"ollama@seed/manifests/{NEW}")}
    assert store.listing() == before
    with Mount(store, tmp_path / "mnt") as mount:
        assert {p: (mount / p).stat().st_ino for p in facts} == facts


def test_todays_ollama_reads_a_model_of_the_first_form(made, tmp_path):
    store, tensors = made
    store.run("prepare", "old@today")
    with Mount(store, tmp_path / "mnt") as mount:
        with Server(mount / "ollama@today", tmp_path / "home", OLLAMA_NOPRUNE="1") as server:
            assert server.names() == {"old:latest"}
            shown = server.ask("POST", "/api/show", {"model": "old", "verbose": True})
    assert {t["name"]: tuple(t["shape"]) for t in shown["tensors"]} == {n: t.shape for n, t in tensors.items()}
    assert (shown["license"], shown["template"]) == ("free", "{{ .Prompt }}")


def test_what_was_computed_and_is_damaged_or_old_counts_for_nothing(made, tmp_path):
    store, tensors = made
    path = f"ollama@today/manifests/{OLD}"

    def is_shown():
        with Mount(store, tmp_path / "mnt") as mount:
            assert os.listdir(mount / "ollama@today/manifests") == ([HOST] if (mount / path).exists() else [])
            if (mount / path).exists():
                assert model(mount, "ollama@today", OLD) == tensors
            return (mount / path).exists()

    store.run("prepare", "old@today")
    assert is_shown()
    (file,) = (store.path / ".wmount/forms").iterdir()
    whole = file.read_bytes()
    for data in (whole[:-1], whole[:50], b"", whole[:200] + bytes([whole[200] ^ 1]) + whole[201:], whole + bytes(32)):
        file.unlink()
        file.write_bytes(data)
        assert not is_shown()
        assert "prepare" in store.json("show", "old")["layouts"]["ollama@today"]["reason"]
        store.run("prepare", "old@today")
        assert is_shown()
    # Another manifest of the same name and number of tensors.
    manifest = store.path / "manifests" / OLD
    document = json.loads(manifest.read_bytes())
    document["layers"].reverse()
    manifest.write_bytes(json.dumps(document).encode())
    assert not is_shown()
    store.run("prepare", "old@today")
    assert is_shown()
    shutil.rmtree(manifest.parent)
    store.run("gc")
    assert not list((store.path / ".wmount/forms").iterdir())


def test_a_damaged_blob_is_not_given_a_digest(made):
    store, _ = made
    blob = max(store.blobs(), key=store.blobs().get)
    with open(store.path / "blobs" / blob, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))
    failures = [store.run("prepare", f"{name}", check=False) for name in ("old@today", "new@seed")]
    words = b"".join(done.stderr for done in failures).decode()
    assert sum(done.returncode for done in failures) >= 1 and f"sha256:{blob[7:]}" in words, words
    assert not (store.path / ".wmount/forms").exists() or len(list((store.path / ".wmount/forms").iterdir())) < 2


def test_what_has_no_other_form_is_told(made, tmp_path):
    store, _ = made
    raw = foreign.Store.__new__(foreign.Store)
    raw.path = store.path
    one = foreign.tensor(np.ones((2, 2), np.float32))
    files = [raw.blob("json", b"{}", name="config.json")]
    raw.manifest(f"{HOST}/library/packed/latest", [raw.named({"a": one, "b": one}), *files])
    raw.manifest(f"{HOST}/library/bare/latest", [raw.seeds("a", one)])
    raw.manifest(f"{HOST}/library/gguf/latest", [raw.blob("model", b"GGUF")])
    for name, form, what in [
        ("packed", "seed", "shares its blob"),
        ("bare", "today", "config.json"),
        ("gguf", "today", "no safetensors weights"),
        ("new", "today", "ollama/ shows it"),
    ]:
        done = store.run("prepare", f"{name}@{form}", check=False)
        words = done.stderr.decode()
        assert done.returncode == 1 and what in words and len(words.splitlines()) == 1, words
        assert what in store.json("show", name)["layouts"][f"ollama@{form}"]["reason"]
