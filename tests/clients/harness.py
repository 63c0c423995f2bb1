"""Runs the built program: imports, mounts, unmounts, and looks at stores and trees from outside."""

import hashlib
import json
import os
import stat
import subprocess
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("WMOUNT", REPOSITORY / "target/release/wmount")).resolve()
HOST = "registry.ollama.ai"


class Store:
    """A store directory and the commands that work on it."""

    def __init__(self, path: Path):
        self.path = path

    def run(self, *args, check=True, timeout=300) -> subprocess.CompletedProcess:
        """`wmount -s STORE ARGS...`; raises with the program's own words when it fails."""
        return run("-s", self.path, *args, check=check, timeout=timeout)

    def json(self, *args, code=0):
        """The same with --json; the parsed answer."""
        done = self.run(*args, "--json", check=False)
        assert done.returncode == code, f"{args}: exit {done.returncode}: {done.stderr.decode()}"
        return json.loads(done.stdout)

    def add(self, *paths, name: str):
        return self.json("import", *paths, "-n", name)

    def blobs(self) -> dict[str, int]:
        return {p.name: p.stat().st_size for p in (self.path / "blobs").iterdir()}

    def listing(self) -> dict[str, str]:
        """Every path of the store with its content's digest, without `.wmount`, which may be rebuilt at any time."""
        if not self.path.exists():
            return {}
        if self.path.is_file():
            return {"": digest(self.path)}
        found = {}
        for path in sorted(self.path.rglob("*")):
            inside = path.relative_to(self.path)
            if inside.parts[0] != ".wmount":
                found[str(inside)] = digest(path) if path.is_file() else "directory"
        return found


class Mount:
    """A store mounted at a directory; a context manager.

    The command's output is read to its end, so a daemon that kept it open would be noticed.
    """

    def __init__(self, store: Store, at: Path, *options: str):
        self.store, self.at, self.options = store, at, options
        at.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        run(*self.options, self.store.path, self.at, timeout=60)
        assert os.path.ismount(self.at), "the command returned before the mount was there"
        return self

    def __exit__(self, *_):
        done = run("umount", self.at, check=False, timeout=60)
        if os.path.ismount(self.at):
            unmount(self.at, lazy=True)
            raise AssertionError(f"still mounted: {done.stderr.decode()}")
        assert done.returncode == 0, done.stderr.decode()

    def __truediv__(self, inside) -> Path:
        return self.at / inside


def run(*args, check=True, timeout=300) -> subprocess.CompletedProcess:
    assert BINARY.is_file(), f"{BINARY} is missing: build it, or set WMOUNT"
    args = [str(a) for a in args]
    done = subprocess.run([str(BINARY), *args], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    if check and done.returncode != 0:
        raise AssertionError(f"wmount {' '.join(args)}: exit {done.returncode}: {done.stderr.decode()}")
    return done


def unmount(at: Path, lazy=False):
    """Unmounts with the system's own command."""
    root = os.geteuid() == 0
    tool = ["umount"] if root else ["fusermount3", "-u"]
    if lazy:
        tool.append("-l" if root else "-z")
    subprocess.run([*tool, str(at)], check=not lazy)


def digest(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 20):
            h.update(piece)
    return h.hexdigest()


def walk(root: Path) -> dict[str, os.stat_result]:
    """Every path below `root`, relative, with lstat."""
    found = {".": os.lstat(root)}

    def enter(directory: Path):
        for entry in os.scandir(directory):
            status = os.lstat(entry.path)
            found[os.path.relpath(entry.path, root)] = status
            if stat.S_ISDIR(status.st_mode):
                enter(Path(entry.path))

    enter(root)
    return found


def eventually(condition, seconds=10.0) -> bool:
    """Whether `condition()` becomes true within that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
