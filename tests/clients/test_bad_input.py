"""Input that lies: one line that names the file and the fault, exit 1, and the store as it was."""

import json
import os
import shutil
import struct

import pytest

import models as made
from harness import Store, run

FILE = "model.safetensors"


def refused(done, *words):
    """Exit 1 and one line on stderr with all the words."""
    line = done.stderr.decode().rstrip("\n")
    assert done.returncode == 1, f"exit {done.returncode}: {line}"
    assert line and "\n" not in line, f"not one line: {line}"
    assert "panicked" not in line
    for word in words:
        assert str(word) in line, f"{word!r} is not named: {line}"


def header(entries: dict, data: bytes = b"", length=None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape, start, end, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ONE = {"a": tensor([4], 0, 16)}
SAFETENSORS = {
    "empty file": b"",
    "seven bytes": b"\0" * 7,
    "header cut off": header(ONE, b"\0" * 16, length=10_000),
    "header length of 2^63": header(ONE, b"\0" * 16, length=1 << 63),
    "header length of 2^64 - 1": header(ONE, b"\0" * 16, length=(1 << 64) - 1),
    "header over the limit": header(ONE, b"\0" * 16, length=100_000_001),
    "header that is no JSON": struct.pack("<Q", 16) + b"{not json}      ",
    "header that is a list": struct.pack("<Q", 8) + b"[1, 2]  ",
    "deep JSON": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "data cut off": header(ONE, b"\0" * 15),
    "data after the end": header(ONE, b"\0" * 17),
    "offsets past the end": header({"a": tensor([4], 0, 16), "b": tensor([4], 16, 32)}, b"\0" * 16),
    "offsets backwards": header({"a": tensor([4], 16, 0)}, b"\0" * 16),
    "negative offset": header({"a": tensor([4], -16, 0)}, b"\0" * 16),
    "offset of 2^64": header({"a": tensor([4], 0, 1 << 64)}, b"\0" * 16),
    "size is not the shape's": header({"a": tensor([5], 0, 16)}, b"\0" * 16),
    "shape that wraps": header({"a": tensor([1 << 62, 4, 4], 0, 0)}),
    "negative dimensions": header({"a": tensor([-2, -2], 0, 16)}, b"\0" * 16),
    "overlap": header({"a": tensor([4], 0, 16), "b": tensor([4], 8, 24)}, b"\0" * 24),
    "two names for one range": header({"a": tensor([4], 0, 16), "b": tensor([4], 0, 16)}, b"\0" * 16),
    "hole": header({"a": tensor([4], 0, 16), "b": tensor([4], 20, 36)}, b"\0" * 36),
    "unknown dtype": header({"a": tensor([4], 0, 16, dtype="Q7")}, b"\0" * 16),
    "no offsets": header({"a": {"dtype": "F32", "shape": [4]}}, b"\0" * 16),
}


@pytest.fixture
def before(small):
    """The small store's listing; the test must leave it so."""
    listing = small.listing()
    yield listing
    assert small.listing() == listing


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_lying_safetensors_file(small, before, tmp_path, case):
    directory = tmp_path / "bad"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / FILE).write_bytes(SAFETENSORS[case])
    refused(small.run("import", directory, "-n", "bad", check=False, timeout=20), FILE)


def test_a_failed_import_makes_no_store(store, tmp_path):
    bad = tmp_path / FILE
    bad.write_bytes(SAFETENSORS["header cut off"])
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


def break_manifest_json(package):
    (package / "Manifest.json").write_text("{")
    return "Manifest.json"


def break_manifest_path(package):
    path = package / "Manifest.json"
    path.write_text(path.read_text().replace("com.apple.CoreML/model.mlmodel", "../../../etc/passwd"))
    return "Manifest.json"


def break_model(package):
    path = package / made.PACKAGE / "model.mlmodel"
    path.write_bytes(path.read_bytes()[:-100])
    return "model.mlmodel"


def lose_weights(package):
    made.weight_bin(package).unlink()
    return "weight.bin"


def patch_weights(form: str, at: int, value: int):
    def patch(package):
        path = made.weight_bin(package)
        data = bytearray(path.read_bytes())
        struct.pack_into(form, data, at, value)
        path.write_bytes(data)
        return "weight.bin"

    return patch


# The first blob's metadata is at 64: sentinel, dtype, size at 72, offset at 80.
PACKAGES = {
    "no Manifest.json": break_manifest,
    "Manifest.json that is no JSON": break_manifest_json,
    "Manifest.json that leads out of the package": break_manifest_path,
    "model.mlmodel cut off": break_model,
    "no weight.bin": lose_weights,
    "blob past the end": patch_weights("<Q", 72, 1 << 40),
    "blob size that wraps": patch_weights("<Q", 72, (1 << 64) - 64),
    "blob offset past the end": patch_weights("<Q", 80, 1 << 40),
    "blob offset that wraps": patch_weights("<Q", 80, (1 << 64) - 64),
    "wrong sentinel": patch_weights("<I", 64, 0x12345678),
    "wrong version": patch_weights("<I", 4, 3),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_a_broken_package(small, before, models, tmp_path, case):
    package = tmp_path / "bad.mlpackage"
    shutil.copytree(models / "mixed.mlpackage", package)
    named = PACKAGES[case](package)
    refused(small.run("import", package, "-n", "bad", check=False, timeout=20), named)


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
    refused(done, "name")


SPECIAL = {
    "fifo": os.mkfifo,
    "self-link": lambda p: p.symlink_to(p.name),
    "dangling": lambda p: p.symlink_to("nothing-there"),
    "device": lambda p: p.symlink_to("/dev/zero"),
    "loop": lambda p: p.symlink_to("."),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["extra.json", "model.safetensors"])
def test_a_file_that_is_no_file(small, before, models, tmp_path, kind, name):
    """FIFOs, devices and links that lead nowhere or in circles are refused before they are opened."""
    directory = tmp_path / "bad"
    directory.mkdir()
    shutil.copy(models / "tiny-llama/config.json", directory)
    SPECIAL[kind](directory / name)
    refused(small.run("import", directory, "-n", "bad", check=False, timeout=20), name)


def test_a_path_that_is_not_there(small, before, tmp_path):
    refused(small.run("import", tmp_path / "absent", "-n", "bad", check=False), "absent")


def test_a_directory_with_no_model(small, before, tmp_path):
    (tmp_path / "bare").mkdir()
    refused(small.run("import", tmp_path / "bare", "-n", "bad", check=False), "bare")


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
