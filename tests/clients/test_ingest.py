"""Writing through the real ollama: its server and command with OLLAMA_MODELS on a mount with --ingest."""

import errno
import hashlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import foreign
import readers
from harness import HOST, Mount, Store, digest, eventually, run, unmount, walk
from registry import Registry
from test_ollama_server import Server, program

# Where llama-quantize is called only to copy a file, this is what it does.
QUANTIZE = """#!/bin/sh
while [ $# -gt 3 ]; do shift; done
exec cp "$1" "$2"
"""


@pytest.fixture
def ingest(store, models, tmp_path):
    """A mount of a store with one model that wmount imported."""
    store.add(models / "tiny-llama", name="tiny-llama")
    with Mount(store, tmp_path / "mnt", "--ingest") as mount:
        yield mount


@pytest.fixture
def server(ingest, tmp_path):
    with Server(ingest / "ollama", tmp_path / "home") as server:
        yield server


@pytest.fixture
def source(models, tmp_path) -> Path:
    """A directory that `ollama create` makes a model of."""
    made = tmp_path / "source"
    shutil.copytree(models / "tiny-llama", made)
    (made / "Modelfile").write_text("FROM .\nTEMPLATE hello\nLICENSE free\n")
    return made


def gguf(path: Path, seed: int = 1) -> bytes:
    random = np.random.default_rng(seed)
    tensors = {"token_embd.weight": random.random((512, 32), np.float32), "output_norm.weight": np.ones(32, np.float32)}
    return foreign.gguf(path, tensors).read_bytes()


def unfinished(store: Store) -> list[str]:
    return sorted(p.name for p in (store.path / ".wmount/ingest").iterdir())


def check(mount: Mount, names: set[str], models: Path, leftovers=0, mode=0o444):
    """These models are everywhere, every blob is what its name says, and the imported model is what it was."""
    store = mount.store
    assert {model["model"] for model in store.json("ls")} == names
    assert not store.json("verify")["damaged"]
    for path in (store.path / "blobs").iterdir():
        assert digest(path) == path.name[7:] and path.stat().st_mode & 0o777 in (0o444, mode)
    shown = {p.name: p.stat().st_size for p in (mount / "ollama/blobs").iterdir()}
    for name in shown:
        assert digest(mount / "ollama/blobs" / name) == name[7:]
    root = mount / "ollama/manifests"
    manifests = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert len(manifests) == len(names)
    for name in manifests:
        manifest = json.loads((root / name).read_bytes())
        for layer in [manifest["config"], *manifest["layers"]]:
            assert shown[layer["digest"].replace(":", "-")] == layer["size"]
    assert len(unfinished(store)) == leftovers
    assert not (store.path / ".wmount/tmp").exists()
    if "tiny-llama:latest" in names:
        original = mount / "original/tiny-llama/latest/tiny-llama"
        for path in (models / "tiny-llama").iterdir():
            assert (original / path.name).read_bytes() == path.read_bytes()


def create(server: Server, name: str, source: Path):
    server.command("create", "--experimental", name, "-f", "Modelfile", cwd=source)


def test_create_copy_and_delete(ingest, server, source, models):
    """From a safetensors directory; each step shows in every layout without a remount."""
    create(server, "made", source)
    assert server.names() == {"tiny-llama:latest", "made:latest"}
    check(ingest, server.names(), models)
    assert readers.safetensors_dir(ingest / "safetensors/made/latest") == readers.safetensors_dir(source)
    for path in ("amb/made/latest.amb", "gds_export/made/latest/manifest.json"):
        assert (ingest / path).stat().st_size > 0
    server.command("cp", "made", "me/other:v1")
    check(ingest, {"tiny-llama:latest", "made:latest", "me/other:v1"}, models)
    before = ingest.store.blobs()
    server.ask("DELETE", "/api/delete", {"model": "made"})
    assert server.names() == {"tiny-llama:latest", "me/other:v1"}
    assert ingest.store.blobs() == before, "the copy needs all of them"
    assert not (ingest / f"ollama/manifests/{HOST}/library/made").exists()
    assert eventually(lambda: not (ingest / "safetensors/made").exists()), "other layouts follow within a second"
    server.command("rm", "me/other:v1")
    check(ingest, {"tiny-llama:latest"}, models)
    assert ingest.store.blobs().keys() < before.keys(), "ollama has removed what nobody needs"
    ingest.store.run("gc")
    check(ingest, {"tiny-llama:latest"}, models)


