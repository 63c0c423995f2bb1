"""What the store holds, and the commands that look at it and change it."""

import json
import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

import models as made
import readers
from harness import BINARY, Mount, Store, digest, eventually, run, unmount, walk


def distinct_bytes(world) -> int:
    """Tensor bytes and small files of everything imported, equal ones counted once."""
    tensors, files = {}, {}
    for sources in world.sources.values():
        for path in (p for source in sources for p in source.rglob("*") if p.is_file()):
            if path.suffix == ".safetensors":
                found = readers.safetensors(path)
            elif path.name == "weight.bin":
                found = readers.milblob(path)
            else:
                files[digest(path)] = path.stat().st_size
                continue
            for tensor in found.values():
                tensors[tensor.dtype, tensor.digest()] = len(tensor.data)
    return sum(tensors.values()) + sum(files.values())


def test_the_store_is_no_larger_than_what_is_distinct_in_it(world):
    """The blobs of nine imports are the distinct tensors and small files plus 0.1%."""
    assert sum(world.store.blobs().values()) <= distinct_bytes(world) * 1.001


def test_importing_the_same_again_adds_nothing(small, models):
    before, listing = small.blobs(), small.listing()
    answer = small.add(models / "tiny-llama", name="tiny-llama")
    assert answer["added"]["tensors"] == answer["added"]["files"] == answer["added"]["bytes"] == 0
    assert answer["present"]["tensors"] == len(made.llama_shapes())
    assert small.blobs() == before
    assert small.listing().keys() == listing.keys()


def test_a_second_name_adds_no_tensor(small, models):
    answer = small.add(made.hub_snapshot(models), name="org/copy:v2")
    assert answer["added"]["tensors"] == 0
    assert answer["present"]["bytes"] > 0


def test_import_says_what_it_added(store, models):
    answer = store.add(models / "tiny-llama", name="tiny-llama")
    assert "tiny-llama" in answer["model"]
    # The norms are all ones: equal tensors of one model are there already when the second comes.
    tensors = readers.safetensors_dir(models / "tiny-llama")
    assert answer["added"]["tensors"] + answer["present"]["tensors"] == len(made.llama_shapes())
    assert answer["present"]["tensors"] == len(made.llama_shapes()) - len({(t.dtype, t.shape, t.digest()) for t in tensors.values()})


def test_blobs_are_named_by_their_sha256_and_read_only(small):
    for path in (small.path / "blobs").iterdir():
        assert path.name == "sha256-" + digest(path)
        assert path.stat().st_mode & 0o777 == 0o444


def test_ls_lists_models_with_path_tensors_and_bytes(world):
    listed = {m["path"]: m for m in world.store.json("ls")}
    assert listed.keys() == world.sources.keys()
    expected = readers.safetensors_dir(world.models / "tiny-llama")
    for path in ("tiny-llama/latest", "org/tiny-llama/hub"):
        assert listed[path]["tensors"] == len(expected)
        assert listed[path]["bytes"] >= sum(len(t.data) for t in expected.values())


def test_show_names_every_tensor_file_program_and_layout(world):
    shown = world.store.json("show", "minilm")
    tensors = {t["name"]: t for t in shown["tensors"]}
    for name, tensor in readers.safetensors_dir(world.models / "minilm").items():
        found = tensors[name]
        assert (found["dtype"], tuple(found["shape"]), found["bytes"]) == (tensor.dtype, tensor.shape, len(tensor.data))
        assert found["digest"].startswith("sha256:")
    files = {f["name"]: f for f in shown["files"]}
    source = world.models / "minilm/tokenizer.json"
    assert files["tokenizer.json"]["bytes"] == source.stat().st_size
    assert files["tokenizer.json"]["digest"] == "sha256:" + digest(source)
    assert len(shown["programs"]) == 4
    assert {"amb", "coreml", "ollama", "safetensors", "original"} <= shown["layouts"].keys()


def test_names_of_tensors_tell_the_terminal_nothing(store, tmp_path):
    bell = "a\x1b]0;title\x07\x9b2J"
    (tmp_path / "m").mkdir()
    save_file({bell: np.zeros(4, np.float32)}, tmp_path / "m" / "model.safetensors")
    said = store.run("import", tmp_path / "m", "-n", "m").stdout + store.run("show", "m").stdout
    assert "\\u{1b}]0;title" in said.decode() and not any(ord(char) < 32 and char != "\n" for char in said.decode())
    assert "\x9b" not in said.decode()
    assert store.json("show", "m")["tensors"][0]["name"] == bell


def test_show_of_an_unknown_model_fails(small):
    done = small.run("show", "nobody", check=False)
    assert done.returncode == 1 and b"nobody" in done.stderr


