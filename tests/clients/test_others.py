"""What other users see, what links and names can reach, and what the serving process may do."""

import contextlib
import errno
import hashlib
import json
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness import BINARY, Mount, Store, eventually, run, walk

# fusermount3 mounts for users with a name only; this one everybody has.
ALICE, BOB = 65534, 12002
SHARD = "safetensors/tiny-llama/latest/model-00001-of-00003.safetensors"
MIXED = "safetensors/mixed/latest/model.safetensors"
ROOT = os.geteuid() == 0


@pytest.fixture
def place():
    """A directory that everybody can enter, with a mountpoint in it."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        (Path(name) / "mnt").mkdir()
        yield Path(name)
        if os.path.ismount(Path(name) / "mnt"):
            run("umount", "--lazy", Path(name) / "mnt")


@pytest.fixture
def hers(place, small) -> Path:
    """A store of Alice's, whose files everybody may read."""
    assert ROOT, "this needs root: two users and a third who mounts"
    store = place / "store"
    shutil.copytree(small.path, store)
    for path in [store, *store.rglob("*")]:
        os.chown(path, ALICE, ALICE)
    return store


@pytest.fixture
def program(place) -> Path:
    """The program where everybody can run it; a clone in root's home directory is root's alone."""
    return Path(shutil.copy(BINARY, place / "wmount"))


def as_user(uid, *args) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(a) for a in args], capture_output=True, user=uid, group=uid, extra_groups=[], cwd="/", timeout=60
    )


def reads(uid, path) -> bool:
    done = as_user(uid, "cat", path)
    assert done.returncode == 0 or b"Permission denied" in done.stderr, done.stderr
    return done.returncode == 0


def blobs_of(store: Path, model: str) -> set[Path]:
    manifest = json.loads((store / "manifests/registry.ollama.ai/library" / model / "latest").read_bytes())
    return {store / "blobs" / it["digest"].replace(":", "-") for it in [manifest["config"], *manifest["layers"]]}


def test_without_allow_other_nobody_else_sees_the_mount(hers, place):
    run(hers, place / "mnt")
    assert not reads(ALICE, place / "mnt" / SHARD)
    assert not reads(BOB, place / "mnt" / SHARD)
    assert (place / "mnt" / SHARD).read_bytes()
    run("umount", place / "mnt")


def test_root_shows_to_all_what_all_could_read(hers, place):
    run("--allow-other", hers, place / "mnt")
    for uid in (ALICE, BOB):
        assert reads(uid, place / "mnt" / SHARD) and reads(uid, place / "mnt" / MIXED)
    run("umount", place / "mnt")


def test_root_shows_nobody_what_he_could_not_read_before(hers, place):
    """One blob that is Alice's alone: then so is the model, and not the other one."""
    own = blobs_of(hers, "tiny-llama") - blobs_of(hers, "mixed")
    os.chmod(sorted(own)[0], 0o600)
    run("--allow-other", hers, place / "mnt")
    for inside in [
        SHARD,
        "amb/tiny-llama/latest.amb",
        "amb/tiny-llama/latest@int8.amb",
        "original/tiny-llama/latest/tiny-llama/config.json",
    ]:
        path = place / "mnt" / inside
        assert reads(ALICE, path) and not reads(BOB, path), inside
        assert path.read_bytes(), "root reads all"
    status = os.stat(place / "mnt" / SHARD)
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (ALICE, ALICE, 0o400)
    assert reads(BOB, place / "mnt" / MIXED)
    assert as_user(BOB, "ls", place / "mnt/safetensors/tiny-llama/latest").returncode != 0
    run("umount", place / "mnt")


def test_a_blob_that_is_not_there_at_first_may_turn_out_to_be_private(hers, place):
    absent = sorted(blobs_of(hers, "tiny-llama") - blobs_of(hers, "mixed"))[0]
    absent.rename(place / "aside")
    run("--allow-other", hers, place / "mnt")
    assert not reads(BOB, place / "mnt" / SHARD)
    (place / "aside").chmod(0o600)
    (place / "aside").rename(absent)
    assert eventually(lambda: as_user(ALICE, "cat", place / "mnt" / SHARD).returncode == 0)
    assert not reads(BOB, place / "mnt" / SHARD) and reads(BOB, place / "mnt" / MIXED)
    run("umount", place / "mnt")


def put(store: Path, media_type: str, data: bytes, uid: int, mode: int = 0o644, **more) -> dict:
    """A blob of a user's; its layer."""
    digest = hashlib.sha256(data).hexdigest()
    blob = store / f"blobs/sha256-{digest}"
    if not blob.exists():
        blob.write_bytes(data)
        os.chown(blob, uid, uid)
        blob.chmod(mode)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data), **more}


def put_model(store: Path, name: str, layers: list[dict], uid: int) -> Path:
    config = put(store, "application/vnd.docker.container.image.v1+json", b"{}", uid)
    manifest = store / "manifests/registry.ollama.ai/library" / name / "latest"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}))
    os.chown(manifest, uid, uid)
    return manifest


