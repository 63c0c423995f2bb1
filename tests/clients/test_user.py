"""Mounting as an ordinary user, through fusermount3."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from harness import BINARY

USER = 65534 if os.geteuid() == 0 else os.geteuid()


@pytest.fixture
def home(small):
    """A directory of that user's with the program, the small store and a mountpoint."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shutil.copy(BINARY, root / "wmount")
        shutil.copytree(small.path, root / "store")
        (root / "mnt").mkdir()
        for path in [root, *root.rglob("*")]:
            os.chown(path, USER, -1)
        yield root


def as_user(home: Path, *args, path=None) -> subprocess.CompletedProcess:
    env = {"HOME": str(home), "PATH": path if path is not None else os.environ["PATH"]}
    user = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
    args = [str(a) for a in (home / "wmount", *args)]
    return subprocess.run(args, capture_output=True, stdin=subprocess.DEVNULL, env=env, cwd=home, timeout=60, **user)


def test_a_user_mounts_reads_and_unmounts(home, models):
    """The daemon serves its own user; root sees it mounted."""
    done = as_user(home, home / "store", home / "mnt")
    assert done.returncode == 0, done.stderr.decode()
    try:
        inside = "safetensors/tiny-llama/latest/config.json"
        user = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
        shown = subprocess.run(["cat", str(home / "mnt" / inside)], capture_output=True, check=True, **user).stdout
        assert shown == (models / "tiny-llama/config.json").read_bytes()
    finally:
        done = as_user(home, "umount", home / "mnt")
    assert done.returncode == 0, done.stderr.decode()
    assert f" {home}/mnt " not in Path("/proc/mounts").read_text()


def test_without_the_helper_the_error_says_what_to_install(home):
    done = as_user(home, home / "store", home / "mnt", path="/nonexistent")
    line = done.stderr.decode().strip()
    assert done.returncode == 1 and "\n" not in line
    assert "fusermount3" in line and "fuse3" in line