def test_verify_finds_nothing_wrong_with_a_whole_store(small):
    answer = small.json("verify")
    assert answer["damaged"] == []
    assert answer["blobs"] == len(small.blobs())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_verify_names_the_blob_and_every_model_that_it_hurts(small, models, damage):
    small.add(made.hub_snapshot(models), name="org/copy:v2")
    name = max(small.blobs().items(), key=lambda item: item[1])[0]
    path = small.path / "blobs" / name
    if damage == "flipped":
        flip(path)
    elif damage == "short":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    answer = small.json("verify", code=1)
    assert [d["digest"] for d in answer["damaged"]] == [name.replace("-", ":")]
    hurt = answer["damaged"][0]["models"]
    assert len(hurt) == 2 and "tiny-llama" in " ".join(hurt) and "org/copy" in " ".join(hurt)
    assert answer["damaged"][0]["fault"]


def test_gc_frees_what_only_the_removed_model_had(small, models, tmp_path):
    alone = tmp_path / "alone.mlpackage"
    small.add(models / "inline.mlpackage", name="extra")
    small.add(made.hub_snapshot(models), name="org/copy:v2")
    before = small.blobs()
    assert small.json("gc") == {"removed": 0, "bytes": 0, "unfinished": 0, "in_use": 0, "young": 0}
    small.run("rm", "tiny-llama")
    small.run("rm", "mixed")
    assert small.blobs() == before, "rm alone frees nothing"
    answer = small.json("gc")
    after = small.blobs()
    assert answer["removed"] == len(before) - len(after) > 0
    assert answer["bytes"] == sum(before.values()) - sum(after.values())
    assert small.json("verify")["damaged"] == []
    small.run("export", "safetensors/org/copy/v2", alone)
    assert readers.safetensors_dir(alone) == readers.safetensors_dir(models / "tiny-llama")
    assert small.json("gc")["removed"] == 0


def test_rm_of_an_unknown_model_fails_and_changes_nothing(small):
    before = small.listing()
    done = small.run("rm", "nobody", check=False)
    assert done.returncode == 1 and b"nobody" in done.stderr
    assert small.listing() == before


def test_status_lists_the_mount(mounted):
    # Another mount of this machine may be dead, which is a failure.
    answer = json.loads(run("status", "--json", check=False).stdout)
    assert str(mounted.at) in str(answer)


@pytest.fixture
def read_only(small, tmp_path):
    """The small store that cannot be written: on a read-only bind mount or, for users, without the permission."""
    if os.geteuid() == 0:
        bound = tmp_path / "bound"
        bound.mkdir()
        subprocess.run(["mount", "--bind", small.path, bound], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", bound], check=True)
        yield Store(bound)
        subprocess.run(["umount", bound], check=True)
        return
    directories = [small.path, *(p for p in small.path.rglob("*") if p.is_dir())]
    for directory in directories:
        directory.chmod(0o555)
    yield small
    for directory in directories:
        directory.chmod(0o755)


def test_a_read_only_store_mounts_and_reads(read_only, models, tmp_path):
    with Mount(read_only, tmp_path / "mnt") as mount:
        shown = readers.safetensors_dir(mount / "safetensors/tiny-llama/latest")
        assert shown == readers.safetensors_dir(models / "tiny-llama")


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "umount", "wmount umount"])
def test_the_foreground_ends_cleanly(small, tmp_path, end):
    """-f stays until a signal or an unmount, and leaves no mount behind."""
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    process = subprocess.Popen([BINARY, "-f", small.path, mnt])
    try:
        assert eventually((mnt / ".wmount/status.json").exists)
        assert process.poll() is None
        if end.startswith("SIG"):
            process.send_signal(getattr(signal, end))
        elif end == "umount":
            unmount(mnt)
        else:
            run("umount", mnt)
        assert process.wait(timeout=20) == 0
        assert not os.path.ismount(mnt)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if os.path.ismount(mnt):
            unmount(mnt, lazy=True)


def test_of_two_exports_to_one_place_one_is_refused_and_takes_nothing_away(small, tmp_path):
    """One finds the place free, and when it comes to make it, the other has."""
    inside, dest = "safetensors/tiny-llama/latest", tmp_path / "copy"
    small.run("export", inside, tmp_path / "expected")
    late = ["strace", "-f", "-qq", "-o", tmp_path / "log", "-e", "trace=/^mkdir", "-e", "inject=/^mkdir:delay_enter=2s"]
    command = [*late, BINARY, "-s", small.path, "export", inside, dest]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as first:
        assert eventually(lambda: str(dest) in (tmp_path / "log").read_text() if (tmp_path / "log").exists() else False)
        small.run("export", inside, dest)
        words = first.communicate()[1].decode()
    assert first.returncode == 1 and "exists" in words, words
    assert Store(dest).listing() == Store(tmp_path / "expected").listing()