@pytest.mark.parametrize("through", ["recipe", "map"])
def test_a_recipe_shows_no_blob_that_the_manifest_does_not_name(hers, place, through):
    """Who may read a model is told by the blobs that its manifest names."""
    private = put(hers, "", b"Alice's alone " * 40, ALICE, 0o600)
    blobs = [[private["digest"].removeprefix("sha256:"), private["size"]]]
    extents = [[0, 0]]
    layers = []
    file = {"path": "stolen.bin", "mtime": [0, 0], "extents": extents}
    if through == "map":
        text = json.dumps({"version": 1, "blobs": blobs, "extents": extents}).encode()
        layers.append(put(hers, "application/vnd.wmount.map", text, BOB))
        file = file | {"map": [layers[0]["digest"].removeprefix("sha256:"), len(text)]}
        del file["extents"]
        blobs = []
    recipe = {"version": 1, "kind": "safetensors", "blobs": blobs, "dirs": [], "files": [file]}
    layers.append(put(hers, "application/vnd.wmount.recipe", json.dumps(recipe).encode(), BOB, name="src"))
    put_model(hers, "thief", layers, BOB)
    run("--allow-other", hers, place / "mnt")
    stolen = as_user(BOB, "cat", place / "mnt/original/thief/latest/src/stolen.bin")
    assert stolen.returncode != 0 and not stolen.stdout
    assert reads(BOB, place / "mnt" / SHARD)
    run("umount", place / "mnt")
    damaged = json.loads(run("verify", "--json", "-s", hers, check=False).stdout)["damaged"]
    assert any("a recipe names blob" in it["fault"] for it in damaged), damaged


