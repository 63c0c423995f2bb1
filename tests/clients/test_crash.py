"""Commands that are killed, or told that the disk failed, at every system call that changes the store.

strace (Debian's package) lists the calls of an undisturbed run, then stops the command at each of them in turn: by
SIGKILL before the call, or with an error in place of it. Each time the store must open, verify, and hold the models
of before or all those of after; running the command again must end as if nothing had happened.

WMOUNT_LONG=1 tries every error at every call instead of one of them.
"""

import errno
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from harness import BINARY, HOST, Mount, Store, digest, eventually
from safetensors.numpy import save_file
from test_ingest import gguf, manifest_of

CALLS = (
    "openat write pwrite64 writev rename renameat renameat2 link linkat unlink unlinkat mkdir mkdirat rmdir fsync fdatasync "
    "sync_file_range syncfs fchmod chmod fchmodat utimensat ftruncate ioctl copy_file_range fallocate symlink symlinkat"
).split()
ERRORS = ["ENOSPC", "EIO", "EROFS", "EDQUOT"]
LONG = os.environ.get("WMOUNT_LONG") == "1"
HARMLESS = re.compile(r"TCGETS|O_RDONLY|O_PATH|^\d+ write\(2,|/dev/fuse")


def save(path: Path, seed: int, **more) -> Path:
    """A model of three tensors and a config."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = {f"layers.{n}.weight": rng.standard_normal((8, 16), dtype=np.float32) for n in range(3)} | more
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


SHARED = {"shared": np.arange(64, dtype=np.float32)}


@dataclass
class Case:
    """A command, the store that it begins with, and the models that it leaves."""

    prepare: Callable[[Store, Path], None]
    args: list[str]
    after: list[str]


def two_models(store: Store, work: Path):
    store.add(save(work / "first", 1, **SHARED), name="first")
    store.add(save(work / "second", 2, **SHARED), name="second")


def and_a_source(store: Store, work: Path):
    two_models(store, work)
    save(work / "new", 3, **SHARED)


def and_another_store(store: Store, work: Path):
    two_models(store, work)
    Store(work / "other").add(save(work / "new", 3, **SHARED), name="new")


def removed(store: Store, work: Path):
    two_models(store, work)
    store.run("rm", "second")


def damaged(store: Store, work: Path):
    two_models(store, work)
    blob = max((store.path / "blobs").iterdir(), key=lambda path: (path.stat().st_size, path.name))
    content = blob.read_bytes()
    blob.chmod(0o644)
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


BOTH = ["first:latest", "second:latest"]
CASES = {
    "import into no store": Case(lambda store, work: save(work / "new", 3) and None, ["import", "new", "-n", "new"], ["new:latest"]),
    "import": Case(and_a_source, ["import", "new", "-n", "new"], ["first:latest", "new:latest", "second:latest"]),
    "import in place of a model": Case(and_a_source, ["import", "new", "-n", "second", "--replace"], BOTH),
    "import of a store": Case(and_another_store, ["import", "other"], ["first:latest", "new:latest", "second:latest"]),
    "rm": Case(two_models, ["rm", "second"], ["first:latest"]),
    "gc": Case(removed, ["gc"], ["first:latest"]),
    "prepare": Case(two_models, ["prepare", "first@fp8"], BOTH),
    "verify --repair": Case(damaged, ["verify", "--repair", "--from", "first", "--from", "second"], BOTH),
}


def changing_calls(log: str) -> list[tuple[str, int]]:
    """Each call that changes something, as its name and which of its thread's calls of that name it is."""
    counts: dict[tuple[str, str], int] = {}
    found = {}
    for line in log.splitlines():
        called = re.match(r"(\d+)\s+(\w+)\(", line)
        if called:
            counts[called.groups()] = counts.get(called.groups(), 0) + 1
            if not HARMLESS.search(line):
                found[called[2], counts[called.groups()]] = line
    return list(found)