def test_what_was_exported_is_durable(small, tmp_path):
    dest, log = tmp_path / "copy", tmp_path / "log"
    traced = ["strace", "-f", "-qq", "-y", "-o", log, "-e", "trace=fsync", BINARY, "-s", small.path]
    subprocess.run([*traced, "export", "safetensors", dest], check=True, stdout=subprocess.DEVNULL)
    synced = re.findall(r"fsync\(\d+<(.*)>\)\s*= 0", log.read_text())
    assert {str(path) for path in [tmp_path, dest, *dest.rglob("*")]} <= set(synced)
    assert any(dest.rglob("*.safetensors"))


@pytest.mark.parametrize("inside", ["safetensors/tiny-llama", "amb/tiny-llama/latest.amb"])
def test_half_an_export_that_cannot_be_removed_is_told_of(small, tmp_path, inside):
    dest = tmp_path / "copy"
    largest = max(small.blobs().items(), key=lambda blob: blob[1])[0]
    os.truncate(small.path / "blobs" / largest, 100)
    refused = ["strace", "-f", "-qq", "-o", tmp_path / "log", "-e", "inject=/^unlink:error=EACCES"]
    command = [BINARY, "-s", small.path, "export", inside]
    done = subprocess.run([*refused, *command, dest], capture_output=True, text=True)
    assert done.returncode == 1 and dest.exists()
    assert "is left, and is not whole" in done.stderr and str(dest) in done.stderr, done.stderr
    done = subprocess.run([*command, tmp_path / "second"], capture_output=True, text=True)
    assert done.returncode == 1 and "is left" not in done.stderr and not (tmp_path / "second").exists()


def test_an_export_to_where_files_have_one_name_is_whole(world, tmp_path):
    """As on exFAT; the shapes of a model are one inode on a mount."""
    inside, dest = "coreml/minilm/latest", tmp_path / "copy"
    world.store.run("export", inside, tmp_path / "expected")
    refused = ["strace", "-f", "-qq", "-o", tmp_path / "log", "-e", "inject=link,linkat:error=EPERM"]
    subprocess.run([*refused, BINARY, "-s", world.store.path, "export", inside, dest], check=True)
    assert "INJECTED" in (tmp_path / "log").read_text()
    assert Store(dest).listing() == Store(tmp_path / "expected").listing()


def test_the_demo_runs_once(tmp_path):
    done = run("demo", "--once", timeout=120)
    assert b"weight.bin" in done.stdout


def test_the_memo_of_a_store_is_only_a_short_cut(small, tmp_path):
    """It is written at the first look, and a broken, missing or false one changes nothing but the time that takes."""

    def tree() -> dict:
        with Mount(small, tmp_path / "mnt") as mount:
            found = walk(mount.at)
        return {path: status.st_ino for path, status in found.items() if ".wmount" not in path}

    memo = small.path / ".wmount/memo.json"
    # Of a manifest that was written just now nothing is remembered: the next version could have the same time.
    time.sleep(3)
    first = tree()
    kept = json.loads(memo.read_bytes())
    assert len(kept["models"]) == 2
    for other in (b"", b"{}", b"[1", json.dumps(kept | {"rules": 0}).encode(), None):
        memo.unlink() if other is None else memo.write_bytes(other)
        assert tree() == first
    assert json.loads(memo.read_bytes()) == kept
    assert tree() == first


def test_a_manifest_that_was_written_over_is_looked_at_again(small, tmp_path):
    """Also one of the same inode, length and time of writing, as `cp -p` onto it leaves."""
    manifest = small.path / "manifests/registry.ollama.ai/library/tiny-llama/latest"
    time.sleep(3)
    with Mount(small, tmp_path / "mnt") as mount:
        assert "tiny-llama" in os.listdir(mount / "amb")
    memo = (small.path / ".wmount/memo.json").read_bytes()
    found, text = manifest.stat(), manifest.read_text()
    with open(manifest, "r+") as file:
        file.write(text.replace('"BF16"', '"FP16"').replace('"F32"', '"U32"').replace('"F16"', '"U16"'))
    os.utime(manifest, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = manifest.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (found.st_ino, found.st_size, found.st_mtime_ns)
    assert manifest.read_text() != text
    with Mount(small, tmp_path / "mnt") as mount:
        assert "tiny-llama" not in os.listdir(mount / "amb")
    assert (small.path / ".wmount/memo.json").read_bytes() != memo
