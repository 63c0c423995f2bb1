"""What users do every day: rename a model, have two versions of one, stop an export, mount from /etc/fstab."""

import json
import os
import shutil
import signal
import subprocess

import mlx_lm
import pytest

from harness import BINARY, Mount, Store, digest, eventually, unmount


def files(root):
    return {str(path.relative_to(root)): digest(path) for path in root.rglob("*") if path.is_file()}


def test_a_model_gets_another_name_while_it_is_mounted_and_open(small, tmp_path):
    blobs = small.blobs()
    with Mount(small, tmp_path / "mnt") as mount:
        old, new = mount / "safetensors/tiny-llama/latest", mount / "safetensors/me/renamed/v2"
        before = files(old)
        assert small.json("cp", "tiny-llama", "me/renamed:v2") == {
            "model": "tiny-llama:latest",
            "copy": "me/renamed:v2",
        }
        assert eventually(new.is_dir) and files(new) == before
        with open(old / "model-00001-of-00003.safetensors", "rb") as still:
            small.run("rm", "tiny-llama")
            assert eventually(lambda: not old.exists())
            assert small.json("gc")["removed"] == 0
            assert len(still.read()) == (new / "model-00001-of-00003.safetensors").stat().st_size
        assert files(new) == before
        mlx_lm.load(str(new))
        assert {path.name for path in (mount / "original/me/renamed/v2").iterdir()} == {"tiny-llama"}
    assert small.blobs() == blobs
    assert {model["model"] for model in small.json("ls")} == {"me/renamed:v2", "mixed:latest"}


def test_a_copy_takes_no_other_models_place_unless_told_to(small):
    before = small.listing()
    for args, word in [
        (("tiny-llama", "mixed"), "has another model mixed:latest"),
        (("tiny-lama", "other"), "tiny-llama:latest"),
        (("tiny-llama:v9", "other"), "tiny-llama:latest"),
    ]:
        done = small.run("cp", *args, check=False)
        assert done.returncode == 1 and word in done.stderr.decode(), done.stderr.decode()
    assert small.listing() == before
    small.run("cp", "tiny-llama", "mixed", "--replace")
    shown = [small.json("show", model)["tensors"] for model in ("tiny-llama", "mixed")]
    assert shown[0] == shown[1]
    done = Store(small.path.parent / "none").run("cp", "a", "b", check=False)
    assert done.returncode == 1 and not (small.path.parent / "none").exists()


@pytest.mark.parametrize("path", ["original/large/latest/large/model.safetensors", "original/large"])
def test_an_interrupted_export_leaves_nothing(store, tmp_path, path):
    size = 100_000_000
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    (tmp_path / "large").mkdir()
    data = bytes(range(250)) * (size // 250)
    (tmp_path / "large/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    store.add(tmp_path / "large", name="large")
    dest = tmp_path / "out"
    written = dest if path.endswith(".safetensors") else dest / "latest/large/model.safetensors"
    # One that was too fast is made again.
    for _ in range(20):
        command = [BINARY, "-s", store.path, "export", path, dest]
        export = subprocess.Popen(command, stderr=subprocess.PIPE)
        while not written.exists() and export.poll() is None:
            pass
        export.send_signal(signal.SIGSTOP)
        is_under_way = export.poll() is None and written.stat().st_size < size
        export.send_signal(signal.SIGINT)
        export.send_signal(signal.SIGCONT)
        _, told = export.communicate()
        if is_under_way:
            break
        shutil.rmtree(dest, ignore_errors=True)
        dest.unlink(missing_ok=True)
    assert is_under_way and export.returncode == 1, told
    assert b"interrupted" in told and not dest.exists()
    store.run("export", path, dest)
    assert digest(written) == digest(tmp_path / "large/model.safetensors")


def test_a_line_of_fstab_mounts(small, tmp_path):
    at = tmp_path / "mnt"
    at.mkdir()
    table = tmp_path / "fstab"
    table.write_text(f"{BINARY}#{small.path} {at} fuse defaults,allow_other,_netdev,nofail,read=cache,variant=int8 0 0\n")
    # Only root may name another table: others are given the options as mount(8) gives them.
    options = ["-o", "rw,nosuid,nodev,nofail,read=cache,variant=int8"]
    command = ["mount", "-T", table, at] if os.geteuid() == 0 else [BINARY, small.path, at, *options]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    try:
        assert "latest@int8.amb" in os.listdir(at / "amb/tiny-llama")
        line = next(line for line in open("/proc/mounts") if f" {at} " in line)
        assert line.split()[2] == "fuse.wmount" and ("allow_other" in line) == (os.geteuid() == 0), line
    finally:
        unmount(at)


@pytest.mark.parametrize("part", ["", "manifests"])
def test_a_store_that_was_away_is_shown_again_when_it_is_back(small, models, tmp_path, part):
    """As a disk that was unplugged while its store is mounted, and first looked at while it was away."""
    place, aside = small.path / part, tmp_path / "aside"
    with Mount(small, tmp_path / "mnt") as mount:
        place.rename(aside)
        shown = [mount / layout / "tiny-llama/latest" for layout in ("safetensors", "gds_export", "original")]
        for path in shown:
            with pytest.raises(OSError):
                os.listdir(path)
        with pytest.raises(OSError):
            (mount / "amb/tiny-llama/latest.amb").read_bytes()
        aside.rename(place)
        assert eventually(lambda: all(path.is_dir() for path in shown)), "it is back, and not shown"
        assert files(shown[0]) == files(models / "tiny-llama") == files(shown[2] / "tiny-llama")
        assert eventually(lambda: (mount / "amb/tiny-llama/latest.amb").read_bytes()[:5] == b"AMBEE")
