#!/usr/bin/env python3
"""Measures import, mount, reads and memory, each beside the plain tool that does the same work in the same round.

    contrib/bench/bench.py MODEL_DIR [--rounds 5] [--disk DIR] [--json FILE] [--markdown FILE]

MODEL_DIR is a directory that `wmount import` takes, with safetensors files. Everything is made in a fresh directory
on tmpfs and on disk and removed at the end. Needs root or fusermount3, and only Python's standard library.
Figures are medians with the smallest and largest in brackets; ratios are taken within each round.
"""

import argparse
import hashlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("WMOUNT", REPOSITORY / "target/release/wmount")).resolve()
CORES = len(os.sched_getaffinity(0))
PIECE = 1 << 20


def seconds(work, *args) -> float:
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def command(*args):
    subprocess.run([str(a) for a in args], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def hash_range(path: str, start: int, length: int):
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as f:
        f.seek(start)
        while length and (piece := f.read(min(length, PIECE))):
            digest.update(piece)
            length -= len(piece)


def pieces_to_hash(files: list[Path]) -> list[tuple[str, int, int]]:
    """What an import has to hash: every tensor twice, for its own blob and for ollama's, other files once."""
    pieces = []
    for path in files:
        if path.suffix != ".safetensors":
            pieces.append((str(path), 0, path.stat().st_size))
            continue
        with open(path, "rb") as f:
            n = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(n))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                pieces += [(str(path), 8 + n + start, end - start)] * 2
    return sorted(pieces, key=lambda piece: -piece[2])


def hash_on_all_cores(pool, pieces):
    for future in [pool.submit(hash_range, *p) for p in pieces]:
        future.result()


def drop_caches():
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        sys.exit("bench.py: a cold read needs root, to drop the page cache")


def read_pread(path: Path):
    fd = os.open(path, os.O_RDONLY)
    buffer = bytearray(PIECE)
    while os.readv(fd, [buffer]):
        pass
    os.close(fd)


def read_mmap(path: Path):
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for at in range(0, len(mapped), PIECE):
            mapped[at : at + PIECE]


