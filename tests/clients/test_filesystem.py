"""The mount as a file system: reads, maps, listings, attributes, compared with an exported copy."""

import ctypes
import errno
import json
import mmap
import os
import random
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import Mount, eventually, walk

# One file of every kind: one blob, many blobs, synthesised, stored small, a recipe.
FILES = [
    "safetensors/tiny-llama/latest/model-00001-of-00003.safetensors",
    "safetensors/minilm/latest/model.safetensors",
    "safetensors/mixed/latest/model.safetensors",
    "safetensors/tiny-llama/latest/config.json",
    "coreml/minilm/latest/minilm-s64.mlpackage/Data/com.apple.CoreML/weights/weight.bin",
    "coreml/mixed/latest/mixed.mlpackage/Data/com.apple.CoreML/model.mlmodel",
    "amb/tiny-llama/latest.amb",
    "amb/minilm-float/v1.amb",
    "ollama/manifests/registry.ollama.ai/library/tiny-llama/latest",
    "original/mixed/latest/mixed.mlpackage/Data/com.apple.CoreML/weights/weight.bin",
]
DIRECTORIES = ["coreml/mixed/latest", "safetensors/tiny-llama/latest", "original/tiny-llama/latest", "ollama/manifests"]


@pytest.fixture(scope="module")
def exported(world, tmp_path_factory):
    """FILES and DIRECTORIES as copies made by `wmount export`, which needs no mount."""
    root = tmp_path_factory.mktemp("exported")
    for inside in DIRECTORIES + FILES:
        dest = root / inside
        if not dest.exists():
            dest.parent.mkdir(parents=True, exist_ok=True)
            world.store.run("export", inside, dest)
    return root


def ranges(size: int, count: int):
    """Random offsets and lengths, the edges of pages and of the file among them; some start or end past the end."""
    rng = random.Random(size)
    edges = [0, 1, 7, 8, 4095, 4096, 131071, 131072, size // 2, size - 1, size, size + 1, size + 4096]
    for offset in edges:
        yield max(offset, 0), rng.choice([0, 1, 4096, 70000])
    for _ in range(count):
        yield rng.randrange(size + 100), int(2 ** rng.uniform(0, 21))


@pytest.mark.parametrize("inside", FILES)
def test_random_reads_are_those_of_the_copy(world, exported, inside):
    expected = (exported / inside).read_bytes()
    fd = os.open(world / inside, os.O_RDONLY)
    try:
        for offset, length in ranges(len(expected), 300):
            assert os.pread(fd, length, offset) == expected[offset : offset + length], (offset, length)
    finally:
        os.close(fd)


@pytest.mark.parametrize("inside", FILES)
def test_unaligned_direct_reads_are_those_of_the_copy(world, exported, inside):
    """O_DIRECT, past the page cache."""
    expected = (exported / inside).read_bytes()
    fd = os.open(world / inside, os.O_RDONLY | os.O_DIRECT)
    try:
        for offset, length in ranges(len(expected), 50):
            got = bytearray(length)
            n = os.preadv(fd, [got], offset) if length else 0
            assert got[:n] == expected[offset : offset + length], (offset, length)
    finally:
        os.close(fd)


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED], ids=["private", "shared"])
@pytest.mark.parametrize("inside", FILES)
def test_a_mapping_is_the_copy(world, exported, inside, flags):
    expected = (exported / inside).read_bytes()
    with open(world / inside, "rb") as f, mmap.mmap(f.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
        assert len(mapped) == len(expected)
        for offset, length in ranges(len(expected), 30):
            assert mapped[offset : offset + length] == expected[offset : offset + length]
        assert mapped[:] == expected


@pytest.mark.parametrize("inside", FILES)
def test_eight_threads_read_one_descriptor(world, exported, inside):
    expected = (exported / inside).read_bytes()
    fd = os.open(world / inside, os.O_RDONLY)

    def work(seed: int) -> bool:
        order = list(ranges(len(expected), 100))
        random.Random(seed).shuffle(order)
        return all(os.pread(fd, length, at) == expected[at : at + length] for at, length in order)

    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
    finally:
        os.close(fd)


@pytest.mark.parametrize("inside", FILES)
def test_cat_writes_the_file(world, inside):
    assert world.store.run("cat", inside).stdout == (world / inside).read_bytes()


@pytest.mark.parametrize("inside", DIRECTORIES + FILES)
def test_the_copy_has_the_same_names_types_and_sizes(world, exported, inside):
    if (world / inside).is_file():
        assert (exported / inside).stat().st_size == (world / inside).stat().st_size
        return

    def kinds(root):
        return {
            name: (stat.S_IFMT(s.st_mode), s.st_size if stat.S_ISREG(s.st_mode) else 0)
            for name, s in walk(root).items()
        }

    assert kinds(exported / inside) == kinds(world / inside)


libc = ctypes.CDLL(None, use_errno=True)


def getdents(fd: int, size: int) -> list[tuple[int, int, int, str]]:
    """One getdents64 call: (inode, next position, type, name)."""
    buffer = ctypes.create_string_buffer(size)
    n = libc.getdents64(fd, buffer, ctypes.c_size_t(size))
    if n < 0:
        raise OSError(ctypes.get_errno(), "getdents64")
    entries, at = [], 0
    while at < n:
        inode, position, length, kind = struct.unpack_from("<QqHB", buffer.raw, at)
        name = buffer.raw[at + 19 : at + length].split(b"\0")[0].decode()
        entries.append((inode, position, kind, name))
        at += length
    return entries


def list_in_pages(path: Path, size: int):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        entries = []
        while page := getdents(fd, size):
            entries += page
        return entries
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [112, 300, 32768])
@pytest.mark.parametrize("inside", [".", "ollama/blobs", "safetensors/tiny-llama/latest", "coreml/minilm/latest"])
def test_a_directory_read_in_pages_is_whole(world, inside, size):
    """However small the pages: every name once, with the type and the inode that stat gives."""
    path = world / inside
    entries = [e for e in list_in_pages(path, size) if e[3] not in (".", "..")]
    names = [e[3] for e in entries]
    assert sorted(names) == sorted(set(names)) == sorted(os.listdir(path))
    for inode, _, kind, name in entries:
        status = os.lstat(path / name)
        assert (inode, kind) == (status.st_ino, stat.S_IFMT(status.st_mode) >> 12), name