def test_a_model_made_again_takes_the_place_of_the_old_one(ingest, server, source, models):
    create(server, "made", source)
    first = ingest / "safetensors/made/latest/model.safetensors"
    before = first.read_bytes() if first.exists() else None
    with open(next((ingest / "safetensors/made/latest").glob("model*.safetensors")), "rb") as still_open:
        (source / "Modelfile").write_text("FROM .\nTEMPLATE another\n")
        create(server, "made", source)
        assert server.ask("POST", "/api/show", {"model": "made"})["template"] == "another"
        assert before is None or still_open.read() == before
    check(ingest, {"tiny-llama:latest", "made:latest"}, models)


def test_create_from_a_gguf(ingest, models, tmp_path, monkeypatch):
    """The blob is posted, then the server has llama-quantize copy it and makes a model."""
    beside = tmp_path / "bin"
    beside.mkdir()
    shutil.copy(program(), beside / "ollama")
    (beside / "llama-quantize").write_text(QUANTIZE)
    (beside / "llama-quantize").chmod(0o755)
    monkeypatch.setenv("OLLAMA", str(beside / "ollama"))
    data = gguf(tmp_path / "tiny.gguf")
    name = "sha256:" + hashlib.sha256(data).hexdigest()
    with Server(ingest / "ollama", tmp_path / "home") as server:
        server.ask("POST", f"/api/blobs/{name}", data, code=201)
        server.ask("POST", f"/api/blobs/{name}", data)
        wrong = server.ask("POST", f"/api/blobs/sha256:{'0' * 64}", data + b"x", code=400)
        assert "mismatch" in wrong["error"]
        request = {"model": "tiny", "files": {"tiny.gguf": name}, "parameters": {"temperature": 1}, "stream": False}
        assert server.ask("POST", "/api/create", request)["status"] == "success"
        shown = server.ask("POST", "/api/show", {"model": "tiny"})
        assert shown["model_info"]["llama.embedding_length"] == 32 and "temperature" in shown["parameters"]
        server.ask("POST", "/api/create", {"model": "again", "from": "tiny", "system": "be brief", "stream": False})
        assert server.ask("POST", "/api/show", {"model": "again"})["system"] == "be brief"
    # What was posted and refused is a blob of nobody, as with ollama's own directory.
    check(ingest, {"tiny-llama:latest", "tiny:latest", "again:latest"}, models, leftovers=1)
    assert name.replace(":", "-") in ingest.store.blobs()


def test_models_that_wmount_imported(ingest, server, models):
    """ollama sees them in another form than the store has: copied they are the model itself, and what is made of them
    is whole."""
    before = ingest.store.blobs()
    server.command("cp", "tiny-llama", "copy")
    check(ingest, {"tiny-llama:latest", "copy:latest"}, models)
    assert ingest.store.blobs() == before
    name = "original/{}/latest/tiny-llama/config.json"
    assert (ingest / name.format("copy")).read_bytes() == (ingest / name.format("tiny-llama")).read_bytes()
    answer = server.ask("POST", "/api/create", {"model": "from", "from": "copy", "system": "hi", "stream": False})
    assert answer["status"] == "success"
    check(ingest, {"tiny-llama:latest", "copy:latest", "from:latest"}, models)
    tensors = readers.safetensors_dir(models / "tiny-llama")
    assert readers.safetensors_dir(ingest / "safetensors/from/latest") == tensors
    for model in ("tiny-llama", "copy"):
        server.ask("DELETE", "/api/delete", {"model": model})
    assert server.names() == {"from:latest"}
    ingest.store.run("gc")
    check(ingest, {"from:latest"}, models)
    assert readers.safetensors_dir(ingest / "safetensors/from/latest") == tensors
    assert server.ask("POST", "/api/show", {"model": "from"})["system"] == "hi"


