"""Hundreds of inputs that break their formats: one line that names the file, the place and the fault, exit 1, and the
store as it was; within limits on time and memory.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import readers
from malformed import Runner, amb, check, coreml, exports, gguf, places, stores, tensors
from harness import BINARY, Mount, Store

CASES = [case for module in (tensors, coreml, amb, exports, gguf, places) for case in module.cases.found]


@pytest.fixture(scope="module")
def runner():
    with Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store of one model, which must be the same after all tests."""
    store = Store(tmp_path_factory.mktemp("whole") / "store")
    directory = store.path.parent / "good"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(tensors.WHOLE)
    store.add(directory, name="good")
    before = store.listing()
    yield store
    assert store.listing() == before
    assert not list((store.path / ".wmount").glob("tmp/*"))


def facts(store: Store) -> dict:
    """Every path of the store as the file system has it; of `.wmount/`, which may be rebuilt, what is unfinished."""
    found = {path.relative_to(store.path): path.lstat() for path in store.path.rglob("*")}
    kept = {path: at for path, at in found.items() if path.parts[0] != ".wmount" or path.parts[1:2] == ("tmp",)}
    kept.pop(Path(".wmount/tmp"), None)
    return {path: (at.st_ino, at.st_size, at.st_mtime_ns, at.st_mode) for path, at in kept.items()}


@pytest.fixture
def place():
    # In memory, where there is such a place: a hundred thousand files take a minute on a busy disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="wmount-test-", dir=memory))
    yield path
    # Python's own way is slow with many files and fails with deep directories.
    subprocess.run(["rm", "-rf", path], check=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_input_that_breaks_its_format(runner, whole, place, case):
    path, before = case.make(place), facts(whole)
    check(runner("import", path, "-s", whole.path, "-n", "bad"), case.words, case.status)
    assert facts(whole) == before


@pytest.mark.parametrize(
    "args, status, words", places.COMMANDS, ids=lambda it: " ".join(it)[:50] if type(it) is list else ""
)
def test_arguments_that_are_wrong(runner, whole, args, status, words):
    before = facts(whole)
    store = ["-s", whole.path] if args[0] not in ("completions", "umount", "status") else []
    check(runner(*args, *store), (words,), status)
    assert facts(whole) == before


@pytest.mark.parametrize("name", places.UNREADABLE)
def test_what_may_not_be_read(place, name):
    """As an ordinary user, whom permissions bind."""
    path, nobody = places.unreadable(name)(place), 65534 if os.geteuid() == 0 else None
    shutil.copy(BINARY, place / "wmount")
    for each in (place, path):
        each.chmod(0o755)
    (place / "store").mkdir()
    (place / "store").chmod(0o777)
    with Runner(place / "wmount") as runner:
        done = runner("import", path, "-s", place / "store", "-n", "bad", user=nobody)
    (path / name).chmod(0o755)
    check(done, (name, "Permission denied"))
    assert not list((place / "store").rglob("sha256-*"))


GOOD = {
    "model.safetensors": tensors.WHOLE,
    "model.amb": amb.GOOD,
    "model.gguf": gguf.WHOLE,
    "whole.mlmodel": coreml.number(1, 8),
}


@pytest.mark.parametrize("name", [*GOOD, "package", "export"])
def test_what_the_broken_ones_were_made_of_is_whole(runner, place, name):
    if name in GOOD:
        path = place / name
        path.write_bytes(GOOD[name])
    else:
        path = (coreml if name == "package" else exports).whole(place)
    check(runner("import", path, "-s", place / "store", "-n", "good"), (), 0)


def test_there_are_many():
    assert len({case.name for case in CASES}) == len(CASES) >= 300


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A store of broken models and a whole one, which nothing may write into."""
    store = Store(tmp_path_factory.mktemp("foreign") / "store")
    stores.write(store.path)
    before = facts(store)
    yield store
    assert facts(store) == before


@pytest.fixture(scope="module")
def listed(foreign):
    return {model["model"]: model for model in foreign.json("ls")}


@pytest.mark.parametrize("model", stores.MODELS, ids=lambda model: model.name)
def test_a_broken_model_is_listed_with_its_fault(listed, model):
    damaged = listed[f"{model.name}:latest"]["damaged"]
    assert damaged and damaged.isprintable() and len(damaged) < 1000, damaged
    for word in model.words:
        assert word in damaged


@pytest.mark.parametrize("model", stores.MODELS, ids=lambda model: model.name)
def test_a_broken_model_is_not_copied(runner, foreign, whole, place, model):
    """But for what is wrong with a part of it: that is copied with all the rest, and listed again."""
    if model.copied:
        check(runner("import", foreign.path, "-s", place / "store", "-m", model.name, "-n", "bad"), (), 0)
        (copy,) = Store(place / "store").json("ls")
        assert all(word in copy["damaged"] for word in model.words)
        return
    before = facts(whole)
    done = runner("import", foreign.path, "-s", whole.path, "-m", model.name, "-n", "bad")
    check(done, (model.name, *model.words))
    assert facts(whole) == before


def readable(path: Path) -> bool:
    """Whether a file has the bytes that it claims, the first and the last; the only error is EIO."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            parts = [os.pread(file.fileno(), 100, at) for at in (0, max(size - 100, 0))]
    except OSError as error:
        assert error.errno == 5, path
        return False
    assert all(len(part) == min(size, 100) for part in parts), path
    return True


def test_broken_models_are_shown_as_damaged_and_hurt_no_other(foreign, tmp_path):
    errors = []
    with Mount(foreign, tmp_path / "mnt") as mount:
        shown = mount / "safetensors/whole/latest"
        assert readers.safetensors(shown / "model.safetensors").keys() == {"w"}
        assert (shown / "config.json").read_bytes() == b"{}"
        damaged = 0
        for here, directories, files in os.walk(mount.at, onerror=lambda error: errors.append(error)):
            for name in directories + files:
                assert name not in ("..", "etc", "passwd", "-ill") and name.isprintable(), here
            for name in files:
                damaged += not readable(Path(here) / name)
        assert damaged > 10 and readable(shown / "model.safetensors")
        # What is whole of a model that is not: files beside a missing blob, and those beside ill names.
        for model in stores.MODELS:
            if model.name.endswith(("blob-missing", "blob-cut-off", "-name-0")):
                directory = mount / f"safetensors/{model.name}/latest"
                assert (directory / "config.json").read_bytes() == b"{}"
                assert readable(directory / "model.safetensors") is model.name.endswith("-name-0")
        for path in (mount / "ollama/blobs").iterdir():
            stored = foreign.path / "blobs" / path.name
            assert not stored.exists() or path.read_bytes() == stored.read_bytes()
    assert all(error.errno == 5 for error in errors), errors
    assert foreign.run("verify", check=False).returncode == 1
