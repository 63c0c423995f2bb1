"""Safetensors files as the benchmarks write them."""

import json
from collections.abc import Iterable


def header(tensors: Iterable[tuple[str, str, list[int], int]]) -> bytes:
    """What stands before the bytes of tensors that follow each other: name, dtype, shape and length of each."""
    entries, at = {}, 0
    for name, dtype, shape, length in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