def offer(registry: Registry, model: str, data: bytes):
    """Puts a GGUF model into the registry."""

    def blob(kind: str, data: bytes) -> dict:
        name = "sha256:" + hashlib.sha256(data).hexdigest()
        registry.blobs[name] = data
        return {"mediaType": kind if "/" in kind else foreign.IMAGE + kind, "digest": name, "size": len(data)}

    config = {"model_format": "gguf", "model_family": "llama", "model_families": ["llama"], "file_type": "F32"}
    layers = [blob("model", data), blob("template", b"{{ .Prompt }}"), blob("params", b'{"stop":["x"]}')]
    document = {"schemaVersion": 2, "mediaType": foreign.MANIFEST, "config": blob(foreign.CONFIG, json.dumps(config).encode())}
    registry.manifests[model] = json.dumps(document | {"layers": layers}).encode()


def pull(server: Server, name: str) -> dict:
    return server.ask("POST", "/api/pull", {"model": name, "insecure": True, "stream": False}, code=None)


def test_pull(ingest, server, models, tmp_path):
    """A pulled model is the registry's to the byte; pulled again in another version, the old blobs go."""
    data = gguf(tmp_path / "tiny.gguf")
    with Registry() as registry:
        offer(registry, "me/tiny:v1", data)
        name = registry.name("me/tiny:v1")
        assert pull(server, name) == {"status": "success"}
        manifest = ingest / "ollama/manifests" / f"127.0.0.1:{registry.port}" / "me/tiny/v1"
        assert manifest.read_bytes() == registry.manifests["me/tiny:v1"]
        check(ingest, {"tiny-llama:latest", name}, models)
        assert (ingest.store.path / "blobs" / ("sha256-" + hashlib.sha256(data).hexdigest())).read_bytes() == data
        assert pull(server, name) == {"status": "success"}
        offer(registry, "me/tiny:v1", gguf(tmp_path / "other.gguf", seed=2))
        assert pull(server, name) == {"status": "success"}
        check(ingest, {"tiny-llama:latest", name}, models)
        assert "sha256-" + hashlib.sha256(data).hexdigest() not in ingest.store.blobs()


def test_a_registry_that_sends_something_else(ingest, server, models, tmp_path):
    data = gguf(tmp_path / "tiny.gguf")
    with Registry() as registry:
        offer(registry, "me/tiny:v1", data)
        before = ingest.store.blobs()
        name = "sha256:" + hashlib.sha256(data).hexdigest()
        registry.blobs[name] = data[:-1] + b"x"
        assert pull(server, registry.name("me/tiny:v1")).get("error")
        assert ingest.store.blobs() == before and name.replace(":", "-") not in unfinished(ingest.store)
        registry.blobs[name] = data
        assert pull(server, registry.name("me/tiny:v1")) == {"status": "success"}
        check(ingest, {"tiny-llama:latest", registry.name("me/tiny:v1")}, models)


def daemon(mount: Mount) -> int:
    return json.loads((mount / ".wmount/status.json").read_bytes())["pid"]


def kill(mount: Mount):
    """Ends the serving process at once, and takes away what it leaves."""
    pid = daemon(mount)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
    unmount(mount.at, lazy=True)


def test_a_pull_that_was_cut_short_goes_on(store, models, tmp_path):
    """The client goes, the server goes, wmount is killed; the next pull asks only for the rest."""
    store.add(models / "tiny-llama", name="tiny-llama")
    data = gguf(tmp_path / "tiny.gguf") + bytes(1 << 20)
    part = f"sha256-{hashlib.sha256(data).hexdigest()}-partial"
    mount = Mount(store, tmp_path / "mnt", "--ingest")
    with Registry() as registry:
        offer(registry, "me/tiny:v1", data)
        registry.halt_at = 600_000
        name = registry.name("me/tiny:v1")
        mount.__enter__()
        try:
            with Server(mount / "ollama", tmp_path / "home") as server:
                connection = http.client.HTTPConnection(server.host, timeout=60)
                connection.request("POST", "/api/pull", json.dumps({"model": name, "insecure": True}))
                answer = connection.getresponse()
                while b'"completed":600000' not in answer.readline():
                    pass
                connection.sock.shutdown(2)
                connection.close()
                record = mount / f"ollama/blobs/{part}-0"
                assert eventually(lambda: json.loads(record.read_text() or "{}").get("Completed") == 600_000, 60)
                assert (mount / f"ollama/blobs/{part}").stat().st_size == len(data)
        finally:
            kill(mount)
        registry.halt_at = None
        with mount:
            assert unfinished(store) == [part, f"{part}-0"]
            assert store.json("verify")["damaged"] == []
            with Server(mount / "ollama", tmp_path / "home") as server:
                registry.ranges.clear()
                assert pull(server, name) == {"status": "success"}
            assert f"bytes=600000-{len(data) - 1}" in registry.ranges
            assert not any(wanted == f"bytes=0-{len(data) - 1}" for wanted in registry.ranges)
            check(mount, {"tiny-llama:latest", name}, models)