def test_another_store_in_the_place_of_one_is_shown_to_those_who_may_read_it(hers, place):
    """Alice, who knows the digest of a blob that is Bob's alone, claims it with a blob of zeros, and puts his store there."""
    text = b"Bob's alone " * 40
    bobs = place / "bob/store"
    for store, content, uid in [(hers, bytes(len(text)), ALICE), (bobs, text, BOB)]:
        (store / "blobs").mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(text).hexdigest()
        blob = store / f"blobs/sha256-{digest}"
        blob.write_bytes(content)
        layer = {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{digest}", "size": len(text)}
        put_model(store, "claimed", [put(store, "application/vnd.ollama.image.model", b"GGUF....", uid), layer], uid)
        os.chown(blob, uid, uid)
    for path in [place / "bob", *(place / "bob").rglob("*")]:
        os.chown(path, BOB, BOB)
    (place / "bob").chmod(0o700)
    run("--allow-other", hers, place / "mnt")
    blob = place / "mnt/ollama/blobs" / blob.name
    assert os.stat(blob).st_mode & 0o777 == 0o444, "it was looked at while it was Alice's"
    hers.rename(place / "aside")
    hers.symlink_to(bobs)
    os.lchown(hers, ALICE, ALICE)
    for uid in (ALICE, 0):
        assert not as_user(uid, "cat", blob).stdout
    hers.unlink()
    (place / "aside").rename(hers)
    assert as_user(ALICE, "cat", blob).stdout == bytes(len(text)), "it is back"
    run("umount", place / "mnt")


@pytest.mark.parametrize("by", ["its owner", "a link of hers", "a group"])
def test_what_is_of_the_one_who_mounts_in_a_place_that_others_can_change_is_shown_by_its_modes(place, small, by):
    """A store of root's that Alice has put there, or a file of root's."""
    assert ROOT, "this needs a second user"
    store, home = place / "home/store", place / "home"
    shutil.copytree(small.path, store)
    if by == "its owner":
        os.chown(home, ALICE, ALICE)
        store.chmod(0o700)
    elif by == "a link of hers":
        store.chmod(0o700)
        store = place / "link"
        store.symlink_to(home / "store")
        os.lchown(store, ALICE, ALICE)
    else:
        blobs = store / "blobs"
        os.chown(blobs, 0, BOB)
        blobs.chmod(0o2775)
        for blob in blobs_of(store, "tiny-llama") - blobs_of(store, "mixed"):
            blob.chmod(0o600)
    run("--allow-other", store, place / "mnt")
    for uid in (ALICE, BOB):
        assert not reads(uid, place / "mnt" / SHARD)
        assert reads(uid, place / "mnt" / MIXED) == (by == "a group")
    assert (place / "mnt" / SHARD).read_bytes()
    run("umount", place / "mnt")


def test_a_private_model_hides_no_blob_that_it_shares_with_a_public_one(hers, place):
    weights = put(hers, "application/vnd.ollama.image.model", b"GGUF....", ALICE)
    private = put(hers, "application/vnd.ollama.image.license", b"Alice's alone", ALICE, 0o600)
    put_model(hers, "0private", [weights, private], ALICE)
    put_model(hers, "public", [weights], ALICE)
    run("--allow-other", hers, place / "mnt")
    blobs = place / "mnt/ollama/blobs"
    assert reads(BOB, blobs / weights["digest"].replace(":", "-"))
    name = private["digest"].replace(":", "-")
    assert reads(ALICE, blobs / name) and not reads(BOB, blobs / name)
    run("umount", place / "mnt")


def test_a_blob_that_is_a_link_tells_nothing_of_what_it_leads_to(hers, place):
    target = secret(place, 1234)
    link = {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'c' * 64}", "size": 5}
    (hers / f"blobs/sha256-{'c' * 64}").symlink_to(target)
    weights = put(hers, "application/vnd.ollama.image.model", b"GGUF....", ALICE)
    put_model(hers, "linked", [weights, link], ALICE)
    run("--allow-other", hers, place / "mnt")
    assert os.stat(place / f"mnt/ollama/blobs/sha256-{'c' * 64}").st_size == 5
    run("umount", place / "mnt")


@pytest.mark.parametrize("closed", ["store", "store/blobs"])
def test_a_directory_that_others_may_not_enter_counts(hers, place, closed):
    os.chmod(place / closed, 0o700)
    run("--allow-other", hers, place / "mnt")
    assert reads(ALICE, place / "mnt" / SHARD) and not reads(BOB, place / "mnt" / SHARD)
    run("umount", place / "mnt")


def test_who_mounts_shows_his_own_store_though_its_directory_is_closed(place, small):
    """The reason for --allow-other: a service of another user reads a store in a home that is closed to it."""
    assert ROOT, "this needs a second user"
    store = place / "home/store"
    shutil.copytree(small.path, store)
    os.chmod(place / "home", 0o700)
    run("--allow-other", store, place / "mnt")
    assert reads(BOB, place / "mnt" / SHARD)
    run("umount", place / "mnt")


def test_status_tells_others_of_no_path_outside_of_the_store(hers, place):
    (sorted(blobs_of(hers, "tiny-llama"))[0]).unlink()
    run("--allow-other", hers, place / "mnt")
    for inside in [SHARD, "amb/tiny-llama/latest.amb", "original/tiny-llama/latest/tiny-llama/config.json"]:
        as_user(BOB, "cat", place / "mnt" / inside)
    time.sleep(1.1)
    text = as_user(BOB, "cat", place / "mnt/.wmount/status.json").stdout.decode()
    # The store's own path is in the kernel's list of mounts anyway.
    assert str(hers) in Path("/proc/mounts").read_text()
    assert json.loads(text)["store"] == str(hers)
    for word in text.replace('"', " ").split():
        assert not word.startswith("/") or word.startswith(str(hers)), word
    run("umount", place / "mnt")


def test_the_mount_is_read_only_nodev_nosuid_noexec(mounted):
    line = next(line for line in Path("/proc/mounts").read_text().splitlines() if f" {mounted.at} " in line)
    assert {"ro", "nodev", "nosuid", "noexec"} <= set(line.split()[3].split(","))


def test_root_logs_nothing_where_another_user_may_have_put_a_link(small, place):
    """As root whose HOME is still Alice's, and in a log with a line for each event, whatever manifests are called."""
    assert ROOT, "this needs a second user"
    home, target = place / "alice", secret(place, 0)
    logs = home / ".local/state/wmount"
    logs.mkdir(parents=True)
    name = str(place / "mnt").strip("/").replace("-", r"\x2d").replace("/", "-")
    for what in ("link", "fifo"):
        log = logs / f"{name}.log"
        log.symlink_to(target) if what == "link" else os.mkfifo(log)
        for path in [home, *home.rglob("*")]:
            os.lchown(path, ALICE, ALICE)
        env = {key: value for key, value in os.environ.items() if key != "XDG_STATE_HOME"} | {"HOME": str(home)}
        subprocess.run([BINARY, small.path, place / "mnt"], env=env, check=True, stdin=subprocess.DEVNULL)
        assert (place / "mnt" / SHARD).read_bytes()
        run("umount", place / "mnt")
        assert target.read_bytes() == b""
        log.unlink()
    log = Path("/var/log/wmount") / log.name
    assert "shows" in log.read_text()
    log.unlink()


def test_a_log_has_a_line_for_each_event(small, place):
    manifest = small.path / "manifests/registry.ollama.ai/library/mixed/latest"
    shutil.copy(manifest, manifest.parent / "x\n2026-01-01T00:00:00Z  INFO forged")
    log = place / "log"
    run("--log", log, small.path, place / "mnt")
    assert (place / "mnt" / SHARD).read_bytes()
    run("umount", place / "mnt")
    lines = log.read_text().splitlines()
    assert any(r"x\n2026" in line and "is ignored" in line for line in lines), lines
    assert not any(line.startswith("2026-01-01T00:00:00Z  INFO forged") for line in lines)


# Links


def secret(place: Path, size: int) -> Path:
    path = place / "secret"
    path.write_bytes(b"s" * size)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("absolute", [True, False])
def test_a_blob_that_is_a_link_out_of_the_store_is_refused(small, tmp_path, absolute):
    blob = max(blobs_of(small.path, "tiny-llama"), key=lambda path: path.stat().st_size)
    target = secret(tmp_path, blob.stat().st_size)
    blob.unlink()
    blob.symlink_to(target if absolute else os.path.relpath(target, blob.parent))
    with Mount(small, tmp_path / "mnt") as mount:
        with pytest.raises(OSError) as refused:
            (mount / "ollama@seed/blobs" / blob.name).read_bytes()
        assert refused.value.errno == errno.EIO
        time.sleep(1.1)
        assert "link that leads out of the store" in (mount / ".wmount/status.json").read_text()
        assert (mount / MIXED).read_bytes()
    assert "leads out" in small.run("verify", check=False).stdout.decode()


def test_a_blob_that_is_a_link_within_the_store_is_read(small, tmp_path):
    blob = max(blobs_of(small.path, "tiny-llama"), key=lambda path: path.stat().st_size)
    data = blob.read_bytes()
    blob.rename(blob.parent / "kept")
    blob.symlink_to("kept")
    with Mount(small, tmp_path / "mnt") as mount:
        assert (mount / "ollama@seed/blobs" / blob.name).read_bytes() == data


def test_a_manifest_that_is_a_link_out_of_the_store_is_no_model(small, tmp_path):
    library = small.path / "manifests/registry.ollama.ai/library"
    (library / "tiny-llama/latest").rename(tmp_path / "manifest")
    (library / "tiny-llama/latest").symlink_to(tmp_path / "manifest")
    (library / "mixed").rename(tmp_path / "mixed")
    (library / "mixed").symlink_to(tmp_path / "mixed")
    assert small.json("ls") == []
    with Mount(small, tmp_path / "mnt") as mount:
        assert os.listdir(mount / "safetensors") == []
    blobs = small.blobs()
    collected = small.run("gc", check=False)
    assert (collected.returncode, small.blobs()) == (1, blobs)
    assert "leads out of the store; it may be a model" in collected.stderr.decode()
    faults = [it["fault"] for it in small.json("verify", code=1)["damaged"]]
    assert len(faults) == 2 and all("leads out" in fault for fault in faults), faults


@pytest.mark.parametrize("hide", ["no rights", "a disk that is not mounted"])
def test_gc_removes_nothing_while_models_cannot_be_looked_at(hers, place, program, hide):
    model = hers / "manifests/registry.ollama.ai/library/mixed"
    if hide == "no rights":
        model.chmod(0)
    else:
        model.rename(place / "elsewhere")
        model.symlink_to(place / "no disk")
    for noise in [hers / "manifests/.DS_Store", hers / "manifests/registry.ollama.ai/library/tiny-llama/.DS_Store"]:
        noise.touch()
    before = Store(hers).blobs()
    collected = as_user(ALICE, program, "-s", hers, "gc")
    assert (collected.returncode, Store(hers).blobs()) == (1, before)
    assert str(model) in collected.stderr.decode() and "nothing is removed" in collected.stderr.decode()
    verified = as_user(ALICE, program, "-s", hers, "verify")
    assert verified.returncode == 1 and str(model) in verified.stdout.decode()
    if hide == "no rights":
        model.chmod(0o755)
    else:
        model.unlink()
        (place / "elsewhere").rename(model)
    assert as_user(ALICE, program, "-s", hers, "gc").returncode == 0
    assert Store(hers).blobs() == before


def test_a_store_on_two_disks_is_read_and_not_written_to(small, models, tmp_path):
    assert ROOT, "this needs a second file system"
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)
    try:
        shutil.move(small.path / "blobs", disk / "blobs")
        (small.path / "blobs").symlink_to(disk / "blobs")
        with Mount(small, tmp_path / "mnt") as mount:
            assert (mount / SHARD).read_bytes()
        before = small.listing()
        for args in [("import", models / "minilm-float", "-n", "new"), ("rm", "mixed")]:
            done = small.run(*args, check=False)
            assert done.returncode == 1 and "is on another file system" in done.stderr.decode()
        assert small.listing() == before and small.json("verify")["damaged"] == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_root_reads_no_file_that_lies_in_a_store_of_somebody_who_may_not_read_it(hers, place):
    """A file of root's in a directory of Alice's is one that she can move and not read."""
    run("--allow-other", hers, place / "mnt")
    assert os.stat(place / "mnt" / SHARD).st_mode & 0o777 == 0o444, "it was looked at while it was hers"
    blob = max(blobs_of(hers, "tiny-llama") - blobs_of(hers, "mixed"), key=lambda path: path.stat().st_size)
    secret(place, blob.stat().st_size).rename(blob)
    for uid in (0, ALICE, BOB):
        read = as_user(uid, "cat", place / "mnt/ollama@seed/blobs" / blob.name)
        assert b"Input/output error" in read.stderr and not read.stdout
    time.sleep(1.1)
    assert f"in a directory of uid {ALICE}" in (place / "mnt/.wmount/status.json").read_text()
    run("umount", place / "mnt")
    own = Store(place / "own")
    done, copied = copied_from(hers, own)
    assert (done.returncode, copied) == (1, ["mixed:latest"]) and blob.name not in own.blobs()
    # It is shown by whoever owns the directory, and as far as he may read it.
    blob.chmod(0o444)
    run("--allow-other", hers, place / "mnt")
    assert reads(BOB, place / "mnt/ollama@seed/blobs" / blob.name)
    run("umount", place / "mnt")


