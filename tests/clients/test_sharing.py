"""Models of several components, what models share, and copies from one store to another."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

import readers
from harness import HOST, Mount, Store, digest


@pytest.fixture
def images(tmp_path):
    """Two models of three components each; they have the text encoder in common."""
    rng = np.random.default_rng(9)
    encoder = {f"layers.{n}.weight": rng.standard_normal((32, 64), dtype=np.float32) for n in range(3)}
    for name in ("one", "two"):
        own = {"transformer": {"x.weight": rng.standard_normal((16, 64), dtype=np.float32)}, "vae": {}}
        own["vae"]["y.weight"] = rng.standard_normal((8, 8), dtype=np.float32)
        for component, tensors in ({"text_encoder": encoder} | own).items():
            (tmp_path / name / component).mkdir(parents=True)
            save_file(tensors, tmp_path / name / component / "model.safetensors")
            (tmp_path / name / component / "config.json").write_text(json.dumps({"component": component}))
        (tmp_path / name / "model_index.json").write_text(json.dumps({"name": name}))
    return tmp_path / "one", tmp_path / "two", 3 * 32 * 64 * 4


def test_models_that_share_a_text_encoder_store_it_once(images, tmp_path):
    one, two, encoder = images
    store = Store(tmp_path / "store")
    store.add(one, name="one")
    added = store.add(two, name="two")
    assert added["present"]["tensors"] == 3 and added["present"]["bytes"] >= encoder
    group = store.json("ls", "--shared")[0]
    assert group["models"] == ["one:latest", "two:latest"] and group["bytes"] >= encoder
    assert "one:latest, two:latest" in store.run("ls", "--shared").stdout.decode()
    with Mount(store, tmp_path / "mnt") as mount:
        for name, source in (("one", one), ("two", two)):
            for path in source.rglob("*.*"):
                assert digest(mount / f"safetensors/{name}/latest" / path.relative_to(source)) == digest(path)
        layers = {}
        for name in ("one", "two"):
            manifest = json.loads((mount / f"ollama@seed/manifests/{HOST}/library/{name}/latest").read_bytes())
            tensors = [x for x in manifest["layers"] if x["mediaType"].endswith("tensor")]
            layers[name] = {x["name"]: x["digest"] for x in tensors}
            assert all(x["dtype"] == "F32" for x in tensors)
            files = {x["name"] for x in manifest["layers"] if x["mediaType"].endswith("json")}
            assert {"model_index.json", "text_encoder/config.json", "vae/config.json"} <= files
            for tensor in tensors:
                path = mount / "ollama@seed/blobs" / tensor["digest"].replace(":", "-")
                assert digest(path) == tensor["digest"][7:]
                assert readers.safetensors(path)["data"].shape == tuple(tensor["shape"])
        for component in ("text_encoder", "transformer", "vae"):
            source = readers.safetensors(one / component / "model.safetensors")
            for export in ("one/latest", "one/latest@fp8"):
                directory = mount / "gds_export" / export / component
                manifest = json.loads((directory / "manifest.json").read_bytes())
                assert {name: entry["shape"] for name, entry in manifest.items()} == {n: list(t.shape) for n, t in source.items()}
                assert {e["path"] for e in manifest.values()} <= set(os.listdir(directory))
            for name, tensor in source.items():
                path = mount / "gds_export/one/latest" / component / (name.replace(".", "__") + ".bin")
                assert path.read_bytes() == tensor.data
        assert not (mount / "gds_export/one/latest/manifest.json").exists()
        common = {n for n in layers["one"] if layers["one"][n] == layers["two"][n]}
        assert common == {f"text_encoder/layers.{n}.weight" for n in range(3)}


def test_a_store_is_copied_by_reference(small, tmp_path):
    copy = Store(tmp_path / "copy")
    report = copy.json("import", small.path)
    assert [model["model"] for model in report["models"]] == [model["model"] for model in small.json("ls")]
    assert copy.listing() == small.listing()
    # Both are on one file system: no blob takes room twice, whether it is linked or cloned.
    linked = [os.path.samefile(small.path / "blobs" / name, copy.path / "blobs" / name) for name in copy.blobs()]
    assert all(linked) or not any(linked)
    for path in (small.path / "manifests").rglob("*/latest"):
        assert (copy.path / path.relative_to(small.path)).stat().st_mtime_ns == path.stat().st_mtime_ns
    again = copy.json("import", small.path)
    assert all(model["added"]["bytes"] == 0 for model in again["models"])
    assert copy.json("verify")["damaged"] == []


def test_one_model_is_copied_under_a_new_name(small, tmp_path):
    copy = Store(tmp_path / "copy")
    assert copy.run("import", small.path, "-n", "new", check=False).returncode == 1
    copy.json("import", small.path, "-m", "mixed", "-n", "me/new:v1")
    assert [model["model"] for model in copy.json("ls")] == ["me/new:v1"]
    assert copy.run("import", small.path, "-m", "none", check=False).returncode == 1
    copy.json("import", small.path, "-m", "tiny-llama", "-n", "me/new:v1", code=1)
    copy.json("import", small.path, "-m", "tiny-llama", "-n", "me/new:v1", "--replace")
    copy.run("gc")
    assert copy.json("verify")["damaged"] == []
    assert small.path.exists() and small.json("verify")["damaged"] == []


def test_a_damaged_model_is_not_copied_and_the_others_are(small, tmp_path):
    manifest = json.loads((small.path / f"manifests/{HOST}/library/mixed/latest").read_bytes())
    (small.path / "blobs" / manifest["layers"][0]["digest"].replace(":", "-")).unlink()
    report = Store(tmp_path / "copy").json("import", small.path, code=1)
    assert [model["model"] for model in report["models"]] == ["tiny-llama:latest"]
    assert len(report["failed"]) == 1 and "mixed" in report["failed"][0]
    assert [model["model"] for model in Store(tmp_path / "copy").json("ls")] == ["tiny-llama:latest"]


def test_a_store_on_another_file_system_is_copied(small, tmp_path):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(dir="/dev/shm") as far:
        copy = Store(Path(far) / "store")
        copy.json("import", small.path)
        assert copy.listing() == small.listing() and copy.json("verify")["damaged"] == []
        # A blob with other content than its name is refused when it has to be read.
        name = next(iter(small.blobs()))
        path = small.path / "blobs" / name
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(bytes(len(data)))
        assert Store(Path(far) / "other").run("import", small.path, check=False).returncode == 1
