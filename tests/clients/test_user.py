"""Mounting as an ordinary user, through fusermount3."""

import hashlib
import json
import mmap
import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from harness import BINARY, Mount, Store, eventually

USER = 65534 if os.geteuid() == 0 else os.geteuid()


@pytest.fixture(scope="module", autouse=True)
def fuse_device():
    """/dev/fuse open to users, as distributions have it; containers often keep it to root."""
    mode = os.stat("/dev/fuse").st_mode & 0o777
    if os.geteuid() == 0:
        os.chmod("/dev/fuse", 0o666)
    yield
    if os.geteuid() == 0:
        os.chmod("/dev/fuse", mode)


@pytest.fixture
def home(small):
    """A directory of that user's with the program, the small store and a mountpoint."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shutil.copy(BINARY, root / "wmount")
        shutil.copytree(small.path, root / "store")
        (root / "mnt").mkdir()
        for path in [root, *root.rglob("*")]:
            os.chown(path, USER, -1)
        yield root


def as_user(home: Path, *args, path=None) -> subprocess.CompletedProcess:
    env = {"HOME": str(home), "PATH": path if path is not None else os.environ["PATH"]}
    user = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
    args = [str(a) for a in (home / "wmount", *args)]
    return subprocess.run(args, capture_output=True, stdin=subprocess.DEVNULL, env=env, cwd=home, timeout=60, **user)


def test_a_user_mounts_reads_and_unmounts(home, models):
    """The daemon serves its own user; root sees it mounted."""
    done = as_user(home, home / "store", home / "mnt")
    assert done.returncode == 0, done.stderr.decode()
    try:
        inside = "safetensors/tiny-llama/latest/config.json"
        user = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
        shown = subprocess.run(["cat", str(home / "mnt" / inside)], capture_output=True, check=True, **user).stdout
        assert shown == (models / "tiny-llama/config.json").read_bytes()
        status = subprocess.run(["cat", str(home / "mnt/.wmount/status.json")], capture_output=True, check=True, **user)
        assert "CAP_SYS_ADMIN" in json.loads(status.stdout)["passthrough"]
    finally:
        done = as_user(home, "umount", home / "mnt")
    assert done.returncode == 0, done.stderr.decode()
    assert f" {home}/mnt " not in Path("/proc/mounts").read_text()


def test_after_a_kill_a_user_mounts_in_the_same_place(home):
    """What is left of the mount is detached by the helper; nobody but its user could."""
    at, inside = home / "mnt", home / "mnt/safetensors/tiny-llama/latest/config.json"
    for _ in range(2):
        env = {"HOME": str(home), "PATH": os.environ["PATH"]}
        user = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
        child = subprocess.Popen([home / "wmount", "-f", home / "store", at], env=env, cwd=home, **user)
        assert eventually(lambda: outcome_as_user(lambda: inside.read_bytes()) != b"")
        child.kill()
        child.wait()
        assert outcome_as_user(lambda: inside.read_bytes()) == b""
        assert f" {at} " in Path("/proc/mounts").read_text(), "the kernel keeps it"
    done = as_user(home, home / "store", at)
    assert done.returncode == 0, done.stderr.decode()
    try:
        assert outcome_as_user(lambda: inside.read_bytes()) != b""
    finally:
        assert as_user(home, "umount", at).returncode == 0
    assert f" {at} " not in Path("/proc/mounts").read_text()


def outcome_as_user(work) -> bytes:
    """What `work` returns in a process of the user's that has all of Python's modules already."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(USER, USER, USER)
                os.setresuid(USER, USER, USER)
            os.write(writing, work())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as f:
        told = f.read()
    os.waitpid(child, 0)
    return told


