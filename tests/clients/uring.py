"""The kernel's io_uring without a library: requests go into one ring of memory, and their outcomes come out of another."""

import ctypes
import errno
import mmap
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
SETUP, ENTER, REGISTER = 425, 426, 427
READV, READ_FIXED, OPENAT, STATX, READ, WRITE, FADVISE, SPLICE = 1, 4, 18, 21, 22, 23, 24, 30
CQ_RING, SQES = 0x8000000, 0x10000000
GETEVENTS, REGISTER_BUFFERS = 1, 0
ASYNC = 1 << 4


def syscall(number, *args) -> int:
    result = libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), "io_uring")
    return result


def request(op, fd, offset=0, address=0, length=0, op_flags=0, buffer=0, splice_from=0, flags=0) -> bytes:
    """A request as the kernel reads it; which one it was is set when it is put into the ring."""
    mask = (1 << 64) - 1
    fields = (op, flags, 0, fd, offset & mask, address, length, op_flags, 0, buffer, 0, splice_from, 0, 0)
    return struct.pack("<BBHiQQIIQHHiQQ", *fields)


class Ring:
    """A context manager; `run` hands over requests all at once and returns the outcome of each."""

    def __init__(self, entries=64):
        parameters = ctypes.create_string_buffer(120)
        self.fd = syscall(SETUP, entries, parameters)
        numbers = struct.unpack("<30I", parameters.raw)
        self.entries, completions = numbers[0], numbers[1]
        self.tail, self.array = numbers[11], numbers[16]
        self.cq_head, self.cq_tail, self.cqes = numbers[20], numbers[21], numbers[25]
        self.mask, self.cq_mask = self.entries - 1, completions - 1
        self.ring = mmap.mmap(self.fd, self.array + 4 * self.entries)
        self.outcomes = mmap.mmap(self.fd, self.cqes + 16 * completions, offset=CQ_RING)
        self.requests = mmap.mmap(self.fd, 64 * self.entries, offset=SQES)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for memory in (self.ring, self.outcomes, self.requests):
            memory.close()
        os.close(self.fd)

    def register(self, buffer):
        """Memory that READ_FIXED reads into."""
        vector = struct.pack("PN", ctypes.addressof(buffer), len(buffer))
        syscall(REGISTER, self.fd, REGISTER_BUFFERS, vector, 1)

    def run(self, requests: list[bytes]) -> list[int]:
        """What each returned, an error as a negative number."""
        assert len(requests) <= self.entries
        (tail,) = struct.unpack_from("<I", self.ring, self.tail)
        for number, each in enumerate(requests):
            place = (tail + number) & self.mask
            self.requests[64 * place : 64 * place + 64] = each[:32] + struct.pack("<Q", number) + each[40:]
            struct.pack_into("<I", self.ring, self.array + 4 * place, place)
        struct.pack_into("<I", self.ring, self.tail, tail + len(requests))
        taken = syscall(ENTER, self.fd, len(requests), len(requests), GETEVENTS, None, ctypes.c_size_t(0))
        assert taken == len(requests)
        results = {}
        head, tail = (struct.unpack_from("<I", self.outcomes, at)[0] for at in (self.cq_head, self.cq_tail))
        for number in range(head, tail):
            which, result, _ = struct.unpack_from("<QiI", self.outcomes, self.cqes + 16 * (number & self.cq_mask))
            results[which] = result
        struct.pack_into("<I", self.outcomes, self.cq_head, tail)
        assert len(results) == len(requests)
        return [results[number] for number in range(len(requests))]

    def one(self, *args, **fields) -> int:
        """The result of a request; raises its error."""
        (result,) = self.run([request(*args, **fields)])
        if result < 0:
            raise OSError(-result, errno.errorcode.get(-result, ""))
        return result
