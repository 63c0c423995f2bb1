"""What users point `import` at: repositories of a hub cache, parts of models, directories of several."""

import json
import shutil

import mlx_lm
import numpy as np
import pytest

import foreign
import models as made
from harness import Mount, digest


def refused(store, path, *words, options=()):
    done = store.run("import", path, *options, check=False)
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr.decode(), done.stderr.decode()


@pytest.fixture
def repository(models, tmp_path):
    """A repository of a hub cache, in a cache of its own."""
    source = made.hub_snapshot(models).parents[1]
    return shutil.copytree(source, tmp_path / "hub" / source.name, symlinks=True)


def test_a_repository_of_a_hub_cache_is_its_main_snapshot(store, models, repository, tmp_path):
    old = repository / "snapshots" / ("f" * 40)
    old.mkdir()
    (old / "config.json").write_text("{}")
    report = store.json("import", repository)
    assert report["model"] == "tiny-llama:latest"
    # Its snapshots, and the snapshot itself, are the same once more.
    for path in (repository / "snapshots", repository / "snapshots" / made.HUB_REVISION):
        assert store.json("import", path)["added"]["bytes"] == 0
    with Mount(store, tmp_path / "mnt") as mount:
        shown = mount / "safetensors/tiny-llama/latest"
        assert {p.name: digest(p) for p in shown.iterdir()} == {p.name: digest(p) for p in (models / "tiny-llama").iterdir()}
        model, tokenizer = mlx_lm.load(str(shown))
        assert mlx_lm.generate(model, tokenizer, prompt="hello", max_tokens=2)


def test_without_a_main_the_snapshot_must_be_the_only_one(store, repository):
    (repository / "refs/main").unlink()
    assert store.json("import", repository)["model"] == "tiny-llama:latest"
    (repository / "snapshots" / ("0" * 40)).mkdir()
    refused(store, repository, "has 2 snapshots", f"such as {repository}/snapshots/{'0' * 40}")
    shutil.rmtree(repository / "snapshots")
    (repository / "snapshots").mkdir()
    refused(store, repository, "no snapshot of it was downloaded")


def test_a_repository_leads_to_no_place_outside_of_it(store, models, repository):
    """It may come from elsewhere: neither a link nor a path in refs/main chooses what is imported."""
    for name in ("../../../elsewhere", str(models / "tiny-llama")):
        (repository / "refs/main").write_text(name)
        assert store.json("import", repository)["formats"] == [f"{made.HUB_REVISION} (safetensors)"]
    shutil.rmtree(repository / "snapshots")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(models / "tiny-llama")
    (repository / "refs/main").write_text("0" * 40)
    refused(store, repository, "no snapshot of it was downloaded")


def test_a_whole_hub_cache_is_no_model(store, repository):
    refused(store, repository.parent, "has a hub cache in it", f"such as {repository}")
    assert store.listing() == {}


def test_shards_of_which_some_are_missing_are_no_model(store, models, tmp_path):
    source = shutil.copytree(models / "tiny-llama", tmp_path / "part")
    shard = "model-00002-of-00003.safetensors"
    refused(store, source / shard, "is one of 3 shards", "import the directory")
    (source / shard).rename(tmp_path / shard)
    refused(store, source, shard, "missing")
    (source / "model.safetensors.index.json").unlink()
    refused(store, source, f"has no {shard}")
    assert store.listing() == {}
    (tmp_path / shard).rename(source / shard)
    assert store.json("import", source)["added"]["tensors"] > 0


def test_a_directory_of_other_models_says_which_files_to_import(store, tmp_path):
    place = tmp_path / "downloads"
    place.mkdir()
    file = foreign.gguf(place / "tiny.gguf", {"a.weight": np.ones((4, 32), np.float32)})
    refused(store, place, f"such as {file}")


def test_another_model_of_the_same_name_is_joined_only_if_that_is_said(store, models, tmp_path):
    package = models / "mixed.mlpackage"
    store.add(package, name="mixed")
    before = store.listing()
    file = foreign.gguf(tmp_path / "mixed.gguf", {"a.weight": np.ones((4, 32), np.float32)})
    refused(store, file, "made of mixed.mlpackage", "say -n mixed:latest to join it")
    assert store.listing() == before
    # What is there may be imported again by its own name.
    assert store.json("import", package)["added"]["bytes"] == 0
    assert store.add(file, name="mixed")["joined"] == ["mixed.mlpackage"]
    with Mount(store, tmp_path / "mnt") as mount:
        assert digest(mount / "gguf/mixed/latest.gguf") == digest(file)
        assert (mount / "coreml/mixed/latest/mixed.mlpackage").is_dir()


def test_a_model_that_ollama_made_takes_no_second_weights(store, models, tmp_path):
    weights = foreign.gguf(tmp_path / "ollama.gguf", {"a.weight": np.ones((4, 32), np.float32)})
    store.add(weights, name="llama")
    manifest = store.path / "manifests/registry.ollama.ai/library/llama/latest"
    layers = json.loads(manifest.read_bytes())
    layers["layers"] = [layer for layer in layers["layers"] if "wmount" not in layer["mediaType"]]
    manifest.chmod(0o644)
    manifest.write_text(json.dumps(layers))
    refused(store, models / "tiny-llama", "made by another program", options=["-n", "llama"])


def test_an_export_in_the_directory_of_its_model_shares_its_tensors(small, models, tmp_path):
    source = shutil.copytree(models / "tiny-llama", tmp_path / "both")
    small.run("export", "gds_export/tiny-llama/latest", source / "gds_export")
    (source / "gds_export/notes.txt").write_text("as oLLM wants them")
    report = small.add(source, name="both")
    assert report["added"]["tensors"] == 0 and report["added"]["files"] == 2, report
    tensors = small.json("show", "tiny-llama")["tensors"]
    with Mount(small, tmp_path / "mnt") as mount:
        for layout in ("original/both/latest/both", "safetensors/both/latest"):
            shown = {str(p.relative_to(mount / layout)): digest(p) for p in (mount / layout).rglob("*") if p.is_file()}
            assert shown == {str(p.relative_to(source)): digest(p) for p in source.rglob("*") if p.is_file()}
        # The model's own tensors are those of its weights alone.
        model, tokenizer = mlx_lm.load(str(mount / "safetensors/both/latest"))
        own = json.loads((mount / "gds_export/both/latest/manifest.json").read_bytes())
        assert sorted(own) == sorted(tensor["name"] for tensor in tensors)
    # One that is not as its format says is kept as it is.
    (source / "gds_export/manifest.json").write_text("{")
    assert small.add(source, name="broken")["added"]["bytes"] > 0
    assert not small.json("verify")["damaged"]
