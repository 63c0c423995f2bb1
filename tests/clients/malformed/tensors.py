"""safetensors files and directories of them."""

import json
import struct
from pathlib import Path

from malformed import Cases, writes

FILE = "model.safetensors"
cases = Cases("safetensors")


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def of(entries, data: int = 0) -> bytes:
    return raw(json.dumps(entries).encode(), bytes(data))


def tensor(shape, start, end, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file(name: str, data: bytes, *words: str):
    cases.add(name, writes(FILE, data), FILE, "(at byte", *words)


def sparse(name: str, start: bytes, size: int, *words: str):
    def make(directory: Path) -> Path:
        with open(directory / FILE, "wb") as f:
            f.write(start)
            f.truncate(size)
        return directory / FILE

    cases.add(name, make, FILE, "(at byte", *words)


ONE = {"a": tensor([4], 0, 16)}
TWO = {"a": tensor([4], 0, 16), "b": tensor([2, 2], 16, 32)}
WHOLE = of(TWO, 32)

# The length of the header.
for length in range(8):
    file(f"{length} bytes", WHOLE[:length], f"the file has {length} in all")
for claim in (len(WHOLE) - 7, 10_000, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 8, (1 << 64) - 1):
    file(f"a header of {claim}", raw(WHOLE[8:-32], bytes(32), claim), f"the header claims {claim} bytes")
file("a header of 0", raw(b"", bytes(8)), "header: EOF", "byte 8")
file("a header one too short", raw(WHOLE[8:-32], bytes(32), len(WHOLE) - 41), "header: EOF")
file("a header one too long", raw(WHOLE[8:-32], bytes(32), len(WHOLE) - 39), "header: trailing characters")
sparse("a header over the limit", struct.pack("<Q", 100_000_001), 100_000_009, "100000001 bytes, more than 100000000")
sparse("a header of zeros", struct.pack("<Q", 90_000_000), 90_000_008, "header: expected value", "byte 8")
sparse("a header that is mostly zeros", raw(b"{", length=90_000_000), 90_000_008, "header: key must be a string")
# Cut off.
for cut in range(8, len(WHOLE), 11):
    words = "the header claims" if cut < len(WHOLE) - 32 else "past the end of the file"
    file(f"cut off at {cut}", WHOLE[:cut], words)
# The text.
for name, text, word in [
    ("no JSON", b"{not json}", "key must be a string"),
    ("a list", b"[1, 2]", "expected an object of tensors"),
    ("a text", b'"a"', "expected an object of tensors"),
    ("a number", b"17", "expected an object of tensors"),
    ("null", b"null", "expected an object of tensors"),
    ("two objects", b"{}{}", "trailing characters"),
    ("an open object", b'{"a"', "EOF"),
    ("a comma too many", b"{,}", "key must be a string"),
    ("a comma at the end", b'{"__metadata__":null,}', "trailing comma"),
    ("a key that is no text", b"{1:2}", "key must be a string"),
    ("not a number", b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', "expected value"),
    ("a comment", b'{/* "a" */}', "key must be a string"),
    ("a mark for the order of bytes", b"\xef\xbb\xbf{}", "expected value"),
    ("UTF-16", '{"a":1}'.encode("utf-16-le"), "key must be a string"),
    ("a name that is no UTF-8", b'{"\xff\xfe":1}', "no UTF-8"),
    ("half a surrogate pair", b'{"\\ud800":1}', "unexpected end of hex escape"),
    ("a control character", b'{"a\nb":1}', "control character"),
    ("an unknown escape", b'{"\\x":1}', "invalid escape"),
    ("a deep list", b"[" * 200_000, "expected an object of tensors"),
    ("a deep entry", b'{"a":' + b"[" * 200_000, "invalid type: sequence, expected"),
    ("a deep field", b'{"a":{"more":' + b'{"a":' * 200_000, "EOF"),
    ("a tensor that is a number", b'{"a":1}', "invalid type: integer"),
    ("a tensor that is null", b'{"a":null}', "invalid type: null"),
    ("a tensor with nothing", b'{"a":{}}', "missing field `dtype`"),
    ("a field twice", b'{"a":{"dtype":"F32","dtype":"F32"}}', "duplicate field `dtype`"),
    ("metadata that is a list", b'{"__metadata__":[]}', "expected an object of strings as __metadata__"),
    ("metadata that is a number", b'{"__metadata__":3}', "expected an object of strings as __metadata__"),
    ("metadata with a number", b'{"__metadata__":{"a":1}}', "expected a string"),
    ("metadata with null", b'{"__metadata__":{"a":null}}', "expected a string"),
    ("metadata with an object", b'{"__metadata__":{"a":{}}}', "expected a string"),
    (
        "very long text in place of a shape",
        b'{"a":{"dtype":"F32","shape":"' + b"x" * 1_000_000 + b'"}}',
        "expected a seq",
    ),
]:
    file(f"a header of {name}", raw(text), "header: ", word)
file("a hundred thousand zeros as a shape", raw(b'{"a":{"dtype":"F32","shape":[' + b"0," * 100_000), "header: EOF")
file("shapes of eighteen million", raw(b'{"a":{"dtype":"F32","shape":[' + b"0," * 18_000_000), "values and separators")
file(
    "metadata of a million",
    raw(b'{"__metadata__":{' + b'"":"",' * 1_000_000),
    "more than 262144 entries of __metadata__",
)
# The entries.
for name, entry, word in [
    ("no dtype", {"shape": [4], "data_offsets": [0, 16]}, "missing field `dtype`"),
    ("no shape", {"dtype": "F32", "data_offsets": [0, 16]}, "missing field `shape`"),
    ("no offsets", {"dtype": "F32", "shape": [4]}, "missing field `data_offsets`"),
    ("a dtype that is a number", tensor([4], 0, 16, dtype=7), "expected a"),
    ("a dtype that is null", tensor([4], 0, 16, dtype=None), "expected a"),
    ("an unknown dtype", tensor([4], 0, 16, dtype="Q7"), 'tensor "a": "Q7" is no known dtype'),
    ("a dtype in small letters", tensor([4], 0, 16, dtype="f32"), "no known dtype"),
    ("a long dtype", tensor([4], 0, 16, dtype="F" * 100_000), "no known dtype"),
    ("a dtype of another format", tensor([4], 0, 2, dtype="I4"), "is no safetensors dtype"),
    ("a shape that is null", tensor(None, 0, 16), "expected a sequence"),
    ("a shape that is a number", tensor(4, 0, 16), "expected a sequence"),
    ("a shape of texts", tensor(["4"], 0, 16), "expected u64"),
    ("a shape of fractions", tensor([4.0], 0, 16), "expected u64"),
    ("a negative dimension", tensor([-4], 0, 16), "expected u64"),
    ("two negative dimensions", tensor([-2, -2], 0, 16), "expected u64"),
    ("a dimension of 2^64", tensor([1 << 64], 0, 16), "expected u64"),
    ("a dimension of 10^400", tensor([10**400], 0, 16), "number out of range"),
    ("a shape that is too large", tensor([5], 0, 16), "F32 [5] does not fill 16 bytes"),
    ("a shape that is too small", tensor([3], 0, 16), "F32 [3] does not fill 16 bytes"),
    ("a scalar of four", tensor([], 0, 16), "F32 [] does not fill 16 bytes"),
    ("nothing of sixteen bytes", tensor([0], 0, 16), "F32 [0] does not fill 16 bytes"),
    ("a shape that wraps", tensor([1 << 62, 4, 4], 0, 0), "does not fill 0 bytes"),
    ("a shape that wraps to its size", tensor([(1 << 62) + 4], 0, 16), "does not fill 16 bytes"),
    ("bits that wrap", tensor([1 << 59], 0, 0), "does not fill 0 bytes"),
    ("half a byte", tensor([31], 0, 16, dtype="F4"), "F4 [31] does not fill 16 bytes"),
    ("the size of another dtype", tensor([4], 0, 16, dtype="BF16"), "BF16 [4] does not fill 16 bytes"),
    ("one offset", {"dtype": "F32", "shape": [4], "data_offsets": [0]}, "invalid length 1"),
    ("three offsets", {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}, "trailing characters"),
    ("offsets that are texts", tensor([4], "0", "16"), "expected u64"),
    ("offsets that are null", tensor([4], None, None), "expected u64"),
    ("a negative offset", tensor([4], -16, 0), "expected u64"),
    ("an offset of 2^64", tensor([4], 0, 1 << 64), "expected u64"),
    ("offsets backwards", tensor([4], 16, 0), "its data ends at 0 but begins at 16"),
    ("an end past the file", tensor([5], 0, 20), "its data ends at 20, past the end of the file"),
    ("a beginning past the file", tensor([0], 17, 17), "its data ends at 17, past the end of the file"),
    ("an end of 2^64 - 1", tensor([4], 0, (1 << 64) - 1), "past the end of the file"),
    ("offsets that overflow", tensor([0], (1 << 64) - 1, (1 << 64) - 1), "past the end of the file"),
    ("a hole before it", tensor([3], 4, 16), "leaves a hole before it"),
    ("a hole after it", tensor([3], 0, 12), "4 bytes belong to no tensor"),
]:
    file(f"a tensor with {name}", of({"a": entry}, 16), word)
# Several.
b = tensor([4], 16, 32)
for name, entries, size, word in [
    ("an overlap", {"a": ONE["a"], "b": tensor([4], 8, 24)}, 24, 'tensor "b" overlaps'),
    ("a tensor in a tensor", {"a": ONE["a"], "b": tensor([1], 4, 8)}, 16, 'tensor "b" overlaps'),
    ("one range for two", {"a": ONE["a"], "b": ONE["a"]}, 16, "overlaps the tensor before it"),
    ("a hole", {"a": ONE["a"], "b": tensor([4], 20, 36)}, 36, 'tensor "b" leaves a hole'),
    ("an empty one within another", {"a": ONE["a"], "e": tensor([0], 8, 8)}, 16, "overlaps"),
    ("bytes before the first", {"a": tensor([4], 1, 17)}, 17, 'tensor "a" leaves a hole'),
    ("bytes after the last", ONE, 17, "1 bytes belong to no tensor"),
    ("data and no tensor", {}, 1, "1 bytes belong to no tensor"),
    ("a good one and a bad one", {"a": ONE["a"], "b": tensor([5], 16, 32)}, 32, 'tensor "b": F32 [5]'),
]:
    file(name, of(entries, size), word)
twice = f'{{"a":{json.dumps(ONE["a"])},"a":{json.dumps(b)}}}'.encode()
file("a name twice", raw(twice, bytes(32)), 'tensor "a" occurs twice')
long = {"n" * 1_000_000: tensor([5], 0, 16)}
file("a name of a megabyte", of(long, 16), "F32 [5] does not fill")
file("a name of control characters", of({"\x1b[2J\r\n": tensor([5], 0, 16)}, 16), "does not fill")

# Directories of shards.
INDEX = "model.safetensors.index.json"


def shards(name: str, index: bytes, *words: str, files: dict[str, bytes] | None = None):
    def make(directory: Path) -> Path:
        root = directory / "shards"
        root.mkdir()
        (root / INDEX).write_bytes(index)
        for path, data in (files or {"model-1.safetensors": of(ONE, 16)}).items():
            (root / path).write_bytes(data)
        return root

    cases.add(f"an index {name}", make, INDEX, "(at byte", *words)


def mapped(to) -> bytes:
    return json.dumps({"weight_map": {"a": to}}).encode()


shards("that names a shard that is missing", mapped("model-2.safetensors"), 'tensor "a" is in "model-2.safetensors"')
shards("that leads out", mapped("../model.safetensors"), 'tensor "a" is in "../model.safetensors", which is missing')
shards("with an absolute path", mapped("/etc/passwd"), 'tensor "a" is in "/etc/passwd", which is missing')
shards("with a path of the same directory", mapped("./model-1.safetensors"), "which is missing")
shards("with NUL", mapped("model-1.safetensors\0"), "which is missing")
shards("with a very long path", mapped("x" * 100_000), "which is missing")
shards("that maps to a number", mapped(1), "is no index of shards", "expected a string")
shards("that maps to null", mapped(None), "is no index of shards", "expected a string")
shards("that is empty", b"", "is no index of shards", "EOF")
shards("that is a list", b"[]", "is no index of shards")
shards("that has no map", b"{}", "is no index of shards", "missing field `weight_map`")
shards("whose map is a list", b'{"weight_map":[]}', "is no index of shards", "expected a map")
shards("that is deep", b'{"metadata":' + b"[" * 100_000, "is no index of shards")
shards("that is cut off", mapped("model-1.safetensors")[:-2], "is no index of shards", "EOF")
shards("that is no UTF-8", b'{"weight_map":{"\xff":"a"}}', "is no index of shards", "no UTF-8")
shards("of five million values", b'{"metadata":[' + b"0," * 5_000_000, "is no index of shards", "values and separators")


def same_tensor(directory: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (directory / name).write_bytes(of(ONE, 16))
    return directory


def second_bad(directory: Path) -> Path:
    (directory / "model-1.safetensors").write_bytes(of(ONE, 16))
    (directory / "model-2.safetensors").write_bytes(WHOLE[:-1])
    return directory


cases.add("one tensor in two shards", same_tensor, "model-2.safetensors", "(at byte", 'tensor "a" is in', "model-1")
cases.add("a good shard and a bad one", second_bad, "model-2.safetensors", "(at byte", "past the end of the file")
