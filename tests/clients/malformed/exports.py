"""gds_export directories."""

import json
import os
from pathlib import Path

from malformed import Cases

cases = Cases("gds_export")
W = {"path": "w.bin", "dtype": "float16", "shape": [2, 3]}


def whole(directory: Path) -> Path:
    """The export that all others differ from."""
    root = directory / "export"
    root.mkdir()
    (root / "manifest.json").write_text(json.dumps({"w": W}))
    (root / "w.bin").write_bytes(bytes(12))
    return root


def export(name: str, manifest, *words: str, files: dict | None = None, extra=None):
    def make(directory: Path) -> Path:
        root = directory / "export"
        root.mkdir()
        text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        (root / "manifest.json").write_bytes(text)
        for path, size in (files if files is not None else {"w.bin": 12}).items():
            (root / path).write_bytes(bytes(size))
        if extra:
            extra(root)
        return root

    cases.add(name, make, *words)


def rule(name: str, change: dict, *words: str, **more):
    """One entry, called w, that breaks a rule."""
    export(
        name,
        {"w": {k: v for k, v in (W | change).items() if v is not ...}},
        "manifest.json",
        'tensor "w"',
        *words,
        **more,
    )


for name, text, word in [
    ("empty", b"", "EOF"),
    ("a list", b"[]", "expected an object of tensors"),
    ("null", b"null", "expected an object of tensors"),
    ("a number", b"1", "expected an object of tensors"),
    ("cut off", b'{"w":{"path":', "EOF"),
    ("two objects", b"{}{}", "trailing characters"),
    ("no UTF-8", b'{"\xff":{}}', "no UTF-8"),
    ("deep", b'{"a":' * 100_000, "recursion limit"),
    ("a pickle", b"\x80\x04\x95\x0b\0\0\0", "no UTF-8"),
    ("of five million values", b'{"a":[' + b"0," * 5_000_000 + b"0]}", "values and separators"),
]:
    export(f"a manifest that is {name}", text, "manifest.json", "(at byte", word)
export("a manifest of no tensor", {}, "manifest.json", "names no tensor")
for name, entry in [("null", None), ("a list", []), ("a text", "w.bin"), ("a number", 3)]:
    export(f"a tensor that is {name}", {"w": entry}, "manifest.json", 'tensor "w": has no path')
rule("no path", {"path": ...}, "has no path")
rule("a path that is a number", {"path": 1}, "its path is no text")
for name, path in [
    ("an absolute path", "/etc/passwd.bin"), ("a path that leads out", "../../w.bin"), ("a path through itself", "a/../w.bin"),
    ("an empty path", ""), ("a path with NUL", "w\0.bin"), ("a path with a line", "w\n.bin"), ("a path with a dot", "./w.bin"),
    ("a path with two slashes", "a//w.bin"), ("a directory as path", "w.bin/"), ("a path of 5,000 characters", "w" * 5000 + ".bin"),
]:  # fmt: skip
    rule(name, {"path": path}, "is no plain relative path")
for end in ("pth", "ckpt", "pickle", "PT"):
    rule(f"a file that ends in {end}", {"path": f"w.{end}"}, "is a pickle, which can run code")
for path in ("w", "w.npy", "w.bin.so", ".bin/w"):
    rule(f"a file {path}", {"path": path}, "does not end in .bin or .raw")
rule("no dtype", {"dtype": ...}, "has no dtype")
rule("a dtype that is null", {"dtype": None}, "its dtype is no text")
rule("a dtype of torch", {"dtype": "torch.float16"}, "pickled by torch")
rule("an unknown dtype", {"dtype": "float12"}, 'its dtype "float12" is not known')
rule("a very long dtype", {"dtype": "f" * 100_000}, "is not known")
rule("packed as an object", {"packed": {"kind": "mxfp4"}}, "is packed as", "only plain tensors")
rule("no shape", {"shape": ...}, "has no shape")
rule("a shape that is a number", {"shape": 6}, "its shape is no list")
rule("a shape of texts", {"shape": ["6"]}, "its shape is no list of sizes")
rule("a negative shape", {"shape": [-6]}, "its shape is no list of sizes")
rule("a shape of fractions", {"shape": [6.0]}, "its shape is no list of sizes")
rule("a shape that overflows", {"shape": [1 << 63, 2]}, "is too large")
rule("a shape of a hundred thousand", {"shape": [1] * 100_000}, "is 2 bytes", '"w.bin" has 12')
rule("a file that is too long", {}, "float16 [2, 3] is 12 bytes", '"w.bin" has 13', files={"w.bin": 13})
rule("a file that is too short", {}, "float16 [2, 3] is 12 bytes", '"w.bin" has 11', files={"w.bin": 11})
rule("an empty file", {}, '"w.bin" has 0', files={"w.bin": 0})
rule("a file that is missing", {}, 'its file "w.bin" is missing', files={})
rule(
    "a file that is a directory",
    {},
    'its file "w.bin" is missing',
    files={},
    extra=lambda root: (root / "w.bin").mkdir(),
)
two = {"w": W, "v": W}
export("one file for two", two, "manifest.json", 'tensor "v"', 'has the file "w.bin", which is that of "w"')
same = f'{{"w":{json.dumps(W)},"w":{json.dumps(W)}}}'.encode()
export("a name twice", same, "manifest.json", 'tensor "w": occurs twice')
export("a second one that is bad", {"w": W, "v": {}}, "manifest.json", 'tensor "v": has no path')
rule("a file that is a FIFO", {}, "w.bin", files={}, extra=lambda root: os.mkfifo(root / "w.bin"))
cases.found[-1].words = ("w.bin", "is a FIFO; only regular files")


def large(directory: Path) -> Path:
    root = directory / "export"
    root.mkdir()
    with open(root / "manifest.json", "wb") as f:
        f.truncate(100 << 20)
    return root


cases.add("a manifest of 100 MiB", large, "manifest.json", "104857600 bytes are too many")
