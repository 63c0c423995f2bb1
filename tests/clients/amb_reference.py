"""AMB in numpy, written from the format's page (src/format/amb/amb.md) and not from the program: a reader of records,
a writer, and the quantisation of every variant.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VARIANTS = ("f16", "int8", "int4-32", "int4-128", "int5-32", "int5-128", "adaptive-32")
F32_MAX = np.finfo(np.float32).max


@dataclass
class Record:
    code: int
    shape: tuple[int, ...]
    data: bytes


@dataclass
class File:
    metadata: bytes
    config: bytes
    tokenizer: bytes
    records: dict[str, Record]


def read(data: bytes) -> File:
    magic, version, _, *sizes, weights = struct.unpack_from("<5sBHIIIQ", data)
    assert (magic, version) == (b"AMBEE", 1) and len(data) == 28 + sum(sizes) + weights
    at, sections = 28, []
    for size in sizes:
        sections.append(data[at : at + size])
        at += size
    records = {}
    while at < len(data):
        (n,) = struct.unpack_from("<H", data, at)
        name = data[at + 2 : at + 2 + n].decode()
        at += 2 + n
        dims = data[at]
        shape = struct.unpack_from(f"<{dims}I", data, at + 1)
        code, size = struct.unpack_from("<BQ", data, at + 1 + 4 * dims)
        at += 10 + 4 * dims
        records[name] = Record(code, shape, data[at : at + size])
        at += size
        assert not any(data[at : at + -at % 8])
        at += -at % 8
    return File(*sections, records)


def write(file: File) -> bytes:
    sections = file.metadata + file.config + file.tokenizer
    out = bytearray(28) + sections
    for name, record in file.records.items():
        encoded = name.encode()
        out += struct.pack("<H", len(encoded)) + encoded
        out += struct.pack(f"<B{len(record.shape)}I", len(record.shape), *record.shape)
        out += struct.pack("<BQ", record.code, len(record.data)) + record.data
        out += bytes(-len(out) % 8)
    sizes = [len(section) for section in (file.metadata, file.config, file.tokenizer)]
    struct.pack_into("<5sBHIIIQ", out, 0, b"AMBEE", 1, 0, *sizes, len(out) - 28 - len(sections))
    return bytes(out)


def untouched(name: str, array: np.ndarray) -> bool:
    return array.ndim < 2 or array.size == 0 or any("norm" in part.lower() for part in name.split("."))


def blocks_of(x: np.ndarray, size: int) -> np.ndarray:
    flat = x.ravel()
    return np.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def largest(x: np.ndarray) -> np.ndarray:
    """The largest absolute value of each row."""
    return np.minimum(np.nan_to_num(np.abs(x), nan=0, posinf=np.inf).max(-1), F32_MAX)


def integers(x: np.ndarray, scale: np.ndarray, levels: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        q = x / scale.astype(np.float32)[..., None]
    q[np.isnan(q)] = 0
    q[np.broadcast_to(scale[..., None] == 0, q.shape)] = 0
    return np.rint(np.clip(q, -levels, levels)).astype(np.int8)


def bits(q: np.ndarray, count: int) -> np.ndarray:
    """Rows of integers as rows of packed bytes."""
    stream = (q.astype(np.uint8)[..., None] >> np.arange(count)) & 1
    return np.packbits(stream.reshape(q.shape[0], -1).astype(np.uint8), axis=-1, bitorder="little")


def in_blocks(x: np.ndarray, levels: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The fp16 scales and packed integers of blocks."""
    scale = np.minimum(largest(x) / np.float32(levels), np.float32(65504)).astype(np.float16)
    return scale, bits(integers(x, scale, levels), count)


def adaptive(x: np.ndarray) -> bytes:
    n = len(x)
    kept_count = math.ceil(n / 10)
    clean = np.clip(np.nan_to_num(x, nan=0, posinf=F32_MAX, neginf=-F32_MAX), -F32_MAX, F32_MAX).astype(np.float64)
    squares = (clean * clean).reshape(n, 4, 8)
    s = ((squares[:, 0] + squares[:, 1]) + squares[:, 2]) + squares[:, 3]
    total = ((s[:, 0] + s[:, 4]) + (s[:, 2] + s[:, 6])) + ((s[:, 1] + s[:, 5]) + (s[:, 3] + s[:, 7]))
    peak = largest(x).astype(np.float64)
    with np.errstate(invalid="ignore"):
        score = np.where(total == 0, 0, peak * peak / total).astype(np.float32)
    kept = np.zeros(n, bool)
    kept[np.argsort(-score, kind="stable")[:kept_count]] = True
    scale, packed = in_blocks(x, 7, 4)
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16)
    body = b"".join(halves[i].tobytes() if kept[i] else packed[i].tobytes() for i in range(n))
    return np.packbits(kept, bitorder="little").tobytes() + scale[~kept].tobytes() + body


def variant(name: str, array: np.ndarray, which: str) -> tuple[int, bytes] | None:
    """Data type and data of a tensor in a variant, `None` if it stays as it is."""
    if untouched(name, array):
        return None
    x = array.astype(np.float32)
    if which == "f16":
        with np.errstate(over="ignore"):
            return 1, x.astype(np.float16).tobytes()
    if which == "int8":
        scale = largest(x.reshape(1, -1)) / np.float32(127)
        return 3, bytes([3, 0, 0, 0]) + scale.tobytes() + integers(x.reshape(1, -1), scale, 127).tobytes()
    kind, size = which.split("-")
    size = int(size)
    if kind == "adaptive":
        return 8, bytes([8, size, 0, 1]) + adaptive(blocks_of(x, size))
    count, code = {"int4": (4, 6), "int5": (5, 7)}[kind]
    scale, packed = in_blocks(blocks_of(x, size), 2 ** (count - 1) - 1, count)
    rows = np.concatenate([scale[:, None].view(np.uint8), packed], axis=1)
    return code, bytes([code, size, 0, 1]) + rows.tobytes()


def quant(which: str) -> dict:
    if which == "f16":
        return {"type": "fp16"}
    if which == "int8":
        return {"type": "int8", "block_size": 0, "scale_type": "fp32"}
    kind, size = which.split("-")
    kind = kind if kind == "adaptive" else kind + "_block"
    return {"type": kind, "block_size": int(size), "scale_type": "fp16"}


def expected(base: File, arrays: dict[str, np.ndarray], which: str) -> bytes:
    """The whole file of a variant, from the plain file and the tensors."""
    records = {}
    for name, record in base.records.items():
        made = variant(name, arrays[name], which)
        records[name] = record if made is None else Record(made[0], record.shape, made[1])
    config = json.loads(base.config or b"{}") | {"quant": quant(which)}
    text = json.dumps(config, separators=(",", ":"), ensure_ascii=False).encode()
    return write(File(base.metadata, text, base.tokenizer, records))


def load(path: Path) -> File:
    return read(path.read_bytes())
