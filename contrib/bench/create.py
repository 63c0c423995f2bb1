#!/usr/bin/env python3
"""Measures `wmount import` beside `ollama create` of the same safetensors directory, in turns.

    contrib/bench/create.py MODEL_DIR [--rounds 5] [--dir DIR] [--markdown FILE]

OLLAMA is the program (contrib/test.sh builds it). `create --experimental` reads the directory and writes the blobs itself;
the server is running before the clock is. wmount writes its blobs durably before it says that it is done; ollama never
syncs, so its time is also given with the `sync -f` that makes its blobs as durable. Both hash each tensor: ollama once,
on one core; wmount for its own blob and for ollama's, on all of them. Figures are medians with the smallest and largest
in brackets; ratios are taken within each round. Needs only Python's standard library.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bench import BINARY, Table, command, seconds

OLLAMA = Path(os.environ.get("OLLAMA", Path.home() / ".cache/wmount/ollama-0.32.15/ollama"))


class Server:
    """An ollama server on a models directory; a context manager."""

    def __init__(self, models: Path, home: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            host = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{host}/api/version"
        self.env = os.environ | {"OLLAMA_MODELS": str(models), "OLLAMA_HOST": host, "HOME": str(home)}

    def __enter__(self):
        self.process = subprocess.Popen([OLLAMA, "serve"], env=self.env, stderr=subprocess.DEVNULL)
        while self.process.poll() is None:
            try:
                urllib.request.urlopen(self.url).close()
                return self
            except OSError:
                time.sleep(0.05)
        sys.exit("create.py: ollama serve ended")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def create(self, source: Path):
        args = [OLLAMA, "create", "--experimental", "bench", "-f", "Modelfile"]
        done = subprocess.run(args, env=self.env, cwd=source, capture_output=True)
        if done.returncode != 0:
            sys.exit(f"create.py: {done.stderr.decode()[-500:]}")


def measure(table: Table, model: Path, work: Path, rounds: int):
    source = work / "model"
    shutil.copytree(model, source)
    size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file()) / 1e6
    (source / "Modelfile").write_text("FROM .\n")
    os.sync()
    took = {"import": [], "create": [], "create and sync": []}
    for _ in range(rounds):
        store, models = work / "store", work / "models"
        took["import"].append(seconds(command, BINARY, "-s", store, "import", source, "-n", "bench"))
        with Server(models, work) as server:
            took["create"].append(seconds(server.create, source))
            took["create and sync"].append(took["create"][-1] + seconds(command, "sync", "-f", models))
        shutil.rmtree(store)
        shutil.rmtree(models)
        os.sync()
    names = {"import": "wmount import, durable", "create": "ollama create, not synced"}
    names["create and sync"] = "ollama create and sync -f"
    for key, name in names.items():
        table.add(name, "MB/s", [size / s for s in took[key]])
    for key in ("create", "create and sync"):
        table.add(f"{names['import']}: against {names[key]}", "x", [b / a for a, b in zip(took["import"], took[key])])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where to work")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    for program in (BINARY, OLLAMA):
        if not program.is_file():
            sys.exit(f"create.py: {program} is missing")
    table = Table()
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        measure(table, args.model, Path(work), args.rounds)
    if args.markdown:
        args.markdown.write_text(table.markdown())
    print(table.markdown(), end="")


if __name__ == "__main__":
    main()