@pytest.mark.parametrize("what", ["store", "blobs", "manifests"])
def test_a_store_that_was_moved_to_another_disk_behind_a_link_is_mounted(small, tmp_path, what):
    path = small.path if what == "store" else small.path / what
    path.rename(tmp_path / "disk")
    path.symlink_to(tmp_path / "disk")
    with Mount(small, tmp_path / "mnt") as mount:
        assert (mount / SHARD).read_bytes() and (mount / MIXED).read_bytes()
    assert small.json("verify")["damaged"] == []


def copied_from(source: Path, into: Store):
    """The outcome of copying a store, and the models that came of it."""
    done = into.run("import", source, check=False)
    return done, [model["model"] for model in into.json("ls")]


@pytest.mark.parametrize("absolute", [True, False])
def test_a_copied_store_brings_nothing_that_its_links_lead_to(small, tmp_path, absolute):
    """Neither as another name of the file nor as a copy: only a digest would tell, and links are not hashed."""
    blob = max(blobs_of(small.path, "tiny-llama") - blobs_of(small.path, "mixed"), key=lambda path: path.stat().st_size)
    target = secret(tmp_path, blob.stat().st_size)
    blob.unlink()
    blob.symlink_to(target if absolute else os.path.relpath(target, blob.parent))
    done, models = copied_from(small.path, Store(tmp_path / "copy"))
    assert done.returncode == 1 and "link that leads out of the store" in done.stdout.decode() + done.stderr.decode()
    assert models == ["mixed:latest"]
    assert target.stat().st_nlink == 1
    assert all(b"sssssssss" not in path.read_bytes() for path in (tmp_path / "copy/blobs").iterdir())


