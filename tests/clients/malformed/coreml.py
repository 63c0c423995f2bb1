"""Core ML packages, bare models and compiled ones, written field by field."""

import json
import os
import struct
from pathlib import Path

from malformed import Cases, changed

cases = Cases("coreml")
MODEL, WEIGHTS = "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"
WEIGHT_FILE = "@model_path/weights/weight.bin"
FP16, FP32, INT64 = 10, 11, 24


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, *parts) -> bytes:
    payload = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    return varint(field << 3 | 2) + varint(len(payload)) + payload


def entry(field: int, key: str, value: bytes) -> bytes:
    return message(field, message(1, key), message(2, value))


def tensor_type(dtype: int, shape: list) -> bytes:
    dims = [message(3, message(2 if size is None else 1, b"" if size is None else number(1, size))) for size in shape]
    return message(1, number(1, dtype), number(2, len(shape)), *dims)


def blob(file: str | bytes = WEIGHT_FILE, offset: int = 64) -> bytes:
    return message(5, message(1, file), number(2, offset))


def constant(name: str | bytes, dtype: int, shape: list, value: bytes) -> bytes:
    output = message(3, message(1, name), message(2, tensor_type(dtype, shape)))
    return message(3, message(1, "const"), output, entry(5, "val", message(2, tensor_type(dtype, shape)) + value))


def function(*operations: bytes) -> bytes:
    return message(1, message(1, "x")) + message(2, "CoreML7") + entry(3, "CoreML7", b"".join(operations))


def program(*functions: bytes) -> bytes:
    return number(1, 8) + message(502, number(1, 1), *functions)


def model(*operations: bytes) -> bytes:
    return program(entry(2, "main", function(*operations)))


W = constant("w", FP16, [3], blob(offset=64))
V = constant("v", FP32, [2, 2], blob(offset=192))


def weights(*blobs, count=None, version=2) -> bytes:
    """A weight file of blobs, each a type and its data."""
    data = bytearray(struct.pack("<II", len(blobs) if count is None else count, version) + bytes(56))
    for code, body in blobs:
        data += bytes(-len(data) % 64)
        data += struct.pack("<IIQQQ", 0xDEADBEEF, code, len(body), len(data) + 64, 0) + bytes(32) + body
    return bytes(data)


GOOD = weights((1, b"abcdef"), (2, bytes(range(16))))
GOOD_MODEL = model(W, V)


def item(name: str, path: str) -> dict:
    return {"author": "com.apple.CoreML", "description": "", "name": name, "path": path}


MANIFEST = {
    "fileFormatVersion": "1.0.0",
    "itemInfoEntries": {
        "a": item("model.mlmodel", "com.apple.CoreML/model.mlmodel"),
        "b": item("weights", "com.apple.CoreML/weights"),
    },
    "rootModelIdentifier": "a",
}


def written(directory: Path, manifest: bytes, program: bytes, weights: bytes | None) -> Path:
    root = directory / "m.mlpackage"
    (root / WEIGHTS).parent.mkdir(parents=True)
    (root / "Manifest.json").write_bytes(manifest)
    (root / MODEL).write_bytes(program)
    if weights is not None:
        (root / WEIGHTS).write_bytes(weights)
    return root


def whole(directory: Path) -> Path:
    """The package that all others differ from."""
    return written(directory, json.dumps(MANIFEST).encode(), GOOD_MODEL, GOOD)


def package(
    name: str, *words: str, manifest=MANIFEST, program: bytes = GOOD_MODEL, weights: bytes | None = GOOD, extra=None
):
    def make(directory: Path) -> Path:
        text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        root = written(directory, text, program, weights)
        if extra:
            extra(root)
        return root

    cases.add(name, make, *words)


def manifest(name: str, content, *words: str):
    package(f"a manifest {name}", "Manifest.json", "(at byte", *words, manifest=content)


def with_item(**change) -> dict:
    changed = {k: v for k, v in (MANIFEST["itemInfoEntries"]["b"] | change).items() if v is not None}
    return MANIFEST | {"itemInfoEntries": MANIFEST["itemInfoEntries"] | {"b": changed}}


