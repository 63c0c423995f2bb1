#!/usr/bin/env python3
"""Measures small operations: stat, lookup, open and close, listing, small reads, and 64 readers at once.

    contrib/bench/small.py [--files 2000] [--rounds 5] [--peers plain,wmount,bindfs] [--disk DIR] [--json FILE]

The files are the raw export of a model of so many tensors of 4 KiB, which is exported for the other peers. "New" is the
first time after mounting, "again" a second time. Rates are medians of interleaved rounds with the smallest and largest in
brackets. Where strace is installed, the last line says how often the server waited for or woke another thread
(futex calls) in a run of the 64 readers: a lock on the way of every request would show as one for each.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from disk import run
from read import BINARY, Bench, available, write_safetensors

READERS, EACH = 64, 200


def stat_all(at: Path, names: list[str]):
    for name in names:
        os.stat(at / name)


def open_all(at: Path, names: list[str]):
    for name in names:
        os.close(os.open(at / name, os.O_RDONLY))


def read_all(at: Path, names: list[str]):
    for name in names:
        fd = os.open(at / name, os.O_RDONLY)
        os.read(fd, 8192)
        os.close(fd)


def missing(at: Path, names: list[str]):
    for name in names:
        try:
            os.stat(at / (name + ".none"))
        except FileNotFoundError:
            continue
        raise RuntimeError("a name that is not there was found")


def list_all(at: Path, names: list[str]):
    assert len(os.listdir(at)) == len(names)


def list_and_stat(at: Path, names: list[str]):
    with os.scandir(at) as entries:
        assert sum(entry.stat(follow_symlinks=False).st_size > 0 for entry in entries) == len(names)


def readers_at_once(at: Path, names: list[str]):
    """Each reader opens, reads and closes files of its own order."""
    children = []
    for number in range(READERS):
        if (child := os.fork()) == 0:
            step = 2 * number + 1
            read_all(at, [names[(number * 31 + i * step) % len(names)] for i in range(EACH)])
            os._exit(0)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        raise RuntimeError("a reader failed")


OPERATIONS = {
    "lookup of what is not there": (missing, None),
    "stat, new": (stat_all, None),
    "stat, again": (stat_all, None),
    "open and close, again": (open_all, None),
    "names of the directory": (list_all, None),
    "names and attributes": (list_and_stat, None),
    "open, read 4 KiB, close, new": (read_all, None),
    "open, read 4 KiB, close, again": (read_all, None),
    "64 readers: open, read, close": (readers_at_once, READERS * EACH),
}


def futexes(bench: Bench, at: Path, names: list[str]) -> int:
    """The futex calls of the server while the 64 readers run."""
    with tempfile.NamedTemporaryFile("r") as log:
        tracer = subprocess.Popen(["strace", "-f", "-c", "-e", "trace=futex", "-o", log.name, "-p", str(bench.server())], stderr=subprocess.PIPE)
        tracer.stderr.readline()  # it is attached
        readers_at_once(at, names)
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        found = re.search(r"(\d+)\s+(?:\d+\s+)?futex", log.read())
        return int(found[1]) if found else 0


class Small(Bench):
    """A model of many small tensors, as the mount's raw export and as a directory."""

    def __init__(self, work: Path, files: int):
        self.work, self.plain, self.at = work, work / "plain", work / "mnt"
        self.at.mkdir()
        self.store, source = work / "store", work / "model"
        source.mkdir()
        write_safetensors(source / "model.safetensors", [4096] * files)
        run(BINARY, "-s", self.store, "import", source, "-n", "m")
        run(BINARY, "-s", self.store, "export", "gds_export/m/latest", self.plain)

    def directory(self, peer: str) -> Path:
        return self.at / "gds_export/m/latest" if peer.startswith("wmount") else self.plain if peer == "plain" else self.at


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=lambda text: text.split(","), default=["plain", "wmount", "bindfs"])
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not BINARY.is_file():
        sys.exit(f"small.py: {BINARY} is missing: build it, or set WMOUNT")
    peers, waits = available(args.peers), None
    rates: dict[str, dict[str, list[float]]] = {name: {peer: [] for peer in peers} for name in OPERATIONS}
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="wmount-bench-") as work:
        bench = Small(Path(work), args.files)
        names = sorted(os.listdir(bench.plain))
        for turn in range(args.rounds):
            for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
                bench.mount(peer)
                at = bench.directory(peer)
                os.stat(at)  # a model is planned when it is first asked for
                for name, (operation, count) in OPERATIONS.items():
                    started = time.perf_counter()
                    operation(at, names)
                    rates[name][peer].append((count or len(names)) / (time.perf_counter() - started))
                if peer == "wmount" and turn == args.rounds - 1 and available(["strace"]):
                    waits = futexes(bench, at, names)
                bench.unmount(peer)
    print(f"{len(names)} files, {os.cpu_count()} cores, {args.rounds} rounds, thousands of names a second\n")
    print("| operation | " + " | ".join(peers) + " |\n|---|" + "---|" * len(peers))
    for name, by_peer in rates.items():
        cells = [f"{statistics.median(r) / 1e3:.0f} ({min(r) / 1e3:.0f} - {max(r) / 1e3:.0f})" for r in by_peer.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if waits is not None:
        print(f"\nfutex calls of the server for {READERS * EACH} files of the {READERS} readers: {waits}")
    if args.json:
        args.json.write_text(json.dumps({"files": len(names), "rates": rates, "futex calls": waits}, indent=1) + "\n")


if __name__ == "__main__":
    main()
