"""The same system calls on a mount and on a copy of it: the same results, the same errors.

The copy is what `wmount export` writes, bind-mounted with the mount's own flags (read only, nodev, nosuid, noexec), with
the same modes, owners and times. Where the two differ on purpose, DIFFERENT says so and why.
"""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import random
import select
import stat
import struct
import subprocess
import time
from pathlib import Path

import pytest

import uring
from harness import Mount, Store, digest, run, unmount, walk

# Directories that are compared, and in them a file of each kind.
TREES = [
    "safetensors/tiny-llama/latest",
    "coreml/mixed/latest",
    "original/tiny-llama/latest",
    "gds_export/tiny-llama/latest",
    "amb/tiny-llama",
]
FILES = {
    "composed": "safetensors/tiny-llama/latest/model-00001-of-00003.safetensors",
    "whole blob": "safetensors/tiny-llama/latest/config.json",
    "synthesised": "amb/tiny-llama/latest.amb",
    "computed": "amb/tiny-llama/latest@int8.amb",
}
DIRECTORY = "original/tiny-llama/latest/tiny-llama"

# Call: why the mount answers otherwise, and what.
DIFFERENT = {
    "getxattr": ("it has no extended attributes, and the kernel asks only once", errno.EOPNOTSUPP),
    "listxattr": ("it has no extended attributes, and the kernel asks only once", errno.EOPNOTSUPP),
    "epoll_ctl": ("the kernel lets every FUSE file be polled; it is always ready", 0),
    "ioctl FS_IOC_GETFLAGS": ("inode flags are those of disks' file systems", errno.ENOTTY),
    "preadv2 NOWAIT": ("the kernel offers no reads without waiting from FUSE", errno.ENOTSUP),
}

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
AT_FDCWD, AT_EACCESS, AT_SYMLINK_NOFOLLOW = -100, 0x200, 0x100


