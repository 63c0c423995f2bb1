"""mlx loads GGUF files, which it opens for writing, through a mount that tolerates that and changes nothing."""

import errno
import json
import mmap
import os

import mlx.core as mx
import numpy as np
import pytest

import foreign
from harness import Mount, digest, eventually

WEIGHTS = {
    "token_embd.weight": np.random.default_rng(3).standard_normal((256, 64), dtype=np.float32),
    "half": np.arange(64, dtype=np.float16).reshape(2, 32),
}


@pytest.fixture
def tiny(store, tmp_path):
    """A store with a GGUF model and another, and the file that was imported."""
    store.add(foreign.gguf(tmp_path / "tiny.gguf", WEIGHTS), name="tiny")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def tolerant(store, tiny, tmp_path):
    before = {name: digest(store.path / "blobs" / name) for name in store.blobs()}
    with Mount(store, tmp_path / "mnt", "--tolerate-rw") as mount:
        assert "--tolerate-rw" in json.loads((mount / ".wmount/status.json").read_bytes())["passthrough"]
        yield mount
    assert all(f"sha256-{true}" == name for name, true in before.items())
    assert {name: digest(store.path / "blobs" / name) for name in store.blobs()} == before
    assert not store.json("verify")["damaged"]


def refused(action, code=errno.EROFS):
    with pytest.raises(OSError) as caught:
        action()
    assert caught.value.errno == code, caught.value


def test_mlx_loads_a_gguf_file_where_that_is_tolerated_and_only_there(store, tiny, tolerant, tmp_path):
    for inside in ("gguf/tiny/latest.gguf", "lmstudio/library/tiny-latest/tiny-latest.gguf"):
        loaded = mx.load(str(tolerant / inside))
        assert {name: np.array(array).tolist() for name, array in loaded.items()} == {
            name: array.tolist() for name, array in WEIGHTS.items()
        }
        assert digest(tolerant / inside) == digest(tiny)
    with Mount(store, tmp_path / "plain") as mount:
        with pytest.raises(RuntimeError):
            mx.load(str(mount / "gguf/tiny/latest.gguf"))
        refused(lambda: os.open(mount / "gguf/tiny/latest.gguf", os.O_RDWR))


def test_files_can_be_open_both_ways_at_once(tiny, tolerant):
    path = tolerant / "gguf/tiny/latest.gguf"
    with open(path, "rb") as first, open(path, "r+b", 0) as second, open(path, "rb") as third:
        assert first.read() == second.read() == third.read() == tiny.read_bytes()


@pytest.mark.parametrize("inside", ["gguf/tiny/latest.gguf", "ollama/manifests/registry.ollama.ai/library/tiny/latest"])
def test_a_stray_store_into_a_map_is_gone_when_it_is_written_out(tolerant, inside):
    """A whole blob, and a file that is put together."""
    path = tolerant / inside
    true = path.read_bytes()
    reader = open(path, "rb")
    seen = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
    with open(path, "r+b", 0) as file:
        written = mmap.mmap(file.fileno(), 0)
        written[:4] = b"EVIL"
        refused(written.flush)
        assert eventually(lambda: seen[:] == written[:] == path.read_bytes() == true)
        written[-4:] = b"EVIL"
        written.close()
        assert eventually(lambda: seen[:] == path.read_bytes() == true)
    seen.close()
    reader.close()


def test_a_write_is_refused_and_seen_by_nobody(tolerant):
    path = tolerant / "gguf/tiny/latest.gguf"
    true = path.read_bytes()
    with open(path, "rb") as reader, open(path, "r+b", 0) as file:
        seen = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
        assert seen[:] == true
        refused(lambda: file.write(b"EVIL"))
        refused(lambda: os.pwrite(file.fileno(), b"EVIL", 4096))
        refused(lambda: os.pwrite(file.fileno(), b"EVIL", len(true)))
        refused(lambda: file.truncate(0))
        refused(lambda: os.posix_fallocate(file.fileno(), 0, 2 * len(true)))
        assert seen[:] == path.read_bytes() == true
        seen.close()


def test_all_else_is_refused_as_ever(tolerant):
    path = tolerant / "gguf/tiny/latest.gguf"
    for action in [
        lambda: os.open(path, os.O_WRONLY),
        lambda: os.open(path, os.O_RDWR | os.O_TRUNC),
        lambda: os.open(path.with_name("new"), os.O_RDWR | os.O_CREAT),
        lambda: os.truncate(path, 0),
        lambda: os.unlink(path),
        lambda: os.rename(path, path.with_name("new")),
        lambda: os.link(path, path.with_name("new")),
        lambda: os.symlink("x", path.with_name("new")),
        lambda: os.mkdir(path.with_name("new")),
        lambda: os.rmdir(path.parent),
        lambda: os.chmod(path, 0o600),
        lambda: os.utime(path),
        lambda: os.setxattr(path, "user.x", b""),
    ]:
        refused(action)
    assert path.stat().st_mode & 0o777 == 0o644
