"""Writes ollama stores as other programs leave them, without wmount: every form of blob and layer."""

import hashlib
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np

import readers

IMAGE = "application/vnd.ollama.image."
CONFIG = "application/vnd.docker.container.image.v1+json"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LIBRARY = "registry.ollama.ai/library"


class Store:
    """A directory for OLLAMA_MODELS in the making."""

    def __init__(self, path: Path):
        self.path = path
        for name in ("blobs", "manifests"):
            (path / name).mkdir(parents=True)

    def blob(self, kind: str, data: bytes, **keys) -> dict:
        """Puts a blob into the store; its layer."""
        digest = hashlib.sha256(data).hexdigest()
        (self.path / f"blobs/sha256-{digest}").write_bytes(data)
        media_type = kind if "/" in kind else IMAGE + kind
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)} | keys

    def manifest(self, name: str, layers: list, config: dict | None = None, when: int | None = None) -> Path:
        """Writes the manifest `host/namespace/model/tag` of these layers."""
        config = self.blob(CONFIG, json.dumps({"model_format": "safetensors"} | (config or {})).encode())
        document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
        return self.raw(name, json.dumps(document, separators=(",", ":")).encode() + b"\n", when)

    def raw(self, name: str, data: bytes, when: int | None = None) -> Path:
        path = self.path / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if when is not None:
            os.utime(path, (when, when))
        return path

    def named(self, tensors: dict[str, readers.Tensor], layer: str | None = None) -> dict:
        """One of today's blobs: the tensors under their full names."""
        return self.blob("tensor", container(tensors), name=layer or next(iter(tensors)))

    def seeds(self, name: str, tensor: readers.Tensor) -> dict:
        """A blob of the seed's form: the tensor is called `data`, the layer says what it is."""
        keys = {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
        return self.blob("tensor", container({"data": tensor}), **keys)

    def quantised(self, name: str, weight: np.ndarray, kind: str, bits: int, group: int, tmp: Path) -> dict:
        """A blob as ollama has MLX write it: packed words, scales and, if affine, biases."""
        mode = "affine" if kind.startswith("int") else kind
        parts = mx.quantize(mx.array(weight).astype(mx.bfloat16), group_size=group, bits=bits, mode=mode)
        arrays = {name + end: part for end, part in zip(("", ".scale", ".bias"), parts)}
        mx.save_safetensors(str(tmp), arrays, metadata={"quant_type": kind, "group_size": str(group)})
        return self.blob("tensor", tmp.read_bytes(), name=name)

    def files(self, directory: Path, prefix: str = "") -> list[dict]:
        """The JSON files of a directory as layers."""
        names = sorted(p.name for p in directory.glob("*.json") if p.name != "model.safetensors.index.json")
        return [self.blob("json", (directory / name).read_bytes(), name=prefix + name) for name in names]


def container(tensors: dict[str, readers.Tensor]) -> bytes:
    """A safetensors file with the tensors in the given order and its header padded to 8 bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        offsets = [end, end + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        end = offsets[1]
    text = readers.go_json(dict(sorted(header.items())))
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())


def tensor(array: np.ndarray, dtype: str = "F32") -> readers.Tensor:
    return readers.Tensor(dtype, array.shape, np.ascontiguousarray(array).tobytes())


def gguf(
    path: Path, tensors: dict[str, np.ndarray], kind: str = "model", architecture: str = "llama", split: int = 0
) -> Path:
    """A GGUF file as gguf's own writer makes it, or files of `split` tensors each, the first with keys alone."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), architecture, split_max_tensors=split, small_first_shard=split > 0)
    writer.add_type(kind)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_head_count(2)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
