#!/usr/bin/env python3
"""Measures computed files: variants of AMB files and of gds_export beside stored files of the same size, and their limits.

    contrib/bench/amb.py [--mib 256] [--rounds 3] [--dir DIR] [--bf16]

Makes a model of random matrices, imports it, mounts it, and prints Markdown. "First read" is sequential, in pieces of a
mebibyte, through the mount. Cold: the page cache was dropped before it (needs root). Warm: the store's blobs are in the page
cache and the mount is new. What is known of whole tensors (scales, masks) was found out before.

"Stored" are the same bytes, exported and imported under another name, and read the same way: what the kernel's FUSE can
deliver. "Source" are the model's blobs, read past the mount in the same pieces and the same round, at the rate that gives the
variant's bytes: what the memory or the disk can deliver. No computed file is faster than the slower of the two; "of limit" is
its rate beside that. Per core: `wmount cat` of one tensor to nowhere, in source bytes for each second of the process's own
processor time. Below the table: the pass that makes the mask of adaptive, against reading the same tensors. Needs numpy.
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
AMB = ("f16", "int8", "int4-32", "int4-128", "int5-32", "int5-128", "adaptive-32")
GDS = {"fp8": ".fp8", "f16": ".bin"}


def wmount(*args, **options):
    subprocess.run([BINARY, *map(str, args)], check=True, stdin=subprocess.DEVNULL, **options)


def make_model(path: Path, mib: int, bf16: bool, each: int = 16 << 20) -> int:
    width, columns = 2 if bf16 else 4, 1024
    rng = np.random.default_rng(each)
    tensors, bodies = [], []
    for number in range(max(1, (mib << 20) // each)):
        values = rng.standard_normal((each // width // columns, columns), dtype=np.float32) * np.float32(0.02)
        body = (values.view(np.uint32) >> 16).astype(np.uint16) if bf16 else values
        tensors.append((f"layers.{number}.weight", "BF16" if bf16 else "F32", list(body.shape), each))
        bodies.append(body.tobytes())
    path.mkdir()
    return write_safetensors(path / "model.safetensors", tensors, bodies)


def write_safetensors(path: Path, tensors: list, bodies: list[bytes]) -> int:
    path.write_bytes(b"".join([header(tensors), *bodies]))
    return sum(map(len, bodies))


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
    """Of a file of the mount, or of all that a pattern means."""
    wmount(store, at)
    try:
        files = sorted(at.glob(inside))
        assert files, inside
        for file in files:
            file.stat()
        if cold:
            drop_caches()
        return sum(map(read, files))
    finally:
        wmount("umount", at)


def source_read(blobs: list[Path], cold: bool) -> float:
    if cold:
        drop_caches()
    return sum(map(read, blobs))


def processor_time(*args) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wmount(*args, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def store_again(store: Path, root: Path, variant: str, ending: str | None) -> tuple[str, str, int]:
    """Imports the bytes of a variant as they are: the patterns of the computed and of the stored files, and their size."""
    name = f"s{variant}{ending or ''}".replace(".", "-")
    if ending is None:
        wmount("-s", store, "export", f"amb/m/latest@{variant}.amb", root / "v.amb", stdout=subprocess.DEVNULL)
        wmount("-s", store, "import", root / "v.amb", "-n", name, stdout=subprocess.DEVNULL)
        size = (root / "v.amb").stat().st_size
        (root / "v.amb").unlink()
        return f"amb/m/latest@{variant}.amb", f"amb/{name}/latest.amb", size
    wmount("-s", store, "export", f"gds_export/m/latest@{variant}", root / "v", stdout=subprocess.DEVNULL)
    files = sorted((root / "v").glob(f"*{ending}"))
    bodies = [path.read_bytes() for path in files]
    tensors = [(path.stem, "U8", [len(body)], len(body)) for path, body in zip(files, bodies)]
    (root / "codes").mkdir()
    size = write_safetensors(root / "codes/x.safetensors", tensors, bodies)
    wmount("-s", store, "import", root / "codes", "-n", name, stdout=subprocess.DEVNULL)
    shutil.rmtree(root / "v")
    shutil.rmtree(root / "codes")
    return f"gds_export/m/latest@{variant}/*{ending}", f"gds_export/{name}/latest/*.bin", size


def wall(*args) -> float:
    start = time.perf_counter()
    wmount(*args, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def mask_pass(store: Path, source: int, rounds: int):
    """The rate of the pass that chooses what adaptive keeps, beside reading the tensors, both from the page cache."""
    pairs = []
    for _ in range(rounds):
        shutil.rmtree(store / ".wmount/memo", ignore_errors=True)
        made = wall("-s", store, "prepare", "m@adaptive-32")
        pairs.append((made, wall("-s", store, "cat", "safetensors/m/latest/model.safetensors")))
    made, read_ = (statistics.median(side) for side in zip(*pairs))
    ratio = statistics.median(read_ / made for made, read_ in pairs)
    print(f"\nmask of adaptive-32: {source / made / 1e6:.0f} MB/s of source; `cat` of the tensors {source / read_ / 1e6:.0f}; ratio {ratio:.2f}")


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
        blobs = sorted(path for path in (store / "blobs").iterdir() if path.stat().st_size > 1 << 20)
        whole = make_model(root / "whole", args.mib, args.bf16, args.mib << 20)
        wmount("-s", store, "import", root / "whole", "-n", "whole", stdout=subprocess.DEVNULL)
        print(f"{'bf16' if args.bf16 else 'f32'}, {args.mib} MiB, {os.cpu_count()} cores, {args.rounds} rounds, MB/s\n")
        print("| variant | MiB | source, each core | warm: computed | stored | ratio | source | of limit "
              "| cold: computed | stored | ratio | source | of limit |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
        for variant, ending in [(name, None) for name in AMB] + list(GDS.items()):
            inside, stored_inside, size = store_again(store, root, variant, ending)
            one = f"gds_export/whole/latest@{variant}/layers__0__weight{ending}" if ending else f"amb/whole/latest@{variant}.amb"
            wmount("-s", store, "cat", one, stdout=subprocess.DEVNULL)
            spent = statistics.median(processor_time("-s", store, "cat", one) for _ in range(args.rounds))
            cells = []
            for cold in (False, True):
                rounds = []
                source_read(blobs, False)
                for _ in range(args.rounds):
                    made = first_read(store, at, inside, cold)
                    rounds.append((made, first_read(store, at, stored_inside, cold), source_read(blobs, cold)))
                made, stored, plain = (statistics.median(side) for side in zip(*rounds))
                ratio = statistics.median(stored / made for made, stored, _ in rounds)
                limit = statistics.median(max(stored, plain) / made for made, stored, plain in rounds)
                cells += [f"{size / it / 1e6:.0f}" for it in (made, stored)] + [f"{ratio:.2f}"]
                cells += [f"{size / plain / 1e6:.0f}", f"{limit:.2f}"]
            layout = "gds_export" if ending else "amb"
            print(f"| {layout}@{variant} | {size >> 20} | {whole / spent / 1e6:.0f} | " + " | ".join(cells) + " |", flush=True)
        wmount("-s", store, "rm", "whole", stdout=subprocess.DEVNULL)
        mask_pass(store, source, args.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