class Scene:
    """A prepared store, copied afresh for each attempt."""

    def __init__(self, case: Case, work: Path):
        assert shutil.which("strace"), "strace is missing (Debian: strace)"
        self.case, self.work, self.pristine = case, work, work / "pristine"
        case.prepare(Store(self.pristine), work)
        self.before = self.models(Store(self.pristine)) if self.pristine.exists() else []
        self.store = Store(work / "store")
        self.reset()
        done = self.traced("-o", work / "log")
        assert done.returncode == 0, done.stderr.decode()
        self.calls = changing_calls((work / "log").read_text())
        self.expected = self.settled()
        assert self.models(self.store) == case.after

    def reset(self):
        if self.store.path.exists():
            shutil.rmtree(self.store.path)
        if self.pristine.exists():
            subprocess.run(["cp", "-a", self.pristine, self.store.path], check=True)

    def traced(self, *options) -> subprocess.CompletedProcess:
        """The command under strace, on one core, so that a run's calls are those of the next."""
        command = ["strace", "-f", "-qq", "-e", "trace=" + ",".join(CALLS), *map(str, options)]
        command += [str(BINARY), "-s", str(self.store.path), *self.case.args]
        one_core = lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # noqa: E731
        return subprocess.run(command, cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, preexec_fn=one_core, timeout=300)

    def models(self, store: Store) -> list[str]:
        return sorted(model["model"] for model in store.json("ls"))

    def is_store(self) -> bool:
        return (self.store.path / "blobs").is_dir() and (self.store.path / "manifests").is_dir()

    def check(self, what: str):
        """The store opens, verifies, and has the models of before or of after."""
        if not self.is_store():
            assert not self.before, what
            return
        assert self.models(self.store) in (self.before, self.case.after), what
        verified = self.store.run("verify", check=False)
        if self.case.prepare is not damaged:
            assert verified.returncode == 0, f"{what}: {verified.stderr.decode()}"

    def settled(self) -> dict[str, str]:
        """What the store holds when all is done, without what may differ: times and blobs that nobody needs."""
        self.store.run("verify")
        self.store.run("gc")
        assert not (self.store.path / ".wmount/tmp").exists() or not any((self.store.path / ".wmount/tmp").iterdir())
        return self.store.listing()

    def finish(self, what: str):
        """Running the command again completes it."""
        again = self.traced("-o", "/dev/null")
        over = self.is_store() and self.models(self.store) == self.case.after
        assert again.returncode == 0 or (self.case.args[0] == "rm" and over), f"{what}: {again.stderr.decode()}"
        assert self.models(self.store) == self.case.after, what
        assert self.settled() == self.expected, what


@pytest.mark.parametrize("name", CASES)
def test_killed_at_every_call(tmp_path, name):
    scene = Scene(CASES[name], tmp_path)
    killed = 0
    for call, number in scene.calls:
        what = f"killed before {call} number {number}"
        scene.reset()
        done = scene.traced("-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={number}")
        # strace ends as its tracee did.
        killed += done.returncode in (-9, 137)
        scene.check(what)
        scene.finish(what)
    assert killed >= len(scene.calls) * 0.8, f"only {killed} of {len(scene.calls)} were killed"


@pytest.mark.parametrize("name", CASES)
def test_every_call_fails(tmp_path, name):
    scene = Scene(CASES[name], tmp_path)
    failed = 0
    for turn, (call, number) in enumerate(scene.calls):
        for error in ERRORS if LONG else [ERRORS[turn % len(ERRORS)]]:
            what = f"{error} at {call} number {number}"
            scene.reset()
            done = scene.traced("-o", "/dev/null", "-e", f"inject={call}:error={error}:when={number}")
            words = done.stderr.decode()
            assert done.returncode in (0, 1), f"{what}: exit {done.returncode}: {words}"
            assert "panicked" not in words, f"{what}: {words}"
            if done.returncode == 1:
                failed += 1
                # What verify could not read is in its report. Each thread counts its own calls, so the write of the message
                # may be the one that fails.
                is_told = words.startswith("wmount: ") or os.strerror(getattr(errno, error)) in done.stdout.decode()
                assert is_told or (call, words) == ("write", ""), f"{what}: {words!r}"
            else:
                # What can be done without, such as a memo, must not be missed.
                assert scene.models(scene.store) == scene.case.after, what
            scene.check(what)
            scene.finish(what)
    assert failed > 0, "no error was ever told"