def test_blobs_that_another_user_could_change_are_copied_and_ones_own_are_linked(hers, place):
    own = place / "own"
    shutil.copytree(hers, own)
    for source, linked in ((hers, False), (own, True)):
        copy = Store(place / f"copy-of-{source.name}")
        done, models = copied_from(source, copy)
        assert done.returncode == 0 and len(models) == 2, done.stderr.decode()
        for blob in (copy.path / "blobs").iterdir():
            original = source / "blobs" / blob.name
            assert blob.read_bytes() == original.read_bytes() and blob.stat().st_uid == 0
            # Where the file system clones, neither is another name.
            assert not blob.samefile(original) or linked


def test_a_copied_blob_is_what_its_name_says(small, tmp_path):
    """A later import of the true bytes would take the name for them."""
    blob = max(blobs_of(small.path, "tiny-llama"), key=lambda path: path.stat().st_size)
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)
    into = Store(tmp_path / "into")
    done, copied = copied_from(small.path, into)
    assert (done.returncode, copied) == (1, ["mixed:latest"])
    assert "its content has the digest" in done.stderr.decode() and blob.name not in into.blobs()


@pytest.mark.parametrize("lie", ["digest", "length"])
def test_a_manifest_that_lies_of_a_blob_shows_it_to_nobody_else(store, tmp_path, lie):
    """ollama/blobs is one directory for all models, and the liar is first in it."""
    for name, seed in [("a-liar", 1), ("honest", 2)]:
        (tmp_path / name).mkdir()
        weights = np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32)
        save_file({"weight": weights}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "seed": seed}))
        store.add(tmp_path / name, name=name)
    manifests = {name: store.path / "manifests/registry.ollama.ai/library" / name / "latest" for name in ["a-liar", "honest"]}
    read = {name: json.loads(path.read_bytes()) for name, path in manifests.items()}
    tensor = {name: next(it for it in read[name]["layers"] if it.get("named")) for name in read}
    config = {name: next(it for it in read[name]["layers"] if it.get("name") == "config.json") for name in read}
    if lie == "digest":
        tensor["a-liar"]["named"] = tensor["honest"]["named"]
    else:
        config["a-liar"] |= {"digest": config["honest"]["digest"], "size": 5}
    manifests["a-liar"].write_text(json.dumps(read["a-liar"]))
    with Mount(store, tmp_path / "mnt") as mount:
        for claimed in [tensor["honest"]["named"], config["honest"]["digest"]]:
            blob = mount / "ollama/blobs" / claimed.replace(":", "-")
            assert "sha256:" + hashlib.sha256(blob.read_bytes()).hexdigest() == claimed
        assert (mount / "safetensors/honest/latest/model.safetensors").read_bytes() == (tmp_path / "honest/model.safetensors").read_bytes()
        listed = os.listdir(mount / "ollama/blobs")
        assert len(listed) == len(set(listed))


def test_who_owns_a_store_that_root_wrote_to_is_told_how_to_get_it_back(hers, program):
    shutil.rmtree(hers / ".wmount", ignore_errors=True)
    Store(hers).run("gc")
    done = as_user(ALICE, program, "-s", hers, "gc")
    assert done.returncode == 1 and f"chown -R {ALICE} {hers}" in done.stderr.decode()


def test_an_import_does_not_follow_links_out_of_what_it_imports(small, models, tmp_path):
    """Such as those to keys, in a model of a stranger's: its blobs can be read by all."""
    before, stranger = small.listing(), tmp_path / "stranger"
    shutil.copytree(models / "tiny-llama", stranger)
    key = secret(tmp_path, 100)
    for link, target in [
        ("notes.txt", key),
        ("notes.txt", "../secret"),
        ("deep/er", "../../.."),
        ("deep/notes.txt", "/proc/self/environ"),
    ]:
        path = stranger / link
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(target)
        done = small.run("import", stranger, "-n", "stranger", check=False)
        words = done.stderr.decode()
        assert done.returncode == 1 and words.count("\n") == 1, words
        assert str(path) in words and "leads out of what is imported" in words and "--follow-links" in words, words
        assert small.listing() == before
        path.unlink()
    (stranger / "notes.txt").symlink_to(key)
    (stranger / "again.json").symlink_to("config.json")
    small.run("import", stranger, "-n", "stranger", "--follow-links")
    for name in ("notes.txt", "again.json"):
        kept = small.run("cat", f"original/stranger/latest/stranger/{name}").stdout
        assert kept == (stranger / name).read_bytes()
    (stranger / "notes.txt").unlink()
    # Within one of them, and from one of them to another.
    (stranger / "beside.txt").symlink_to(tmp_path / "beside.mlpackage/Manifest.json")
    shutil.copytree(models / "inline.mlpackage", tmp_path / "beside.mlpackage")
    small.run("import", stranger, tmp_path / "beside.mlpackage", "-n", "two")
    assert small.json("verify")["damaged"] == []