def call(function, *args) -> int:
    """A libc function; raises as Python's own do."""
    result = getattr(libc, function)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), function)
    return result


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory):
    """The mount, and the copy beside it."""
    assert os.geteuid() == 0, "a bind mount needs root"
    root = tmp_path_factory.mktemp("conformance")
    store = Store(root / "store")
    store.add(models / "tiny-llama", name="tiny-llama")
    store.add(models / "mixed.mlpackage", name="mixed")
    with Mount(store, root / "mnt") as mount:
        copy, bound = root / "copy", root / "bound"
        for inside in [*TREES, FILES["computed"]]:
            (copy / inside).parent.mkdir(parents=True, exist_ok=True)
            store.run("export", inside, copy / inside)
        for name in sorted(walk(copy), reverse=True):
            like = os.stat(mount / name)
            os.chmod(copy / name, stat.S_IMODE(like.st_mode))
            os.utime(copy / name, ns=(like.st_mtime_ns, like.st_mtime_ns))
        bound.mkdir()
        subprocess.run(["mount", "--bind", copy, bound], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro,nosuid,nodev,noexec", bound], check=True)
            yield mount.at, bound
        finally:
            unmount(bound, lazy=True)


def outcome(work, *args):
    """What a call returns, or the name of its error."""
    try:
        return work(*args)
    except OSError as error:
        return errno.errorcode[error.errno]


def compare(pair, calls: dict):
    """Runs every call on both; collects where they differ."""
    different = {}
    for name, work in calls.items():
        shown, expected = (outcome(work, base) for base in pair)
        reason = DIFFERENT.get(name.split(":")[0])
        if reason:
            expected = errno.errorcode[reason[1]] if reason[1] else shown if not isinstance(shown, str) else 0
        if shown != expected:
            different[name] = (shown, expected)
    shown = list(different.items())
    assert not different, f"{len(shown)} of {len(calls)} differ (call: mount, copy): {shown[:40]}"


def opened(base: Path, inside: str, flags: int):
    """The kind and size of what is opened; the descriptor is closed."""
    fd = os.open(os.fsencode(base) + b"/" + os.fsencode(inside), flags, 0o644)
    try:
        found = os.fstat(fd)
        status = fcntl.fcntl(fd, fcntl.F_GETFL)
        return stat.S_IFMT(found.st_mode), stat.S_ISREG(found.st_mode) and found.st_size, status
    finally:
        os.close(fd)


FLAGS = [
    "CREAT",
    "EXCL",
    "TRUNC",
    "APPEND",
    "DIRECT",
    "DIRECTORY",
    "NOFOLLOW",
    "PATH",
    "TMPFILE",
    "NONBLOCK",
    "SYNC",
    "NOATIME",
    "CLOEXEC",
]


@pytest.mark.parametrize("kind", FILES)
def test_open_with_every_three_flags(pair, kind):
    file = FILES[kind]
    places = [
        file,
        file + "/",
        file + "/x",
        f"{file}/.",
        DIRECTORY,
        DIRECTORY + "/",
        f"{DIRECTORY}/.",
        f"{DIRECTORY}/..",
        DIRECTORY + "/none",
        DIRECTORY + "/none/",
        "none/none",
        DIRECTORY + "/" + "n" * 255,
        DIRECTORY + "/" + "n" * 256,
    ]
    calls = {}
    sets = [flags for count in range(4) for flags in itertools.combinations(FLAGS, count)]
    for mode, flags, place in itertools.product(["RDONLY", "WRONLY", "RDWR"], sets, places):
        bits = getattr(os, "O_" + mode)
        for flag in flags:
            bits |= getattr(os, "O_" + flag)
        name = f"open {place[-40:]} {mode} {' '.join(flags)}"
        calls[name] = lambda base, place=place, bits=bits: opened(base, place, bits)
    compare(pair, calls)


def with_fd(inside, work, flags=os.O_RDONLY):
    def run_with(base):
        fd = os.open(base / inside, flags)
        try:
            return work(fd)
        finally:
            os.close(fd)

    return run_with


def size_of(pair, inside) -> int:
    return os.stat(pair[1] / inside).st_size


def edges(size):
    return [
        -(2**63),
        -1,
        0,
        1,
        7,
        4095,
        4096,
        4097,
        size // 2,
        size - 1,
        size,
        size + 1,
        size + 4096,
        2**43,
    ]  # ext4 ends at 2**44


@pytest.mark.parametrize("kind", FILES)
def test_reads_at_all_edges(pair, kind):
    inside = FILES[kind]
    size = size_of(pair, inside)
    calls = {}
    lengths = [0, 1, 100, 4096, 65536, size, size + 1]

    def preadv(lengths, offset, flags=0):
        def work(fd):
            buffers = [bytearray(length) for length in lengths]
            read = os.preadv(fd, buffers, offset, flags) if flags else os.preadv(fd, buffers, offset)
            return read, [bytes(buffer) for buffer in buffers]

        return work

    def seek_and(offset, read):
        def work(fd):
            os.lseek(fd, offset, os.SEEK_SET)
            got = read(fd)
            return got, os.lseek(fd, 0, os.SEEK_CUR)

        return work

    def readv(fd):
        buffers = [bytearray(10), bytearray(0), bytearray(5000)]
        return os.readv(fd, buffers), buffers

    for offset in edges(size):
        for length in lengths:
            calls[f"pread {length} at {offset}"] = with_fd(inside, lambda fd, a=length, b=offset: os.pread(fd, a, b))
            calls[f"read {length} at {offset}"] = with_fd(inside, seek_and(offset, lambda fd, a=length: os.read(fd, a)))
        calls[f"preadv at {offset}"] = with_fd(inside, preadv([3, 0, 4096, 100000], offset))
        calls[f"preadv2 HIPRI at {offset}"] = with_fd(inside, preadv([10], offset, os.RWF_HIPRI))
        calls[f"readv at {offset}"] = with_fd(inside, seek_and(offset, readv))
        for whence in ["SET", "CUR", "END", "DATA", "HOLE"]:
            seek = lambda fd, a=offset, b=whence: os.lseek(fd, a, getattr(os, "SEEK_" + b))
            calls[f"lseek {whence} {offset}"] = with_fd(inside, seek)
    calls["lseek with a bad whence"] = with_fd(inside, lambda fd: os.lseek(fd, 0, 77))
    calls["preadv of 1025 parts"] = with_fd(
        inside, lambda fd: call("preadv", fd, ctypes.create_string_buffer(16 * 1025), 1025, ctypes.c_int64(0))
    )
    calls["read into nowhere"] = with_fd(
        inside, lambda fd: call("pread", fd, ctypes.c_void_p(8), 100, ctypes.c_int64(0))
    )
    calls["write"] = with_fd(inside, lambda fd: os.write(fd, b"x"))
    calls["pwrite"] = with_fd(inside, lambda fd: os.pwrite(fd, b"x", 0))
    compare(pair, calls)


@pytest.mark.parametrize("kind", FILES)
def test_maps(pair, kind):
    inside = FILES[kind]
    size = size_of(pair, inside)

    def mapped(length, prot, flags, offset):
        def work(fd):
            at = libc.mmap(None, length, prot, flags, fd, offset)
            if at == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mmap")
            inside_file = max(0, min(length, size - offset))
            # The rest of the last page is zeros; what follows it is not touched.
            shown = ctypes.string_at(at, min(-(-inside_file // 4096) * 4096, length)) if prot & mmap.PROT_READ else b""
            upgraded = outcome(lambda: call("mprotect", ctypes.c_void_p(at), ctypes.c_size_t(4096), 7))
            libc.munmap(at, length)
            return shown, upgraded

        return work

    calls = {}
    kinds = {
        "shared": 1,
        "private": 2,
        "validate": 3,
        "populate": 0x8001,
        "none": 0,
        "locked": 0x2002,
        "noreserve": 0x4002,
    }
    ranges = [
        (0, 0),
        (1, 0),
        (size, 0),
        (size + 4096, 0),
        (4096, 4096),
        (4096, 1),
        (4096, -(-size // 4096) * 4096),
        (4096, 2**40),
    ]
    for (length, offset), prot, name in itertools.product(ranges, range(8), kinds):
        calls[f"mmap {length} at {offset} prot {prot} {name}"] = with_fd(
            inside, mapped(length, prot, kinds[name], offset)
        )
    for advice in [0, 1, 2, 3, 4, 8, 9, 10, 12, 14, 15, 16, 20, 21, 22, 23, 25, 77]:

        def madvise(fd, advice=advice):
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as m:
                m.madvise(advice)
                return m[:]

        calls[f"madvise {advice}"] = with_fd(inside, madvise)
    compare(pair, calls)


def same_of_stat(found):
    return found.st_mode, found.st_uid, found.st_gid, stat.S_ISREG(found.st_mode) and found.st_size, found.st_mtime_ns


PLACES = [
    *FILES.values(),
    DIRECTORY,
    DIRECTORY + "/",
    DIRECTORY + "/.",
    DIRECTORY + "/..",
    FILES["composed"] + "/",
    FILES["composed"] + "/.",
    FILES["composed"] + "/..",
    DIRECTORY + "/none",
    DIRECTORY + "/none/x",
    DIRECTORY + "/" + "n" * 255,
    DIRECTORY + "/" + "n" * 256,
    DIRECTORY + "/\udcff",
    "x/" * 2047,
    "x/" * 2049,
]


def joined(base: Path, inside: str) -> bytes:
    return os.fsencode(base) + b"/" + os.fsencode(inside)


def test_stat_and_access(pair):
    calls = {}
    for place in PLACES:
        calls[f"stat {place[-40:]}"] = lambda base, p=place: same_of_stat(os.stat(joined(base, p)))
        calls[f"lstat {place[-40:]}"] = lambda base, p=place: same_of_stat(os.lstat(joined(base, p)))
        calls[f"readlink {place[-40:]}"] = lambda base, p=place: os.readlink(joined(base, p))
        calls[f"chdir {place[-40:]}"] = lambda base, p=place: os.chdir(joined(base, p)) or os.chdir("/")
        for mode, flags in itertools.product(range(9), [0, AT_EACCESS, AT_SYMLINK_NOFOLLOW, 0x4000]):
            calls[f"faccessat2 {mode} {flags} {place[-40:]}"] = lambda base, p=place, m=mode, f=flags: call(
                "syscall", ctypes.c_long(439), AT_FDCWD, joined(base, p), m, f
            )

        def statx(base, p=place):
            buffer = ctypes.create_string_buffer(256)
            call("statx", AT_FDCWD, joined(base, p), 0, 0x7FF, buffer)
            mask, block, attributes, nlink, uid, gid, mode = struct.unpack_from("<IIQIIIH", buffer.raw)
            return mask & 0x7FF & ~0x800, uid, gid, mode

        calls[f"statx {place[-40:]}"] = statx
    for inside in [*FILES.values(), DIRECTORY]:
        for flags in (os.O_RDONLY, os.O_PATH):
            calls[f"fstat {inside} {flags}"] = with_fd(inside, lambda fd: same_of_stat(os.fstat(fd)), flags)
            calls[f"fchdir {inside} {flags}"] = with_fd(inside, lambda fd: os.fchdir(fd) or os.chdir("/"), flags)

    def statfs(base):
        found = os.statvfs(base / DIRECTORY)
        return found.f_namemax, found.f_flag & 0xF

    calls["statfs"] = statfs
    compare(pair, calls)


def statx_of(directory: int, path: bytes, flags: int, mask: int):
    """The fields that were asked for and are the same on all file systems, and which of the basic ones were given."""
    buffer = ctypes.create_string_buffer(256)
    call("statx", directory, path, flags, ctypes.c_uint(mask), buffer)
    given, _, _, _, uid, gid, mode, _, _, size = struct.unpack_from("<IIQIIIHHQQ", buffer.raw)
    mtime = struct.unpack_from("<qI", buffer.raw, 0x70)
    basic = 0x7FF
    fields = {3: mode, 8: uid, 0x10: gid, 0x40: mtime, 0x200: size if stat.S_ISREG(mode) else None}
    return given & mask & basic, [value for bit, value in fields.items() if mask & bit]


def test_statx_with_every_mask_and_flag(pair):
    calls = {}
    no_follow, no_automount, empty_path, force, dont = 0x100, 0x800, 0x1000, 0x2000, 0x4000
    masks = [0, *(1 << bit for bit in range(17)), 0x7FF, 0xFFF, 0x1FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    ways = [0, no_follow, no_automount, force, dont, force | dont, 0x8000, 1]
    for place, mask, way in itertools.product([*FILES.values(), DIRECTORY, DIRECTORY + "/none"], masks, ways):
        calls[f"statx {place[-40:]} {mask:#x} {way:#x}"] = lambda base, p=place, m=mask, w=way: statx_of(
            AT_FDCWD, joined(base, p), w, m
        )
    for inside, mask, flags in itertools.product([*FILES.values(), DIRECTORY], masks, (os.O_RDONLY, os.O_PATH)):
        for way in (empty_path, empty_path | dont, 0):
            calls[f"statx of a descriptor {inside} {mask:#x} {way:#x} {flags}"] = with_fd(
                inside, lambda fd, m=mask, w=way: statx_of(fd, b"", w, m), flags
            )
    compare(pair, calls)


FOLLOW, EMPTY_PATH = 0x400, 0x1000


def handle(directory: int, path: bytes, flags: int, room=128) -> bytes:
    buffer = ctypes.create_string_buffer(struct.pack("Ii", room, 0) + bytes(max(room, 128)))
    call("name_to_handle_at", directory, path, buffer, ctypes.byref(ctypes.c_int()), flags)
    return buffer.raw


def by_handle(base: Path, made: bytes, flags: int) -> int:
    mount = os.open(base, os.O_RDONLY)
    try:
        return call("open_by_handle_at", mount, ctypes.create_string_buffer(made), flags)
    finally:
        os.close(mount)


@pytest.mark.parametrize("inside", [*FILES.values(), DIRECTORY])
def test_handles_lead_to_the_same_file_and_to_no_writing(pair, inside):
    """As long as the kernel remembers the file, which it does while it is open."""
    mount = pair[0]
    held = os.open(mount / inside, os.O_RDONLY)
    try:
        made = handle(held, b"", EMPTY_PATH)
        assert made == handle(AT_FDCWD, joined(mount, inside), 0) == handle(AT_FDCWD, joined(mount, inside), FOLLOW)
        opened = by_handle(mount, made, os.O_RDONLY)
        try:
            assert os.fstat(opened) == os.fstat(held)
            if inside != DIRECTORY:
                assert os.pread(opened, 10**6, 0) == os.pread(held, 10**6, 0)
        finally:
            os.close(opened)
        for flags in (os.O_WRONLY, os.O_RDWR):
            assert outcome(by_handle, mount, made, flags) == ("EISDIR" if inside == DIRECTORY else "EROFS")
        assert outcome(handle, held, b"", EMPTY_PATH, 0) == "EOVERFLOW"
        # Of no file, of another life of it, and of no kind that there is.
        size, kind, words = made[:4], made[4:8], made[8:]
        for other in (
            size + kind + bytes(byte ^ 1 for byte in words[:8]) + words[8:],
            size + kind + words[:8] + bytes(byte ^ 1 for byte in words[8:12]) + words[12:],
            size + struct.pack("i", 0x77) + words,
        ):
            assert outcome(by_handle, mount, other, os.O_RDONLY) == "ESTALE"
    finally:
        os.close(held)


def test_handles_of_what_is_not_there(pair):
    calls = {}
    for place in PLACES[len(FILES) + 4 :]:
        calls[f"of nothing {place[-40:]}"] = lambda base, p=place: handle(AT_FDCWD, joined(base, p), 0)
    for place in [*FILES.values(), DIRECTORY]:
        calls[f"bad flags {place}"] = lambda base, p=place: handle(AT_FDCWD, joined(base, p), 0x8)
        calls[f"too much room {place}"] = lambda base, p=place: handle(AT_FDCWD, joined(base, p), 0, room=1000)
        calls[f"not a handle {place}"] = lambda base, p=place: by_handle(base / p, struct.pack("Ii", 0, 1), os.O_RDONLY)
    calls["no such descriptor"] = lambda base: call("open_by_handle_at", 9999, struct.pack("Ii8x", 8, 1), os.O_RDONLY)
    compare(pair, calls)


@pytest.mark.parametrize("kind", FILES)
def test_io_uring(pair, kind):
    inside = FILES[kind]
    size = size_of(pair, inside)

    def into(length, ask, fixed=False):
        """What the request returned, and the bytes that it read."""

        def work(fd):
            buffer = ctypes.create_string_buffer(max(length, 1))
            with uring.Ring() as ring:
                if fixed:
                    ring.register(buffer)
                return ask(ring, fd, buffer), buffer.raw

        return work

    def read(op, offset, length, **fields):
        return lambda ring, fd, buffer: ring.one(op, fd, offset, ctypes.addressof(buffer), length, **fields)

    def readv(offset, lengths):
        def ask(ring, fd, buffer):
            at, vectors = ctypes.addressof(buffer), b""
            for length in lengths:
                vectors += struct.pack("PN", at, length)
                at += length
            held = ctypes.create_string_buffer(vectors)
            return ring.one(uring.READV, fd, offset, ctypes.addressof(held), len(lengths))

        return ask

    def spliced(offset, length):
        def work(fd):
            reader, writer = os.pipe()
            try:
                with uring.Ring() as ring:
                    fields = {"address": offset & (2**64 - 1), "splice_from": fd}
                    moved = ring.one(uring.SPLICE, writer, -1, length=length, **fields)
                return moved > 0 and os.read(reader, moved)
            finally:
                os.close(reader)
                os.close(writer)

        return work

    def opened(flags):
        def work(base):
            path = ctypes.create_string_buffer(joined(base, inside))
            with uring.Ring() as ring:
                fd = ring.one(uring.OPENAT, AT_FDCWD, 0, ctypes.addressof(path), 0o644, flags)
                try:
                    return same_of_stat(os.fstat(fd))
                finally:
                    os.close(fd)

        return work

    def statx(base):
        path, buffer = ctypes.create_string_buffer(joined(base, inside)), ctypes.create_string_buffer(256)
        with uring.Ring() as ring:
            ring.one(uring.STATX, AT_FDCWD, ctypes.addressof(buffer), ctypes.addressof(path), 0x7FF)
        mask, _, _, _, uid, gid, mode = struct.unpack_from("<IIQIIIH", buffer.raw)
        return mask & 0x7FF, uid, gid, mode

    calls = {"OPENAT of O_RDONLY": opened(os.O_RDONLY), "OPENAT of O_RDWR": opened(os.O_RDWR), "STATX": statx}
    calls["OPENAT of O_DIRECT"] = opened(os.O_RDONLY | os.O_DIRECT)
    for offset in edges(size):
        for length in [0, 1, 4096, 65536, size]:
            key = f"{length} at {offset}"
            calls[f"READ {key}"] = with_fd(inside, into(length, read(uring.READ, offset, length)))
            calls[f"READ async {key}"] = with_fd(
                inside, into(length, read(uring.READ, offset, length, flags=uring.ASYNC))
            )
            calls[f"READ_FIXED {key}"] = with_fd(
                inside, into(length, read(uring.READ_FIXED, offset, length), fixed=True)
            )
        calls[f"READV at {offset}"] = with_fd(inside, into(110_000, readv(offset, [3, 0, 4096, 100_000])))
        calls[f"SPLICE at {offset}"] = with_fd(inside, spliced(offset, 5000))
    calls["WRITE"] = with_fd(inside, into(10, read(uring.WRITE, 0, 10)))
    calls["READ of a path alone"] = with_fd(inside, into(10, read(uring.READ, 0, 10)), os.O_PATH)
    calls["READ into nowhere"] = with_fd(inside, into(10, lambda ring, fd, _: ring.one(uring.READ, fd, 0, 8, 10)))
    for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_WILLNEED, 77):
        calls[f"FADVISE {advice}"] = with_fd(
            inside, into(0, lambda ring, fd, _, a=advice: ring.one(uring.FADVISE, fd, op_flags=a))
        )
    compare(pair, calls)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
def test_io_uring_with_many_requests_at_once(pair, kind, flags):
    """Random ranges, 64 at a time, some of them beyond the end; every byte compared with the copy."""
    inside = FILES[kind]
    whole = (pair[1] / inside).read_bytes()
    rng = random.Random(len(whole))
    fd = os.open(pair[0] / inside, os.O_RDONLY | flags)
    try:
        with uring.Ring(64) as ring:
            for turn in range(20):
                ranges = [(rng.randrange(len(whole) + 5000), int(2 ** rng.uniform(0, 17))) for _ in range(64)]
                buffers = [ctypes.create_string_buffer(length) for _, length in ranges]
                requests = [
                    uring.request(uring.READ, fd, offset, ctypes.addressof(buffer), length, flags=turn % 2 * uring.ASYNC)
                    for (offset, length), buffer in zip(ranges, buffers)
                ]
                if turn % 4 == 0:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                for (offset, length), buffer, read in zip(ranges, buffers, ring.run(requests)):
                    assert read >= 0, (os.strerror(-read), offset, length)
                    assert buffer.raw[:read] == whole[offset : offset + length], (offset, length, read)
    finally:
        os.close(fd)


def getdents(fd: int, size: int):
    buffer = ctypes.create_string_buffer(max(size, 1))
    filled, at, entries = call("getdents64", fd, buffer, ctypes.c_size_t(size)), 0, []
    while at < filled:
        _, position, length, kind = struct.unpack_from("<QqHB", buffer.raw, at)
        entries.append((position, buffer.raw[at + 19 : at + length].split(b"\0")[0], kind))
        at += length
    return entries


def listed(fd: int, size=4096):
    entries = []
    while page := getdents(fd, size):
        entries += page
    return entries


# amb/ shows a computed file only to who names it.
@pytest.mark.parametrize("inside", [*TREES[:-1], DIRECTORY])
def test_directories_are_read_sought_and_rewound(pair, inside):
    def names(fd):
        return sorted((name, kind) for _, name, kind in listed(fd))

    def twice(fd):
        first = names(fd)
        end = outcome(lambda: getdents(fd, 4096))
        os.lseek(fd, 0, os.SEEK_SET)
        return first, end, names(fd)

    def sought(fd):
        """From each position on: the rest, in the order of the first reading."""
        whole = listed(fd)
        for index, (position, _, _) in enumerate(whole[:-1]):
            os.lseek(fd, position, os.SEEK_SET)
            assert [name for _, name, _ in listed(fd)] == [name for _, name, _ in whole[index + 1 :]]
        return len(whole)

    calls = {
        "twice": with_fd(inside, twice),
        "in small pages": with_fd(inside, lambda fd: sorted(name for _, name, _ in listed(fd, 300))),
        "seekdir": with_fd(inside, sought),
        "a page of no room": with_fd(inside, lambda fd: getdents(fd, 4)),
        "a path alone": with_fd(inside, lambda fd: getdents(fd, 4096), os.O_PATH),
        "read": with_fd(inside, lambda fd: os.read(fd, 10)),
        "mmap": with_fd(inside, lambda fd: mmap.mmap(fd, 4096, prot=mmap.PROT_READ)),
        "fsync": with_fd(inside, os.fsync),
        "flock": with_fd(inside, lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        "ftruncate": with_fd(inside, lambda fd: os.ftruncate(fd, 0)),
    }
    file = FILES["composed"]
    calls["getdents of a file"] = with_fd(file, lambda fd: getdents(fd, 4096))
    compare(pair, calls)


def test_every_change_is_refused_as_on_a_read_only_copy(pair):
    changes = {}
    places = [FILES["composed"], FILES["whole blob"], DIRECTORY, *PLACES[4:15]]
    for place in places:

        def at(work, place=place):
            return lambda base: work(joined(base, place))

        short = place[-40:]
        changes |= {
            f"unlink {short}": at(os.unlink),
            f"rmdir {short}": at(os.rmdir),
            f"mkdir {short}": at(os.mkdir),
            f"mkfifo {short}": at(os.mkfifo),
            f"mknod {short}": at(lambda p: os.mknod(p, 0o600 | stat.S_IFCHR, os.makedev(1, 3))),
            f"symlink {short}": at(lambda p: os.symlink("x", p)),
            f"chmod {short}": at(lambda p: os.chmod(p, 0o700)),
            f"chown {short}": at(lambda p: os.chown(p, 1, 1)),
            f"chown nothing {short}": at(lambda p: os.chown(p, -1, -1)),
            f"lchown {short}": at(lambda p: os.lchown(p, 1, 1)),
            f"utime now {short}": at(os.utime),
            f"utime {short}": at(lambda p: os.utime(p, (0, 0))),
            f"utimensat omit {short}": at(
                lambda p: call("utimensat", AT_FDCWD, p, struct.pack("<qqqq", 0, 2**30 - 2, 0, 2**30 - 2), 0)
            ),
            f"truncate {short}": at(lambda p: os.truncate(p, 1)),
            f"truncate same {short}": at(lambda p: os.truncate(p, os.stat(p).st_size)),
            f"truncate negative {short}": at(lambda p: os.truncate(p, -1)),
            f"setxattr {short}": at(lambda p: os.setxattr(p, "user.x", b"1")),
            f"removexattr {short}": at(lambda p: os.removexattr(p, "user.x")),
        }
        if place in places[:3]:
            changes |= {
                f"getxattr: {short}": at(lambda p: os.getxattr(p, "user.x")),
                f"listxattr: {short}": at(os.listxattr),
            }
    for old, new in itertools.product(places[:8], places[:8]):
        key = f"{old[-30:]} to {new[-30:]}"
        changes[f"rename {key}"] = lambda base, a=old, b=new: os.rename(joined(base, a), joined(base, b))
        changes[f"link {key}"] = lambda base, a=old, b=new: os.link(joined(base, a), joined(base, b))
        for flags in (1, 2, 4, 3):
            changes[f"renameat2 {flags} {key}"] = lambda base, a=old, b=new, f=flags: call(
                "renameat2", AT_FDCWD, joined(base, a), AT_FDCWD, joined(base, b), f
            )
    for place in places[:3]:
        inside = place
        changes |= {
            f"fchmod {place}": with_fd(inside, lambda fd: os.fchmod(fd, 0o600)),
            f"fchown {place}": with_fd(inside, lambda fd: os.fchown(fd, 1, 1)),
            f"futimens {place}": with_fd(inside, lambda fd: os.utime(fd, (0, 0))),
            f"ftruncate {place}": with_fd(inside, lambda fd: os.ftruncate(fd, 0)),
            f"fsetxattr {place}": with_fd(inside, lambda fd: os.setxattr(fd, "user.x", b"1")),
            f"linkat a descriptor {place}": lambda base, p=place: with_fd(
                p, lambda fd: os.link(f"/proc/self/fd/{fd}", base / DIRECTORY / "new", follow_symlinks=True)
            )(base),
        }
        for mode in (0, 1, 2, 3, 8, 16, 32):
            changes[f"fallocate {mode} {place}"] = with_fd(
                inside, lambda fd, m=mode: call("fallocate", fd, m, ctypes.c_int64(0), ctypes.c_int64(4096))
            )
    compare(pair, changes)


def test_locks_and_leases(pair):
    calls = {}
    for kind, inside in FILES.items():
        for name, how in {
            "shared": fcntl.LOCK_SH,
            "exclusive": fcntl.LOCK_EX,
            "unlock": fcntl.LOCK_UN,
            "bad": 64,
        }.items():
            calls[f"flock {name} {kind}"] = with_fd(inside, lambda fd, how=how: fcntl.flock(fd, how | fcntl.LOCK_NB))

        def contended(base, inside=inside):
            first, second = os.open(base / inside, os.O_RDONLY), os.open(base / inside, os.O_RDONLY)
            try:
                fcntl.flock(first, fcntl.LOCK_EX)
                return outcome(lambda: fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB))
            finally:
                os.close(first)
                os.close(second)

        calls[f"flock contended {kind}"] = contended
        for command in ("F_SETLK", "F_GETLK", "F_OFD_SETLK"):
            for lock in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK):
                packed = struct.pack("hhqqi4x", lock, os.SEEK_SET, 0, 100, 0)
                calls[f"fcntl {command} {lock} {kind}"] = with_fd(
                    inside,
                    lambda fd, c=command, p=packed: struct.unpack("hhqqi4x", fcntl.fcntl(fd, getattr(fcntl, c), p))[0],
                )
        for lease in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK):
            calls[f"lease {lease} {kind}"] = with_fd(
                inside, lambda fd, lease=lease: fcntl.fcntl(fd, fcntl.F_SETLEASE, lease)
            )
        calls[f"getlease {kind}"] = with_fd(inside, lambda fd: fcntl.fcntl(fd, fcntl.F_GETLEASE))
    compare(pair, calls)


@pytest.mark.parametrize("kind", FILES)
def test_bytes_are_moved_by_the_kernel(pair, kind, tmp_path):
    inside = FILES[kind]
    size = size_of(pair, inside)
    shm = Path("/dev/shm") if os.path.isdir("/dev/shm") else tmp_path

    def sendfile(offset, count):
        def work(fd):
            with open(shm / f"out{os.getpid()}", "w+b") as out:
                os.unlink(out.name)
                sent = os.sendfile(out.fileno(), fd, offset, count)
                out.seek(0)
                return sent, out.read()

        return work

    def spliced(offset, count):
        def work(fd):
            reader, writer = os.pipe()
            try:
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)
                moved = os.splice(fd, writer, count, offset_src=offset)
                return moved > 0 and os.read(reader, moved)
            finally:
                os.close(reader)
                os.close(writer)

        return work

    def copied(offset, count):
        def work(fd):
            with open(shm / f"out{os.getpid()}", "w+b") as out:
                os.unlink(out.name)
                return os.copy_file_range(fd, out.fileno(), count, offset)

        return work

    def vmspliced(fd):
        reader, writer = os.pipe()
        try:
            with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as m:
                view = (ctypes.c_char * len(m)).from_buffer(m)
                vector = struct.pack("PN", ctypes.addressof(view), min(len(m), 4096))
                moved = call("vmsplice", writer, vector, 1, 0)
                got = os.read(reader, moved)
                del view
                return got
        finally:
            os.close(reader)
            os.close(writer)

    calls = {}
    for offset, count in itertools.product(
        [0, 1, 4095, size // 2, size - 1, size, size + 1, -1, 2**43], [0, 1, 4096, 5000]
    ):
        calls[f"sendfile {count} at {offset}"] = with_fd(inside, sendfile(offset, count))
        calls[f"splice {count} at {offset}"] = with_fd(inside, spliced(offset, count))
        calls[f"copy_file_range {count} at {offset}"] = with_fd(inside, copied(offset, count))
    calls["sendfile all"] = with_fd(inside, sendfile(0, size + 10))
    calls["vmsplice"] = with_fd(inside, vmspliced)
    calls["into itself"] = with_fd(inside, lambda fd: os.copy_file_range(fd, fd, 10, 0, size // 2))
    for advice in range(8):
        calls[f"fadvise {advice}"] = with_fd(
            inside, lambda fd, a=advice: call("posix_fadvise", fd, ctypes.c_int64(0), ctypes.c_int64(0), a)
        )
        calls[f"fadvise {advice} negative"] = with_fd(
            inside, lambda fd, a=advice: call("posix_fadvise", fd, ctypes.c_int64(5), ctypes.c_int64(-5), a)
        )
    calls["readahead"] = with_fd(inside, lambda fd: call("readahead", fd, ctypes.c_int64(0), ctypes.c_size_t(size)))
    calls["readahead negative"] = with_fd(
        inside, lambda fd: call("readahead", fd, ctypes.c_int64(-1), ctypes.c_size_t(10))
    )
    calls["fsync"] = with_fd(inside, os.fsync)
    calls["fdatasync"] = with_fd(inside, os.fdatasync)
    calls["syncfs"] = with_fd(inside, lambda fd: call("syncfs", fd))
    calls["FIONREAD"] = with_fd(inside, lambda fd: fcntl.ioctl(fd, 0x541B, b"\0" * 4))
    calls["isatty"] = with_fd(inside, os.isatty)
    calls["ioctl FS_IOC_GETFLAGS"] = with_fd(inside, lambda fd: fcntl.ioctl(fd, 0x80086601, b"\0" * 8))
    calls["an ioctl of nobody"] = with_fd(inside, lambda fd: fcntl.ioctl(fd, 0x1234, b"\0" * 8))
    calls["select"] = with_fd(inside, lambda fd: len(select.select([fd], [], [], 0)[0]))
    calls["epoll_ctl"] = with_fd(inside, lambda fd: select.epoll().register(fd, select.EPOLLIN) or 0)
    calls["preadv2 NOWAIT: what is in memory"] = with_fd(
        inside, lambda fd: (os.pread(fd, 100, 0), os.preadv(fd, [bytearray(100)], 0, os.RWF_NOWAIT))
    )
    compare(pair, calls)


@pytest.mark.parametrize("kind", FILES)
def test_random_operations_read_what_the_copy_has(pair, kind):
    """In the spirit of fsx: two descriptors and a map of each, random ranges, against the copy's bytes."""
    inside = FILES[kind]
    whole = (pair[1] / inside).read_bytes()
    size = len(whole)
    rng = random.Random(size)
    seconds = 120 if os.environ.get("WMOUNT_LONG") else 2
    fds = [os.open(pair[0] / inside, os.O_RDONLY), os.open(pair[0] / inside, os.O_RDONLY | os.O_DIRECT)]
    maps = [mmap.mmap(fds[0], 0, prot=mmap.PROT_READ, flags=flags) for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE)]
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        offset, length = rng.randrange(size + 5000), int(2 ** rng.uniform(0, 18))
        expected = whole[offset : offset + length]
        fd = rng.choice(fds)
        match rng.randrange(8):
            case 0 | 1:
                got = os.pread(fd, length, offset)
            case 2:
                os.lseek(fd, offset, os.SEEK_SET)
                got = os.read(fd, length)
            case 3:
                parts = [bytearray(rng.randrange(1, length + 1)), bytearray(length)]
                read = os.preadv(fd, parts, offset)
                got = b"".join(parts)[: min(read, length)]
            case 4 | 5:
                got = rng.choice(maps)[offset : offset + length]
            case 6:
                os.posix_fadvise(
                    fd,
                    offset,
                    length,
                    rng.choice(
                        [os.POSIX_FADV_DONTNEED, os.POSIX_FADV_WILLNEED, os.POSIX_FADV_RANDOM, os.POSIX_FADV_SEQUENTIAL]
                    ),
                )
                continue
            case _:
                maps[0].madvise(
                    rng.choice([mmap.MADV_DONTNEED, mmap.MADV_WILLNEED, mmap.MADV_RANDOM, mmap.MADV_NORMAL])
                )
                continue
        assert got == expected, (offset, length, done)
        done += 1
    for m in maps:
        m.close()
    for fd in fds:
        os.close(fd)
    assert done > 100


def test_fio_verifies_through_the_mount_what_it_wrote(models, tmp_path):
    """fio writes a file with a checksum in every block; it is imported beside a model, and fio checks it there."""
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", models / "tiny-llama", model], check=True)
    job = ["fio", "--name=data", "--filename=data.bin", "--bs=8k", "--size=24M", "--verify=crc32c", "--randseed=7"]
    subprocess.run([*job, "--rw=randwrite", "--do_verify=0"], cwd=model, check=True, capture_output=True)
    store = Store(tmp_path / "store")
    store.add(model, name="fio")
    at = tmp_path / "mnt"
    at.mkdir()
    for read in ("auto", "cache", "direct"):
        run("--read", read, store.path, at)
        try:
            place = at / "original/fio/latest/model"
            assert digest(place / "data.bin") == digest(model / "data.bin")
            for engine in (
                ["--ioengine=psync"],
                ["--ioengine=mmap"],
                ["--ioengine=libaio", "--iodepth=16"],
                ["--ioengine=io_uring", "--iodepth=16"],
                ["--ioengine=psync", "--direct=1"],
            ):
                words = [*job, *engine, "--readonly", "--rw=randread", "--verify_fatal=1"]
                done = subprocess.run(words, cwd=place, capture_output=True, text=True)
                assert done.returncode == 0 and "verify:" not in done.stderr, (read, engine, done.stdout, done.stderr)
                assert "io=24.0MiB" in done.stdout, done.stdout
        finally:
            run("umount", at)
