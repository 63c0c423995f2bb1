"""The real ollama server and command on a mount: OLLAMA is the program (contrib/test.sh builds it).

It is built without its runners, which need libraries that its module does not carry: it lists, shows, creates and
deletes, and loads no model.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import foreign
import readers
from harness import HOST, Mount, Store, eventually

DEFAULT = Path.home() / ".cache/wmount/ollama-0.32.15/ollama"


class Server:
    """An ollama server on a models directory; a context manager."""

    def __init__(self, models: Path, home: Path, **settings):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host = f"127.0.0.1:{free.getsockname()[1]}"
        home.mkdir(exist_ok=True)
        self.log = home / "serve.log"
        self.env = os.environ | {"OLLAMA_MODELS": str(models), "OLLAMA_HOST": self.host, "HOME": str(home)} | settings

    def __enter__(self):
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([program(), "serve"], env=self.env, stdout=log, stderr=log)
        assert eventually(self.is_up, 30), self.log.read_text()
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(20)

    def is_up(self) -> bool:
        try:
            return self.process.poll() is not None or "version" in self.ask("GET", "/api/version")
        except OSError:
            return False

    def ask(self, method: str, path: str, body=None, code=200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://{self.host}{path}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        assert code is None or status == code, f"{method} {path}: {status} {text[:500]}"
        return json.loads(text) if text.startswith(b"{") else text

    def command(self, *args, cwd=None) -> str:
        done = subprocess.run([program(), *args], env=self.env, cwd=cwd, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def names(self) -> set[str]:
        return {model["name"] for model in self.ask("GET", "/api/tags")["models"]}


def program() -> str:
    path = Path(os.environ.get("OLLAMA", DEFAULT))
    if not path.is_file():
        pytest.fail(f"{path} is missing: contrib/test.sh builds it; or set OLLAMA", pytrace=False)
    return str(path)


@pytest.fixture(scope="module")
def server(world, tmp_path_factory):
    with Server(world / "ollama", tmp_path_factory.mktemp("home"), OLLAMA_NOPRUNE="1") as server:
        yield server


def test_it_starts_and_lists_every_model(world, server):
    expected = {"minilm:latest", "minilm-float:v1", "tiny-llama:latest", "org/tiny-llama:hub"}
    listed = {model["name"]: model for model in server.ask("GET", "/api/tags")["models"]}
    assert listed.keys() == expected
    for name, model in listed.items():
        path, tag = name.rsplit(":", 1)
        manifest = world / f"ollama/manifests/{HOST}" / (path if "/" in path else f"library/{path}") / tag
        data = manifest.read_bytes()
        layers = json.loads(data)["layers"] + [json.loads(data)["config"]]
        assert model["digest"] == hashlib.sha256(data).hexdigest()
        assert model["size"] == sum(layer["size"] for layer in layers)
    assert "tiny-llama:latest" in server.command("list")


def test_it_shows_a_model_that_wmount_imported(world, server):
    shown = server.ask("POST", "/api/show", {"model": "tiny-llama", "verbose": True})
    tensors = readers.safetensors_dir(world.models / "tiny-llama")
    assert shown["details"]["format"] == "safetensors" and shown["details"]["family"] == "llama"
    assert shown["model_info"]["general.parameter_count"] == sum(int(np.prod(t.shape)) for t in tensors.values())
    assert {t["name"]: tuple(t["shape"]) for t in shown["tensors"]} == {n: t.shape for n, t in tensors.items()}
    assert shown["capabilities"] == ["completion"]


def test_what_it_would_write_is_refused(world, server):
    before = server.names()
    assert server.ask("DELETE", "/api/delete", {"model": "tiny-llama"}, code=None).get("error")
    assert server.ask("POST", "/api/copy", {"source": "tiny-llama", "destination": "copy"}, code=None).get("error")
    assert server.names() == before


def test_it_starts_without_settings_too(world, tmp_path):
    """No directory below manifests is empty and no blob is unreferenced, so pruning finds nothing to do."""
    with Server(world / "ollama", tmp_path / "home") as server:
        assert "tiny-llama:latest" in server.names()
        assert "failed to remove" not in server.log.read_text()


def test_what_ollama_creates_is_mounted(models, tmp_path):
    """`ollama create` from a safetensors directory writes, wmount mounts, and ollama reads its own again."""
    source = tmp_path / "source"
    shutil.copytree(models / "tiny-llama", source)
    (source / "Modelfile").write_text("FROM .\nTEMPLATE hello\nLICENSE free\n")
    made = tmp_path / "made"
    with Server(made, tmp_path / "home") as server:
        server.command("create", "--experimental", "tiny", "-f", "Modelfile", cwd=source)
        server.command("cp", "tiny", "me/other:v1")
        shown = server.ask("POST", "/api/show", {"model": "tiny"})
        server.ask("POST", "/api/copy", {"source": "tiny", "destination": "brief"})
        server.ask("DELETE", "/api/delete", {"model": "brief"})
        assert server.names() == {"tiny:latest", "me/other:v1"}
    files = {p: p.stat().st_mtime_ns for p in made.rglob("*")}
    with Mount(Store(made), tmp_path / "mnt") as mount:
        with Server(mount / "ollama", tmp_path / "home", OLLAMA_NOPRUNE="1") as server:
            assert server.names() == {"tiny:latest", "me/other:v1"}
            assert server.ask("POST", "/api/show", {"model": "me/other:v1"}) == shown | {
                "modified_at": server.ask("POST", "/api/show", {"model": "me/other:v1"})["modified_at"],
                "modelfile": shown["modelfile"].replace("FROM tiny:latest", "FROM me/other:v1"),
            }
        for model in ("tiny/latest", "me/other/v1"):
            assert readers.safetensors_dir(mount / "safetensors" / model) == readers.safetensors_dir(source)
    assert {p: p.stat().st_mtime_ns for p in made.rglob("*")} == files


def test_wmount_and_ollama_write_the_same_blobs(models, tmp_path):
    """The manifest that wmount shows for an import names what ollama's own importer makes of the same directory."""
    source = tmp_path / "source"
    shutil.copytree(models / "tiny-llama", source)
    (source / "Modelfile").write_text("FROM .\n")
    with Server(tmp_path / "made", tmp_path / "home") as server:
        server.command("create", "--experimental", "tiny", "-f", "Modelfile", cwd=source)
    store = Store(tmp_path / "store")
    store.add(models / "tiny-llama", name="tiny")
    inside = f"manifests/{HOST}/library/tiny/latest"
    theirs = json.loads((tmp_path / "made" / inside).read_bytes())
    with Mount(store, tmp_path / "mnt") as mount:
        ours = json.loads((mount / "ollama" / inside).read_bytes())
    assert ours == theirs


def test_its_own_reader_reads_a_gguf_through_the_mount(tmp_path):
    store = foreign.Store(tmp_path / "store")
    weights = {"token_embd.weight": np.ones((16, 32), np.float32), "output_norm.weight": np.zeros(32, np.float32)}
    data = foreign.gguf(tmp_path / "tiny.gguf", weights).read_bytes()
    config = {"model_format": "gguf", "model_family": "llama", "model_families": ["llama"]}
    store.manifest(f"{HOST}/library/gguf/latest", [store.blob("model", data)], config)
    with Mount(Store(store.path), tmp_path / "mnt") as mount:
        with Server(mount / "ollama", tmp_path / "home", OLLAMA_NOPRUNE="1") as server:
            shown = server.ask("POST", "/api/show", {"model": "gguf", "verbose": True})
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.embedding_length"] == 32
    assert {t["name"]: tuple(reversed(t["shape"])) for t in shown["tensors"]} == {n: a.shape for n, a in weights.items()}