def test_gc_removes_what_nobody_goes_on_with(store, models, tmp_path):
    store.add(models / "tiny-llama", name="tiny-llama")
    mount = Mount(store, tmp_path / "mnt", "--ingest")
    with mount:
        blobs = mount / "ollama/blobs"
        (blobs / f"sha256-{'0' * 64}-partial").write_bytes(b"some")
        (blobs / "sha256-12345").write_bytes(b"some")
        finished(blobs, b"a blob without a manifest")
        store.run("gc")
        assert len(unfinished(store)) == 3, "a mount is using them"
    with mount:
        assert len(unfinished(store)) == 2, "no program goes on with the file of an unknown name"
    store.run("gc")
    assert not (store.path / ".wmount/ingest").exists()


def finished(blobs: Path, data: bytes) -> str:
    """Writes a blob as ollama does: under another name, then renamed."""
    name = "sha256-" + hashlib.sha256(data).hexdigest()
    temporary = blobs / f"sha256-{threading.get_ident()}"
    temporary.write_bytes(data)
    temporary.rename(blobs / name)
    (blobs / name).chmod(0o644)
    os.utime(blobs / name)
    return name


def refuses(code: int, work, *args):
    with pytest.raises(OSError) as caught:
        work(*args)
    assert caught.value.errno == code, caught.value


def test_content_that_is_not_what_its_name_says(ingest):
    blobs, store = ingest / "ollama/blobs", ingest.store
    before = store.blobs()
    wrong = blobs / ("sha256-" + "1" * 64)
    (blobs / "sha256-77").write_bytes(b"something")
    refuses(errno.EIO, os.rename, blobs / "sha256-77", wrong)
    assert not wrong.exists() and (blobs / "sha256-77").read_bytes() == b"something"
    with pytest.raises(OSError):
        wrong.write_bytes(b"something")
    assert unfinished(store) == [name for name in unfinished(store) if name.startswith("new-")]
    (blobs / "sha256-77").unlink()
    wrong.unlink()
    assert store.blobs() == before and unfinished(store) == []
    # The right content under its own name is a blob at once, and then nobody changes it.
    right = blobs / ("sha256-" + hashlib.sha256(b"something").hexdigest())
    right.write_bytes(b"something")
    assert unfinished(store) == [right.name] and right.stat().st_mode & 0o777 == 0o444
    refuses(errno.EACCES, right.write_bytes, b"other")
    known = next(path for path in blobs.iterdir() if path != right)
    refuses(errno.EROFS, open, known, "r+b")


def test_manifests_that_cannot_become_models(ingest):
    place = ingest / f"ollama/manifests/{HOST}/library/bad"
    place.mkdir()
    layer = {"mediaType": "x", "digest": "sha256:" + "2" * 64, "size": 3}
    lacking = json.dumps({"schemaVersion": 2, "config": layer, "layers": []}).encode()
    for data in (lacking, b"no json", b'{"schemaVersion":1,"config":{},"layers":[]}', lacking[:40]):
        with pytest.raises(OSError):
            (place / "latest").write_bytes(data)
        assert ingest.store.json("ls")[0]["model"] == "tiny-llama:latest" and not (place / "latest").exists()
    tiny = ingest / f"ollama/manifests/{HOST}/library/tiny-llama/latest"
    before = tiny.read_bytes()
    with pytest.raises(OSError):
        tiny.write_bytes(lacking)
    assert tiny.read_bytes() == before
    refuses(errno.EINVAL, (ingest / "ollama/manifests/stray").write_bytes, b"x")
    place.rmdir()
    assert len(ingest.store.json("ls")) == 1 and unfinished(ingest.store) == []


