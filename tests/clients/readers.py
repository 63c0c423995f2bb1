"""Independent readers of the containers, written from their descriptions and not from the program."""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F32": np.float32, "F64": np.float64,
}  # fmt: skip


@dataclass
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)

    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def safetensors(path: Path) -> dict[str, Tensor]:
    data = path.read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + n :]
    return {
        name: Tensor(t["dtype"], tuple(t["shape"]), bytes(body[slice(*t["data_offsets"])]))
        for name, t in header.items()
    }


def safetensors_dir(path: Path) -> dict[str, Tensor]:
    """All tensors of a model directory, as mlx-lm finds them."""
    files = sorted(path.glob("model*.safetensors"))
    assert files, f"no model*.safetensors in {path}"
    return {name: t for file in files for name, t in safetensors(file).items()}


AMB_DTYPES = {0: "F32", 1: "F16", 2: "BF16", 3: "I8"}


@dataclass
class Amb:
    flags: int
    metadata: dict
    config: dict
    tokenizer: bytes
    tensors: dict[str, Tensor]


def amb(path: Path) -> Amb:
    data = path.read_bytes()
    magic, version, flags, metadata, config, tokenizer, weights = struct.unpack_from("<5sBHIIIQ", data)
    assert (magic, version) == (b"AMBEE", 1)
    assert len(data) == 28 + metadata + config + tokenizer + weights, "the sizes are not the file's"
    at = 28

    def take(n: int) -> bytes:
        nonlocal at
        assert at + n <= len(data), f"{n} bytes at {at} run past the end"
        at += n
        return data[at - n : at]

    sections = take(metadata), take(config), take(tokenizer)
    tensors = {}
    while at < len(data):
        (length,) = struct.unpack("<H", take(2))
        name = take(length).decode()
        (dims,) = take(1)
        shape = struct.unpack(f"<{dims}I", take(4 * dims))
        (code,) = take(1)
        (size,) = struct.unpack("<Q", take(8))
        assert name not in tensors, f"{name} twice"
        tensors[name] = Tensor(AMB_DTYPES[code], shape, take(size))
        assert tensors[name].array().nbytes == size
        assert not any(take(-at % 8)), "padding that is not zero"
    # A model without config.json, as CoreML packages alone are, has no config section.
    return Amb(flags, json.loads(sections[0]), json.loads(sections[1] or b"{}"), sections[2], tensors)


MIL_DTYPES = {1: "F16", 2: "F32", 3: "U8", 4: "I8", 8: "INT4", 11: "UINT4", 14: "I32"}


def milblob(path: Path) -> dict[int, Tensor]:
    """The blobs of a weight.bin by the offset of their metadata; flat, because the shapes are in the program."""
    data = path.read_bytes()
    count, version = struct.unpack_from("<II", data)
    assert version == 2
    blobs, at = {}, 64
    for _ in range(count):
        sentinel, code, size, offset, _ = struct.unpack_from("<IIQQQ", data, at)
        assert sentinel == 0xDEADBEEF and offset + size <= len(data)
        blobs[at] = Tensor(MIL_DTYPES[code], (size,), data[offset : offset + size])
        at = -(-(offset + size) // 64) * 64
    return blobs


def go_json(value) -> bytes:
    """JSON as Go's encoder writes it, without the newline."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode()