@pytest.fixture
def disk(tmp_path):
    """A file system of 12 MiB."""
    image, at = tmp_path / "image", tmp_path / "disk"
    at.mkdir()
    with open(image, "wb") as file:
        file.truncate(12 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, at], check=True)
    yield at
    subprocess.run(["umount", at], check=True)


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def test_a_full_disk(disk, tmp_path):
    """What does not fit leaves nothing behind, and what fits is imported after it."""
    store = Store(disk / "store")
    store.add(save(tmp_path / "small", 1), name="small")
    before = store.listing()
    large = save(tmp_path / "large", 2, huge=np.random.default_rng(4).standard_normal(8 << 20).astype(np.float32))
    done = store.run("import", large, "-n", "large", check=False)
    assert done.returncode == 1
    assert "No space left" in done.stderr.decode() and done.stderr.decode().count("\n") == 1
    assert store.listing() == before
    store.run("verify")
    assert free(disk) > 4 << 20, "what did not fit still takes room"
    # Room for nothing at all: removing and collecting must still work.
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
    assert store.run("import", save(tmp_path / "more", 3, more=np.ones(1 << 18, np.float32)), "-n", "more", check=False).returncode == 1
    assert store.listing() == before
    store.run("verify")
    with Mount(store, tmp_path / "mnt") as mount:
        assert (mount / "safetensors/small/latest/config.json").read_bytes()
    (disk / "filler").unlink()
    store.add(tmp_path / "more", name="more")
    store.run("rm", "small")
    store.run("gc")
    store.run("verify")


def test_a_full_disk_under_a_mount_that_ollama_writes_to(disk, tmp_path):
    """Who writes is told; what he removes gives its room back, and what fits becomes a model."""
    store = Store(disk / "store")
    store.add(save(tmp_path / "small", 1), name="small")
    before, room = store.listing(), free(disk)
    with Mount(store, tmp_path / "mnt", "--ingest") as mount:
        blobs = mount / "ollama/blobs"
        unfinished = blobs / f"sha256-{'1' * 64}-partial"
        with pytest.raises(OSError) as refused:
            with open(unfinished, "wb", buffering=0) as file:
                for _ in range(20):
                    file.write(os.urandom(1 << 20))
                os.fsync(file.fileno())
        assert refused.value.errno == errno.ENOSPC
        assert store.listing() == before and not store.json("verify")["damaged"]
        assert (mount / "safetensors/small/latest/config.json").read_bytes()
        unfinished.unlink()
        assert eventually(lambda: free(disk) > room - (1 << 20))
        place = mount / f"ollama/manifests/{HOST}/library/new"
        manifest = manifest_of(blobs, [gguf(tmp_path / "a.gguf")])
        place.mkdir()
        (place / "v1").write_bytes(manifest)
        assert {model["model"] for model in store.json("ls")} == {"small:latest", "new:v1"}
    assert not store.json("verify")["damaged"]


