#!/usr/bin/env python3
"""Measures a store of many models: how soon the mount is ready, how long listings take, and the daemon's memory.

    contrib/bench/many.py [--models 1000] [--tensors 1000] [--keep DIR]

The manifests are those of imported models with as many tensors as said; of the blobs only the small files are there,
as nothing here reads a tensor. Needs root or fusermount3, and only Python's standard library.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("WMOUNT", REPOSITORY / "target/release/wmount")).resolve()
IMAGE = "application/vnd.ollama.image."
CONFIG = b'{"model_type":"llama","hidden_size":2}'


def layer(kind: str, digest: str, size: int, **keys) -> dict:
    return {"mediaType": kind, "digest": "sha256:" + digest, "size": size} | keys


def make(store: Path, models: int, tensors: int):
    """Writes the store; the digests are made up, but are the same in every run."""
    (store / "blobs").mkdir(parents=True)
    config = hashlib.sha256(CONFIG).hexdigest()
    (store / f"blobs/sha256-{config}").write_bytes(CONFIG)
    first = layer("application/vnd.docker.container.image.v1+json", config, len(CONFIG))
    for number in range(models):
        layers = []
        for index in range(tensors):
            name = f"model.layers.{index:04}.mlp.down_proj.weight"
            digest, named = (hashlib.sha256(f"{form}/{number}/{index}".encode()).hexdigest() for form in "ab")
            keys = {"name": name, "dtype": "BF16", "shape": [2, 2], "named": "sha256:" + named}
            layers.append(layer(IMAGE + "tensor", digest, 80, **keys))
        layers.append(layer(IMAGE + "json", config, len(CONFIG), name="config.json"))
        document = {"schemaVersion": 2, "mediaType": "", "config": first, "layers": layers}
        path = store / f"manifests/registry.ollama.ai/library/model{number:04}/latest"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def memory(at: Path) -> dict[str, float]:
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if os.readlink(entry / "exe") == str(BINARY) and os.fsencode(at) in arguments:
                lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
                return {key: int(lines[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM")}
        except OSError:
            continue
    sys.exit("many.py: no process serves the mount")


def measure(store: Path, at: Path):
    at.mkdir(exist_ok=True)
    run = lambda *args: subprocess.run([str(a) for a in args], check=True, stdout=subprocess.PIPE).stdout
    print(f"ready: {timed(lambda: run(BINARY, store, at)):.0f} ms")
    try:
        print(f"memory when ready: {memory(at)} MB")
        for layout in sorted(os.listdir(at)):
            took = timed(lambda: os.listdir(at / layout))
            print(f"first ls {layout}: {took:.0f} ms, {memory(at)['VmRSS']:.0f} MB")
        for layout in sorted(os.listdir(at)):
            start = time.perf_counter()
            count = len(run("find", at / layout).splitlines())
            took = time.perf_counter() - start
            print(f"find {layout}: {count} paths, {took:.1f} s, {memory(at)} MB")
        time.sleep(2)
        print(f"memory afterwards: {memory(at)} MB")
    finally:
        run(BINARY, "umount", at)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="where the store is made, or found if it is there")
    args = parser.parse_args()
    if not BINARY.is_file():
        sys.exit(f"many.py: {BINARY} is missing: build it, or set WMOUNT")
    with tempfile.TemporaryDirectory() as work:
        store = args.keep or Path(work) / "store"
        if not store.exists():
            make(store, args.models, args.tensors)
        measure(store, Path(work) / "mnt")


if __name__ == "__main__":
    main()
