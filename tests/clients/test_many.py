"""Sixty-four processes read random ranges of every file of every layout, and compare each byte with a copy.

For some seconds; for ten minutes with WMOUNT_LONG=1.
"""

import mmap
import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import Store, run, walk

PROCESSES = 64
SECONDS = 600 if os.environ.get("WMOUNT_LONG") else 8


@pytest.fixture(scope="module")
def trees(models, tmp_path_factory):
    """The mount with all variants among its entries, and the exported copy."""
    root = tmp_path_factory.mktemp("many")
    store = Store(root / "store")
    store.add(models / "tiny-llama", name="tiny-llama")
    store.add(models / "mixed.mlpackage", name="mixed")
    store.add(models / "subbyte.mlpackage", name="subbyte")
    at, copy = root / "mnt", root / "copy"
    at.mkdir()
    copy.mkdir()
    run("--variant", "all", store.path, at)
    try:
        layouts = [name for name in os.listdir(at) if not name.startswith(".")]
        assert len(layouts) >= 10
        for layout in layouts:
            store.run("export", layout, copy / layout)
        # Variants are exported by their names.
        for name, found in walk(at).items():
            if stat.S_ISREG(found.st_mode) and not name.startswith(".wmount") and not (copy / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                store.run("export", name, copy / name)
        yield at, copy
    finally:
        run("umount", at)


def work(at: Path, copy: Path, seed: int, seconds: float) -> int:
    rng = random.Random(seed)
    names = [name for name, found in walk(copy).items() if stat.S_ISREG(found.st_mode) and found.st_size]
    end, reads = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        name = rng.choice(names)
        flags = os.O_RDONLY | (os.O_DIRECT if rng.random() < 0.2 else 0)
        shown, expected = os.open(at / name, flags), os.open(copy / name, os.O_RDONLY)
        try:
            size = os.fstat(expected).st_size
            assert os.fstat(shown).st_size == size, name
            mapped = mmap.mmap(shown, 0, prot=mmap.PROT_READ) if rng.random() < 0.3 else None
            for _ in range(10):
                offset, length = rng.randrange(size + 10), int(2 ** rng.uniform(0, 18))
                want = os.pread(expected, length, offset)
                got = mapped[offset : offset + length] if mapped else os.pread(shown, length, offset)
                assert got == want, (name, offset, length, flags, mapped is not None)
                reads += 1
            if mapped:
                mapped.close()
            if rng.random() < 0.5:
                os.posix_fadvise(shown, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(shown)
            os.close(expected)
    return reads


def test_every_byte_that_many_processes_read_is_that_of_the_copy(trees):
    at, copy = trees
    command = [sys.executable, __file__, at, copy]
    start = lambda seed: subprocess.Popen(
        [str(word) for word in [*command, seed, SECONDS]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    children = [start(seed) for seed in range(PROCESSES)]
    total = 0
    for child in children:
        out, err = child.communicate()
        assert child.returncode == 0, err
        total += int(out)
    assert total > 10 * PROCESSES
    assert "problems        none" in run("status", at).stdout.decode()


if __name__ == "__main__":
    print(work(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
