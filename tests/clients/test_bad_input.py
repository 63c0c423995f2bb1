"""Input and arguments that are wrong: one line that names the file and the fault, exit 1, and the store as it was."""

import os
import shutil

import pytest

from harness import Store, run
from malformed import tensors

FILE = "model.safetensors"


def refused(done, *words):
    """Exit 1 and one line on stderr with all the words."""
    line = done.stderr.decode().rstrip("\n")
    assert done.returncode == 1, f"exit {done.returncode}: {line}"
    assert line and "\n" not in line, f"not one line: {line}"
    assert "panicked" not in line
    for word in words:
        assert str(word) in line, f"{word!r} is not named: {line}"


@pytest.fixture
def before(small):
    """The small store's listing; the test must leave it so."""
    listing = small.listing()
    yield listing
    assert small.listing() == listing


def test_a_failed_import_makes_no_store(store, tmp_path):
    bad = tmp_path / FILE
    bad.write_bytes(tensors.WHOLE[:50])
    refused(store.run("import", bad, "-n", "bad", check=False), FILE)
    assert not [p for p in store.path.rglob("*") if p.is_file() and ".wmount" not in p.parts]


def test_an_index_that_names_a_shard_that_is_not_there(small, before, models, tmp_path):
    directory = tmp_path / "bad"
    shutil.copytree(models / "tiny-llama", directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    refused(small.run("import", directory, "-n", "bad", check=False), "model-00002-of-00003.safetensors")


def break_manifest(package):
    (package / "Manifest.json").unlink()
    return "Manifest.json"


def test_a_broken_package_among_good_ones_adds_nothing(small, before, models, tmp_path):
    package = tmp_path / "bad.mlpackage"
    shutil.copytree(models / "mixed.mlpackage", package)
    break_manifest(package)
    refused(small.run("import", models / "inline.mlpackage", package, "-n", "bad", check=False), "Manifest.json")


@pytest.mark.parametrize(
    "name",
    ["", "..", "../up", "a b", ".hidden", "a/b/c/d", "x:", ":tag", "x:y:z", "x/", "n" * 81, "x:" + "t" * 81, "a\nb"],
)
def test_a_name_that_is_no_name(small, before, models, name):
    done = small.run("import", models / "inline.mlpackage", f"--name={name}", check=False)
    assert done.returncode == 2 and "--name" in done.stderr.decode(), done.stderr


@pytest.fixture(params=["absent", "file", "directory"])
def no_store(request, tmp_path):
    path = tmp_path / f"no-store-{request.param}"
    if request.param == "file":
        path.write_text("x")
    elif request.param == "directory":
        path.mkdir()
        (path / "letter.txt").write_text("x")
    before = Store(path).listing()
    yield path
    assert Store(path).listing() == before


@pytest.mark.parametrize("verb", [["ls"], ["show", "m"], ["verify"], ["gc"], ["rm", "m"], ["cat", "amb"]])
def test_a_store_that_is_none(no_store, verb):
    refused(Store(no_store).run(*verb, check=False), no_store.name)


def test_a_store_that_is_none_is_not_mounted(no_store, tmp_path):
    (tmp_path / "mnt").mkdir()
    refused(run(no_store, tmp_path / "mnt", check=False, timeout=20), no_store.name)
    assert not os.path.ismount(tmp_path / "mnt")


def test_a_file_is_no_store_to_import_into(models, tmp_path):
    (tmp_path / "store").write_text("x")
    done = Store(tmp_path / "store").run("import", models / "inline.mlpackage", "-n", "x", check=False)
    refused(done, "store")
    assert (tmp_path / "store").read_text() == "x"


@pytest.mark.parametrize("kind", ["missing", "a file", "not empty"])
def test_a_mountpoint_that_is_none(small, before, tmp_path, kind):
    path = tmp_path / "mountpoint"
    if kind == "a file":
        path.write_text("x")
    elif kind == "not empty":
        path.mkdir()
        (path / "letter.txt").write_text("x")
    refused(run(small.path, path, check=False, timeout=20), "mountpoint")
    assert not os.path.ismount(path)


def test_unmounting_what_is_not_mounted(tmp_path):
    refused(run("umount", tmp_path, check=False), tmp_path.name)


@pytest.mark.parametrize("inside", ["amb/nobody.amb", "../etc/passwd", "nowhere"])
def test_cat_and_export_of_a_path_that_is_not_there(small, before, tmp_path, inside):
    refused(small.run("cat", inside, check=False), inside)
    refused(small.run("export", inside, tmp_path / "copy", check=False), inside)
    assert not (tmp_path / "copy").exists()


def test_misuse_is_exit_2(small):
    assert small.run("import", check=False).returncode == 2
    assert run("--no-such-option", check=False).returncode == 2


@pytest.mark.parametrize("option", [[], ["-f"]])
def test_a_way_to_read_that_is_none(small, before, tmp_path, monkeypatch, option):
    monkeypatch.setenv("WMOUNT_READ", "fast")
    (tmp_path / "mnt").mkdir()
    done = run(*option, small.path, tmp_path / "mnt", check=False)
    assert done.returncode == 2 and "WMOUNT_READ" in done.stderr.decode(), done.stderr
    assert not os.path.ismount(tmp_path / "mnt")


def test_a_mistyped_command_with_a_model_is_no_mount(small, before):
    done = run("shwo", "tiny-llama", check=False)
    assert done.returncode == 2 and "'show'" in done.stderr.decode(), done.stderr


def test_an_unknown_tag_names_the_tags_that_are_there(small, models):
    small.add(models / "tiny-llama", name="tiny-llama:v2")
    refused(small.run("show", "tiny-llama:v1", check=False), "tiny-llama:latest, tiny-llama:v2", small.path)
