"""Inputs that break their formats, each with the error that it must give."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import BINARY

CPU_SECONDS = 5
MEMORY = 512 << 20
RUNNER = Path(__file__).with_name("runner.py")


@dataclass
class Case:
    """Makes an input below a directory and returns what is to be imported; the error has all the words in one line."""

    name: str
    make: Callable[[Path], Path]
    words: tuple[str, ...]
    status: int = 1


@dataclass
class Cases:
    """The cases of a format, all in one kind of file or directory."""

    group: str
    found: list[Case] = field(default_factory=list)

    def add(self, name: str, make: Callable[[Path], Path], *words: str):
        self.found.append(Case(f"{self.group}: {name}", make, words))


@dataclass
class Done:
    status: int
    line: str
    memory: int
    cpu: float


class Runner:
    """Runs the program with a limit on its CPU time, from a process so small that its own memory does not show."""

    def __init__(self, program: Path = BINARY):
        self.program = program

    def __enter__(self):
        command = [sys.executable, "-I", "-S", str(RUNNER), str(self.program), str(CPU_SECONDS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def __call__(self, *args, user: int | None = None) -> Done:
        order = {"args": [str(arg) for arg in args], "user": user}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Done(**json.loads(self.process.stdout.readline()))


def check(done: Done, words: tuple[str, ...], status: int = 1):
    """The status, one line with the words, and no more time or memory than an error may take."""
    line = done.line.rstrip("\n")
    assert done.status == status, f"exit {done.status}: {line}"
    assert "panicked" not in line
    if status == 1:
        assert line and "\n" not in line, f"not one line: {line}"
        assert len(line) < 6000 and line.isprintable(), f"cannot be shown: {line[:2000]!r}"
    for word in words:
        assert str(word) in line, f"{word!r} is not named: {line}"
    assert done.memory <= MEMORY, f"{done.memory >> 20} MiB"
    assert done.cpu < CPU_SECONDS


def changed(data: bytes, at: int, new: bytes) -> bytes:
    """The same with other bytes from a place on."""
    return data[:at] + new + data[at + len(new) :]


def writes(name: str, data: bytes) -> Callable[[Path], Path]:
    """Makes one file."""

    def make(directory: Path) -> Path:
        (directory / name).write_bytes(data)
        return directory / name

    return make