package(
    "a package without a manifest",
    "m.mlpackage",
    "has no Manifest.json",
    extra=lambda root: (root / "Manifest.json").unlink(),
)
for name, text, word in [
    ("that is empty", b"", "EOF"),
    ("that is a list", b"[]", "invalid length 0"),
    ("that is null", b"null", "invalid type: null"),
    ("that is cut off", json.dumps(MANIFEST).encode()[:-1], "EOF"),
    ("that is no UTF-8", b'{"fileFormatVersion":"\xff"}', "no UTF-8"),
    ("that is deep", b'{"a":' + b"[" * 100_000, "EOF"),
    ("that is a property list", b'<?xml version="1.0"?>', "expected value"),
    ("of nothing", b"{}", "missing field `fileFormatVersion`"),
    ("of 17 MB", b"[" + b"0," * 8_400_000, "16800001 bytes are too many"),
]:
    manifest(name, text, word)
for version in ("", "1", "1.0", "1.0.0.0", "a.b.c", "-1.0.0", "1.0.99999999999"):
    manifest(f"of version {version!r}", MANIFEST | {"fileFormatVersion": version}, "is not of the form a.b.c")
for version in ("1.0.1", "2.0.0", "4294967295.0.0"):
    manifest(
        f"of version {version}", MANIFEST | {"fileFormatVersion": version}, f"package version {version} is above 1.0.0"
    )
manifest("whose version is a number", MANIFEST | {"fileFormatVersion": 1}, "expected a string")
manifest("whose items are a list", MANIFEST | {"itemInfoEntries": []}, "expected a map")
manifest("whose item is null", MANIFEST | {"itemInfoEntries": {"a": None}}, "invalid type: null")
manifest("without a root", {k: v for k, v in MANIFEST.items() if k[0] != "r"}, "missing field `rootModelIdentifier`")
manifest("with another root", MANIFEST | {"rootModelIdentifier": "c"}, 'no item has the root\'s identifier "c"')
manifest("without items", MANIFEST | {"itemInfoEntries": {}}, "no item has the root's identifier")
for field in ("author", "description", "name", "path"):
    manifest(f"whose item has no {field}", with_item(**{field: None}), f"missing field `{field}`")
for path in ("", "/etc", "..", "../../etc", "a/../b", "./a", "a//b", "a/", "a\0b", "x" * 300):
    word = "is not one below Data/" if len(path) < 300 else "which is missing"
    manifest(f"whose item is at {path[:20]!r}", with_item(path=path), word)
manifest(
    "whose item is missing",
    with_item(path="com.apple.CoreML/more"),
    'names "Data/com.apple.CoreML/more", which is missing',
)
manifest("whose root is a directory", MANIFEST | {"rootModelIdentifier": "b"}, "is missing or no file")


# The model.
def broken(name: str, data: bytes, *words: str):
    package(name, "model.mlmodel", "(at byte", *words, program=data)


NONE = "no Core ML model"
broken("an empty model", b"", NONE, "no specification version")
broken("a model of version 0", number(1, 0) + GOOD_MODEL[2:], NONE, "no specification version")
for cut in (1, 3, 4, *range(5, len(GOOD_MODEL), 23), len(GOOD_MODEL) - 2):
    broken(f"a model cut off at {cut}", GOOD_MODEL[:cut], NONE)
broken("a model that is text", b"hello, this is no model", NONE)
broken("a field that is number 0", b"\0\0" + GOOD_MODEL, NONE)
broken("a group", number(1, 8) + b"\x13\x14", NONE, "it has groups")
for kind in (6, 7):
    broken(f"a field of kind {kind}", number(1, 8) + bytes([2 << 3 | kind]), NONE)
