"""GGUF files."""

import struct

from malformed import Cases, changed, writes

FILE = "model.gguf"
cases = Cases("gguf")


def file(name: str, data: bytes, *words: str):
    cases.add(name, writes(FILE, data), FILE, "(at byte", *words)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def of(keys: list[bytes], tensors: list[bytes], data: int = 64) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    return head + bytes(-len(head) % 32 + data)


KEYS = [
    key("general.architecture", 8, string("llama")),
    key("general.file_type", 4, struct.pack("<I", 1)),
    key("words", 9, struct.pack("<IQ", 8, 2) + string("a") + string("b")),
]
WHOLE = of(KEYS, [tensor("a", [16], 1, 0), tensor("b", [4, 2], 1, 32)], 48)
for cut in (0, 1, 3):
    file(f"cut off at {cut}", WHOLE[:cut], "it begins with", 'not with "GGUF"')
for cut in (4, 8, 20):
    file(f"cut off at {cut}", WHOLE[:cut], "bytes are needed but the file has")
for cut in (30, 59):
    file(f"cut off at {cut}", WHOLE[:cut], f"2 tensors and 3 keys do not fit into {cut} bytes")
for cut in (88, 117, 175, 204):
    file(f"cut off at {cut}", WHOLE[:cut], f"bytes are needed but the file has {cut} in all")
file("an array that is cut off", WHOLE[:146], "an array of 2 does not fit into the file")
file("one byte short", WHOLE[:-1], "the tensor here needs")
file("magic of another kind", b"ggjt" + WHOLE[4:], 'it begins with "ggjt"')
for version in (1, 4, 99, 1 << 15):
    file(f"version {version}", changed(WHOLE, 4, struct.pack("<I", version)), f"version {version}")
file("big-endian", changed(WHOLE, 4, struct.pack(">I", 3)), "is big-endian")
for name, at in (("tensors", 8), ("keys", 16)):
    for count in (1 << 20, 1 << 40, (1 << 64) - 1):
        file(f"{count} {name}", changed(WHOLE, at, struct.pack("<Q", count)), "do not fit into")
deep = struct.pack("<IQ", 9, 1) * 300_000
for name, entry, *words in [
    ("a key of 2^64 - 1", b"\xff" * 8, "bytes are needed"),
    ("a type of 13", key("x", 13, bytes(8)), "there is no type 13"),
    ("a type of 2^32 - 1", key("x", (1 << 32) - 1, bytes(8)), "there is no type 4294967295"),
    ("a text past the end", key("x", 8, b"\xff" * 8), "bytes are needed"),
    ("an array past the end", key("x", 9, struct.pack("<IQ", 4, 1 << 40)), "does not fit into the file"),
    ("an array that overflows", key("x", 9, struct.pack("<IQ", 8, 1 << 62)), "does not fit into the file"),
    ("an array of an unknown type", key("x", 9, struct.pack("<IQ", 77, 1)), "there is no type 77"),
    ("arrays within arrays", key("x", 9, deep), "nested too deeply"),
    ("an alignment of 0", key("general.alignment", 4, bytes(4)), "an alignment of 0 is no power of two"),
    ("an alignment of 12", key("general.alignment", 4, struct.pack("<I", 12)), "an alignment of 12"),
    ("a negative alignment", key("general.alignment", 5, struct.pack("<i", -32)), "negative"),
    ("an alignment that is a text", key("general.alignment", 8, string("32")), "is no integer"),
    ("a part of a file", key("split.count", 2, struct.pack("<H", 2)), "is one of 2 parts", "its name is not that of one"),
]:
    file(name, of([entry], []), *words)
for name, entry, *words in [
    ("five dimensions", tensor("a", [1] * 5, 0, 0), "5 dimensions"),
    ("2^32 - 1 dimensions", string("a") + b"\xff" * 4, "4294967295 dimensions"),
    ("more elements than there are numbers", tensor("a", [1 << 40, 1 << 40], 0, 0), "more elements than can be"),
    ("more bytes than there are numbers", tensor("a", [1 << 62], 0, 0), "larger than a file can be"),
    ("an end past the file", tensor("a", [1 << 20], 0, 0), "the tensor here needs"),
    ("an offset past the file", tensor("a", [4], 0, 1 << 40), "the tensor here needs"),
    ("an offset that overflows", tensor("a", [4], 0, (1 << 64) - 32), "needs more bytes than there can be"),
    ("an offset between", tensor("a", [4], 0, 5), "begins at 5, no multiple of 32"),
    ("rows of half a block", tensor("a", [33], 8, 0), "no multiple of the 32 of its type"),
    ("a name past the end", b"\xff" * 8 + bytes(40), "bytes are needed"),
]:
    file(f"a tensor with {name}", of([], [entry]), *words)