def test_a_file_written_in_many_places_at_once(ingest):
    """As a pull does it: one sparse file, a size beforehand, pieces by several threads, records beside it."""
    blobs, data = ingest / "ollama/blobs", np.random.default_rng(3).bytes(5 << 20)
    name = "sha256-" + hashlib.sha256(data).hexdigest()
    file = os.open(blobs / f"{name}-partial", os.O_CREAT | os.O_RDWR, 0o644)
    os.ftruncate(file, len(data))
    step = 300_001

    def part(first: int):
        for at in range(first * step, len(data), 4 * step):
            os.pwrite(file, data[at : at + step], at)
            (blobs / f"{name}-partial-{first}").write_text(json.dumps({"N": first, "Completed": at}))

    threads = [threading.Thread(target=part, args=(first,)) for first in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    os.fsync(file)
    assert os.fstat(file).st_size == len(data) and os.pread(file, 9, 4 << 20) == data[4 << 20 :][:9]
    os.close(file)
    for first in range(4):
        assert (blobs / f"{name}-partial-{first}").exists()
        (blobs / f"{name}-partial-{first}").unlink()
    os.utime(blobs / f"{name}-partial", (1_700_000_000, 1_700_000_000))
    assert (blobs / f"{name}-partial").stat().st_mtime == 1_700_000_000
    (blobs / f"{name}-partial").rename(blobs / name)
    assert sorted(os.listdir(blobs))[-1] != f"{name}-partial" and unfinished(ingest.store) == [name]
    assert (blobs / name).read_bytes() == data
    # Once more, with the name there already.
    assert finished(blobs, data) == name and unfinished(ingest.store) == [name]
    (blobs / name).unlink()
    assert not (blobs / name).exists() and unfinished(ingest.store) == []


def test_directories_and_links_of_a_conversion(ingest):
    """ollama converts in a directory of its own beside blobs/, with links to the blobs."""
    root, data = ingest / "ollama", b"a part"
    name = finished(root / "blobs", data)
    work = root / "ollama-safetensors123"
    (work / "deep").mkdir(parents=True)
    (work / "deep/model.safetensors").symlink_to(root / "blobs" / name)
    os.link(root / "blobs" / name, work / "part-00001-of-00002.gguf")
    shown = next(p for p in (root / "blobs").iterdir() if p.name != name)
    os.link(shown, work / "part-00002-of-00002.gguf")
    assert (work / "deep/model.safetensors").read_bytes() == (work / "part-00001-of-00002.gguf").read_bytes() == data
    assert (work / "part-00002-of-00002.gguf").read_bytes() == shown.read_bytes()
    (work / "fp16").write_bytes(b"0123456789")
    with open(work / "fp16", "r+b") as file:
        file.truncate(4)
    with open(work / "fp16", "ab") as file:
        file.write(b"xyz")
    assert (work / "fp16").read_bytes() == b"0123xyz"
    assert {p.name for p in work.iterdir()} == {"deep", "fp16", "part-00001-of-00002.gguf", "part-00002-of-00002.gguf"}
    refuses(errno.ENOTEMPTY, work.rmdir)
    refuses(errno.EEXIST, work.mkdir)
    shutil.rmtree(work)
    assert not work.exists() and shown.exists() and unfinished(ingest.store) == [name]


def test_the_rest_of_the_tree_stays_as_it_is(ingest):
    before = {path: status.st_ino for path, status in walk(ingest.at).items() if not path.startswith(".wmount")}
    for place in ("", "original", "safetensors/tiny-llama/latest", "ollama@seed/blobs", ".wmount", "amb"):
        there = ingest / place
        refuses(errno.EROFS, (there / "new").write_bytes, b"x")
        refuses(errno.EROFS, (there / "new").mkdir)
        inside = next(there.iterdir())
        refuses(errno.EROFS, inside.rename, there / "new")
        refuses(errno.EROFS, os.link, ingest / "safetensors/tiny-llama/latest/config.json", there / "new")
        refuses(errno.EROFS, (there / "new").symlink_to, "x")
    file = ingest / "safetensors/tiny-llama/latest/config.json"
    refuses(errno.EROFS, open, file, "r+b")
    refuses(errno.EROFS, file.unlink)
    refuses(errno.EROFS, file.chmod, 0o600)
    refuses(errno.EROFS, os.utime, file)
    refuses(errno.EROFS, os.truncate, file, 0)
    refuses(errno.EROFS, file.rename, ingest / "ollama/blobs/x")
    refuses(errno.EROFS, (ingest / "ollama").rmdir)
    # Models are removed by their manifests, and blobs that a model needs stay.
    blob = next((ingest / "ollama/blobs").iterdir())
    blob.unlink()
    assert blob.exists()
    assert {path: status.st_ino for path, status in walk(ingest.at).items() if not path.startswith(".wmount")} == before


def test_two_are_made_at_once(ingest, server, source, models):
    commands = [[program(), "create", "--experimental", name, "-f", "Modelfile"] for name in ("one", "two")]
    processes = [
        subprocess.Popen(command, env=server.env, cwd=source, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for command in commands
    ]
    for process in processes:
        _, words = process.communicate(timeout=120)
        assert process.returncode == 0, words
    assert server.names() == {"tiny-llama:latest", "one:latest", "two:latest"}
    check(ingest, server.names(), models)


def test_one_name_is_made_by_two_at_once(ingest, server, source, models, tmp_path):
    """Whoever is last wins; what the other had is whole or gone."""
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "Modelfile").write_text("FROM .\nTEMPLATE other\n")
    create(server, "made", source)
    command = [program(), "create", "--experimental", "made", "-f", "Modelfile"]
    pipes = {"env": server.env, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, cwd=cwd, **pipes) for cwd in (source, other, source, other)]
    for process in processes:
        _, words = process.communicate(timeout=120)
        assert process.returncode == 0, words[-500:]
    assert server.ask("POST", "/api/show", {"model": "made"})["template"] in ("hello", "other")
    # Two may write to one manifest before either becomes a model: the blob that only one of them named is left then.
    left = unfinished(ingest.store)
    assert len(left) <= 1 and all(digest(ingest.store.path / ".wmount/ingest" / name) == name[7:] for name in left)
    check(ingest, {"tiny-llama:latest", "made:latest"}, models, leftovers=len(left))