broken("a number that does not end", b"\x08" + b"\xff" * 11, NONE)
broken("a tag that does not end", b"\xff" * 11, NONE)
broken("a field of 2^63", number(1, 8) + b"\x12" + varint(1 << 63), NONE, "ends after the message that it is in")
broken("a field of 2^64 - 1", number(1, 8) + b"\x12" + varint((1 << 64) - 1), NONE, "ends after the message")
broken("a version that is a text", message(1, "8") + GOOD_MODEL[2:], "field 1 is no number")
broken("a program that is a number", number(1, 8) + number(502, 7), "field 502 is no message")
broken("two programs", GOOD_MODEL + GOOD_MODEL[2:], NONE, "says again what was said")
broken("two versions", number(1, 8) + GOOD_MODEL, NONE, "field 1 says again")
broken("a program and a network", GOOD_MODEL + message(500), NONE, "field 500 says again")
nested = b""
for _ in range(200):
    nested = message(3, message(1, "cond"), message(4, nested))
broken("blocks within blocks", model(nested), NONE, "nested more than 100 deep")
pipeline = number(1, 8)
for _ in range(150):
    pipeline = number(1, 8) + message(202, message(1, pipeline))
broken("pipelines within pipelines", pipeline, NONE, "nested more than 100 deep")
broken("a million functions and more", program(b"\x12\0" * (1 << 20), b"\x12\0"), NONE, "1048576 fields in a row")
broken("a name that is no UTF-8", model(constant(b"\xff", FP16, [3], blob())), "a name is not UTF-8")
broken("a file that is no UTF-8", model(constant("w", FP16, [3], blob(file=b"\xff"))), "a name is not UTF-8")
for file in ("/etc/passwd", "../weight.bin", "weight.bin", "@model_path/weights/", "@model_path/weights/..",
             "@model_path/weights/a/b", "@model_path/weights/\0", "@model_path/../x", "", "x" * 100_000):  # fmt: skip
    broken(
        f"a weight file {file[:24]!r}",
        model(constant("w", FP16, [3], blob(file=file))),
        "is not of the form @model_path/weights/NAME",
    )
broken(
    "a weight file that is missing",
    model(constant("w", FP16, [3], blob("@model_path/weights/x.bin"))),
    '"w" is in',
    "which is missing",
)
for offset in (0, 1, 63, 65, 128, len(GOOD) - 1, len(GOOD), 1 << 40, (1 << 64) - 64, (1 << 64) - 1):
    broken(
        f"a blob at {offset}",
        model(constant("w", FP16, [3], blob(offset=offset))),
        '"w" is in',
        "where it cites no blob",
    )
broken("a blob of another type", model(constant("w", FP32, [3], blob())), '"w": its type is F32 but the blob holds F16')
broken(
    "a blob of another size",
    model(constant("w", FP16, [4], blob())),
    '"w": F16 [4] does not fill the 6 bytes of the blob',
)
broken("a shape that overflows", model(constant("w", FP16, [1 << 63, 2], blob())), "does not fill the 6 bytes")
broken("a type that no weight file holds", model(constant("w", INT64, [3], blob())), "its type is I64 but")
broken("an unknown type", model(constant("w", 99, [3], blob())), '"w", which is in a weight file, has the data type 99')
broken("a type of text", model(constant("w", 2, [3], blob())), "has the data type 2, which no weight file holds")
broken("an unknown dimension", model(constant("w", FP16, [None], blob())), "has a dimension that is not known")
untyped = message(3, message(1, "const"), message(3, message(1, "w")), entry(5, "val", blob()))
broken("a blob without a type", model(untyped), '"w", which is in a weight file, is no tensor')
both = constant("w", FP16, [3], blob() + message(3, message(1, message(7, message(1, b"abcdef")))))
broken("a value that is in two places", model(both), "says again what was said")


# The weight file.
def weight_file(name: str, data: bytes | None, *words: str, at="weight.bin"):
    package(name, at, "(at byte", *words, weights=data)


weight_file(
    "no weight file", None, '"w" is in "Data/com.apple.CoreML/weights/weight.bin", which is missing', at="model.mlmodel"
)
for cut in (0, 7, 55, 57, 63):
    weight_file(f"weights cut off at {cut}", GOOD[:cut], "has a header of 64 bytes", f"this file has {cut}")
weight_file("weights cut off at 56", GOOD[:56], "the header claims 2 blobs, but the file has only 56 bytes")
for cut in (64, 100, 127, 192, 255):
    weight_file(f"weights cut off at {cut}", GOOD[:cut], f"64 bytes are needed but the file has {cut} in all")
