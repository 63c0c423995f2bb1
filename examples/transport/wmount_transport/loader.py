"""Stages encoded tensors and upcasts them before use.

On `cuda` the encoded bytes and scales are moved to the device and upcast there (`cuda-upcast`, needs torch). On `cpu`
numpy decodes them (`cpu-decode-then-transfer`). Any other device, a missing torch and an artefact that breaks a rule lead to the plain export,
and the report says why.
"""

import hashlib
import time
from pathlib import Path

import numpy as np

from .manifest import Invalid, Manifest, Tensor
from .report import Figures, Report

RAW = "raw"


def decode_table() -> np.ndarray:
    """The 256 values of e4m3fn as fp32, from their definition."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction / 512.0, (1 + fraction / 8.0) * 2.0 ** (exponent - 7.0))
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


TABLE = decode_table()


def numpy_dtype(name: str) -> np.dtype:
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def decode(codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Codes of shape (rows, ...) times the scale of their row, in fp32, then rounded to `dtype`."""
    scales = scales.reshape(-1, *[1] * (codes.ndim - 1))
    with np.errstate(over="ignore", invalid="ignore"):
        return (TABLE[codes] * scales).astype(dtype)


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
        return None if torch.cuda.is_available() else "unsupported device: torch finds no cuda device"

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
        if "sha256:" + hashlib.sha256(codes).hexdigest() != tensor.transport.checksum:
            raise Invalid(f"{tensor.name}: wrong checksum of {tensor.path.name}")
        if len(scales) != 4 * tensor.shape[0]:
            raise Invalid(f"{tensor.name}: {tensor.scale_path.name} became shorter")
        codes = np.frombuffer(codes, np.uint8).reshape(tensor.shape)
        scales = np.frombuffer(scales, "<f4")
        started = time.perf_counter()
        if self.device == "cpu":
            used, scratch = "cpu-decode-then-transfer", codes.nbytes + scales.nbytes + 4 * codes.size
            loaded = decode(codes, scales, numpy_dtype(tensor.transport.decoded_dtype))
        else:
            used, scratch = "cuda-upcast", codes.nbytes + scales.nbytes + 4 * codes.size
            loaded = self._upcast(codes, scales, tensor.transport.decoded_dtype)
        decode_seconds = time.perf_counter() - started
        encoded = codes.nbytes + scales.nbytes
        decoded = tensor.transport.decoded_nbytes
        self.report.tensors[tensor.name] = Figures(used, encoded, decoded, read_seconds, decode_seconds, scratch)
        return loaded

    def _upcast(self, codes: np.ndarray, scales: np.ndarray, dtype: str):
        import torch

        staged = torch.from_numpy(codes.copy()).to(self.device).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(scales.copy()).to(self.device).view(-1, *[1] * (codes.ndim - 1))
        loaded = (staged.to(torch.float32) * scales).to(getattr(torch, dtype))
        torch.cuda.synchronize()
        return loaded

    def _raw(self, tensor: Tensor, reason: str | None):
        started = time.perf_counter()
        data = read(tensor.path)
        seconds = time.perf_counter() - started
        if len(data) != tensor.nbytes:
            raise Invalid(f"{tensor.name}: {tensor.path.name} became shorter")
        self.report.tensors[tensor.name] = Figures(RAW, len(data), len(data), seconds, fallback=reason)
        if self.device.startswith("cuda") and self._unsupported() is None:
            import torch

            loaded = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
            return loaded.view(getattr(torch, tensor.dtype)).reshape(tensor.shape).to(self.device)
        return np.frombuffer(data, numpy_dtype(tensor.dtype)).reshape(tensor.shape)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Invalid(f"{path.name}: {error}") from error
