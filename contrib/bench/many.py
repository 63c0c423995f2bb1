#!/usr/bin/env python3
"""Measures a store of many models: how soon the mount is ready, the first look at each layout, and the daemon's memory.

    contrib/bench/many.py [--models 1000] [--tensors 1000] [--rounds 5] [--keep DIR] [--markdown FILE]

The store has the manifests and recipes of imported models with as many tensors as said; of the blobs only these and the
small files are there, as nothing here reads a tensor. A first look is the `ls` of a layout's directory at once after
`wmount` returned, each in a mount of its own: without a memo of an earlier mount, with one, and, as root, with neither
memo nor page cache. Afterwards `find` walks the whole tree. Figures are medians with the smallest and largest in
brackets. Needs root or fusermount3, and only Python's standard library.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import BINARY, Mounted, Table, drop_caches, seconds

IMAGE = "application/vnd.ollama.image."
OWN = "application/vnd.wmount."
CONFIG = b'{"model_type":"llama","hidden_size":2}'
TIME = [1_700_000_000, 0]


def layer(kind: str, digest: str, size: int, **keys) -> dict:
    return {"mediaType": kind, "digest": "sha256:" + digest, "size": size} | keys


class Store:
    """A store in the making; the digests of tensors are made up, but are the same in every run."""

    def __init__(self, path: Path):
        self.path = path
        (path / "blobs").mkdir(parents=True)
        self.config = self.put(CONFIG)

    def put(self, content: bytes) -> tuple[str, int]:
        digest = hashlib.sha256(content).hexdigest()
        (self.path / f"blobs/sha256-{digest}").write_bytes(content)
        return digest, len(content)

    def put_json(self, document: dict) -> tuple[str, int]:
        return self.put(json.dumps(document, separators=(",", ":")).encode())

    def add(self, number: int, tensors: int):
        layers, blobs, extents = [], [], ["7b7d"]
        for index in range(tensors):
            name = f"model.layers.{index:04}.mlp.down_proj.weight"
            digest, named = (hashlib.sha256(f"{form}/{number}/{index}".encode()).hexdigest() for form in "ab")
            keys = {"name": name, "dtype": "BF16", "shape": [2, 2], "named": "sha256:" + named}
            layers.append(layer(IMAGE + "tensor", digest, 80, **keys))
            blobs.append([digest, 80])
            extents.append([index, 72])
        fragment = self.put_json({"version": 1, "blobs": blobs, "extents": extents})
        files = [
            {"path": "config.json", "mtime": TIME, "extents": [[0, 0]]},
            {"path": "model.safetensors", "mtime": TIME, "map": fragment},
        ]
        recipe = {"version": 1, "kind": "safetensors", "blobs": [self.config], "dirs": [], "files": files}
        layers.append(layer(IMAGE + "json", *self.config, name="config.json"))
        layers.append(layer(OWN + "fragment", *fragment))
        layers.append(layer(OWN + "recipe", *self.put_json(recipe), name="model"))
        first = layer("application/vnd.docker.container.image.v1+json", *self.config)
        document = {"schemaVersion": 2, "mediaType": "", "config": first, "layers": layers}
        path = self.path / f"manifests/registry.ollama.ai/library/model{number:04}/latest"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def looks(table: Table, store: Path, at: Path, how: str, rounds: int, before):
    """The first look at each layout, and at all of them one after the other; `before` each mount something is done."""
    with Mounted(store, at):
        layouts = sorted(name for name in os.listdir(at) if not name.startswith("."))
    took = {name: [] for name in ["ready", *layouts, "all layouts in turn"]}
    for _ in range(rounds):
        for name in list(took)[1:]:
            before()
            mounted = Mounted(store, at)
            took["ready"].append(1e3 * seconds(mounted.__enter__))
            names = [name] if name in layouts else layouts
            took[name].append(1e3 * seconds(lambda: [os.listdir(at / name) for name in names]))
            mounted.__exit__()
    table.add(f"{how}: `wmount` returns", "ms", took.pop("ready"))
    for name, samples in took.items():
        table.add(f"{how}: first ls, {name}", "ms", samples)
    slowest = max((took[name] for name in layouts), key=statistics.median)
    table.add(f"{how}: first ls, the slowest layout", "ms", slowest)


def walk(table: Table, store: Path, at: Path):
    with Mounted(store, at) as mounted:
        table.add("memory of the daemon when ready", "MB", [mounted.memory()["VmRSS"]])
        for layout in sorted(os.listdir(at)):
            start = time.perf_counter()
            count = len(subprocess.run(["find", at / layout], check=True, stdout=subprocess.PIPE).stdout.splitlines())
            took = time.perf_counter() - start
            print(f"find {layout}: {count} paths, {took:.1f} s, {mounted.memory()} MB", file=sys.stderr)
        memory = mounted.memory()
        table.add("memory of the daemon after find over the whole tree", "MB", [memory["VmRSS"]])
        table.add("the most that it had on the way", "MB", [memory["VmHWM"]])


def measure(table: Table, store: Path, at: Path, rounds: int):
    memos = store / ".wmount"
    shutil.rmtree(memos, ignore_errors=True)
    looks(table, store, at, "no memo", rounds, lambda: None)
    if os.geteuid() == 0:
        looks(table, store, at, "no memo, cold", rounds, drop_caches)
    # A memo is kept where wmount has written to the store, and of no manifest that was written just now.
    memos.mkdir()
    time.sleep(3)
    looks(table, store, at, "memo", rounds, lambda: None)
    walk(table, store, at)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="where the store is made, or found if it is there")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if not BINARY.is_file():
        sys.exit(f"many.py: {BINARY} is missing: build it, or set WMOUNT")
    table = Table()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as work:
        path = args.keep or Path(work) / "store"
        if not path.exists():
            store = Store(path)
            for number in range(args.models):
                store.add(number, args.tensors)
        measure(table, path, Path(work) / "mnt", args.rounds)
    if args.markdown:
        args.markdown.write_text(table.markdown())
    print(table.markdown(), end="")


if __name__ == "__main__":
    main()