for cut in (128, 133, 256, len(GOOD) - 1):
    weight_file(f"weights cut off at {cut}", GOOD[:cut], f"are not within the file of {cut} bytes")
for version in (0, 1, 3, 0x2000000):
    weight_file(
        f"weights of version {version}", changed(GOOD, 4, struct.pack("<I", version)), f"weight file version {version}"
    )
weight_file("weights that count one blob too many", changed(GOOD, 0, b"\3"), "64 bytes are needed")
weight_file("weights that count 2^32 - 1", changed(GOOD, 0, b"\xff" * 4), "64 bytes are needed")
weight_file("another sentinel", changed(GOOD, 64, b"\0"), "instead of the sentinel 0xdeadbeef", "byte 64")
weight_file("the sentinel backwards", changed(GOOD, 192, b"\xde\xad\xbe\xef"), "instead of the sentinel", "byte 192")
for code in (0, 18, (1 << 32) - 1):
    weight_file(
        f"data of type {code}", changed(GOOD, 68, struct.pack("<I", code)), f"unknown data type {code}", "byte 68"
    )
for name, at in (("size", 72), ("offset", 80)):
    for value in (1 << 40, 1 << 63, (1 << 64) - 64, (1 << 64) - 1):
        weight_file(
            f"a {name} of {value}", changed(GOOD, at, struct.pack("<Q", value)), "are not within the file", "byte 72"
        )
weight_file("eight padding bits", changed(GOOD, 88, b"\x08"), "8 padding bits", "byte 88")
weight_file("2^63 padding bits", changed(GOOD, 88, struct.pack("<Q", 1 << 63)), "9223372036854775808 padding bits")
weight_file("a blob whose data is before it", changed(GOOD, 208, struct.pack("<Q", 0)), "before its metadata")
standing = changed(changed(GOOD, 72, bytes(16)), 80, struct.pack("<Q", 64))
weight_file("a walk that stands still", changed(standing, 0, b"\xff" * 4), "before its metadata")
long = weights((1, bytes(200)), (2, bytes(100)))
two = model(constant("w", FP16, [100], blob()), constant("v", FP32, [25], blob(offset=384)))
overlap = changed(long, 400, struct.pack("<Q", 320))
package(
    "two blobs that overlap", "weight.bin", "(at byte 320)", "overlaps the one before it", program=two, weights=overlap
)
weight_file("weights that are text", b"x" * 1000, "weight file version 2021161080")


def bare(directory: Path) -> Path:
    (directory / "m.mlmodel").write_bytes(GOOD_MODEL)
    return directory / "m.mlmodel"


def compiled(directory: Path) -> Path:
    root = directory / "m.mlmodelc"
    (root / "weights").mkdir(parents=True)
    (root / "coremldata.bin").write_bytes(b"")
    (root / "model.mil").write_text("program(1.0) {}")
    (root / "weights/weight.bin").write_bytes(GOOD[:100])
    return root


cases.add(
    "a bare model with a weight file", bare, "m.mlmodel", "which only an .mlpackage has: import the whole package"
)
cases.add("a compiled model with broken weights", compiled, "weight.bin", "64 bytes are needed", "(at byte 64)")
package(
    "a manifest that is a directory",
    "Manifest.json",
    extra=lambda root: ((root / "Manifest.json").unlink(), (root / "Manifest.json").mkdir()),
)
package(
    "a model that is a FIFO",
    "model.mlmodel",
    "is a FIFO",
    extra=lambda root: ((root / MODEL).unlink(), os.mkfifo(root / MODEL)),
)
package(
    "weights that are a link to nothing",
    "weight.bin",
    "is a link to nothing",
    extra=lambda root: ((root / WEIGHTS).unlink(), (root / WEIGHTS).symlink_to("x")),
)
package(
    "three hundred tensors of one name",
    "m.mlpackage",
    "more than 256 tensors are called",
    program=model(*(constant("w", FP32, [2, 2], blob(offset=64 + 128 * number)) for number in range(300))),
    weights=weights(*((2, struct.pack("<IIII", number, 1, 2, 3)) for number in range(300))),
)
