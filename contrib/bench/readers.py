"""Ways to read a file: each reads all of PATH once and returns the bytes that it read.

The synthetic ones need only Python's standard library. The real ones run a loader in a process of its own, which
measures itself, so that its start is not counted: `python readers.py NAME PATH` prints seconds and bytes.
"""

import ctypes
import mmap
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
BATCH = 32 * MIB  # mlx reads batches of this size
THREADS = 4  # with so many threads
SHAPES = 9
RANDOM_READS = 20_000
MAP_POPULATE = 0x8000
LIBC = ctypes.CDLL(None, use_errno=True)


def sequential(path, size: int, flags=0) -> int:
    fd = os.open(path, os.O_RDONLY | flags)
    buffer = mmap.mmap(-1, size)  # aligned to pages, as O_DIRECT wants
    total = 0
    while n := os.readv(fd, [buffer]):
        total += n
    os.close(fd)
    return total


# Written to before anything is measured: giving fresh memory to a process costs more than reading into it.
BUFFERS = [mmap.mmap(-1, BATCH) for _ in range(THREADS)]
for _buffer in BUFFERS:
    _buffer.write(bytes(BATCH))


def threads(path) -> int:
    fd = os.open(path, os.O_RDONLY)
    length = os.fstat(fd).st_size
    free = list(BUFFERS)

    def batch(start: int) -> int:
        buffer = free.pop()
        at, end = start, min(start + BATCH, length)
        with memoryview(buffer) as view:
            while at < end:
                at += os.preadv(fd, [view[at - start : end - start]], at)
        free.append(buffer)
        return end - start

    with ThreadPoolExecutor(THREADS) as pool:
        total = sum(pool.map(batch, range(0, length, BATCH)))
    os.close(fd)
    return total


def touch(path, advice=None, flags=mmap.MAP_SHARED) -> int:
    """Every byte, in order, copied to one place."""
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, flags, mmap.PROT_READ) as mapped:
        if advice is not None:
            mapped.madvise(advice)
        length = len(mapped)
        with memoryview(mapped) as view, memoryview(BUFFERS[0]) as target:
            for at in range(0, length, MIB):
                with view[at : at + MIB] as piece:
                    target[: len(piece)] = piece
    return length


def random_pages(path, count=RANDOM_READS) -> int:
    fd = os.open(path, os.O_RDONLY)
    pages = os.fstat(fd).st_size // PAGE
    numbers, buffer = random.Random(1), bytearray(PAGE)
    for _ in range(count):
        os.preadv(fd, [buffer], numbers.randrange(pages) * PAGE)
    os.close(fd)
    return count * PAGE


def shapes(path) -> int:
    """Nine processes that map one file, as a Core ML program for each shape does."""
    children = []
    for _ in range(SHAPES):
        if (child := os.fork()) == 0:
            touch(path)
            os._exit(0)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise RuntimeError("a reader failed")
    return SHAPES * os.stat(path).st_size


def whole(path) -> int:
    with open(path, "rb") as f:
        return len(f.read())


def command(*args) -> int:
    subprocess.run([str(a) for a in args], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return os.stat(args[-1]).st_size


def copy(path) -> int:
    # To nowhere, since writing would be measured too.
    subprocess.run(["cp", path, "/dev/null"], check=True)
    return os.stat(path).st_size


SYNTHETIC = {
    "read 4 KiB": lambda path: sequential(path, 4 * KIB),
    "read 32 KiB": lambda path: sequential(path, 32 * KIB),
    "read 1 MiB": lambda path: sequential(path, MIB),
    "O_DIRECT 1 MiB": lambda path: sequential(path, MIB, os.O_DIRECT),
    "4 threads, pread 32 MiB": threads,
    "random 4 KiB": random_pages,
    "mmap": touch,
    "mmap, sequential": lambda path: touch(path, mmap.MADV_SEQUENTIAL),
    "mmap, willneed": lambda path: touch(path, mmap.MADV_WILLNEED),
    "mmap, populate": lambda path: touch(path, flags=mmap.MAP_SHARED | MAP_POPULATE),
    "9 processes, mmap": shapes,
    "Python read()": whole,
    "cat": lambda path: command("cat", path),
    "cp": copy,
    "sha256sum": lambda path: command("sha256sum", path),
}


def mlx_load(path) -> int:
    import mlx.core as mx

    tensors = mx.load(str(path))
    mx.eval(list(tensors.values()))
    return os.stat(path).st_size


def safetensors_numpy(path) -> int:
    import numpy
    from safetensors import safe_open

    total = 0
    with safe_open(path, framework="numpy") as f:
        for name in f.keys():
            total += numpy.ascontiguousarray(f.get_tensor(name)).nbytes
    return total


def coremltools_blobs(path) -> int:
    """Every blob of a weight file of floats, as coremltools reads constants."""
    import struct

    from coremltools.libmilstoragepython import _BlobStorageReader

    reader, total = _BlobStorageReader(str(path)), 0
    with open(path, "rb", buffering=0) as file:
        count, at = struct.unpack("<I", file.read(4))[0], 64
        for _ in range(count):
            size, offset = struct.unpack("<QQ", os.pread(file.fileno(), 16, at + 8))
            total += len(reader.read_float_data(at)) * 4
            at = -(-(offset + size) // 64) * 64
    return total


REAL = {"mlx load": mlx_load, "safetensors to numpy": safetensors_numpy, "coremltools": coremltools_blobs}
IMPORTS = {"mlx load": ["mlx.core"], "safetensors to numpy": ["numpy", "safetensors"], "coremltools": ["coremltools.libmilstoragepython"]}
# The kinds of file that a reader reads, if not all.
FITS = {"mlx load": ("large", "small"), "safetensors to numpy": ("large", "small"), "coremltools": ("coreml",)}


def measure(name: str, path, python: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds of the readers, bytes."""
    if name in REAL:
        done = subprocess.run([python, __file__, name, path], check=True, capture_output=True, text=True)
        seconds, cpu, total = done.stdout.split()
        return float(seconds), float(cpu), int(total)
    return timed(SYNTHETIC[name], path)


def timed(reader, path) -> tuple[float, float, int]:
    def cpu() -> float:
        spent = os.times()
        return spent.user + spent.system + spent.children_user + spent.children_system

    before, start = cpu(), time.perf_counter()
    total = reader(path)
    return time.perf_counter() - start, cpu() - before, total


if __name__ == "__main__":
    _, wanted, file = sys.argv
    for module in IMPORTS[wanted]:
        __import__(module)
    print(*timed(REAL[wanted], file))