@pytest.mark.parametrize("what", ["blobs", "manifests"])
def test_root_does_not_follow_a_link_that_another_user_made_of_a_directory(hers, place, what):
    (hers / what).rename(place / "elsewhere")
    (hers / what).symlink_to(place / "elsewhere")
    os.lchown(hers / what, ALICE, ALICE)
    done = run(hers, place / "mnt", check=False)
    line = done.stderr.decode().strip()
    assert done.returncode == 1 and "\n" not in line
    assert what in line and "link of another user" in line and str(ALICE) in line


@pytest.fixture
def roots(hers) -> Path:
    """The same store, of root's by now."""
    for path in [hers, *hers.rglob("*")]:
        os.chown(path, 0, 0)
    return hers


def test_what_is_taken_in_leads_nowhere_else(roots, place):
    """The directory of what ollama writes is Alice's, who has left something in it and then puts links in its place."""
    hers = roots
    target, taken = secret(place, 100), hers / ".wmount/ingest"
    taken.mkdir(exist_ok=True)
    names = [f"sha256-{'a' * 64}-partial", f"sha256-{'b' * 64}", f"sha256-{'c' * 64}.tmp", f"sha256-{'d' * 64}-partial"]
    for name in names:
        (taken / name).write_bytes(b"here")
    (taken / names[3]).chmod(0o600)
    for path in [taken, *taken.iterdir()]:
        os.chown(path, ALICE, ALICE)
    taken.chmod(0o777)
    run("--ingest", "--allow-other", hers, place / "mnt")
    for name in names[:3]:
        (taken / name).unlink()
    (taken / names[0]).symlink_to(target)
    (taken / names[1]).symlink_to(target)
    os.mkfifo(taken / names[2])
    # What is not taken in yet, and would be written over.
    (taken / f"sha256-{'e' * 64}-partial").symlink_to(target)
    blobs = place / "mnt/ollama/blobs"
    for uid in (0, ALICE, BOB):
        for name in names[:3]:
            assert not as_user(uid, "cat", blobs / name).stdout
    assert reads(ALICE, blobs / names[3]) and not reads(BOB, blobs / names[3]), "a file that is hers alone"
    with contextlib.suppress(OSError):
        (blobs / f"sha256-{'e' * 64}-partial").write_bytes(b"new")
    assert target.read_bytes() == b"s" * 100
    run("umount", place / "mnt")


def test_a_model_that_is_removed_through_a_mount_shows_its_blobs_to_nobody_else(roots, place):
    hers, target = roots, secret(place, 100)
    private = put(hers, "application/vnd.ollama.image.license", b"Alice's alone", ALICE, 0o600)
    link = {**private, "digest": f"sha256:{'c' * 64}", "size": 100}
    (hers / f"blobs/sha256-{'c' * 64}").symlink_to(target)
    weights = put(hers, "application/vnd.ollama.image.model", b"GGUF....", ALICE)
    put_model(hers, "removed", [weights, private, link], ALICE)
    run("--ingest", "--allow-other", hers, place / "mnt")
    blobs = place / "mnt/ollama/blobs"
    (place / "mnt/ollama/manifests/registry.ollama.ai/library/removed/latest").unlink()
    name = private["digest"].replace(":", "-")
    assert reads(ALICE, blobs / name) and not reads(BOB, blobs / name)
    for uid in (0, ALICE, BOB):
        assert not as_user(uid, "cat", blobs / f"sha256-{'c' * 64}").stdout
    run("umount", place / "mnt")


def test_nothing_is_written_through_a_link_in_place_of_our_directory(small, tmp_path):
    shutil.rmtree(small.path / ".wmount")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (small.path / ".wmount").symlink_to(elsewhere)
    with Mount(small, tmp_path / "mnt") as mount:
        assert (mount / "amb/tiny-llama/latest@int8.amb").read_bytes()
        assert (mount / SHARD).read_bytes()
    assert b"link" in small.run("gc", check=False).stderr
    assert os.listdir(elsewhere) == []


def test_what_is_kept_is_not_read_or_written_through_links(small, tmp_path):
    variant = "amb/tiny-llama/latest@adaptive-32.amb"
    with Mount(small, tmp_path / "mnt") as mount:
        expected = (mount / variant).read_bytes()
    own, elsewhere = small.path / ".wmount", tmp_path / "elsewhere"
    kept = sorted(os.listdir(own / "memo"))
    assert kept and (own / "memo.json").is_file(), "nothing is kept that could be a link"
    # What has no end, and what waits for a writer.
    for path in [own / "memo.json", *(own / "memo" / name for name in kept)]:
        path.unlink()
    (own / "memo.json").symlink_to("/dev/zero")
    for name in kept:
        os.mkfifo(own / "memo" / name)
    with Mount(small, tmp_path / "mnt") as mount:
        assert (mount / variant).read_bytes() == expected
    assert all((own / "memo" / name).is_file() for name in kept) and (own / "memo.json").is_file()
    shutil.rmtree(own / "memo")
    elsewhere.mkdir()
    (own / "memo").symlink_to(elsewhere)
    with Mount(small, tmp_path / "mnt") as mount:
        assert (mount / variant).read_bytes() == expected
    assert os.listdir(elsewhere) == []


# Names


def outcome(call):
    try:
        call()
    except OSError as error:
        return error.errno
    return 0