@pytest.fixture
def large(home, tmp_path):
    """A store with one model of 24 MB, mounted by the user, and its file's path and bytes."""
    data = random.Random(5).randbytes(24_000_001)
    (tmp_path / "m").mkdir()
    header = json.dumps({"t": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    file = len(header).to_bytes(8, "little") + header + data
    (tmp_path / "m/model.safetensors").write_bytes(file)
    store = Store(home / "large")
    store.add(tmp_path / "m", name="m")
    for path in [store.path, *store.path.rglob("*")]:
        os.chown(path, USER, -1)
    at = home / "mnt"
    assert as_user(home, store.path, at).returncode == 0
    yield at, at / "original/m/latest/m/model.safetensors", file
    assert as_user(home, "umount", at).returncode == 0


def status(at: Path) -> dict:
    return json.loads(outcome_as_user(lambda: (at / ".wmount/status.json").read_bytes()))


def test_bytes_of_blobs_are_sent_to_a_user_too(large):
    at, path, file = large
    assert outcome_as_user(lambda: hashlib.sha256(path.read_bytes()).digest()) == hashlib.sha256(file).digest()
    assert eventually(lambda: status(at)["bytes_read"] >= len(file)), "the status stays behind"
    figures = status(at)["layouts"]["original"]
    assert figures["sent_bytes"] > 0.9 * len(file)


def test_a_map_that_is_read_page_by_page_is_read_ahead(large):
    """In a map with MADV_SEQUENTIAL, copies of large pieces touch their pages backwards: one request for each."""
    at, path, file = large
    piece = 1 << 20

    def read() -> bytes:
        hashed = hashlib.sha256()
        with open(path, "rb") as f:
            with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                mapped.madvise(mmap.MADV_SEQUENTIAL)
                for start in range(0, len(mapped), piece):
                    # From the last page to the first, whatever this machine's way of copying is.
                    end = min(start + piece, len(mapped))
                    pages = [mapped[max(start, page) : page + 4096] for page in range(end - 4096, start - 4096, -4096)]
                    hashed.update(b"".join(reversed(pages)))
                assert hashlib.sha256(mapped).digest() == hashed.digest()
        return hashed.digest()

    assert status(at)["read_ahead_kib"] < 1024, "a user's mount is read ahead as root's"
    assert outcome_as_user(read) == hashlib.sha256(file).digest()
    assert eventually(lambda: status(at)["bytes_read"] >= len(file)), "the status stays behind"
    reads = sum(layout["reads"] for layout in status(at)["layouts"].values())
    # Of the six thousand pages, most are not asked for.
    assert reads < 3000, reads


def test_who_may_not_write_is_told_who_may(home):
    if os.geteuid() == 0:
        for path in [home / "store", *(home / "store").rglob("*")]:
            os.chown(path, 0, 0)
        done = as_user(home, "gc", "-s", home / "store")
        line = done.stderr.decode()
        assert done.returncode == 1 and ".wmount/lock: Permission denied" in line and "user with the id 0" in line, line


def test_a_store_that_a_user_may_not_look_into_is_not_taken_for_none(home):
    store = (home / "store").rename(home / "mnt/store")
    for closed, hidden in [(store, store / "blobs"), (store.parent, store)]:
        closed.chmod(0)
        done = as_user(home, "ls", "-s", store)
        closed.chmod(0o755)
        line = done.stderr.decode()
        assert done.returncode == 1 and f"{hidden}: Permission denied" in line, line
    assert as_user(home, "ls", "-s", store).returncode == 0


def test_what_another_user_mounted_is_told_as_that(home, small, tmp_path):
    if os.geteuid() == 0:
        at = home / "roots"
        at.mkdir()
        with Mount(small, at):
            done = as_user(home, "umount", at)
            line = done.stderr.decode()
            assert done.returncode == 1 and "user with the id 0" in line and "fusermount" not in line, line
            done = as_user(home, "status", at)
            assert done.returncode == 1 and "mounted by another user" in done.stdout.decode()
            assert str(at) in as_user(home, "status").stdout.decode()


HIDDEN = """
for helper in /bin/fusermount3 /usr/bin/fusermount3; do [ ! -e $helper ] || mount --bind /dev/null $helper; done
exec setpriv --reuid=65534 --regid=65534 --clear-groups -- "$@"
"""


def test_without_the_helper_the_error_says_what_to_install(home):
    """In a mount name space of its own, where the helper is hidden behind something that is no program."""
    assert os.geteuid() == 0, "hiding the helper needs root"
    command = ["unshare", "--mount", "sh", "-c", HIDDEN, "sh", home / "wmount", home / "store", home / "mnt"]
    done = subprocess.run([str(word) for word in command], capture_output=True, timeout=60, cwd=home)
    line = done.stderr.decode().strip()
    assert done.returncode == 1 and "\n" not in line
    assert "fusermount3" in line and "fuse3" in line


def test_a_user_may_open_for_writing_where_that_is_tolerated(home):
    done = as_user(home, "--tolerate-rw", home / "store", home / "mnt")
    assert done.returncode == 0, done.stderr.decode()
    try:
        script = "import os, sys; f = os.open(sys.argv[1], os.O_RDWR)\ntry: os.write(f, b'x')\nexcept OSError as e: print(e.errno)"
        user = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
        path = home / "mnt/safetensors/tiny-llama/latest/config.json"
        done = subprocess.run(["python3", "-c", script, str(path)], capture_output=True, **user)
        assert done.stdout == b"30\n", done.stderr.decode()
    finally:
        done = as_user(home, "umount", home / "mnt")
        assert done.returncode == 0, done.stderr.decode()


INGEST = """
import hashlib, json, os, sys
root = sys.argv[1]
def blob(data):
    name = hashlib.sha256(data).hexdigest()
    with open(f"{root}/ollama/blobs/sha256-1", "xb") as file:
        file.write(data)
    os.rename(f"{root}/ollama/blobs/sha256-1", f"{root}/ollama/blobs/sha256-{name}")
    os.chmod(f"{root}/ollama/blobs/sha256-{name}", 0o644)
    os.utime(f"{root}/ollama/blobs/sha256-{name}")
    return {"mediaType": "x", "digest": f"sha256:{name}", "size": len(data)}
manifest = json.dumps({"schemaVersion": 2, "config": blob(b"{}"), "layers": [blob(b"text")]})
place = f"{root}/ollama/manifests/registry.ollama.ai/library/made"
os.mkdir(place)
for _ in range(2):
    with open(f"{place}/latest", "w") as file:
        file.write(manifest)
os.unlink(f"{root}/ollama/manifests/registry.ollama.ai/library/tiny-llama/latest")
for path in (f"{root}/new", f"{root}/original/new"):
    try:
        open(path, "w")
    except OSError as error:
        print(error.errno)
"""


def test_a_user_writes_through_ollama(home):
    """With the modes of directories and manifests that let the owner do so, and of all else that do not."""
    done = as_user(home, "--ingest", home / "store", home / "mnt")
    assert done.returncode == 0, done.stderr.decode()
    try:
        user = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run(["python3", "-c", INGEST, str(home / "mnt")], capture_output=True, **user)
        assert done.returncode == 0 and set(done.stdout.split()) == {b"13"}, done.stderr.decode()
        done = as_user(home, "-s", home / "store", "ls", "--json")
        assert {model["model"] for model in json.loads(done.stdout)} == {"made:latest", "mixed:latest"}
    finally:
        done = as_user(home, "umount", home / "mnt")
        assert done.returncode == 0, done.stderr.decode()


def test_root_takes_nothing_in_for_another_user(home):
    """Root's process has given up the right to write there, and what it wrote would be root's."""
    assert os.geteuid() == 0, "root is meant"
    done = subprocess.run([BINARY, "--ingest", home / "store", home / "mnt"], capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"--ingest writes into the store" in done.stderr and b"ermission denied" in done.stderr
    assert f" {home}/mnt " not in Path("/proc/mounts").read_text()
