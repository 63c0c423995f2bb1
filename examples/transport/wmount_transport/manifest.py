"""manifest.json: every rule is checked before a tensor is read, and nothing of a file is ever executed."""

import json
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

ENCODING = "fp8-e4m3fn-rows"
SCALE_ENCODING = "fp32-rows"
DECODE_LOCATIONS = ("cuda-upcast", "cpu-decode-then-transfer")
ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
DECODED = ("float32", "float16", "bfloat16")
RAW_EXTENSIONS = (".bin", ".raw")
PICKLED = (".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Invalid(ValueError):
    """The manifest or one of its files breaks a rule."""


@dataclass(frozen=True)
class Transport:
    """The ten fields of the transport contract."""

    encoding: str
    encoded_dtype: str
    encoded_nbytes: int
    decoded_dtype: str
    decoded_shape: tuple
    decoded_nbytes: int
    scale_encoding: str
    scale_path: str
    checksum: str
    decode_location: str


@dataclass(frozen=True)
class Tensor:
    name: str
    path: Path
    dtype: str
    shape: tuple
    transport: Transport | None = None
    scale_path: Path | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


class Manifest:
    """The tensors of an export directory. Raises Invalid at the first broken rule; checksums are checked on reading."""

    def __init__(self, root):
        self.root = Path(root).resolve()
        try:
            entries = json.loads((self.root / "manifest.json").read_bytes(), object_pairs_hook=unique)
        except (OSError, ValueError, RecursionError) as error:
            raise Invalid(f"manifest.json: {error}") from error
        if not isinstance(entries, dict):
            raise Invalid("manifest.json: is no object")
        self.tensors = {name: self._tensor(name, entry) for name, entry in entries.items()}

    def check_complete(self, base: "Manifest"):
        """Every tensor of the base model is here, of the same shape and type after decoding, and no other."""
        if missing := base.tensors.keys() - self.tensors.keys():
            raise Invalid(f"{min(missing)}: is in the base model and not here")
        if unknown := self.tensors.keys() - base.tensors.keys():
            raise Invalid(f"{min(unknown)}: is not in the base model")
        for name, tensor in self.tensors.items():
            dtype = tensor.transport.decoded_dtype if tensor.transport else tensor.dtype
            other = base.tensors[name]
            if (dtype, tensor.shape) != (other.dtype, other.shape):
                raise Invalid(f"{name}: {dtype} {tensor.shape} is {other.dtype} {other.shape} in the base model")

    def _tensor(self, name: str, entry) -> Tensor:
        def rule(holds, what):
            if not holds:
                raise Invalid(f"{name}: {what}")

        rule(isinstance(entry, dict), "is no object")
        rule(entry.get("packed") is None, f"is packed as {entry.get('packed')}")
        dtype, shape = entry.get("dtype"), entry.get("shape")
        rule(isinstance(dtype, str) and not dtype.startswith("torch"), f"dtype {dtype} is of a pickled tensor")
        rule(dtype in ITEMSIZE, f"unknown dtype {dtype}")
        rule(is_shape(shape), f"shape {shape} is no list of sizes")
        fields_of = entry.get("transport")
        allowed = RAW_EXTENSIONS if fields_of is None else (".fp8",)
        path = self._file(name, entry.get("path"), allowed)
        tensor = Tensor(name, path, dtype, tuple(shape))
        rule(path.stat().st_size == tensor.nbytes, f"shape mismatch: {path.name} has {path.stat().st_size} bytes, {dtype} {shape} is {tensor.nbytes}")
        if fields_of is None:
            rule(dtype != "float8_e4m3fn" or path.suffix != ".fp8", "encoded, but without a transport")
            return tensor
        expected = {field.name for field in fields(Transport)}
        rule(isinstance(fields_of, dict) and fields_of.keys() == expected, "transport has other fields than the ten")
        t = Transport(**{**fields_of, "decoded_shape": fields_of["decoded_shape"]})
        rule(t.encoding == ENCODING, f"unknown encoding {t.encoding}")
        rule(t.scale_encoding == SCALE_ENCODING, f"unknown scale encoding {t.scale_encoding}")
        rule(t.encoded_dtype == dtype == "float8_e4m3fn", f"encoded dtype {t.encoded_dtype} is not that of the encoding")
        rule(t.decoded_dtype in DECODED, f"unknown decoded dtype {t.decoded_dtype}")
        rule(t.decode_location in DECODE_LOCATIONS, f"unknown decode location {t.decode_location}")
        rule(t.decoded_shape == shape and len(shape) > 1, f"shape mismatch: {shape} decodes to {t.decoded_shape}")
        rule(t.encoded_nbytes == tensor.nbytes, f"shape mismatch: encoded_nbytes is {t.encoded_nbytes}")
        rule(t.decoded_nbytes == prod(shape) * ITEMSIZE[t.decoded_dtype], f"shape mismatch: decoded_nbytes is {t.decoded_nbytes}")
        rule(is_checksum(t.checksum), f"checksum {t.checksum} is no sha256")
        scale = self._file(name, t.scale_path, (".scale",))
        rule(scale.stat().st_size == 4 * shape[0], f"shape mismatch: {scale.name} does not hold {shape[0]} scales")
        return Tensor(name, path, dtype, tuple(shape), t, scale)

    def _file(self, name: str, path, allowed) -> Path:
        if not isinstance(path, str) or not path or "\0" in path:
            raise Invalid(f"{name}: path {path!r} is no path")
        if Path(path).suffix.lower() in PICKLED:
            raise Invalid(f"{name}: {path} is a pickle and is not opened")
        if Path(path).suffix not in allowed:
            raise Invalid(f"{name}: extension of {path} is none of {' '.join(allowed)}")
        try:
            whole = (self.root / path).resolve()
            inside = whole.is_relative_to(self.root) and not Path(path).is_absolute()
            is_there = inside and whole.is_file()
        except (OSError, ValueError, RuntimeError) as error:
            # A name that is too long or no text, and links in a circle.
            raise Invalid(f"{name}: path {path[:80]!r} leads nowhere") from error
        if not inside:
            raise Invalid(f"{name}: {path} is outside of the export")
        if not is_there:
            raise Invalid(f"{name}: {path} is missing")
        return whole


def unique(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def is_shape(shape) -> bool:
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def is_checksum(text) -> bool:
    digest = text.removeprefix("sha256:") if isinstance(text, str) and text.startswith("sha256:") else ""
    return len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