def test_names_lead_nowhere_else(mounted, tmp_path):
    (tmp_path / "beside").write_bytes(b"x")
    at = os.fsencode(mounted.at)
    for name, expected in [
        (b"x" * 255, errno.ENOENT),
        (b"x" * 256, errno.ENAMETOOLONG),
        (b"x" * 1025, errno.ENAMETOOLONG),
        (b"\xff\xfe", errno.ENOENT),
        (b"new\nline", errno.ENOENT),
        (b"safetensors\\..\\x", errno.ENOENT),
        (b"safetensors/tiny-llama/latest/\xc3\x28", errno.ENOENT),
        (b"safetensors/tiny-llama/latest/..%2f", errno.ENOENT),
        (b"safetensors/./tiny-llama/../tiny-llama/latest", 0),
        # The kernel itself goes up, out of any file system.
        (b"../beside", 0),
    ]:
        assert outcome(lambda: os.stat(at + b"/" + name)) == expected, name
    with pytest.raises(ValueError):
        os.stat(at + b"/a\0b")


def hostile(store: Path, names: list[str]):
    """A manifest whose files and tensors have these names; their content is one word."""
    (store / "manifests/registry.ollama.ai/library/hostile").mkdir(parents=True, exist_ok=True)

    def put(data: bytes):
        name = hashlib.sha256(data).hexdigest()
        (store / "blobs" / f"sha256-{name}").write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    header = b'{"data":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    header += b" " * (-len(header) % 8)
    tensor = put(len(header).to_bytes(8, "little") + header + b"word")
    layers = []
    for name in names:
        layers.append({"mediaType": "application/vnd.ollama.image.json", "name": name, **put(b"{}")})
        layers.append(
            {"mediaType": "application/vnd.ollama.image.tensor", "name": name, "dtype": "U8", "shape": [4], **tensor}
        )
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", **put(b'{"model_format":"safetensors"}')}
    manifest = {"schemaVersion": 2, "mediaType": "", "config": config, "layers": layers}
    (store / "manifests/registry.ollama.ai/library/hostile/latest").write_text(json.dumps(manifest))


def test_no_name_of_a_hostile_manifest_is_shown_that_is_none(small, tmp_path):
    names = [
        "../../up",
        "/etc/passwd",
        "a/../../b",
        "a\0b",
        "new\nline",
        "n" * 300,
        "..",
        ".",
        "",
        "a//b",
        "\x1b[31m",
        "good.json",
        "x/" * 3000,
        "con",
        "NUL.txt",
        "C:\\up",
        "\u202egpj.exe",
    ]
    hostile(small.path, names)
    before = {path for path in tmp_path.rglob("*")}
    with Mount(small, tmp_path / "mnt") as mount:
        shown = walk(mount.at)
        assert any("hostile" in name for name in shown)
        for name in shown:
            assert not any(ord(char) < 32 for char in name), name
            assert all(0 < len(os.fsencode(part)) <= 255 and part != ".." for part in name.split("/")), name
        assert not any(name.endswith(("/up", "passwd")) and "/.." in name for name in shown)
        done = small.run("export", "safetensors/hostile/latest", tmp_path / "copy", check=False)
        assert done.returncode in (0, 1)
    new = {path for path in tmp_path.rglob("*")} - before
    assert all(
        str(path).startswith((str(tmp_path / "copy"), str(tmp_path / "mnt"), str(small.path / ".wmount")))
        for path in new
    )


# The process


