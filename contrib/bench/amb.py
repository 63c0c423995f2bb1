#!/usr/bin/env python3
"""Measures the variants of AMB files: the first read of a computed file beside that of a stored file of the same size.

    contrib/bench/amb.py [--mib 256] [--rounds 3] [--dir DIR] [--bf16]

Makes a model of random matrices, imports it, mounts it, and prints Markdown. "First read" is sequential, in pieces of a
mebibyte, through the mount. Cold: the page cache was dropped before it (needs root). Warm: the store's blobs are in the page
cache and the mount is new. The stored file is the exported variant, imported under another name and read the same way.
Per core: `wmount cat` to nowhere, in source bytes for each second of the process's own processor time. The ratios are of
the bytes that a reader gets; beside them, in brackets, of the source bytes that were read for them, which is what a disk
or memory limits. Below the table: the pass that makes the mask of adaptive, against reading the same tensors. Needs numpy.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from tensors import header

REPOSITORY = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("WMOUNT", REPOSITORY / "target/release/wmount")).resolve()
VARIANTS = ("f16", "int8", "int4-32", "int4-128", "int5-32", "int5-128", "adaptive-32")


def wmount(*args, **options):
    subprocess.run([BINARY, *map(str, args)], check=True, stdin=subprocess.DEVNULL, **options)


def make_model(path: Path, mib: int, bf16: bool):
    width = 2 if bf16 else 4
    each, rows = 16 << 20, 4096
    rng = np.random.default_rng(1)
    tensors, bodies = [], []
    for number in range(max(1, (mib << 20) // each)):
        values = rng.standard_normal(each // width, dtype=np.float32) * np.float32(0.02)
        body = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes() if bf16 else values.tobytes()
        shape = [rows, each // width // rows]
        dtype = "BF16" if bf16 else "F32"
        tensors.append((f"layers.{number}.weight", dtype, shape, each))
        bodies.append(body)
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"".join([header(tensors), *bodies]))
    return each * len(bodies)


def drop_caches():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def read(path: Path) -> float:
    buffer = bytearray(1 << 20)
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def first_read(store: Path, at: Path, inside: str, cold: bool) -> float:
    wmount(store, at)
    try:
        os.stat(at / inside)
        if cold:
            drop_caches()
        return read(at / inside)
    finally:
        wmount("umount", at)


def wall(*args) -> float:
    start = time.perf_counter()
    wmount(*args, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def mask_pass(store: Path, rounds: int):
    """The rate of the pass that chooses what adaptive keeps, beside reading the tensors, both from the page cache."""
    size = sum(path.stat().st_size for path in (store / "blobs").iterdir())
    pairs = []
    for _ in range(rounds):
        shutil.rmtree(store / ".wmount/memo", ignore_errors=True)
        made = wall("-s", store, "prepare", "m@adaptive-32")
        pairs.append((made, wall("-s", store, "cat", "safetensors/m/latest/model.safetensors")))
    made, read_ = (statistics.median(side) for side in zip(*pairs))
    ratio = statistics.median(read_ / made for made, read_ in pairs)
    print(f"\nmask of adaptive-32: {size / made / 1e6:.0f} MB/s of source; `cat` of the tensors {size / read_ / 1e6:.0f}; ratio {ratio:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.dir))
    store, at = root / "store", root / "mnt"
    at.mkdir()
    try:
        source = make_model(root / "model", args.mib, args.bf16)
        wmount("-s", store, "import", root / "model", "-n", "m", stdout=subprocess.DEVNULL)
        print(f"{'bf16' if args.bf16 else 'f32'}, {args.mib} MiB, {os.cpu_count()} cores, {args.rounds} rounds, MB/s\n")
        mask_pass(store, args.rounds)
        print("\n| variant | MiB | source, each core | computed, warm | stored, warm | ratio | computed, cold | stored, cold | ratio |")
        print("|---|---|---|---|---|---|---|---|---|")
        for which in VARIANTS:
            inside = f"amb/m/latest@{which}.amb"
            wmount("-s", store, "export", inside, root / "v.amb", stdout=subprocess.DEVNULL)
            size = (root / "v.amb").stat().st_size
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            wmount("-s", store, "cat", inside, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            name = f"s{which}"
            wmount("-s", store, "import", root / "v.amb", "-n", name, stdout=subprocess.DEVNULL)
            (root / "v.amb").unlink()
            cells = []
            for cold in (False, True):
                pairs = []
                for _ in range(args.rounds):
                    made = first_read(store, at, inside, cold)
                    pairs.append((made, first_read(store, at, f"amb/{name}/latest.amb", cold)))
                made, stored = (statistics.median(side) for side in zip(*pairs))
                ratio = statistics.median(stored / made for made, stored in pairs)
                cells += [f"{size / made / 1e6:.0f}", f"{size / stored / 1e6:.0f}", f"{ratio:.2f} ({ratio * source / size:.1f})"]
            print(f"| {which} | {size >> 20} | {source / spent / 1e6:.0f} | " + " | ".join(cells) + " |", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