def test_blobs_are_touched_while_models_are_made_of_them(ingest):
    """ollama touches every blob of what it makes; that one becomes another inode in between is nothing to notice."""
    blobs, current, ended, faults = ingest / "ollama/blobs", [], threading.Event(), []
    place = ingest / f"ollama/manifests/{HOST}/library"

    def touch():
        while not ended.is_set():
            try:
                for name in current[-1:]:
                    os.utime(name)
                    name.chmod(0o644)
                    assert name.read_bytes().startswith(b"shared")
            except (OSError, AssertionError) as fault:
                faults.append(fault)

    threads = [threading.Thread(target=touch) for _ in range(3)]
    [thread.start() for thread in threads]
    for number in range(60):
        data = b"shared %d" % number
        name = finished(blobs, data)
        current.append(blobs / name)
        layer = {"mediaType": foreign.IMAGE + "license", "digest": name.replace("-", ":"), "size": len(data)}
        (place / f"m{number}").mkdir()
        document = {"schemaVersion": 2, "config": layer, "layers": []}
        (place / f"m{number}/latest").write_text(json.dumps(document))
    ended.set()
    [thread.join() for thread in threads]
    assert faults == []
    assert len(ingest.store.json("ls")) == 61 and unfinished(ingest.store) == []


def manifest_of(blobs: Path, layers: list[bytes]) -> bytes:
    """Writes the blobs of a model; its manifest."""

    def layer(kind: str, data: bytes) -> dict:
        return {"mediaType": kind, "digest": finished(blobs, data).replace("-", ":"), "size": len(data)}

    layers = [layer(foreign.IMAGE + "model", data) for data in layers]
    config = layer(foreign.CONFIG, b'{"model_format":"gguf"}')
    return json.dumps({"schemaVersion": 2, "mediaType": foreign.MANIFEST, "config": config, "layers": layers}).encode()