class Mounted:
    def __init__(self, store: Path, at: Path):
        self.store, self.at = store, at
        at.mkdir(exist_ok=True)

    def __enter__(self):
        command(BINARY, self.store, self.at)
        return self

    def __exit__(self, *_):
        command(BINARY, "umount", self.at)

    def daemon(self) -> int:
        """The process that serves this mount: our program with the mountpoint among its arguments."""
        for entry in Path("/proc").iterdir():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if os.readlink(entry / "exe") == str(BINARY) and os.fsencode(self.at) in arguments:
                    return int(entry.name)
            except OSError:
                continue
        raise RuntimeError("no process serves the mount")

    def memory(self) -> dict[str, float]:
        status = Path(f"/proc/{self.daemon()}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines())
        return {key: int(lines[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM")}


class Table:
    """Rows of (what, unit, samples)."""

    def __init__(self):
        self.rows = []

    def add(self, what: str, unit: str, samples: list[float]):
        row = {"what": what, "unit": unit, "median": statistics.median(samples), "samples": samples}
        self.rows.append(row)
        print(f"{what}: {self.text(row)}", file=sys.stderr)

    @staticmethod
    def text(row) -> str:
        digits = 2 if row["unit"] in ("x", "ms") or row["median"] < 10 else 0
        low, high = min(row["samples"]), max(row["samples"])
        text = f"{row['median']:.{digits}f} {row['unit']}"
        return text if low == high else f"{text} ({low:.{digits}f} - {high:.{digits}f})"

    def markdown(self) -> str:
        lines = ["| what | median (min - max) |", "|---|---|"]
        return "\n".join(lines + [f"| {r['what']} | {self.text(r)} |" for r in self.rows]) + "\n"


def bench_import(table: Table, where: str, model: Path, work: Path, rounds: int):
    """Import of a model whose files are in the page cache, beside the tools in the same round."""
    source = work / "model"
    shutil.copytree(model, source)
    files = [p for p in source.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files) / 1e6
    pieces = pieces_to_hash(files)
    hashed = sum(length for _, _, length in pieces) / 1e6
    runs = {"import": [], "sha256sum": [], "cp": [], "hash": []}
    with ProcessPoolExecutor(CORES) as pool:
        hash_on_all_cores(pool, pieces)
        for _ in range(rounds):
            store, copy = work / "store", work / "copy"
            os.sync()
            runs["import"].append(seconds(command, BINARY, "-s", store, "import", source, "-n", "bench"))
            runs["sha256sum"].append(seconds(command, "sha256sum", *files))
            runs["cp"].append(seconds(command, "sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', source, copy))
            runs["hash"].append(seconds(hash_on_all_cores, pool, pieces))
            shutil.rmtree(store)
            shutil.rmtree(copy)

    def ratio(other: str) -> list[float]:
        return [b / a for a, b in zip(runs["import"], runs[other])]

    table.add(f"{where}: import", "MB/s", [size / s for s in runs["import"]])
    table.add(f"{where}: sha256sum of the same files", "MB/s", [size / s for s in runs["sha256sum"]])
    table.add(f"{where}: cp and sync of the same files", "MB/s", [size / s for s in runs["cp"]])
    table.add(f"{where}: {CORES} cores hash what import must hash", "MB/s hashed", [hashed / s for s in runs["hash"]])
    table.add(f"{where}: import against sha256sum", "x", ratio("sha256sum"))
    table.add(f"{where}: import against cp and sync", "x", ratio("cp"))
    table.add(f"{where}: import against hashing on all cores", "x", ratio("hash"))
    shutil.rmtree(source)


def bench_mount(table: Table, store: Path, work: Path, rounds: int):
    """From starting the command to the first byte of a file below the mount."""
    samples = []
    for _ in range(rounds * 4):
        mount = Mounted(store, work / "mnt")
        start = time.perf_counter()
        with mount:
            with open(mount.at / "safetensors/bench/latest/config.json", "rb", buffering=0) as f:
                f.read(1)
            samples.append((time.perf_counter() - start) * 1e3)
    table.add("from `wmount` to the first byte", "ms", samples)
    table.add("starting `true`, for comparison", "ms", [seconds(command, "true") * 1e3 for _ in samples])


def bench_read(table: Table, store: Path, model: Path, work: Path, rounds: int):
    """The largest safetensors file, cold and warm, read and mapped, beside its plain copy."""
    name = max(model.glob("*.safetensors"), key=lambda p: p.stat().st_size).name
    plain = work / "plain"
    shutil.copy(model / name, plain)
    size = plain.stat().st_size / 1e6
    shown = {"original file": f"safetensors/bench/latest/{name}", "AMB": "amb/bench/latest.amb"}
    for label, inside in shown.items():
        for how, read in (("read", read_pread), ("mmap", read_mmap)):
            runs = {(who, turn): [] for who in ("plain", "mount") for turn in ("first", "second")}
            for _ in range(rounds):
                for who in ("plain", "mount"):
                    drop_caches()
                    with Mounted(store, work / "mnt") as mount:
                        path = plain if who == "plain" else mount.at / inside
                        if not path.exists():
                            break
                        here = path.stat().st_size / 1e6
                        for turn in ("first", "second"):
                            runs[who, turn].append(here / seconds(read, path))
            if not runs["mount", "first"]:
                continue
            for turn in ("first", "second"):
                mount, flat = runs["mount", turn], runs["plain", turn]
                table.add(f"{label}, {how}, {turn}", "MB/s", mount)
                table.add(f"plain file of {size:.0f} MB, {how}, {turn}", "MB/s", flat)
                table.add(f"{label}, {how}, {turn}: mount against plain", "x", [m / p for m, p in zip(mount, flat)])


def bench_memory(table: Table, store: Path, work: Path):
    """The daemon after every file of every layout was read and mapped once."""
    with Mounted(store, work / "mnt") as mount:
        files = [p for p in mount.at.rglob("*") if p.is_file()]
        for path in files:
            read_pread(path)
            if path.stat().st_size:
                read_mmap(path)
        for key, megabytes in mount.memory().items():
            table.add(f"{key} of the daemon after reading all {len(files)} files", "MB", [megabytes])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where on disk to work")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if not BINARY.is_file():
        sys.exit(f"bench.py: {BINARY} is missing: build it, or set WMOUNT")

    table = Table()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as fast, tempfile.TemporaryDirectory(dir=args.disk) as disk:
        bench_import(table, "tmpfs", args.model, Path(fast), args.rounds)
        bench_import(table, "disk", args.model, Path(disk), args.rounds)
        store = Path(disk) / "bench-store"
        command(BINARY, "-s", store, "import", args.model, "-n", "bench")
        bench_mount(table, store, Path(disk), args.rounds)
        bench_read(table, store, args.model, Path(disk), args.rounds)
        bench_memory(table, store, Path(disk))

    if args.json:
        args.json.write_text(json.dumps({"cores": CORES, "rows": table.rows}, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(table.markdown())
    print(table.markdown(), end="")


if __name__ == "__main__":
    main()