def test_results_that_cannot_be_printed_are_a_failure(small):
    """Standard output on a full disk: the command says so instead of ending as if it had spoken."""
    for args in (["ls"], ["show", "mixed"], ["verify"], ["cat", "safetensors/tiny-llama/latest/config.json"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([BINARY, "-s", small.path, *args], stdout=full, stderr=subprocess.PIPE, timeout=300)
        assert done.returncode == 1, args
        assert b"No space left" in done.stderr and b"panicked" not in done.stderr, done.stderr


class Ingesting:
    """A mount with --ingest under strace, and what ollama would write to it."""

    NEW, COPY = "new:v1", "copy:v1"

    def __init__(self, store: Store, at: Path, data: list[bytes]):
        self.store, self.at, self.data = store, at, data
        at.mkdir(exist_ok=True)

    def session(self, log: Path, *options) -> set[str]:
        """Makes one model, copies it, and removes the first; the models whose making returned."""
        command = ["strace", "-f", "-qq", "-y", "-o", log, "-e", "trace=" + ",".join(CALLS), *options]
        command += [BINARY, "-f", "--ingest", "--threads", "1", "--log", log.with_suffix(".words"), self.store.path, self.at]
        process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.there, self.under_way = {"first:latest"}, set()
        try:
            if eventually(lambda: os.path.ismount(self.at) or process.poll() is not None, 60) and process.poll() is None:
                self.write()
        except OSError:
            pass
        finally:
            subprocess.run(["umount", "-l", self.at], capture_output=True)
            process.wait(60)
        return self.there

    def write(self):
        manifest = manifest_of(self.at / "ollama/blobs", self.data)
        manifests = self.at / f"ollama/manifests/{HOST}/library"
        for name in (self.NEW, self.COPY):
            self.under_way = {name}
            place = manifests / name.partition(":")[0]
            place.mkdir()
            (place / "v1").write_bytes(manifest)
            self.there.add(name)
        self.under_way = {self.NEW}
        (manifests / "new/v1").unlink()
        self.there.discard(self.NEW)
        self.under_way = set()

    def check(self, what: str):
        models = {model["model"] for model in self.store.json("ls")}
        assert models - self.under_way == self.there - self.under_way, what
        assert not self.store.json("verify")["damaged"], what
        for path in (self.store.path / "blobs").iterdir():
            assert digest(path) == path.name[7:], what


    def again(self, what: str):
        """Whatever was left behind does not keep the same from being done again."""
        for name in (self.NEW, self.COPY):
            self.store.run("rm", name, check=False)
        assert self.session(self.at.with_name("again")) == {"first:latest", self.COPY}, what
        self.check(what)


@pytest.fixture
def ingesting(tmp_path):
    """A store, what puts it back to how it was, and the calls of an undisturbed session that change something."""
    pristine, store = Store(tmp_path / "pristine"), Store(tmp_path / "store")
    pristine.add(save(tmp_path / "first", 1), name="first")
    data = [gguf(tmp_path / "a.gguf", 1), gguf(tmp_path / "b.gguf", 2)]
    ingesting = Ingesting(store, tmp_path / "mnt", data)

    def reset():
        shutil.rmtree(store.path, ignore_errors=True)
        subprocess.run(["cp", "-a", pristine.path, store.path], check=True)

    reset()
    assert ingesting.session(tmp_path / "log") == {"first:latest", "copy:v1"}
    ingesting.check("undisturbed")
    calls = changing_calls((tmp_path / "log").read_text())
    assert len(calls) > 20
    return ingesting, reset, calls


def test_a_mount_that_ollama_writes_to_is_killed_at_every_call(ingesting, tmp_path):
    ingesting, reset, calls = ingesting
    killed = 0
    for call, number in calls:
        what = f"killed before {call} number {number}"
        reset()
        ingesting.session(tmp_path / "killed", "-e", f"inject={call}:signal=KILL:when={number}")
        killed += "killed by SIGKILL" in (tmp_path / "killed").read_text()
        ingesting.check(what)
        ingesting.again(what)
    assert killed >= len(calls) * 0.6, f"only {killed} of {len(calls)} were killed"


def test_every_call_of_a_mount_that_ollama_writes_to_fails(ingesting, tmp_path):
    """Who writes is told, or nothing is missing; the mount goes on or ends, and leaves what it said that it has."""
    ingesting, reset, calls = ingesting
    injected = told = 0
    for turn, (call, number) in enumerate(calls):
        for error in ERRORS if LONG else [ERRORS[turn % len(ERRORS)]]:
            what = f"{error} at {call} number {number}"
            reset()
            ingesting.session(tmp_path / "failed", "-e", f"inject={call}:error={error}:when={number}")
            injected += "(INJECTED)" in (tmp_path / "failed").read_text()
            told += bool(ingesting.under_way) or ingesting.there != {"first:latest", ingesting.COPY}
            # Each thread counts its own calls, and so a crate's write to wake itself, which no kernel refuses, fails as well.
            words = (tmp_path / "failed.words").read_text() if (tmp_path / "failed.words").exists() else ""
            assert not [line for line in words.splitlines() if "panicked" in line and "/notify-" not in line], what
            ingesting.check(what)
            if turn % 4 == 0 or LONG:
                ingesting.again(what)
    assert injected > 0 and told > 0
