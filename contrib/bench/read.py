#!/usr/bin/env python3
"""Reads the same bytes in every way, from a mount and from what one could use instead, in one run.

    contrib/bench/read.py [--size MB] [--rounds N] [--peers A,B] [--readers A,B] [--states A,B] [--files A,B]
                          [--disk DIR] [--fs xfs|btrfs|ext4] [--hold MB/s] [--python PYTHON]
                          [--json FILE] [--markdown FILE] [--svg FILE]

Every sample has a fresh mount. Within a round all peers take turns, so that a figure and its neighbours saw the same
machine; ratios are taken against the plain file of the same round, and the table has medians of them.

States: `cold`, with the page cache dropped (root); `first`, with the stored bytes in the page cache but the mount
not yet read; `second`, the same again. Peers: `plain`; `wmount`, `wmount:cache` and `wmount:direct`, the mount and its
modes; `ceiling` and `ceiling:direct`, files of the same length whose bytes cost nothing, which is what FUSE itself takes
(`cargo build --release --example ceiling`; root); `bindfs` and `mergerfs` over the plain files (Debian's packages);
`ratarmount` over a tar of them (PyPI, the version of requirements.txt). The plain file of a computed one is what
`wmount export` writes. Real loaders (mlx, safetensors, coremltools) need --python, an interpreter that has them. What is
not installed is left out, and named. --fs makes a file system of that kind in a file and works there (root). --hold lets
everybody read so many MB in a second from the disk at the most (root).
"""

import argparse
import array
import contextlib
import json
import mmap
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chart
import disk
import readers
from disk import run
from tensors import header

REPOSITORY = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("WMOUNT", REPOSITORY / "target/release/wmount")).resolve()
CEILING = BINARY.parent / "examples/ceiling"
MB = 1_000_000
STATES = ["cold", "first", "second"]
PEERS = ["plain", "wmount", "ceiling", "bindfs", "mergerfs", "ratarmount"]
FILES = {
    "whole": "weights.bin",
    "large": "large.safetensors",
    "small": "small.safetensors",
    "computed": "computed.amb",
    "coreml": "weight.bin",
}
# Where the mount has them, if not in the imported directory.
ELSEWHERE = {
    "computed": "amb/floats/latest@f16.amb",
    "coreml": "coreml/net/latest/net.mlpackage/Data/com.apple.CoreML/weights/weight.bin",
}
WHAT = {
    "whole": "a file that is one blob",
    "large": "composed of a few large tensors",
    "small": "composed of many 4 KiB tensors",
    "computed": "fp16, computed from fp32",
    "coreml": "the weights of a Core ML package",
}


def write_safetensors(path: Path, lengths: list[int]):
    with open(path, "wb") as f:
        f.write(header((f"{path.stem}.{i}", "U8", [length], length) for i, length in enumerate(lengths)))
        for i, length in enumerate(lengths):
            write_random(f, length, i)


def write_random(f, length: int, seed: int):
    """Other bytes for each seed, so that no two tensors are one blob."""
    numbers = random.Random(seed)
    while length:
        f.write(numbers.randbytes(min(length, 16 * MB)))
        length -= min(length, 16 * MB)