def process(mount_at) -> dict[str, str]:
    pid = json.loads((mount_at / ".wmount/status.json").read_bytes())["pid"]
    text = Path(f"/proc/{pid}/status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def threads_of(mount_at) -> list[str]:
    pid = json.loads((mount_at / ".wmount/status.json").read_bytes())["pid"]
    return [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]


SYS_ADMIN, DAC_READ_SEARCH = 1 << 21, 1 << 2
# What /proc says of threads whose system calls go through a filter.
FILTERED = "2"


def test_roots_process_keeps_two_capabilities_and_gains_none(hers, place, models):
    """And all goes on working, with system calls filtered: whole blobs by the kernel, news of models, unmounting."""
    os.chmod(hers, 0o700)
    at = place / "mnt"
    run(hers, at)
    for text in threads_of(at):
        fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        for which in ("CapEff", "CapPrm", "CapBnd"):
            assert int(fields[which], 16) == SYS_ADMIN | DAC_READ_SEARCH, (fields["Name"], which, fields[which])
        assert int(fields["CapInh"], 16) == int(fields["CapAmb"], 16) == 0
        assert fields["NoNewPrivs"].strip() == "1" and fields["Seccomp"].strip() == FILTERED, fields["Name"]
    status = json.loads((at / ".wmount/status.json").read_bytes())
    assert status["passthrough"] == status["filter"] == status["landlock"] == "on"
    words = run("doctor").stdout.decode()
    assert f"{at}: the filter of system calls is on" in words and f"{at}: the fence around the store is on" in words
    blob = max(blobs_of(hers, "tiny-llama"), key=lambda path: path.stat().st_size)
    assert (at / "ollama@seed/blobs" / blob.name).read_bytes() == blob.read_bytes()
    assert (at / "amb/tiny-llama/latest@int8.amb").read_bytes()
    run("prepare", "tiny-llama@fp8", "-s", hers)
    Store(hers).add(models / "inline.mlpackage", name="later")
    assert eventually((at / "coreml/later/latest/inline.mlpackage/Manifest.json").exists)
    assert eventually(lambda: "later:latest" in run("status", at).stdout.decode())
    pid = status["pid"]
    os.kill(pid, 15)
    assert eventually(lambda: not os.path.ismount(at)), "it unmounts by itself"
    run(hers, at)
    run("umount", at)
    assert not os.path.ismount(at)


@pytest.mark.parametrize("options", [[], ["--ingest"], ["--tolerate-rw"], ["--read", "direct"], ["--verify-on-read"]])
def test_the_process_is_restricted_however_it_is_mounted(small, tmp_path, options):
    with Mount(small, tmp_path / "mnt", *options) as mount:
        assert (mount / SHARD).read_bytes() and (mount / "amb/tiny-llama/latest@int8.amb").read_bytes()
        for text in threads_of(mount.at):
            fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            assert fields["Seccomp"].strip() == FILTERED, fields["Name"]
        status = json.loads((mount / ".wmount/status.json").read_bytes())
        assert status["filter"] == status["landlock"] == "on"


def test_nobody_else_can_keep_a_store_from_being_written_to(place, models):
    """Whoever could open the writers' lock could hold it."""
    assert ROOT, "this needs a second user"
    store = Store(place / "store")
    store.add(models / "inline.mlpackage", name="first")
    locks = [path for path in (store.path / ".wmount").iterdir() if "lock" in path.name]
    assert locks
    for lock in locks:
        held = as_user(BOB, "flock", "--nonblock", lock, "true")
        assert held.returncode != 0 and b"Permission denied" in held.stderr, held
    assert reads(BOB, next((store.path / "blobs").iterdir())), "he could not have come to the lock"


def test_who_has_very_many_files_open_takes_nothing_from_others(store, tmp_path):
    """The process may have fewer files open than its readers have; with all its own used up, others would get errors."""
    source = tmp_path / "many"
    source.mkdir()
    save_file({"t": np.zeros(4, np.float32)}, source / "model.safetensors")
    names = [f"{number}.txt" for number in range(1500)]
    for name in names:
        (source / name).write_text(name)
    store.add(source, name="many")
    own, at = resource.getrlimit(resource.RLIMIT_NOFILE), tmp_path / "mnt"
    at.mkdir()
    with contextlib.ExitStack() as stack:
        # The mount raises the first of its two limits by itself.
        few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))  # noqa: E731
        subprocess.run([BINARY, store.path, at], check=True, preexec_fn=few, timeout=60)
        stack.callback(run, "umount", at)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4000, own[1]), own[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, own)
        shown = at / "original/many/latest/many"
        opened = [stack.enter_context(open(shown / name)) for name in names]
        assert [file.read() for file in opened] == names
        assert (shown / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
        time.sleep(1.1)
        status = json.loads((at / ".wmount/status.json").read_bytes())
        assert status["problems"] == [] and status["passthrough"] == "on"
        assert len(os.listdir(f"/proc/{status['pid']}/fd")) < 1000


def test_a_service_is_told_that_its_mount_answers(small, tmp_path):
    """As systemd wants of Type=notify, though the process may open no socket once it has mounted."""
    at = tmp_path / "mnt"
    at.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        env = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        child = subprocess.Popen([BINARY, "-f", small.path, at], env=env, stderr=subprocess.DEVNULL)
        try:
            assert systemd.recv(100) == b"READY=1"
            assert (at / SHARD).read_bytes()

            def sockets() -> int:
                links = []
                for link in Path(f"/proc/{child.pid}/fd").iterdir():
                    with contextlib.suppress(FileNotFoundError):
                        links.append(os.readlink(link))
                return sum(link.startswith("socket:") for link in links)

            # The one that told systemd closes a moment after that.
            assert eventually(lambda: sockets() == 2), "a pair of its own that signals come through"
        finally:
            child.terminate()
            assert child.wait(60) == 0


@contextlib.contextmanager
def open_device():
    mode = os.stat("/dev/fuse").st_mode & 0o777
    if ROOT:
        os.chmod("/dev/fuse", 0o666)
    try:
        yield
    finally:
        if ROOT:
            os.chmod("/dev/fuse", mode)


def test_an_ordinary_users_process_has_no_capability_and_can_unmount(hers, place, program):
    os.chown(place / "mnt", ALICE, ALICE)
    user = {"user": ALICE, "group": ALICE, "extra_groups": []}
    env = {"HOME": str(hers), "PATH": os.environ["PATH"]}
    with open_device():
        child = subprocess.Popen([program, "-f", hers, place / "mnt"], env=env, cwd="/", **user)
        try:
            assert eventually(lambda: f" {place}/mnt " in Path("/proc/mounts").read_text())
            assert eventually(lambda: as_user(ALICE, "cat", place / "mnt" / MIXED).returncode == 0)
            for status in Path(f"/proc/{child.pid}/task").glob("*/status"):
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
                assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
                # Unmounting takes a setuid program.
                expected = "0" if fields["Name"].strip() == "deputy" else FILTERED
                assert fields["Seccomp"].strip() == expected, fields["Name"]
            told = json.loads(as_user(ALICE, "cat", place / "mnt/.wmount/status.json").stdout)
            assert told["filter"] == told["landlock"] == "on"
            child.terminate()
            assert child.wait(timeout=60) == 0
        finally:
            child.kill()
        assert f" {place}/mnt " not in Path("/proc/mounts").read_text()
