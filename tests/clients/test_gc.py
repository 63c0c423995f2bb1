"""What `rm` and `gc` must not take: blobs that somebody else's models need, or that manifests in odd places name."""

import json
import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness import BINARY, Mount, Store, eventually

ROOT = os.geteuid() == 0
NOTHING = {"removed": 0, "bytes": 0, "unfinished": 0, "in_use": 0, "young": 0}


def refused(store: Store, *args) -> str:
    """The error of a command that must change nothing."""
    before = store.listing()
    done = store.run(*args, check=False)
    assert done.returncode == 1 and store.listing() == before
    return done.stderr.decode()


def manifest(store: Store, name: str):
    return store.path / "manifests/registry.ollama.ai/library" / name / "latest"


@pytest.fixture(params=["a link", "a bind mount"])
def second(small, tmp_path, request):
    """Another store with the blobs of the small one."""
    store = Store(tmp_path / "second")
    (store.path / "manifests").mkdir(parents=True)
    (store.path / ".wmount").mkdir()
    blobs = store.path / "blobs"
    if request.param == "a link":
        blobs.symlink_to(small.path / "blobs")
        yield store
        return
    assert ROOT, "this needs a bind mount"
    blobs.mkdir()
    subprocess.run(["mount", "--bind", small.path / "blobs", blobs], check=True)
    try:
        yield store
    finally:
        subprocess.run(["umount", blobs], check=True)


def test_the_blobs_of_another_store_are_left_alone(small, second, models):
    before = small.blobs()
    for args in [("gc",), ("import", models / "tiny-llama", "-n", "new")]:
        assert "read and not written to" in refused(second, *args)
    assert small.blobs() == before and not small.json("verify")["damaged"]


def test_a_store_whose_two_directories_are_links_is_one_store(small, models, tmp_path):
    linked = Store(tmp_path / "linked")
    linked.path.mkdir()
    for name in ["blobs", "manifests"]:
        (linked.path / name).symlink_to(small.path / name)
    linked.add(models / "inline.mlpackage", name="new")
    assert linked.json("gc") == NOTHING and "new:latest" in str(small.json("ls"))
    linked.run("rm", "new")
    assert linked.json("gc")["removed"] > 0 and not small.json("verify")["damaged"]


def test_gc_stops_where_the_manifests_are_on_a_disk_that_is_not_there(small, tmp_path):
    shutil.move(small.path / "manifests", tmp_path / "elsewhere")
    (tmp_path / "disk").mkdir()
    (small.path / "manifests").symlink_to(tmp_path / "disk")
    assert "is its disk mounted?" in refused(small, "gc")


def test_gc_stops_at_manifests_of_a_kind_that_it_does_not_know(small):
    (small.path / "manifests-v2/library").mkdir(parents=True)
    assert "manifests-v2: may hold models" in refused(small, "gc")


@pytest.mark.parametrize("aside", ["tiny-llama/latest~", "tiny-llama/old/latest", "latest", "a/b/c/d/latest"])
def test_a_manifest_that_somebody_put_aside_keeps_its_blobs(small, aside):
    path, before = manifest(small, "tiny-llama"), small.blobs()
    place = path.parents[1] / aside
    place.parent.mkdir(parents=True, exist_ok=True)
    path.rename(place)
    (place.parent / "notes~").write_text("no manifest")
    assert small.json("gc") == NOTHING and small.blobs() == before
    place.unlink()
    assert small.json("gc")["removed"] > 0


@pytest.mark.parametrize("text", ['{"schemaVersion":2', None])
def test_gc_tells_how_to_go_on_after_a_manifest_that_is_none(small, text):
    path = manifest(small, "tiny-llama")
    path.write_text(text or path.read_text().replace('"layers"', '"Layers"'))
    error = refused(small, "gc")
    assert str(path) in error and "wmount rm tiny-llama:latest" in error
    small.run("rm", "tiny-llama")
    assert small.json("gc")["removed"] > 0 and not small.json("verify")["damaged"]


def test_a_clock_that_was_put_back_makes_no_pulled_blob_old(small):
    path = small.path / "blobs" / ("sha256-" + "ab" * 32)
    path.write_bytes(b"of a model that is yet to come")
    for ahead, young in [(600, 1), (7200, 0)]:
        os.utime(path, (time.time() + ahead,) * 2)
        assert small.json("gc")["young"] == young
    assert not path.exists()


def test_a_tag_that_is_a_link_goes_alone(small):
    link = manifest(small, "tiny-llama").with_name("prod")
    link.symlink_to("latest")
    before = small.blobs()
    small.run("rm", "tiny-llama:prod")
    assert not link.is_symlink() and small.json("gc") == NOTHING and small.blobs() == before
    # As an earlier version left it.
    (small.path / ".wmount/removed").mkdir(exist_ok=True)
    (small.path / ".wmount/removed/7").symlink_to("latest")
    assert small.json("gc") == NOTHING


def test_a_model_that_is_named_twice_is_removed_once(small):
    assert small.json("rm", "mixed", "tiny-llama", "mixed:latest") == {"removed": ["mixed:latest", "tiny-llama:latest"]}
    assert small.json("ls") == []


def test_gc_removes_what_an_import_that_was_stopped_has_left(small, tmp_path):
    source = tmp_path / "large"
    source.mkdir()
    values = np.random.default_rng(5).random((8, 4 << 20), np.float32)
    save_file({f"t{at}": row for at, row in enumerate(values)}, source / "model.safetensors")
    staged = small.path / ".wmount/tmp"
    begun = subprocess.Popen([BINARY, "-s", small.path, "import", source, "-n", "large"])
    assert eventually(lambda: staged.exists() and any(path.stat().st_size for path in staged.iterdir()))
    begun.send_signal(signal.SIGINT)
    assert begun.wait() == -signal.SIGINT, "it was stopped in the middle"
    left = [path.stat().st_size for path in staged.iterdir()]
    report = small.json("gc")
    assert (report["unfinished"], report["bytes"]) == (len(left), sum(left)) and not staged.exists()


def test_a_copy_written_over_an_imported_model_is_refused(small, tmp_path):
    """`ollama create` over a model that came from files would lose those that ollama does not show."""
    with Mount(small, tmp_path / "mnt", "--ingest") as mount:
        shown = mount / "ollama/manifests/registry.ollama.ai/library"
        text = (shown / "tiny-llama/latest").read_bytes()
        before = {path: path.read_bytes() for path in (mount / "original/tiny-llama").rglob("*") if path.is_file()}
        (shown / "tiny-llama/latest").write_bytes(text)
        (shown / "copy").mkdir()
        (shown / "copy/latest").write_bytes(text)
        changed = json.loads(text)
        changed["layers"].append(changed["config"] | {"mediaType": "application/vnd.ollama.image.system"})
        other = json.dumps(changed).encode()
        with pytest.raises(FileExistsError):
            (shown / "tiny-llama/latest").write_bytes(other)
        (shown / "new").mkdir()
        (shown / "new/latest").write_bytes(other)
        (mount / "ollama/blobs/manifest").write_bytes(other)
        with pytest.raises(FileExistsError):
            (mount / "ollama/blobs/manifest").rename(shown / "tiny-llama/latest")
        assert (shown / "tiny-llama/latest").read_bytes() == text
        assert before and all(path.read_bytes() == data for path, data in before.items())
        assert (shown / "new/latest").read_bytes() == other