def test_mlx_loads_what_ollama_writes_if_that_is_tolerated(store, models, tmp_path):
    """mlx opens GGUF files for writing: they can be written through no path, while ollama writes others."""
    data = gguf(tmp_path / "tiny.gguf")
    store.add(models / "tiny-llama", name="tiny-llama")
    with Mount(store, tmp_path / "mnt", "--ingest", "--tolerate-rw") as mount:
        library = mount / f"ollama/manifests/{HOST}/library"
        (library / "tiny").mkdir(parents=True)
        (library / "tiny/latest").write_bytes(manifest_of(mount / "ollama/blobs", [data]))
        blob = mount / "ollama/blobs" / ("sha256-" + hashlib.sha256(data).hexdigest())
        for path in (mount / "gguf/tiny/latest.gguf", blob):
            assert path.read_bytes() == data
            with open(path, "r+b", 0) as file:
                with pytest.raises(OSError) as caught:
                    os.pwrite(file.fileno(), b"EVIL", 0)
                assert caught.value.errno == errno.EROFS
        assert mx.load(str(mount / "gguf/tiny/latest.gguf"))
        (library / "copy").mkdir()
        (library / "copy/latest").write_bytes((library / "tiny/latest").read_bytes())
        assert (mount / "gguf/copy/latest.gguf").read_bytes() == data
        check(mount, {"tiny-llama:latest", "tiny:latest", "copy:latest"}, models)
        os.unlink(library / "tiny/latest")
        assert eventually(lambda: not (mount / "gguf/tiny").exists())
        assert (mount / "gguf/copy/latest.gguf").read_bytes() == data


def test_gc_and_import_beside_an_unfinished_model(ingest, models, tmp_path):
    blobs, store = ingest / "ollama/blobs", ingest.store
    manifest = manifest_of(blobs, [gguf(tmp_path / "a.gguf")])
    with open(blobs / "sha256-555", "wb") as half:
        half.write(b"half")
        half.flush()
        store.run("gc")
        store.add(models / "mixed.mlpackage", name="mixed")
        store.run("gc")
        assert len(unfinished(store)) == 3
        half.write(b" and half")
    assert (blobs / "sha256-555").read_bytes() == b"half and half"
    (blobs / "sha256-555").unlink()
    place = ingest / f"ollama/manifests/{HOST}/library/late"
    place.mkdir()
    (place / "v1").write_bytes(manifest)
    assert eventually(lambda: (ingest / "coreml/mixed").exists())
    assert (place / "v1").read_bytes() == manifest
    assert {model["model"] for model in store.json("ls")} == {"late:v1", "mixed:latest", "tiny-llama:latest"}
    assert unfinished(store) == [] and not store.json("verify")["damaged"]