def test_a_listing_goes_on_where_seekdir_puts_it(world):
    path = world / "ollama/blobs"
    entries = list_in_pages(path, 300)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for index in (0, len(entries) // 2, len(entries) - 2):
            os.lseek(fd, entries[index][1], os.SEEK_SET)
            assert getdents(fd, 300)[0][3] == entries[index + 1][3]
    finally:
        os.close(fd)


def identity(root: Path):
    """What must never change, of every path but the counters."""
    return {
        name: (s.st_ino, s.st_mode, s.st_nlink, s.st_size, s.st_mtime_ns, s.st_uid)
        for name, s in walk(root).items()
        if not name.startswith(".wmount")
    }


def test_a_second_mount_shows_the_same_inodes_times_and_sizes(world, tmp_path):
    first = identity(world.mount.at)
    with Mount(world.store, tmp_path / "again") as again:
        assert identity(again.at) == first


def test_a_remount_shows_the_same_inodes_times_and_sizes(small, tmp_path):
    seen = []
    for _ in range(2):
        with Mount(small, tmp_path / "mnt") as mount:
            seen.append(identity(mount.at))
    assert seen[0] == seen[1]


def test_an_inode_number_is_one_content(world):
    """Paths with one inode number have one size and as many links as paths."""
    paths = {}
    for name, status in walk(world.mount.at).items():
        if stat.S_ISREG(status.st_mode):
            paths.setdefault(status.st_ino, []).append((name, status))
    for entries in paths.values():
        assert len({s.st_size for _, s in entries}) == 1, entries
        assert all(s.st_nlink == len(entries) for _, s in entries), entries


def test_only_regular_files_and_directories_that_nobody_may_write(world):
    for name, status in walk(world.mount.at).items():
        if stat.S_ISDIR(status.st_mode):
            assert stat.S_IMODE(status.st_mode) == 0o555, name
        else:
            assert stat.S_ISREG(status.st_mode), name
            assert stat.S_IMODE(status.st_mode) == 0o444, name
        assert status.st_uid == os.geteuid(), name


WRITES = {
    "open for writing": lambda f, d: os.open(f, os.O_WRONLY),
    "open for both": lambda f, d: os.open(f, os.O_RDWR),
    "append": lambda f, d: os.open(f, os.O_WRONLY | os.O_APPEND),
    "truncate": lambda f, d: os.truncate(f, 0),
    "create": lambda f, d: os.open(d / "new", os.O_CREAT | os.O_WRONLY, 0o644),
    "mkdir": lambda f, d: os.mkdir(d / "new"),
    "rmdir": lambda f, d: os.rmdir(d),
    "unlink": lambda f, d: os.unlink(f),
    "rename": lambda f, d: os.rename(f, d / "new"),
    "link": lambda f, d: os.link(f, d / "new"),
    "symlink": lambda f, d: os.symlink("x", d / "new"),
    "mkfifo": lambda f, d: os.mkfifo(d / "new"),
    "chmod": lambda f, d: os.chmod(f, 0o644),
    "chown": lambda f, d: os.chown(f, 1, 1),
    "utime": lambda f, d: os.utime(f, (0, 0)),
    "setxattr": lambda f, d: os.setxattr(f, "user.x", b"1"),
}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("inside", [FILES[0], FILES[4], ".wmount/status.json"])
def test_every_write_is_refused_as_read_only(world, what, inside):
    path = world / inside
    with pytest.raises(OSError) as refused:
        WRITES[what](path, path.parent)
    assert refused.value.errno == errno.EROFS


def test_a_name_that_is_not_there_is_enoent(world):
    for inside in ["x", "safetensors/x", "safetensors/minilm/latest/x", "ollama/blobs/sha256-x", "amb/" + "n" * 255]:
        with pytest.raises(FileNotFoundError):
            os.stat(world / inside)


def test_status_json_names_version_and_models(world):
    status = json.loads((world / ".wmount/status.json").read_bytes())
    assert status["version"] and status["models"]


def test_damage_is_eio_and_hurts_only_what_touches_it(small, tmp_path):
    """A blob that is missing or short is EIO where it is read; the rest of the tree, listings too, stays whole."""
    blobs = sorted(small.blobs().items(), key=lambda item: item[1])
    for name, cut in [(blobs[-1][0], 0), (blobs[-2][0], 8)]:
        path = small.path / "blobs" / name
        path.rename(tmp_path / name)
        if cut:
            path.write_bytes((tmp_path / name).read_bytes()[:-cut])
    with Mount(small, tmp_path / "mnt") as mount:
        failed = set()
        for name, status in walk(mount.at).items():
            if stat.S_ISREG(status.st_mode):
                try:
                    assert len((mount / name).read_bytes()) == status.st_size
                except OSError as error:
                    assert error.errno == errno.EIO, name
                    failed.add(name.split("/")[0] + "/" + name.split("/")[1])
        assert "safetensors/tiny-llama" in failed
        assert not any("mixed" in name for name in failed)
        assert (mount / "safetensors/tiny-llama/latest/config.json").read_bytes()


def test_a_model_imported_while_mounted_appears(mounted, models):
    mounted.store.add(models / "inline.mlpackage", name="later")
    assert eventually((mounted / "coreml/later/latest/inline.mlpackage/Manifest.json").exists)
    assert "later" in os.listdir(mounted / "coreml")


def test_a_removed_model_vanishes_and_its_open_files_stay_readable(mounted, models):
    inside = "safetensors/tiny-llama/latest/model-00002-of-00003.safetensors"
    with open(mounted / inside, "rb") as opened:
        mounted.store.run("rm", "tiny-llama")
        assert eventually(lambda: not (mounted / inside).exists())
        assert opened.read() == (models / "tiny-llama" / Path(inside).name).read_bytes()
    assert "tiny-llama" not in os.listdir(mounted / "safetensors")
    assert (mounted / "coreml/mixed/latest/mixed.mlpackage/Manifest.json").read_bytes()
