"""Stages encoded tensors and upcasts them before use.

On `cuda` the encoded bytes and scales are moved to the device and upcast there (`cuda-upcast`, needs torch). On `cpu`
numpy decodes them (`cpu-decode-then-transfer`). Any other device, a missing torch and an artefact that breaks a rule lead
to the plain export, and the report says why.
"""

import hashlib
import time
from pathlib import Path

import numpy as np

from .manifest import Invalid, Manifest, Tensor
from .report import Figures, Report

RAW = "raw"
# Elements that numpy decodes at a time, in whole rows: few enough for a processor's cache.
PIECE = 1 << 16


def decode_table() -> np.ndarray:
    """The 256 values of e4m3fn as fp32, from their definition."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction / 512.0, (1 + fraction / 8.0) * 2.0 ** (exponent - 7.0))
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


TABLE = decode_table()


def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16" or name.startswith("float8_"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def decode(codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, int]:
    """Codes of shape (rows, ...) times the scale of their row, in fp32, then rounded to `dtype`; and the bytes of memory
    that this took beside codes, scales and result."""
    decoded = np.empty(codes.shape, dtype)
    rows, out = codes.reshape(len(scales), -1), decoded.reshape(len(scales), -1)
    step = max(1, PIECE // rows.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):
        for row in range(0, len(rows), step):
            values = TABLE[rows[row : row + step]]
            values *= scales[row : row + step, None]
            out[row : row + step] = values
    # numpy makes an index of 8 bytes from each code, and gives it back for the values.
    return decoded, 8 * min(step * rows.shape[1], rows.size)


class Loader:
    """Loads tensors of the export at `transport`, or of the plain one at `base` where that is not possible."""

    def __init__(self, transport, base, device: str = "cpu"):
        self.base, self.device, self.report = Manifest(base), device, Report()
        self.reason = self._unsupported()
        self.encoded: Manifest | None = None
        if self.reason is None:
            try:
                self.encoded = Manifest(transport)
                self.encoded.check_complete(self.base)
            except Invalid as error:
                self.encoded, self.reason = None, f"invalid transport: {error}"

    def _unsupported(self) -> str | None:
        if self.device == "cpu":
            return None
        if not self.device.startswith("cuda"):
            return f"unsupported device: {self.device}"
        try:
            import torch
        except ImportError:
            return "unsupported device: cuda needs torch, which is not installed"
        if not torch.cuda.is_available():
            return "unsupported device: torch finds no cuda device"
        number = self.device.removeprefix("cuda").removeprefix(":") or "0"
        if not number.isdecimal() or int(number) >= torch.cuda.device_count():
            return f"unsupported device: torch finds no {self.device}"
        return None if hasattr(torch, "float8_e4m3fn") else f"unsupported device: torch {torch.__version__} has no e4m3fn"

    def names(self) -> list[str]:
        return list(self.base.tensors)

    def load(self, name: str):
        """The tensor, of its stored type: a torch tensor on a cuda device, else a numpy array."""
        if self.encoded is None:
            return self._raw(self.base.tensors[name], self.reason)
        tensor = self.encoded.tensors[name]
        if tensor.transport is None:
            return self._raw(tensor, None)
        try:
            return self._staged(tensor)
        except Invalid as error:
            # What is wrong with one file says that the rest cannot be trusted either.
            self.encoded, self.reason = None, f"invalid transport: {error}"
            return self._raw(self.base.tensors[name], self.reason)

    def _staged(self, tensor: Tensor):
        started = time.perf_counter()
        codes, scales = read(tensor.path), read(tensor.scale_path)
        read_seconds = time.perf_counter() - started
        started = time.perf_counter()
        if "sha256:" + hashlib.sha256(codes).hexdigest() != tensor.transport.checksum:
            raise Invalid(f"{tensor.name}: wrong checksum of {tensor.path.name}")
        if scales.nbytes != 4 * tensor.shape[0]:
            raise Invalid(f"{tensor.name}: {tensor.scale_path.name} became shorter")
        codes, scales = codes.reshape(tensor.shape), scales.view("<f4")
        # The checksum is that of the codes alone.
        if not (np.isfinite(scales) & (scales > 0)).all():
            raise Invalid(f"{tensor.name}: {tensor.scale_path.name} holds what is no scale")
        check_seconds = time.perf_counter() - started
        started = time.perf_counter()
        if self.device == "cpu":
            used = "cpu-decode-then-transfer"
            loaded, scratch = decode(codes, scales, numpy_dtype(tensor.transport.decoded_dtype))
        else:
            used = "cuda-upcast"
            loaded, scratch = self._upcast(codes, scales, tensor.transport.decoded_dtype)
        decode_seconds = time.perf_counter() - started
        encoded = codes.nbytes + scales.nbytes
        decoded = tensor.transport.decoded_nbytes
        self.report.tensors[tensor.name] = Figures(
            used, encoded, decoded, read_seconds, check_seconds, decode_seconds, encoded + scratch
        )
        return loaded

    def _upcast(self, codes: np.ndarray, scales: np.ndarray, dtype: str):
        import torch

        staged = torch.from_numpy(codes).to(self.device).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(scales).to(self.device).view(-1, *[1] * (codes.ndim - 1))
        values = staged.to(torch.float32).mul_(scales)
        loaded = values.to(getattr(torch, dtype))
        torch.cuda.synchronize(self.device)
        # On the device: codes, scales and values, unless these are the result.
        return loaded, codes.nbytes + scales.nbytes + (0 if loaded is values else values.nbytes)

    def _raw(self, tensor: Tensor, reason: str | None):
        started = time.perf_counter()
        data = read(tensor.path)
        seconds = time.perf_counter() - started
        if data.nbytes != tensor.nbytes:
            raise Invalid(f"{tensor.name}: {tensor.path.name} became shorter")
        self.report.tensors[tensor.name] = Figures(RAW, data.nbytes, data.nbytes, seconds, fallback=reason)
        if self.device.startswith("cuda") and self._unsupported() is None:
            import torch

            return torch.from_numpy(data).view(getattr(torch, tensor.dtype)).reshape(tensor.shape).to(self.device)
        return data.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)


def read(path: Path) -> np.ndarray:
    """The bytes of a file."""
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise Invalid(f"{path.name}: {error}") from error