def write_floats(path: Path, count: int):
    """Fp32 tensors with values that fp16 has: small integers times a power of two."""
    width = 4 * (1 << 22)
    count = max(1, count * 4 // width)
    values = array.array("f", (((i * 2654435761) % 1021 - 510) / 256 for i in range(1 << 16)))
    with open(path, "wb") as f:
        f.write(header((f"floats.{i}", "F32", [1 << 11, 1 << 11], width) for i in range(count)))
        for i in range(count):
            values[0] = i
            f.write(values.tobytes() * (width // (values.itemsize * len(values))))


def write_package(path: Path, python: str, size: int):
    """A Core ML package of coremltools' own making."""
    script = (
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1]); import coreml;"
        "rng = np.random.default_rng(1); n = max(2, int(sys.argv[3]) // (4 * coreml.WIDTH ** 2));"
        "coreml.convert(8, [rng.standard_normal((coreml.WIDTH,) * 2, dtype=np.float32) for _ in range(n)]).save(sys.argv[2])"
    )
    run(python, "-c", script, Path(__file__).parent, path, size)


def make_files(plain: Path, size: int):
    plain.mkdir()
    with open(plain / FILES["whole"], "wb") as f:
        write_random(f, size, -1)
    # Lengths that are no multiple of anything, so that no tensor begins where a page does.
    write_safetensors(plain / FILES["large"], [size // 8 + 1000 * i + i for i in range(8)])
    write_safetensors(plain / FILES["small"], [4096 + i % 7 for i in range(size // 8 // 4096)])
    os.sync()


class Bench:
    """The stored bytes, in each peer's form, and what mounts them."""

    def __init__(self, work: Path, size: int, peers: list[str], files: list[str], python: str | None):
        self.size = size
        self.work, self.plain, self.at = work, work / "plain", work / "mnt"
        self.at.mkdir()
        make_files(self.plain, size)
        self.store, self.tar = work / "store", work / "files.tar"
        run(BINARY, "-s", self.store, "import", self.plain, "-n", "bench")
        if "computed" in files:
            (work / "floats").mkdir()
            write_floats(work / "floats/model.safetensors", size // 2)
            run(BINARY, "-s", self.store, "import", work / "floats", "-n", "floats")
            shutil.rmtree(work / "floats")
            run(BINARY, "-s", self.store, "export", ELSEWHERE["computed"], self.plain / FILES["computed"])
        if "coreml" in files:
            package = work / "net.mlpackage"
            write_package(package, python, size)
            run(BINARY, "-s", self.store, "import", package, "-n", "net")
            (package / "Data/com.apple.CoreML/weights/weight.bin").rename(self.plain / FILES["coreml"])
            shutil.rmtree(package)
        os.sync()
        if "ratarmount" in peers:
            run("tar", "-C", self.plain, "-cf", self.tar, ".")
            self.tool = shutil.which("ratarmount")

    def stored(self, peer: str) -> list[Path]:
        if peer.startswith("wmount"):
            return list((self.store / "blobs").iterdir())
        return [self.tar] if peer == "ratarmount" else list(self.plain.iterdir())

    def prepare(self, peer: str, state: str):
        if state == "cold":
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("1")
        else:
            for path in self.stored(peer):
                readers.sequential(path, readers.MIB)
        # A virtual machine may have given its free memory back to the host, and gets it again page by page: that would
        # cost whoever is measured next more than reading does.
        mmap.mmap(-1, 4 * self.size, flags=mmap.MAP_PRIVATE | readers.MAP_POPULATE).close()

    def mount(self, peer: str):
        name, _, mode = peer.partition(":")
        if name == "wmount":
            run(BINARY, "--read", mode or "auto", self.store, self.at)
        elif name == "ratarmount":
            run(self.tool, self.tar, self.at)
        elif name == "ceiling":
            server = subprocess.Popen([CEILING, self.plain, self.at, mode])
            while not os.path.ismount(self.at):
                if server.poll() is not None:
                    sys.exit(f"read.py: {CEILING} ended")
                time.sleep(0.01)
        elif name != "plain":
            run(name, self.plain, self.at)

    def path(self, peer: str, file: str) -> Path:
        """The file, in what is mounted."""
        if peer == "plain":
            return self.plain / FILES[file]
        if peer.startswith("wmount"):
            return self.at / ELSEWHERE.get(file, f"safetensors/bench/latest/{FILES[file]}")
        return self.at / FILES[file]

    def unmount(self, peer: str):
        if peer == "plain":
            return
        for _ in range(100):
            if subprocess.run(["umount", self.at], capture_output=True).returncode == 0:
                break
            time.sleep(0.05)
        while self.server() is not None:
            time.sleep(0.01)

    def server(self) -> int | None:
        """The process that serves the mount: the youngest with the mountpoint among its arguments."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(self.at) in arguments:
                found.append(int(entry.name))
        return max(found, default=None)


def ticks(pid: int | None) -> float:
    """CPU seconds of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int | None) -> dict[str, int]:
    """Bytes in the page cache of the machine, and anonymous and file bytes resident in the server."""
    def kib(path: str, keys: dict[str, str]) -> dict[str, int]:
        lines = dict(line.split(":", 1) for line in Path(path).read_text().splitlines() if ":" in line)
        return {name: int(lines[key].split()[0]) * 1024 for key, name in keys.items()}

    found = kib("/proc/meminfo", {"Cached": "cached"})
    if pid is not None:
        found |= kib(f"/proc/{pid}/status", {"RssAnon": "server", "RssFile": "server_files"})
    return found


def sample(bench: Bench, peer: str, file: str, reader: str, states: list[str], python: str) -> list[dict]:
    """One mount of one peer: a cold or first read, and a second one."""
    found = []
    for begin in [state for state in ("cold", "first") if state in states]:
        bench.prepare(peer, begin)
        bench.mount(peer)
        path = bench.path(peer, file)
        os.stat(path)  # a model is planned when it is first asked for: that is not reading
        pid = None if peer == "plain" else bench.server()
        turns = [begin] + (["second"] if "second" in states and begin == ("first" if "first" in states else "cold") else [])
        for state in turns:
            before, spent = memory(pid), ticks(pid)
            seconds, cpu, total = readers.measure(reader, path, python)
            after = memory(pid)
            row = {"peer": peer, "file": file, "reader": reader, "state": state}
            row |= {"rate": total / seconds, "cpu": (cpu + ticks(pid) - spent) / total * 1e9}
            row |= {key: after[key] - before[key] for key in before}
            found.append(row)
        bench.unmount(peer)
    return found


def available(peers: list[str]) -> list[str]:
    def is_here(name: str) -> bool:
        return name in ("plain", "wmount") or bool(shutil.which(CEILING if name == "ceiling" else name))

    missing = [peer for peer in peers if not is_here(peer.partition(":")[0])]
    for peer in missing:
        print(f"read.py: {peer} is not installed and left out", file=sys.stderr)
    return [peer for peer in peers if peer not in missing]


def summary(samples: list[dict], peers: list[str]) -> list[dict]:
    """Medians of the rates, and of the ratios to the plain file in the same round."""
    groups = {}
    for row in samples:
        groups.setdefault((row["file"], row["reader"], row["state"]), {}).setdefault(row["peer"], []).append(row)
    rows = []
    for (file, reader, state), by_peer in groups.items():
        row = {"file": file, "reader": reader, "state": state, "peers": {}}
        for peer in [peer for peer in peers if peer in by_peer]:
            mine = by_peer[peer]
            rates = [one["rate"] for one in mine]
            cell = {"rate": statistics.median(rates), "low": min(rates), "high": max(rates)}
            cell |= {key: statistics.median(one[key] for one in mine) for key in ("cpu", "cached")}
            cell |= {key: max(one[key] for one in mine) for key in ("server", "server_files") if key in mine[0]}
            if "plain" in by_peer:
                pairs = zip(mine, by_peer["plain"])
                cell["ratio"] = statistics.median(one["rate"] / plain["rate"] for one, plain in pairs)
            row["peers"][peer] = cell
        rows.append(row)
    return rows


def markdown(rows: list[dict], peers: list[str]) -> str:
    text = ""
    for file in dict.fromkeys(row["file"] for row in rows):
        text += f"### {WHAT[file][0].upper()}{WHAT[file][1:]}\n\n"
        text += "GB/s, and in brackets the ratio to the plain file; then CPU seconds for each GB.\n\n"
        text += "| reader | state | " + " | ".join(peers) + " |\n|---|---|" + "---|" * len(peers) + "\n"
        for row in (row for row in rows if row["file"] == file):
            cells = [cell(row["peers"].get(peer)) for peer in peers]
            text += f"| {row['reader']} | {row['state']} | " + " | ".join(cells) + " |\n"
        text += "\nMB that the page cache grew by, and after a + the largest growth of the server's own memory.\n\n"
        text += "| reader | state | " + " | ".join(peers) + " |\n|---|---|" + "---|" * len(peers) + "\n"
        for row in (row for row in rows if row["file"] == file):
            cells = [growth(row["peers"].get(peer)) for peer in peers]
            text += f"| {row['reader']} | {row['state']} | " + " | ".join(cells) + " |\n"
        text += "\n"
    return text


def growth(found: dict | None) -> str:
    if found is None:
        return "-"
    return f"{found['cached'] / 1e6:.0f}" + (f" + {found['server'] / 1e6:.0f}" if "server" in found else "")


def version(peer: str) -> str:
    """What a peer says of itself in its first line."""
    if peer.startswith("ceiling"):
        return "examples/ceiling.rs"
    name = BINARY if peer.startswith("wmount") else peer
    done = subprocess.run([name, "--version"], capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().partition("\n")[0]


def cell(found: dict | None) -> str:
    if found is None:
        return "-"
    ratio = f" ({found['ratio']:.2f})" if "ratio" in found else ""
    return f"{found['rate'] / 1e9:.2f}{ratio}, {found['cpu']:.2f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="MB of the large files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where on disk to work")
    parser.add_argument("--fs", choices=["ext4", "xfs", "btrfs"], help="make such a file system and work there")
    parser.add_argument("--hold", type=int, metavar="MB/s", help="let the disk give no more than this")
    parser.add_argument("--python", help="an interpreter with mlx, safetensors and coremltools")
    for name, all_ in (("peers", PEERS), ("states", STATES), ("files", FILES), ("readers", None)):
        default = list(all_) if all_ else None
        parser.add_argument(f"--{name}", type=lambda text: text.split(";" if ";" in text else ","), default=default)
    for name in ("json", "markdown", "svg"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args()
    if not BINARY.is_file():
        sys.exit(f"read.py: {BINARY} is missing: build it, or set WMOUNT")
    wanted = args.readers or list(readers.SYNTHETIC) + (list(readers.REAL) if args.python else [])
    peers = available(args.peers)
    if not args.python and "coreml" in args.files:
        print("read.py: without --python there is no Core ML package", file=sys.stderr)
        args.files.remove("coreml")

    samples = []
    # Cut short, it reports what it has.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        place = args.disk
        if args.fs:
            place = stack.enter_context(disk.file_system(args.fs, place, 12 * args.size + 1024))
        work = stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix="wmount-bench-"))
        bench = Bench(Path(work), args.size * MB, peers, args.files, args.python)
        if args.hold:
            stack.enter_context(disk.held(Path(work), args.hold * MB))
        try:
            for turn in range(args.rounds):
                for file, reader in [(file, reader) for file in args.files for reader in wanted]:
                    if file not in readers.FITS.get(reader, FILES):
                        continue
                    for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
                        states = args.states
                        if peer.startswith("ceiling"):
                            # Zeros are no model, and on no disk.
                            states = [state for state in states if state != "cold" and reader not in readers.REAL]
                        samples += sample(bench, peer, file, reader, states, args.python)
                print(f"read.py: round {turn + 1} of {args.rounds} done", file=sys.stderr)
        except KeyboardInterrupt:
            subprocess.run(["umount", "-l", bench.at], capture_output=True)

    rows = summary(samples, peers)
    machine = {"kernel": platform.release(), "cores": len(os.sched_getaffinity(0)), "size": args.size * MB}
    machine |= {"file system": args.fs or "as it is", "disk held to MB/s": args.hold, "rounds": args.rounds, "load": os.getloadavg()[1]}
    machine["versions"] = {peer: version(peer) for peer in peers if peer != "plain"}
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows, "samples": samples}, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(f"{json.dumps(machine)}\n\n{markdown(rows, peers)}")
    if args.svg:
        args.svg.write_text(chart.svg(rows, peers))
    print(markdown(rows, peers), end="")


if __name__ == "__main__":
    main()
