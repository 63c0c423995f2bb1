#!/usr/bin/env python3
"""Measures nine shapes of one CoreML model: ready to load from a mount, beside nine packages that coremltools writes.

    contrib/bench/coreml.py [--megabytes 1300] [--rounds 5] [--disk DIR] [--json FILE] [--quick]

Needs coremltools, and root or fusermount3. Every package is written, imported and deleted in turn, so the disk has to
hold two copies of the weights. `--quick` takes 64 MB. Figures are medians with the smallest and largest in brackets.
"""

import argparse
import json
import logging
import os
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path

from bench import BINARY, Mounted, Table, command, drop_caches, read_pread, seconds

INSIDE = Path("Data/com.apple.CoreML")
SHAPES = (8, 16, 32, 64, 128, 256, 384, 512, 1024)
WIDTH = 2048


def program(length: int, weights):
    from coremltools.converters.mil import Builder as mb

    @mb.program(input_specs=[mb.TensorSpec((length, WIDTH))])
    def layers(x):
        for index, weight in enumerate(weights):
            x = mb.linear(x=x, weight=weight, name=f"layer_{index}")
        return x

    return layers


def convert(length: int, weights):
    import coremltools as ct

    return ct.convert(
        program(length, weights),
        convert_to="mlprogram",
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS17,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )


def last_blob(weight_bin: Path) -> int:
    """Offset of the last blob's metadata."""
    with open(weight_bin, "rb", buffering=0) as f:
        count, at = struct.unpack("<I", f.read(4))[0], 64
        for index in range(count):
            f.seek(at)
            _, _, size, offset = struct.unpack("<IIQQ", f.read(24))
            if index < count - 1:
                at = -(-(offset + size) // 64) * 64
    return at


def ready(packages: list[Path], last: int):
    """What a loader does before it touches a weight: every file looked at, every program and two headers read."""
    for package in packages:
        for directory, _, files in os.walk(package):
            for name in files:
                os.stat(os.path.join(directory, name))
        (package / INSIDE / "model.mlmodel").read_bytes()
        fd = os.open(package / INSIDE / "weights/weight.bin", os.O_RDONLY)
        for at in (64, last):
            assert os.pread(fd, 4, at) == b"\xef\xbe\xad\xde"
        os.close(fd)


def cached_megabytes() -> float:
    """The page cache of files, without shared memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(lines["Cached"].split()[0]) - int(lines["Shmem"].split()[0])) / 1024


def disk_usage(path: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where on disk to work")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if not BINARY.is_file():
        sys.exit(f"coreml.py: {BINARY} is missing: build it, or set WMOUNT")
    import numpy as np

    os.environ["TQDM_DISABLE"] = "1"
    logging.disable(logging.WARNING)
    megabytes = 64 if args.quick else args.megabytes
    rng = np.random.default_rng(1)
    count = max(2, round(megabytes * 1e6 / (WIDTH * WIDTH * 4)))
    weights = [rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) for _ in range(count)]
    table = Table()
    with tempfile.TemporaryDirectory(dir=args.disk) as work:
        work = Path(work)
        store, saving, importing, grown = work / "store", [], [], []
        for length in SHAPES:
            package = work / f"s{length}.mlpackage"
            model = convert(length, weights)
            os.sync()
            saving.append(seconds(lambda: (model.save(str(package)), os.sync())))
            del model
            before = disk_usage(store) if store.exists() else 0
            importing.append(seconds(command, BINARY, "-s", store, "import", package, "-n", "bench"))
            grown.append((disk_usage(store) - before) / 1e6)
            size = (package / INSIDE / "weights/weight.bin").stat().st_size / 1e6
            last = last_blob(package / INSIDE / "weights/weight.bin")
            shutil.rmtree(package)
        table.add(f"coremltools saves one package of {size:.0f} MB", "ms", [s * 1e3 for s in saving])
        table.add("coremltools saves nine", "ms", [sum(saving) * 1e3])
        table.add("import of the first", "ms", [importing[0] * 1e3])
        table.add("the store grows by, first", "MB", [grown[0]])
        table.add("import of a later one", "ms", [s * 1e3 for s in importing[1:]])
        table.add("the store grows by, later", "MB", grown[1:])

        before, times, mounting = disk_usage(store), [], []
        for _ in range(args.rounds):
            drop_caches()
            mount = Mounted(store, work / "mnt")
            start = time.perf_counter()
            with mount:
                os.stat(mount.at)
                mounting.append((time.perf_counter() - start) * 1e3)
                packages = [mount.at / f"coreml/bench/latest/s{length}.mlpackage" for length in SHAPES]
                times.append(seconds(ready, packages, last) * 1e3)
        table.add("from `wmount` to its answer, caches dropped", "ms", mounting)
        table.add("nine shapes ready after that, caches dropped", "ms", times)
        warm = []
        for _ in range(args.rounds):
            with Mounted(store, work / "mnt") as mount:
                os.stat(mount.at)
                warm.append(seconds(ready, [mount.at / p.relative_to(mount.at) for p in packages], last) * 1e3)
        table.add("nine shapes ready on a fresh mount, blobs cached", "ms", warm)
        table.add("written for that", "MB", [(disk_usage(store) - before) / 1e6])

        drop_caches()
        with Mounted(store, work / "mnt") as mount:
            start = cached_megabytes()
            after = []
            for package in packages:
                read_pread(package / INSIDE / "weights/weight.bin")
                after.append(cached_megabytes() - start)
        table.add("page cache after reading one weight file", "MB", [after[0] * 1.048576])
        table.add("page cache after reading all nine", "MB", [after[-1] * 1.048576])
    if args.json:
        args.json.write_text(json.dumps({"megabytes": megabytes, "rows": table.rows}, indent=1) + "\n")
    print(table.markdown(), end="")


if __name__ == "__main__":
    main()
