"""Damage under a running mount, with readers and maps at work: an I/O error where it hurts, and only there."""

import errno
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from harness import BINARY, Mount, Store, eventually, run, walk

TENSOR = "model.layers.0.mlp.down_proj.weight"
# Files of every kind that hold the tensor: composed, whole blob, computed.
SHARD = "safetensors/tiny-llama/latest/model-00001-of-00003.safetensors"
AMB = "amb/tiny-llama/latest.amb"
COMPUTED = "amb/tiny-llama/latest@int8.amb"


@pytest.fixture
def damage(small, tmp_path):
    return Damage(small, tmp_path)


class Damage:
    """The blob of TENSOR and the ways to hurt it."""

    def __init__(self, store: Store, aside: Path):
        self.store, self.aside = store, aside
        self.digest = next(t["digest"] for t in store.json("show", "tiny-llama")["tensors"] if t["name"] == TENSOR)
        self.name = self.digest.replace(":", "-")
        self.path = store.path / "blobs" / self.name
        self.whole_file = f"ollama@seed/blobs/{self.name}"
        self.bytes = self.path.read_bytes()

    def remove(self):
        self.path.unlink()

    def cut(self):
        """In place: whoever has it open feels it."""
        os.chmod(self.path, 0o644)
        os.truncate(self.path, 4096)

    def replace(self):
        other = self.aside / "other"
        other.write_bytes(b"other")
        other.rename(self.path)

    def flip(self):
        os.chmod(self.path, 0o644)
        with open(self.path, "r+b") as f:
            f.seek(len(self.bytes) - 100)
            f.write(bytes([self.bytes[-100] ^ 1]))


def problems(mount) -> str:
    time.sleep(1.1)  # the kernel asks for the name again after a second
    return json.dumps(json.loads((mount / ".wmount/status.json").read_bytes())["problems"])


def log_of(mount) -> str:
    """The daemon's log, at the place that the README says."""
    state = Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local/state"))
    name = str(mount.at).strip("/").replace("-", "\\x2d").replace("/", "-")[-200:]
    return (state / "wmount" / f"{name}.log").read_text()


def files_of(mount) -> list[str]:
    names = [
        name for name, s in walk(mount.at).items() if not name.startswith(".wmount") and os.path.isfile(mount / name)
    ]
    return [*names, COMPUTED]


def read_range(fd: int, length: int, offset: int) -> bytes:
    """As loaders read: a read that meets an error behind good bytes gives those first, and the error when asked again."""
    got = b""
    while len(got) < length and (part := os.pread(fd, length - len(got), offset + len(got))):
        got += part
    return got


class Readers:
    """Threads that read random ranges of files, each file opened once before the damage, and compare."""

    def __init__(self, mount, expected: dict[str, bytes], threads=6):
        self.mount, self.expected, self.stop = mount, expected, threading.Event()
        self.wrong, self.failed, self.reads = [], set(), 0
        self.threads = [threading.Thread(target=self.work, args=(seed,)) for seed in range(threads)]
        for thread in self.threads:
            thread.start()

    def work(self, seed):
        rng = random.Random(seed)
        names = sorted(self.expected)
        opened = {name: os.open(self.mount / name, os.O_RDONLY) for name in names}
        while not self.stop.is_set():
            name = rng.choice(names)
            whole = self.expected[name]
            offset, length = rng.randrange(len(whole)), int(2 ** rng.uniform(0, 17))
            fd, own = opened[name], None
            if rng.random() < 0.3:
                try:
                    fd = own = os.open(self.mount / name, os.O_RDONLY)
                except OSError as error:
                    self.failed.add((name, error.errno))
                    continue
            try:
                # What the page cache has would hide the damage.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                got = read_range(fd, length, offset)
                if got != whole[offset : offset + length]:
                    self.wrong.append((name, offset, length, len(got)))
            except OSError as error:
                self.failed.add((name, error.errno))
            finally:
                if own is not None:
                    os.close(own)
            self.reads += 1
        for fd in opened.values():
            os.close(fd)

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("how", ["remove", "cut", "replace"])
def test_readers_at_work_get_right_bytes_or_an_io_error(damage, tmp_path, how):
    with Mount(damage.store, tmp_path / "mnt") as mount:
        names = files_of(mount)
        # The kernel reads a whole blob past us: of one that is cut while it is open see the test below.
        if how == "cut":
            names = [name for name in names if damage.name not in name and "gds_export" not in name]
        expected = {name: data for name in names if (data := (mount / name).read_bytes())}
        readers = Readers(mount, expected)
        assert eventually(lambda: readers.reads > 500, 60)
        getattr(damage, how)()
        before = readers.reads
        assert eventually(lambda: readers.reads > before + 3000, 120)
        readers.end()
        assert not readers.wrong
        assert {code for _, code in readers.failed} <= {errno.EIO}
        hurt = {name for name, _ in readers.failed}
        assert not any("mixed" in name or name.endswith(".json") for name in hurt), hurt
        if how == "cut":
            assert {SHARD, AMB, COMPUTED} <= hurt
            told, log = problems(mount), log_of(mount)
            for word in (damage.digest, TENSOR, "tiny-llama:latest"):
                assert word in told and word in log
        report = damage.store.json("verify", code=1)
        assert [d["digest"] for d in report["damaged"]] == [damage.digest]
        assert report["damaged"][0]["models"] == ["tiny-llama:latest"]


