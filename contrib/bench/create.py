#!/usr/bin/env python3
"""Measures `wmount import` beside `ollama create` of the same safetensors directory, in turns.

    contrib/bench/create.py MODEL_DIR [--rounds 5] [--dir DIR] [--markdown FILE]

OLLAMA is the program (contrib/test.sh builds it). `create --experimental` reads the directory and writes the blobs itself;
the server is running before the clock is. wmount writes its blobs durably before it says that it is done; ollama never
syncs, so its time is also given with the `sync -f` that makes its blobs as durable. Both hash each tensor: ollama once,
on one core; wmount for its own blob and for ollama's, on all of them.

The same rounds measure what bounds both: the disk, which takes the same bytes from memory into one file and is synced,
and the cores, which hash every tensor twice in memory, with nothing to read or to write. The slower of the two is the
limit, unless the digests are computed in turns, as wmount does; an import also copies the bytes in and out of the page
cache. Figures are medians with the smallest and largest in brackets; ratios are taken within each round. Needs only
Python's standard library.
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
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from bench import BINARY, CORES, PIECE, Table, command, pieces_to_hash, seconds

STRIDE = 8 * PIECE
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
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([OLLAMA, "serve"], env=self.env, **quiet)
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


def write_and_sync(content: list[memoryview], path: Path):
    with open(path, "wb", buffering=0) as file:
        written = 0
        for bytes_of_file in content:
            for at in range(0, len(bytes_of_file), STRIDE):
                written += file.write(bytes_of_file[at : at + STRIDE])
                # Has the kernel begin to write it out, and makes the last sync shorter.
                os.posix_fadvise(file.fileno(), 0, written, os.POSIX_FADV_DONTNEED)
        os.fsync(file.fileno())


def measure(table: Table, model: Path, work: Path, rounds: int):
    source = work / "model"
    shutil.copytree(model, source)
    files = {str(p): memoryview(p.read_bytes()) for p in source.rglob("*") if p.is_file()}
    size = sum(map(len, files.values())) / 1e6
    to_hash = [files[path][start : start + length] for path, start, length in pieces_to_hash([Path(p) for p in files])]
    (source / "Modelfile").write_text("FROM .\n")
    os.sync()
    took = {"import": [], "create": [], "create and sync": [], "disk": [], "hash": [], "limit": []}
    pool = ThreadPoolExecutor(CORES)
    for _ in range(rounds):
        store, models = work / "store", work / "models"
        took["import"].append(seconds(command, BINARY, "-s", store, "import", source, "-n", "bench"))
        with Server(models, work) as server:
            took["create"].append(seconds(server.create, source))
            took["create and sync"].append(took["create"][-1] + seconds(command, "sync", "-f", models))
        shutil.rmtree(store)
        shutil.rmtree(models)
        os.sync()
        took["disk"].append(seconds(write_and_sync, list(files.values()), work / "same"))
        (work / "same").unlink()
        os.sync()
        # hashlib lets the other threads run.
        took["hash"].append(seconds(lambda: list(pool.map(sha256, to_hash))))
        took["limit"].append(max(took["disk"][-1], took["hash"][-1]))
    names = {"import": "wmount import, durable", "create": "ollama create, not synced"}
    names["create and sync"] = "ollama create and sync -f"
    names["disk"] = "disk: write and sync the same bytes"
    names["hash"] = f"{CORES} cores: hash every tensor twice"
    names["limit"] = "limit: the slower of disk and hashing"
    for key, name in names.items():
        table.add(name, "MB/s", [size / s for s in took[key]])
    for key in ("create", "create and sync"):
        for program in ("import", "limit"):
            ratios = [b / a for a, b in zip(took[program], took[key])]
            table.add(f"{names[program].split(':')[0]}: against {names[key]}", "x", ratios)
    table.add("wmount import: against the limit", "x", [b / a for a, b in zip(took["import"], took["limit"])])


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