def test_a_manifest_waits_for_an_import(ingest, models, tmp_path):
    """While another process has the writers' lock nothing is published, and afterwards it is."""
    import fcntl

    manifest = manifest_of(ingest / "ollama/blobs", [gguf(tmp_path / "a.gguf")])
    place = ingest / f"ollama/manifests/{HOST}/library/late"
    place.mkdir()
    with open(ingest.store.path / ".wmount/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writing = threading.Thread(target=(place / "v1").write_bytes, args=(manifest,))
        writing.start()
        time.sleep(0.3)
        assert writing.is_alive() and len(ingest.store.json("ls")) == 1
    writing.join()
    assert {model["model"] for model in ingest.store.json("ls")} == {"late:v1", "tiny-llama:latest"}


def test_killed_in_the_middle(store, models, tmp_path):
    """Half-written files of every kind are no blobs and no models afterwards."""
    store.add(models / "tiny-llama", name="tiny-llama")
    before, mount = store.blobs(), Mount(store, tmp_path / "mnt", "--ingest")
    data = np.random.default_rng(5).bytes(1 << 20)
    name = "sha256-" + hashlib.sha256(data).hexdigest()
    mount.__enter__()
    try:
        blobs = mount / "ollama/blobs"
        manifest = manifest_of(blobs, [data])
        place = mount / f"ollama/manifests/{HOST}/library/half"
        place.mkdir()
        files = [blobs / f"sha256-{'3' * 64}", blobs / "sha256-42", blobs / f"sha256-{'4' * 64}-partial", place / "latest"]
        held = [os.open(file, os.O_CREAT | os.O_RDWR, 0o644) for file in files]
        for file in held:
            os.write(file, manifest[:100])
    finally:
        kill(mount)
    for file in held:
        try:
            os.close(file)
        except OSError:
            pass
    assert store.blobs() == before and not store.json("verify")["damaged"]
    with mount:
        assert [model["model"] for model in store.json("ls")] == ["tiny-llama:latest"]
        kept = unfinished(store)
        assert f"sha256-{'3' * 64}" not in kept and "sha256-42" not in kept and name in kept
        assert digest(mount / "ollama/blobs" / name) == name[7:]
        place.mkdir()
        (place / "latest").write_bytes(manifest)
        (mount / f"ollama/blobs/sha256-{'4' * 64}-partial").unlink()
        check(mount, {"tiny-llama:latest", "half:latest"}, models)


def test_a_store_that_ollama_made(models, source, tmp_path):
    """wmount never wrote to it before; ollama goes on with it through the mount, and without."""
    made = tmp_path / "made"
    with Server(made, tmp_path / "home") as server:
        create(server, "first", source)
    store = Store(made)
    with Mount(store, tmp_path / "mnt", "--ingest") as mount:
        done = run("--ingest", made, tmp_path / "elsewhere", check=False)
        assert done.returncode == 1
        (tmp_path / "elsewhere").mkdir()
        done = run("--ingest", made, tmp_path / "elsewhere", check=False)
        assert done.returncode == 1 and b"another mount with --ingest" in done.stderr
        with Server(mount / "ollama", tmp_path / "home") as server:
            (source / "Modelfile").write_text("FROM .\nTEMPLATE second\n")
            create(server, "second", source)
            server.ask("DELETE", "/api/delete", {"model": "first"})
            check(mount, {"second:latest"}, models, mode=0o644)
    with Server(made, tmp_path / "home") as server:
        assert server.names() == {"second:latest"}
        assert server.ask("POST", "/api/show", {"model": "second"})["template"] == "second"
        server.ask("DELETE", "/api/delete", {"model": "second"})
    assert store.blobs() == {}


def test_a_store_that_cannot_be_written_to(store, models, tmp_path):
    store.add(models / "tiny-llama", name="tiny-llama")
    bound = tmp_path / "bound"
    bound.mkdir()
    (tmp_path / "mnt").mkdir()
    subprocess.run(["mount", "--bind", "-o", "ro", str(store.path), str(bound)], check=True)
    try:
        done = run("--ingest", bound, tmp_path / "mnt", check=False)
        assert done.returncode == 1 and b"--ingest writes into the store" in done.stderr, done.stderr
        assert b"ead-only file system" in done.stderr and not os.path.ismount(tmp_path / "mnt")
    finally:
        unmount(bound)


def test_a_link_in_place_of_the_directory_leads_nowhere(store, models, tmp_path):
    store.add(models / "tiny-llama", name="tiny-llama")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    (store.path / ".wmount/ingest").symlink_to(outside)
    (tmp_path / "mnt").mkdir()
    done = run("--ingest", store.path, tmp_path / "mnt", check=False)
    assert done.returncode == 1 and b".wmount/ingest" in done.stderr
    (store.path / ".wmount/ingest").unlink()
    (store.path / ".wmount/ingest").mkdir()
    (store.path / f".wmount/ingest/sha256-{'5' * 64}-partial").symlink_to(outside / "precious")
    with Mount(store, tmp_path / "mnt", "--ingest") as mount:
        (mount / f"ollama/blobs/sha256-{'5' * 64}-partial").write_bytes(b"other")
    assert (outside / "precious").read_bytes() == b"x"


def test_an_empty_store(tmp_path, source):
    """ollama's own directories are there to begin with, and again when it has removed the last model."""
    store = Store(tmp_path / "store")
    for name in ("blobs", "manifests"):
        (store.path / name).mkdir(parents=True)
    with Mount(store, tmp_path / "mnt", "--ingest") as mount:
        for _ in range(2):
            with Server(mount / "ollama", tmp_path / "home") as server:
                assert server.names() == set()
                create(server, "made", source)
                server.ask("DELETE", "/api/delete", {"model": "made"})
                assert server.names() == set()
        assert os.listdir(mount / "ollama/manifests") == [] and store.blobs() == {}
