"""How files are read: past the daemon where a file is one blob, and the same bytes in every mode."""

import json
import mmap
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from harness import Mount, Store, eventually, run

SIZE = 5_000_001
root = pytest.mark.skipif(os.geteuid() != 0, reason="the kernel lets root alone pass files through")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with a file that is one blob and one that is not, and their bytes."""
    work = tmp_path_factory.mktemp("readpath")
    source = work / "source"
    source.mkdir()
    numbers = random.Random(7)
    (source / "config.json").write_text("{}")
    (source / "weights.bin").write_bytes(numbers.randbytes(SIZE))
    tensors, at = {}, 0
    for i, length in enumerate([3_000_001, 17, 4096, 1_000_003]):
        tensors[f"t{i}"] = {"dtype": "U8", "shape": [length], "data_offsets": [at, at + length]}
        at += length
    header = json.dumps(tensors).encode()
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + numbers.randbytes(at))
    store = Store(work / "store")
    store.add(source, name="m")
    return store, {path.name: path.read_bytes() for path in source.iterdir()}


def status(mount) -> dict:
    return json.loads((mount / ".wmount/status.json").read_text())


@root
def test_a_file_that_is_one_blob_is_not_read_by_the_daemon(made, tmp_path):
    store, files = made
    with Mount(store, tmp_path / "mnt") as mount:
        assert status(mount)["passthrough"] == "on"
        path = mount / "safetensors/m/latest/weights.bin"
        assert path.read_bytes() == files["weights.bin"]
        assert status(mount)["bytes_read"] == 0


@root
def test_any_range_can_be_read_directly_beside_other_readers(made, tmp_path):
    store, files = made
    with Mount(store, tmp_path / "mnt") as mount:
        path, expected = mount / "safetensors/m/latest/weights.bin", files["weights.bin"]
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            assert os.pread(fd, 100_001, 7) == expected[7:100_008]
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as other:
                assert other[:] == mapped[:] == expected
            os.close(fd)
            assert f.read() == expected


@pytest.mark.parametrize("name", ["weights.bin", "model.safetensors"])
def test_a_blob_of_another_size_is_an_error(made, tmp_path, name):
    store, files = made
    with Mount(store, tmp_path / "mnt") as mount:
        largest = max((store.path / "blobs").iterdir(), key=lambda p: p.stat().st_size)
        if name != "weights.bin":
            largest = sorted((store.path / "blobs").iterdir(), key=lambda p: p.stat().st_size)[-2]
        content = largest.read_bytes()
        os.chmod(largest, 0o644)
        try:
            os.truncate(largest, len(content) - 1)
            with pytest.raises(OSError, match="Input/output error"):
                (mount / "safetensors/m/latest" / name).read_bytes()
        finally:
            largest.write_bytes(content)
        assert (mount / "safetensors/m/latest" / name).read_bytes() == files[name]


@pytest.mark.parametrize("mode", ["auto", "cache", "direct"])
def test_random_ranges_in_every_mode(made, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("WMOUNT_READ", mode)
    store, files = made
    numbers = random.Random(11)
    with Mount(store, tmp_path / "mnt") as mount:
        for name, expected in files.items():
            with open(mount / "safetensors/m/latest" / name, "rb", buffering=0) as f:
                mapped = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
                for _ in range(200):
                    start = numbers.randrange(len(expected) + 10)
                    length = numbers.choice([1, 100, 4096, 32768, 200_000, 3_000_000])
                    assert os.pread(f.fileno(), length, start) == expected[start : start + length]
                    assert mapped[start : start + length] == expected[start : start + length]
                mapped.close()


@pytest.mark.parametrize("mode", ["cache", "direct"])
@pytest.mark.parametrize("name", ["weights.bin", "model.safetensors"])
def test_bytes_of_blobs_are_sent_without_a_copy_in_the_daemon(made, tmp_path, monkeypatch, mode, name):
    monkeypatch.setenv("WMOUNT_READ", mode)
    store, files = made
    with Mount(store, tmp_path / "mnt") as mount:
        with open(mount / "safetensors/m/latest" / name, "rb", buffering=0) as f:
            parts = iter(lambda: f.read(700_001), b"")
            assert b"".join(parts) == files[name]
        time.sleep(0.15)  # a status is as old as that
        figures = status(mount)["layouts"]["safetensors"]
        assert figures["bytes"] >= len(files[name])
        # What is left is the end of the file, and where a request has both the header and many small tensors.
        assert 0.9 * figures["bytes"] < figures["sent_bytes"] <= figures["bytes"]


# Each request is two pieces of one blob and one of another at the most, and then the reply: what fails is any of them.
@pytest.mark.parametrize("fault", ["error=EIO:when=2+3", "error=EAGAIN:when=3+5", "error=EPERM", "retval=4096:when=1+4", "retval=0:when=2+2"])
def test_a_reply_that_cannot_be_sent_is_read_and_counted_once(made, tmp_path, monkeypatch, fault):
    monkeypatch.setenv("WMOUNT_READ", "direct")
    store, files = made
    expected = files["model.safetensors"]
    with Mount(store, tmp_path / "mnt") as mount:
        pid = status(mount)["pid"]
        log = tmp_path / "log"
        tracer = subprocess.Popen(["strace", "-f", "-p", str(pid), "-o", log, "-e", "trace=splice", "-e", f"inject=splice:{fault}"], stderr=subprocess.PIPE)
        assert b"attached" in tracer.stderr.readline()
        count = 0
        with open(mount / "safetensors/m/latest/model.safetensors", "rb", buffering=0) as f:
            for start in range(0, len(expected), 300_000):
                part = os.pread(f.fileno(), 300_000, start)
                assert part == expected[start : start + 300_000]
                count += len(part)
        tracer.terminate()
        tracer.wait()
        assert "INJECTED" in log.read_text()
        time.sleep(1.1)  # the kernel asks for a name again after a second
        found = status(mount)
        assert found["layouts"]["safetensors"]["bytes"] == count and found["problems"] == []


def test_what_is_small_or_computed_is_not_sent(made, tmp_path, monkeypatch):
    monkeypatch.setenv("WMOUNT_READ", "direct")
    store, files = made
    with Mount(store, tmp_path / "mnt") as mount:
        with open(mount / "safetensors/m/latest/model.safetensors", "rb", buffering=0) as f:
            for start in range(0, 300_000, 5000):
                assert os.pread(f.fileno(), 5000, start) == files["model.safetensors"][start : start + 5000]
        time.sleep(0.15)  # a status is as old as that
        figures = status(mount)["layouts"]["safetensors"]
        assert figures["bytes"] == 300_000 and figures["sent_bytes"] == 0


def test_large_files_change_over_when_they_are_mapped(made, tmp_path):
    """A file that was mapped keeps its pages when it is mapped again: nothing is read twice."""
    store, files = made
    with Mount(store, tmp_path / "mnt") as mount:
        path = mount / "safetensors/m/latest/model.safetensors"
        read = []
        for _ in range(4):
            with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == files["model.safetensors"]
            read.append(status(mount)["bytes_read"])
            time.sleep(0.15)  # a status is as old as that
        assert read[-1] == read[-2]


def test_the_status_says_how_far_the_kernel_reads_ahead_by_now(made, tmp_path):
    """A udev rule sets it after the mount is made."""
    store, _ = made
    with Mount(store, tmp_path / "mnt") as mount:
        device = os.stat(mount.at).st_dev
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        assert status(mount)["read_ahead_kib"] == int(setting.read_text())
        setting.write_text("1000")
        assert eventually(lambda: status(mount)["read_ahead_kib"] == 1000)


def test_the_doctor_changes_nothing_and_names_commands(made, tmp_path):
    store, _ = made
    with Mount(store, tmp_path / "mnt") as mount:
        device = os.stat(mount.at).st_dev
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        before = setting.read_text()
        findings = json.loads(run("doctor", "--json").stdout)
        assert setting.read_text() == before
        assert all("command" in it or "passthrough" in it["what"] for it in findings if it["state"] != "good")
        assert any(str(mount.at) in it["what"] for it in findings)
        assert run("doctor").stdout.decode().count("\n") >= len(findings)
