"""AMB files."""

import struct

import amb_reference as reference
from amb_reference import Record
from malformed import Cases, changed, writes

FILE = "model.amb"
cases = Cases("amb")


def file(name: str, data: bytes, *words: str):
    cases.add(name, writes(FILE, data), FILE, "(at byte", *words)


METADATA, CONFIG = b'{"name": "x"}', b'{"hidden_size": 4}'
TOKENIZER = b"\x01" + struct.pack("<5H", 1, 2, 3, 65535, 65535) + b"words"
RECORDS = {
    "wte": Record(0, (2, 3), bytes(24)),
    "half": Record(1, (5,), bytes(10)),
    "brain": Record(2, (2, 2), bytes(8)),
    "byte": Record(3, (3,), b"abc"),
    "block": Record(6, (9,), bytes(21)),
}
GOOD = reference.write(reference.File(METADATA, CONFIG, TOKENIZER, RECORDS))
START = 28 + len(METADATA) + len(CONFIG) + len(TOKENIZER)


def with_record(record: bytes, sections: bytes = b"") -> bytes:
    """A file of one record, given as bytes without padding."""
    data = bytearray(28) + sections + record
    data += bytes(-len(data) % 8)
    struct.pack_into("<5sBHIIIQ", data, 0, b"AMBEE", 1, 0, len(sections), 0, 0, len(data) - 28 - len(sections))
    return bytes(data)


def record(name: bytes, dims: tuple, code: int, size: int, data: bytes) -> bytes:
    head = struct.pack("<H", len(name)) + name + bytes([len(dims)]) + struct.pack(f"<{len(dims)}I", *dims)
    return head + struct.pack("<BQ", code, size) + data


for cut in (0, 1, 4):
    file(f"cut off at {cut}", GOOD[:cut], "does not begin with AMBEE")
for cut in (5, 6, 8, 12, 20, 27):
    file(f"cut off at {cut}", GOOD[:cut], f"the header needs 28 bytes but the file has {cut}")
for cut in (*range(28, len(GOOD), 13), len(GOOD) - 1):
    file(f"cut off at {cut}", GOOD[:cut], f"its sections need {len(GOOD)} bytes but the file has {cut}")
file("other magic", changed(GOOD, 0, b"X"), "does not begin with AMBEE")
for version in (0, 2, 255):
    file(f"version {version}", changed(GOOD, 5, bytes([version])), f"its version is {version}", "byte 5")
for name, at in (("metadata", 8), ("config", 12), ("tokenizer", 16)):
    file(f"a {name} section of 4 GiB", changed(GOOD, at, b"\xff" * 4), "its sections need")
for size in ((1 << 64) - 1, (1 << 64) - 28):
    file(f"a weights section of {size}", changed(GOOD, 20, struct.pack("<Q", size)), "sections overflow", "byte 8")
file("a weights section of 2^63", changed(GOOD, 20, struct.pack("<Q", 1 << 63)), "its sections need")
file("bytes after the end", GOOD + b"\0", "1 bytes follow its last section")
file("a weights section one too short", changed(GOOD, 20, struct.pack("<Q", len(GOOD) - START - 1)), "1 bytes follow")
# Sections of JSON.
for name, text, word in [
    ("a list", b"[]", "expected a map"),
    ("a text", b'"x"', "expected a map"),
    ("a number", b"1", "expected a map"),
    ("null", b"null", "expected a map"),
    ("no JSON", b"{x}", "key must be a string"),
    ("half an object", b'{"a":', "EOF"),
    ("two objects", b"{}{}", "trailing characters"),
    ("a deep object", b'{"a":' * 100_000, "recursion limit"),
    ("no UTF-8", b'{"a":"\xff"}', "no UTF-8"),
    ("five million values", b'{"a":[' + b"0," * 5_000_000 + b"0]}", "values and separators"),
]:
    for section in ("metadata", "config"):
        parts = (text, b"") if section == "metadata" else (b"", text)
        data = reference.write(reference.File(*parts, b"", {}))
        file(f"a {section} section of {name}", data, f"the {section} section is no JSON object", word)
for length in (1, 2, 10):
    data = reference.write(reference.File(b"", b"", bytes(length), {}))
    file(f"a tokenizer section of {length}", data, f"the tokenizer section has {length} bytes")
# Records.
OK = record(b"w", (2,), 0, 8, bytes(8))
for name, data, word in [
    ("nothing but a length of the name", b"\1", "the data type or size of tensor number 0 runs past"),
    ("a name that is too long", b"\xff\xffw", "the name of tensor number 0 runs past"),
    ("a name that is no UTF-8", record(b"\xff", (2,), 0, 8, bytes(8)), "the name of tensor number 0 is not UTF-8"),
    ("no dimensions", b"\1\0w", "tensor number 0 runs past the weights section"),
    ("too many dimensions", b"\1\0w\xff" + bytes(12), "the shape of tensor number 0 runs past"),
    ("no size", b"\1\0w\1\2\0\0\0\0\0\0\0", "the data type or size of tensor number 0 runs past"),
    ("a size past the end", record(b"w", (2,), 0, 800, bytes(8)), 'tensor "w": its 800 bytes run past'),
    ("a size of 2^64 - 1", record(b"w", (2,), 0, (1 << 64) - 1, bytes(8)), "run past the weights section"),
    ("a quantised size past the end", record(b"w", (2,), 6, 1 << 40, bytes(8)), "run past the weights section"),
    ("an unknown type", record(b"w", (2,), 9, 8, bytes(8)), 'tensor "w": data type 9 is not known'),
    ("type 255", record(b"w", (2,), 255, 8, bytes(8)), 'tensor "w": data type 255 is not known'),
    ("fp32 of the wrong size", record(b"w", (2,), 0, 7, bytes(7)), "its shape [2] of FP32 has not 7 bytes"),
    ("fp16 of the wrong size", record(b"w", (2,), 1, 8, bytes(8)), "its shape [2] of FP16 has not 8 bytes"),
    ("bf16 of the wrong size", record(b"w", (), 2, 8, bytes(8)), "its shape [] of BF16 has not 8 bytes"),
    ("int8 of the wrong size", record(b"w", (2,), 3, 8, bytes(8)), "its shape [2] of INT8 has not 8 bytes"),
    ("a shape that wraps", record(b"w", (1 << 31,) * 3, 0, 0, b""), "of FP32 has not 0 bytes"),
    ("a shape of 255 that wraps", record(b"w", (1 << 16,) * 255, 0, 0, b""), "of FP32 has not 0 bytes"),
    ("padding that is not zero", OK + b"\1", "its padding is not zero"),
    ("a name twice", OK + bytes(-(28 + len(OK)) % 8) + OK, 'tensor "w" occurs twice'),
    (
        "a second one that is cut",
        OK + bytes(-(28 + len(OK)) % 8) + b"\5\0w",
        "the data type or size of tensor number 1 runs past",
    ),
]:
    file(f"a record with {name}", with_record(data), word)
unpadded = bytearray(with_record(OK))[: 28 + len(OK)]
struct.pack_into("<Q", unpadded, 20, len(OK))
file("a record without its padding", bytes(unpadded), "its padding runs past the weights section")
file("padding of the last record", changed(GOOD, len(GOOD) - 1, b"\1"), 'tensor "block": its padding is not zero')