MAP = """
import mmap, sys
f = open(sys.argv[1], "rb")
m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
m.madvise(mmap.MADV_RANDOM)
print("mapped", flush=True)
sys.stdin.readline()
print(sum(m[:]), flush=True)
"""


def mapping(path) -> subprocess.Popen:
    """A process that maps a file and reads all of it when it is told to."""
    child = subprocess.Popen(
        [sys.executable, "-c", MAP, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "mapped\n"
    return child


@pytest.mark.parametrize("kind", ["composed", "whole blob", "computed"])
def test_only_who_maps_a_cut_blob_is_killed(damage, tmp_path, kind):
    """SIGBUS, as with a plain file; the daemon, and who maps another file, go on."""
    inside = {"composed": SHARD, "whole blob": damage.whole_file, "computed": COMPUTED}[kind]
    with Mount(damage.store, tmp_path / "mnt") as mount:
        other = "original/tiny-llama/latest/tiny-llama/model-00003-of-00003.safetensors"
        hurt, whole = mapping(mount / inside), mapping(mount / other)
        damage.cut()
        out, _ = whole.communicate("go\n")
        assert whole.returncode == 0 and int(out) == sum((mount / other).read_bytes())
        hurt.communicate("go\n")
        assert hurt.returncode == -signal.SIGBUS
        assert (mount / "safetensors/mixed/latest/model.safetensors").read_bytes()


def passes_through(mount) -> bool:
    return json.loads((mount / ".wmount/status.json").read_bytes())["passthrough"] == "on"


def test_a_whole_blob_that_is_cut_while_the_kernel_reads_it_is_told_of_and_not_opened_again(damage, tmp_path):
    with Mount(damage.store, tmp_path / "mnt") as mount:
        if os.geteuid() == 0:
            assert passes_through(mount), "this kernel lacks passthrough: nothing is tested here"
        with open(mount / damage.whole_file, "rb", buffering=0) as opened:
            damage.cut()
            # Without a further request: the daemon looks by itself.
            assert eventually(lambda: damage.digest in problems(mount), 20)
            assert TENSOR in problems(mount) and TENSOR in log_of(mount)
            with pytest.raises(OSError) as refused:
                (mount / damage.whole_file).read_bytes()
            assert refused.value.errno == errno.EIO
            # What this reader gets is what the plain file would give; the README says so.
            assert len(os.pread(opened.fileno(), 8192, 0)) in (4096, 8192)
        with pytest.raises(OSError) as refused:
            (mount / damage.whole_file).read_bytes()
        assert refused.value.errno == errno.EIO
        os.truncate(damage.path, 0)
        damage.path.write_bytes(damage.bytes)
        assert eventually(lambda: (mount / damage.whole_file).read_bytes() == damage.bytes)


def test_without_passthrough_a_whole_blob_that_is_cut_is_an_io_error(damage, tmp_path):
    at = tmp_path / "mnt"
    at.mkdir()
    run("--read", "cache", damage.store.path, at)
    try:
        with open(at / damage.whole_file, "rb", buffering=0) as opened:
            damage.cut()
            with pytest.raises(OSError) as refused:
                os.pread(opened.fileno(), 4096, 8192)
            assert refused.value.errno == errno.EIO
    finally:
        run("umount", at)


def test_a_flipped_bit_is_found_by_verify_and_named(damage, tmp_path):
    with Mount(damage.store, tmp_path / "mnt") as mount:
        damage.flip()
        report = damage.store.json("verify", code=1)
        assert [d["digest"] for d in report["damaged"]] == [damage.digest]
        assert TENSOR in report["damaged"][0]["holds"][0]
        words = damage.store.run("verify", check=False).stdout.decode()
        assert TENSOR in words and "tiny-llama:latest" in words
        assert len((mount / SHARD).read_bytes()) == os.stat(mount / SHARD).st_size


def test_a_blob_that_the_user_may_not_read_is_an_io_error_that_says_so(damage):
    """As an ordinary user: root reads everything."""
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    drop = {"user": user, "group": user, "extra_groups": []} if os.geteuid() == 0 else {}
    mode = os.stat("/dev/fuse").st_mode & 0o777
    if os.geteuid() == 0:
        os.chmod("/dev/fuse", 0o666)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "mnt").mkdir()
        (home / "wmount").write_bytes(BINARY.read_bytes())
        (home / "wmount").chmod(0o755)
        damage.store.path.rename(home / "store")
        for path in [home, *home.rglob("*")]:
            os.chown(path, user, -1)
        os.chmod(home / "store/blobs" / damage.name, 0)
        env = {"HOME": str(home), "PATH": os.environ["PATH"]}

        def as_user(*args):
            args = [str(arg) for arg in args]
            return subprocess.run(args, capture_output=True, env=env, cwd=home, timeout=60, **drop)

        try:
            done = as_user(home / "wmount", home / "store", home / "mnt")
            assert done.returncode == 0, done.stderr.decode()
            for inside in (SHARD, AMB, damage.whole_file, COMPUTED):
                done = as_user("cat", home / "mnt" / inside)
                assert done.returncode != 0 and b"Input/output error" in done.stderr, inside
            assert as_user("cat", home / "mnt/safetensors/mixed/latest/model.safetensors").returncode == 0
            time.sleep(1.1)
            status = as_user("cat", home / "mnt/.wmount/status.json").stdout.decode()
            assert "Permission denied" in status and damage.digest in status and TENSOR in status
        finally:
            as_user(home / "wmount", "umount", home / "mnt")
            if os.geteuid() == 0:
                os.chmod("/dev/fuse", mode)


@pytest.fixture
def checking(damage, tmp_path):
    """The store mounted with --verify-on-read."""
    mount = Mount(damage.store, tmp_path / "checking")

    def begin(*options):
        run("--verify-on-read", *options, damage.store.path, mount.at)
        return mount

    yield begin
    if os.path.ismount(mount.at):
        run("umount", "--lazy", mount.at)


def verified(mount) -> int:
    time.sleep(1.1)
    return json.loads((mount / ".wmount/status.json").read_bytes())["verified"]["blobs"]


def is_eio(path) -> bool:
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno == errno.EIO
    return False


def test_nothing_is_remembered_that_was_computed_from_a_damaged_blob(damage, tmp_path):
    """Neither by the mount that met the damage nor by the next, once the blob is mended by hand."""
    computed = [COMPUTED, "amb/tiny-llama/latest@adaptive-32.amb", "gds_export/tiny-llama/latest@fp8/manifest.json"]
    damage.flip()
    with Mount(damage.store, tmp_path / "first") as mount:
        assert all(is_eio(mount / name) for name in computed)
        assert "its content has the digest" in problems(mount)
    damage.path.write_bytes(damage.bytes)
    with Mount(damage.store, tmp_path / "second") as mount:
        shown = [(mount / name).read_bytes() for name in computed]
    shutil.rmtree(damage.store.path / ".wmount/memo")
    with Mount(damage.store, tmp_path / "third") as mount:
        assert shown == [(mount / name).read_bytes() for name in computed]


@pytest.mark.parametrize("read", ["auto", "cache", "direct"])
def test_verify_on_read_gives_no_byte_of_a_wrong_blob(damage, checking, read):
    """Composed, whole (which the kernel would read by itself) and computed files; all others are read as ever."""
    damage.flip()
    mount = checking("--read", read)
    hurt = {name for name in files_of(mount) if is_eio(mount / name)}
    assert {SHARD, AMB, COMPUTED, damage.whole_file} <= hurt
    assert not any("mixed" in name or name.endswith(".json") for name in hurt), hurt
    told, log = problems(mount), log_of(mount)
    for word in (damage.digest, TENSOR, "tiny-llama:latest", "its content has the digest"):
        assert word in told and word in log
    # Mended by hand, in place: another version, checked again.
    damage.path.write_bytes(damage.bytes)
    assert eventually(lambda: not any(is_eio(mount / name) for name in hurt))


def test_verify_on_read_checks_a_blob_once_and_who_comes_meanwhile_waits(damage, checking):
    mount = checking("--read", "cache")
    inside = mount / damage.whole_file
    os.stat(inside)
    before, results = verified(mount), []

    def read():
        results.append(inside.read_bytes())

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [damage.bytes] * 16
    for _ in range(5):
        with open(inside, "rb", buffering=0) as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert f.read() == damage.bytes
    assert verified(mount) == before + 1


@pytest.mark.parametrize("read", ["cache", "direct"])
def test_verify_on_read_is_not_deceived_by_times_that_were_set_back(damage, checking, read):
    """As `touch -r` and `cp -p` set them: damage with the time of the whole blob, and the mended blob with that time."""
    times = os.stat(damage.path)

    def back():
        os.utime(damage.path, ns=(times.st_atime_ns, times.st_mtime_ns))

    damage.flip()
    back()
    mount = checking("--read", read)
    assert is_eio(mount / AMB)
    damage.path.write_bytes(damage.bytes)
    back()
    assert eventually(lambda: not is_eio(mount / AMB))
    if read == "direct":
        damage.flip()
        back()
        assert is_eio(mount / AMB)


def test_verify_on_read_sees_what_changes_under_it(damage, checking):
    mount = checking("--read", "direct")
    with open(mount / SHARD, "rb", buffering=0) as f:
        whole = f.read()
        damage.flip()
        with pytest.raises(OSError) as refused:
            f.seek(0)
            f.read()
        assert refused.value.errno == errno.EIO
        damage.store.json("verify", "--repair", "--from", mount.store.path, code=1)
        damage.path.write_bytes(damage.bytes)
        f.seek(0)
        assert f.read() == whole


class ByHand:
    """The ways to put a good copy in the place of a damaged blob, without wmount."""

    def cp(good: Path, blob: Path):
        subprocess.run(["cp", good, blob], check=True)

    def cp_with_times(good: Path, blob: Path):
        subprocess.run(["cp", "-p", good, blob], check=True)

    def cat(good: Path, blob: Path):
        subprocess.run(["sh", "-c", 'cat "$0" >"$1"', good, blob], check=True)

    def in_place(good: Path, blob: Path):
        """As `rsync --inplace` does."""
        with open(blob, "r+b") as f:
            f.write(good.read_bytes())

    def mv(good: Path, blob: Path):
        good.rename(blob)

    def rm_and_cp(good: Path, blob: Path):
        blob.unlink()
        shutil.copy2(good, blob)

    def rm_and_ln(good: Path, blob: Path):
        blob.unlink()
        os.link(good, blob)


BY_HAND = [name for name in vars(ByHand) if not name.startswith("_")]


def answer(path) -> bytes | int:
    """The bytes of a file, or the error's number."""
    try:
        return path.read_bytes()
    except OSError as error:
        return error.errno


def shown(mount, names) -> dict[str, bytes]:
    return {name: (mount / name).read_bytes() for name in names}


@pytest.mark.parametrize("read", ["auto", "cache"])
@pytest.mark.parametrize("how", BY_HAND)
def test_a_blob_that_is_mended_by_hand_is_shown_without_a_remount(damage, tmp_path, how, read):
    """Composed and whole files that were read, and are in the page cache; one is open and mapped all the time."""
    good, times = tmp_path / "good", os.stat(damage.path)
    shutil.copy2(damage.path, good)
    names = [SHARD, AMB, "original/tiny-llama/latest/tiny-llama/model-00001-of-00003.safetensors", damage.whole_file]
    with Mount(damage.store, tmp_path / "right") as mount:
        right = shown(mount, names)
    damage.flip()
    # As a disk does it.
    os.utime(damage.path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with Mount(damage.store, tmp_path / "mnt", "--read", read) as mount:
        wrong = shown(mount, names)
        assert all(wrong[name] != right[name] for name in names)
        with open(mount / SHARD, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == wrong[SHARD]
            getattr(ByHand, how)(good, damage.path)
            assert eventually(lambda: shown(mount, names) == right)
            assert eventually(lambda: mapped[:] == right[SHARD])
        # And the reverse: it is shown as it is.
        os.chmod(damage.path, 0o644)
        damage.flip()
        assert eventually(lambda: shown(mount, names) == wrong)


def test_a_whole_blob_that_is_open_when_another_is_moved_over_it_is_given_to_nobody_else(damage, tmp_path):
    good = tmp_path / "good"
    shutil.copy2(damage.path, good)
    damage.flip()
    with Mount(damage.store, tmp_path / "mnt") as mount:
        whole = mount / damage.whole_file
        with open(whole, "rb"):
            ByHand.mv(good, damage.path)
            # Where the kernel reads the blob itself, it cannot be made to read another one.
            assert eventually(lambda: answer(whole) in (damage.bytes, errno.EIO))
        assert eventually(lambda: answer(whole) == damage.bytes)


@pytest.mark.parametrize("how", ["cp", "mv"])
def test_what_was_planned_from_a_damaged_header_is_planned_anew_when_it_is_mended_by_hand(damage, tmp_path, how):
    """In a store as ollama makes it, where dtypes and shapes are in the blobs alone; also after the next mount."""
    theirs = Store(tmp_path / "theirs")
    with Mount(damage.store, tmp_path / "ours") as mount:
        shutil.copytree(mount / "ollama", theirs.path, copy_function=shutil.copyfile)
    subprocess.run(["chmod", "-R", "u+w", theirs.path], check=True)
    # wmount remembers what it finds out where it has such a directory.
    (theirs.path / ".wmount").mkdir()
    tensor = next(t for t in theirs.json("show", "tiny-llama")["tensors"] if t["name"] == TENSOR)
    blob, good = theirs.path / "blobs" / tensor["digest"].replace(":", "-"), tmp_path / "good"
    shutil.copy2(blob, good)
    names = ["safetensors/tiny-llama/latest/model.safetensors", AMB, "gds_export/tiny-llama/latest/manifest.json"]
    with Mount(theirs, tmp_path / "right") as mount:
        right = shown(mount, names)
    (theirs.path / ".wmount/memo.json").unlink()
    whole = blob.read_bytes()
    dtype, other = next(it for it in [(b'"F32"', b'"I32"'), (b'"F16"', b'"I16"'), (b'"BF16"', b'"I16" ')] if it[0] in whole)
    blob.write_bytes(whole.replace(dtype, other, 1))
    with Mount(theirs, tmp_path / "mnt") as mount:
        assert (mount / names[0]).read_bytes() != right[names[0]] and not (mount / AMB).exists()
        getattr(ByHand, how)(good, blob)
        assert eventually(lambda: (mount / AMB).exists() and shown(mount, names) == right)
    with Mount(theirs, tmp_path / "next") as mount:
        assert shown(mount, names) == right
