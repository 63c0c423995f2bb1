"""Paths that lead to no file that can be read, and directories that are too much."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from malformed import Cases
from malformed.tensors import INDEX, ONE, of

cases = Cases("places")


def no_file(directory: Path) -> Path:
    return directory / "absent.safetensors"


def listener(path: Path):
    here = os.getcwd()
    # The address of a socket is short, its path need not be.
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


KINDS: list[tuple[str, Callable[[Path], object], str]] = [
    ("FIFO", os.mkfifo, "is a FIFO; only regular files"),
    ("socket", listener, "is a socket; only regular files"),
    ("link to a device", lambda path: path.symlink_to("/dev/zero"), "is a device; only regular files"),
    ("link to a terminal", lambda path: path.symlink_to("/dev/tty"), "is a device; only regular files"),
    ("link to nothing", lambda path: path.symlink_to("nothing-there"), "is a link to nothing"),
    ("link to itself", lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    ("link through a file", lambda path: path.symlink_to("config.json/x"), "Not a directory"),
]
if os.geteuid() == 0:
    KINDS.append(("device", lambda path: os.mknod(path, 0o20666, os.makedev(1, 5)), "is a device; only regular files"))
for name in ("model.safetensors", "model.amb", "model.gguf", "m.mlmodel", "m.mlpackage", "plain"):
    for kind, make, words in KINDS:

        def alone(directory: Path, name=name, make=make) -> Path:
            (directory / "config.json").write_text("{}")
            make(directory / name)
            return directory / name

        cases.add(f"{name} that is a {kind}", alone, name, words)
for name in ("model.safetensors", "config.json", "manifest.json", "a/b/c/tokenizer.json"):
    for kind, make, words in KINDS:

        def within(directory: Path, name=name, make=make) -> Path:
            root = directory / "model"
            (root / name).parent.mkdir(parents=True)
            make(root / name)
            return root

        if kind != "link through a file":
            cases.add(f"a directory whose {name} is a {kind}", within, name, words)


def loop(target: str):
    def make(directory: Path) -> Path:
        (directory / "model/a/b").mkdir(parents=True)
        (directory / "model/model.safetensors").write_bytes(of(ONE, 16))
        (directory / "model/a/b/again").symlink_to(target)
        return directory / "model"

    return make


for target in (".", "..", "../..", "../../../model"):
    cases.add(f"a link to {target}", loop(target), "again: is a link to a directory that it is in")


def doubling(directory: Path) -> Path:
    """Thirty directories, each with two links to the next."""
    root = directory / "model"
    for level in range(30):
        (root / str(level)).mkdir(parents=True)
        for link in "ab":
            (root / str(level) / link).symlink_to(f"../{level + 1}")
    (root / "30").mkdir()
    return root


cases.add("links that make a thousand million directories of thirty", doubling, "is a directory that 64 other paths lead to already")


def named(name: bytes):
    def make(directory: Path) -> Path:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(of(ONE, 16))
        with open(bytes(directory) + b"/" + name, "wb"):
            return directory

    return make


cases.add("a file whose name is no UTF-8", named(b"a\xff.json"), "its name is not UTF-8")
cases.add("a file with a line in its name", named(b"two\nlines.json"), "two\\nlines.json", "is no plain relative path")
cases.add("a file with an escape in its name", named(b"\x1b[2J.json"), "[2J.json", "is no plain relative path")
cases.add("a file with DEL in its name", named(b"a\x7f.json"), "is no plain relative path")


def text(name: str, content: bytes):
    def make(directory: Path) -> Path:
        (directory / name).write_bytes(content)
        return directory / name

    return make


NOTHING = "is nothing that can be imported"
cases.add("a path that is not there", no_file, "absent.safetensors: No such file or directory")
cases.add("a path below a file", lambda d: text("x", b"")(d) / "y", "x/y", "Not a directory")
cases.add("a path that is too long", lambda d: d / ("x" * 300), "File name too long")
cases.add("an empty directory", lambda d: d, NOTHING)
cases.add("a text file", text("letter.txt", b"Dear Sir"), "letter.txt", NOTHING)
cases.add("an empty file", text("nothing", b""), "nothing", NOTHING)
cases.add("a pickle", text("pytorch_model.bin", b"\x80\x02}q\x00."), "pytorch_model.bin", NOTHING)
cases.add("a zip", text("model.pt", b"PK\x03\x04" + bytes(26)), "model.pt", NOTHING)
cases.add("a directory called as a file", lambda d: ((d / "m.amb").mkdir(), d / "m.amb")[1], "m.amb", NOTHING)


def deep(directory: Path) -> Path:
    here = os.getcwd()
    os.chdir(directory)
    try:
        os.mkdir("deep")
        os.chdir("deep")
        for _ in range(3000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    return directory / "deep"


cases.add("directories within directories", deep, "deep/d/d/d", "it has more than 100 names")


def many(count: int, name: str, extra: Callable[[Path], None] | None = None):
    def make(directory: Path) -> Path:
        root = directory / "many"
        root.mkdir()
        for number in range(count):
            os.mknod(root / f"{number:06}{name}")
        if extra:
            extra(root)
        return root

    return make


def large_index(root: Path):
    (root / "model.safetensors").write_bytes(of(ONE, 16))
    names = ",".join(f'"t{number}":"{number:06}.txt"' for number in range(100_000))
    (root / INDEX).write_text(f'{{"weight_map":{{{names},"last":"x"}}}}')


cases.add("a directory of 100,000 files", many(100_000, ".txt"), "many", NOTHING)
cases.add(
    "a directory of 100,000 safetensors files",
    many(100_000, ".safetensors"),
    "many/000000.safetensors",
    "8 bytes are needed",
)
cases.add(
    "an index of 100,000 names", many(100_000, ".txt", large_index), INDEX, 'tensor "last" is in "x", which is missing'
)
cases.add("a good file beside a bad one", named(b"model-2.safetensors"), "model-2.safetensors", "8 bytes are needed")


def unreadable(name: str) -> Callable[[Path], Path]:
    """What only another user may read; the program is run as nobody if this is root."""

    def make(directory: Path) -> Path:
        root = directory / "model"
        (root / "below").mkdir(parents=True)
        (root / "config.json").write_text("{}")
        (root / "model.safetensors").write_bytes(of(ONE, 16))
        (root / name).chmod(0)
        return root

    return make


UNREADABLE = ["model.safetensors", "config.json", "below"]

# Arguments, with the store put after them: the exit status and the words.
COMMANDS: list[tuple[list[str], int, str]] = [
    (["rm", ".."], 2, '".." is no valid name of a model'),
    (["rm", "a b"], 2, '"a b" is no valid name of a model'),
    (["rm", "../../etc"], 2, '".." is no valid host of a model'),
    (["rm", "/etc/passwd"], 2, '"" is no valid host of a model'),
    (["rm", ""], 2, '"" is no valid name of a model'),
    (["rm", "good", "absent"], 1, "model absent:latest in the store"),
    (["rm", "good:absent"], 1, ", which has good:latest: not found"),
    (["rm", "god"], 1, ", which has good:latest: not found"),
    (["rm", "good", "godo:1"], 1, ", which has good:latest: not found"),
    (["rm"], 2, "<MODEL>"),
    (["show", "../x"], 2, '".." is no valid namespace'),
    (["show", "good/../good"], 2, '".." is no valid namespace'),
    (["show", "good:v9"], 1, "model good:v9 in the store"),
    (["show", "me/goodd"], 1, ", which has good:latest: not found"),
    (["show", "x" * 5000], 2, "is no valid name of a model"),
    (["show", "\x1b[2J"], 2, "is no valid name of a model"),
    (["show", "n\xe9"], 2, "is no valid name of a model"),
    (["show", "good@"], 2, '"" is no variant; there are today, seed, f16'),
    (["show", "good@nothing"], 2, '"nothing" is no variant; there are today, seed, f16'),
    (["show"], 2, "<MODEL>"),
    (["verify", "a/b/c/d"], 2, '"a/b/c/d" is no model name: it takes [[HOST/]NAMESPACE/]NAME[:TAG]'),
    (["verify", "absent"], 1, "model absent:latest in the store"),
    (["verify", "Good"], 1, ", which has good:latest: not found"),
    (["verify", "-x"], 2, "unexpected argument '-x'"),
    (["prepare", "good"], 2, "say which variant, such as good:latest@fp8"),
    (["prepare", "good@"], 2, '"" is no variant; there are today, seed, f16'),
    (["prepare", "good@x"], 2, '"x" is no variant; there are today, seed, f16'),
    (["prepare", "absent@f16"], 1, "model absent:latest in the store"),
    (["prepare", "goood@f16"], 1, ", which has good:latest: not found"),
    (["cat", ""], 1, '"": is a directory'),
    (["cat", "/"], 1, '"/": is a directory'),
    (["cat", "safetensors/good/latest"], 1, '"safetensors/good/latest": is a directory'),
    (["cat", "../../etc/passwd"], 1, "../../etc/passwd in the store "),
    (["cat", "/etc/passwd"], 1, "/etc/passwd in the store "),
    (["cat", "amb/../../etc"], 1, "amb/../../etc in the store "),
    (["cat", "safetensors/good/latest/none\n"], 1, "safetensors/good/latest/none\\n in the store "),
    (["cat", "safetensors/good/latest/model.safetensors/x"], 1, 'model.safetensors/x: "x" is below a file'),
    (["cat", "amb/" + "x" * 5000], 1, "not found"),
    (["cat", "safetensors/good/config.json"], 1, ", where safetensors/good/ has latest: not found"),
    (["cat", "safetensors/god/latest"], 1, ", where safetensors/ has good: not found"),
    (["cat", "/mnt/w/amb"], 1, ", whose tree has .wmount, amb, coreml, gds_export, gguf, "),
    (["export", "gguf/good", "/dev/shm/nothing"], 1, ", where gguf/ has nothing: not found"),
    (["cat"], 2, "<TREE-PATH>"),
    (["export", "nowhere", "/dev/shm/nothing"], 1, "nowhere in the store "),
    (["export", "safetensors/good/latest", "/proc/nothing"], 1, "/proc/nothing: No such file or directory"),
    (["export", "safetensors/good/latest", "/etc"], 1, "/etc"),
    (["export", "safetensors"], 2, "<DEST>"),
    (["import"], 2, "<PATH>"),
    (["import", ""], 2, "<PATH>"),
    (["import", "/dev/null", "-n", "z"], 1, "/dev/null: is a device; only regular files can be imported"),
    (["import", "/dev/null", "-n", ".."], 2, '".." is no valid name of a model'),
    (["import", "/dev/null", "-n", "z", "--blob-threshold", "x"], 2, "invalid value 'x' for '--blob-threshold"),
    (["import", "/dev/null", "-n", "z", "--blob-threshold", "-1"], 2, "unexpected argument '-1'"),
    (["import", "/dev/null", "-n", "z", "--blob-threshold", str(1 << 64)], 2, "number too large"),
    (["ls", "extra"], 2, "unexpected argument 'extra'"),
    (["ls", "--sharedd"], 2, "unexpected argument '--sharedd'"),
    (["gc", "x"], 2, "unexpected argument 'x'"),
    (["completions", "klingon"], 2, "invalid value 'klingon'"),
    (["umount", "/nowhere"], 1, "/nowhere: No such file or directory"),
    (["lss"], 2, "'ls'"),
    (["mount", "/dev/shm"], 2, "wmount STORE MOUNTPOINT"),
    (["status", "/nowhere"], 1, "/nowhere: No such file or directory"),
]
