"""Disks to measure on: a file system of a kind in a file, and a disk that is held to a rate."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def run(*args):
    """Runs a command; ends the program if it fails."""
    done = subprocess.run([str(a) for a in args], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{Path(sys.argv[0]).name}: {' '.join(map(str, args))}: {done.stderr.strip()}")


@contextlib.contextmanager
def file_system(kind: str, disk: Path, megabytes: int):
    """The mountpoint of a new file system in a file on `disk`."""
    image, at = disk / f"wmount-bench-{os.getpid()}.{kind}", disk / f"wmount-bench-{os.getpid()}"
    with open(image, "wb") as f:
        f.truncate(megabytes << 20)
    run(f"mkfs.{kind}", *(["-F"] if kind == "ext4" else ["-f"]), "-q", image)
    at.mkdir()
    run("mount", "-o", "loop", image, at)
    try:
        yield at
    finally:
        run("umount", at)
        at.rmdir()
        image.unlink()


@contextlib.contextmanager
def held(path: Path, rate: int):
    """Lets this process, and those that it starts, read no more than `rate` bytes in a second from the disk of `path`.

    What a virtual machine takes for its disk is in part its host's memory, and as fast as that happens to be: plain reads of
    one file were seen at 0.4 to 2.4 GB/s. A disk that is held to less than the least of it is the same for everybody."""
    device = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    # A partition is held by its disk.
    number = (block.parent / "dev" if (block / "partition").exists() else block / "dev").read_text().strip()
    name = f"wmount-bench-{os.getpid()}"
    if (CGROUPS / "blkio").is_dir():
        top, limit, line = CGROUPS / "blkio", "blkio.throttle.read_bps_device", f"{number} {rate}"
    else:
        top, limit, line = CGROUPS, "io.max", f"{number} rbps={rate}"
        (top / "cgroup.subtree_control").write_text("+io")
    group = top / name
    group.mkdir()
    try:
        (group / limit).write_text(line)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (top / "cgroup.procs").write_text(process)
        group.rmdir()
