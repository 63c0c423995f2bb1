#!/usr/bin/env python3
"""Streams a llama-shaped model layer by layer as oLLM does, by each way that its weights can travel, and weighs the quality.

    contrib/bench/transport.py [--layers 16] [--hidden 1024] [--rounds 5] [--device cpu|cuda] [--dir DIR] [--json FILE]

The ways, never mixed: `plain files` are a raw gds_export directory on the disk, which is the upstream concept; `mount, raw`
is the same directory computed by wmount; `mount, fp8` is its transport variant, decoded by examples/transport; `plain
fp8 files` are that variant, exported, and say what computing it costs. Each round loads every layer's tensors by each way
in turn, with the store's blobs or files in the page cache (warm) or not (cold, needs root). Execution dtype and
authoritative format are BF16 throughout; only the transport differs. On cuda the bytes moved to the device are those
that were read.

Quality: for each tensor the relative error |decoded - stored| / |stored| (Frobenius norm); and the sentence embeddings
of the real all-MiniLM-L6-v2, computed in fp32 with stored and with transported weights. Needs numpy, ml_dtypes and, for the
embeddings, the packages of tests/clients/requirements*.txt; torch for cuda.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from bench import BINARY, REPOSITORY, Mounted, command, drop_caches, read_pread, seconds
from tensors import header

sys.path[:0] = [str(REPOSITORY / "examples/transport"), str(REPOSITORY / "tests/clients")]
from wmount_transport import Loader  # noqa: E402

SENTENCES = [
    "The cat sits outside", "A man is playing guitar", "The new movie is awesome", "The dog plays in the garden",
    "A woman watches TV", "Photosynthesis turns light into sugar", "Der Zug kommt heute spaeter", "sudo apt install fuse3",
]  # fmt: skip


def wmount(*args):
    command(BINARY, *args)


def layer_shapes(hidden: int) -> dict[str, tuple]:
    wide, narrow = hidden * 11 // 4, hidden // 4
    return {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
    }  # fmt: skip


def make_model(path: Path, layers: int, hidden: int):
    """BF16 with the spread of trained weights: a scale for each row, and few values far out."""
    rng, tensors, bodies = np.random.default_rng(3), [], []
    for layer in range(layers):
        for name, shape in layer_shapes(hidden).items():
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            if len(shape) > 1:
                values *= np.exp(rng.standard_normal((shape[0], 1), dtype=np.float32) * np.float32(0.5))
                values[rng.random(shape, dtype=np.float32) < 1e-4] *= 12
            body = values.astype(ml_dtypes.bfloat16).tobytes()
            tensors.append((f"model.layers.{layer}.{name}.weight", "BF16", shape, len(body)))
            bodies.append(body)
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"".join([header(tensors), *bodies]))


def by_layer(names) -> list[list[str]]:
    layers: dict[int, list[str]] = {}
    for name in names:
        layers.setdefault(int(re.search(r"layers\.(\d+)\.", name)[1]), []).append(name)
    return [layers[number] for number in sorted(layers)]


def stream(transport: Path | None, base: Path, device: str) -> dict:
    """Loads one layer after the other, each let go of before the next; the loader's own figures and the wall time."""
    started = time.perf_counter()
    # A path without a transport is that of today: the raw export, and no fallback.
    loader = Loader(transport or base, base, device)
    opened = time.perf_counter() - started
    slowest = 0.0
    for layer in by_layer(loader.names()):
        begun = time.perf_counter()
        tensors = [loader.load(name) for name in layer]
        slowest = max(slowest, time.perf_counter() - begun)
        del tensors
    total = loader.report.total()
    fallbacks = total.pop("fallbacks")
    if transport is not None and fallbacks:
        raise SystemExit(f"the transport was not used: {next(iter(fallbacks.values()))}")
    return total | {"seconds": time.perf_counter() - started, "opened": opened, "slowest_layer": slowest}


def first_reads(store: Path, at: Path, root: Path, rounds: int):
    """The encoded files, computed, beside tensors of as many bytes that are stored: the first reads of new mounts."""
    codes = sorted((root / "plain-fp8").glob("*.fp8"))
    sizes = [path.stat().st_size for path in codes]
    (root / "codes").mkdir()
    with open(root / "codes/model.safetensors", "wb") as file:
        file.write(header((path.stem, "U8", [size], size) for path, size in zip(codes, sizes)))
        for path in codes:
            file.write(path.read_bytes())
    wmount("-s", store, "import", root / "codes", "-n", "codes")
    for state in ("warm", "cold"):
        pairs = []
        for _ in range(rounds):
            times = []
            for directory, ending in (("m/latest@fp8", ".fp8"), ("codes/latest", ".bin")):
                with Mounted(store, at):
                    files = [at / "gds_export" / directory / (path.stem + ending) for path in codes]
                    for file in files:
                        file.stat()
                    if state == "cold":
                        drop_caches()
                    times.append(seconds(lambda: [read_pread(file) for file in files]))
            pairs.append(times)
        ratios = [stored / computed for computed, stored in pairs]
        computed, stored = (sum(sizes) / statistics.median(side) / 1e6 for side in zip(*pairs))
        print(f"first read, {state}: computed {computed:.0f} MB/s, stored {stored:.0f} MB/s, ratio {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} - {max(ratios):.2f}); the computed one reads twice the bytes")  # fmt: skip


def relative_errors(export: Path, base: Path) -> list[float]:
    coded, stored, errors = Loader(export, base), Loader(base, base), []
    for name in coded.names():
        if coded.encoded.tensors[name].transport is not None:
            exact = stored.load(name).astype(np.float32)
            errors.append(float(np.linalg.norm(coded.load(name).astype(np.float32) - exact) / np.linalg.norm(exact)))
    return errors


def bert_embedding(weights: dict, ids: list[int], config: dict) -> np.ndarray:
    """The mean of the last hidden states, normalised: what all-MiniLM-L6-v2 gives for a sentence."""
    from math import erf

    def linear(x, name):
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return x * weights[name + ".weight"] + weights[name + ".bias"]

    heads, gelu = config["num_attention_heads"], np.vectorize(lambda v: 0.5 * v * (1 + erf(v / 2**0.5)), otypes=[np.float32])
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        split = lambda part: linear(x, f"{at}attention.self.{part}").reshape(len(ids), heads, -1).swapaxes(0, 1)  # noqa: E731
        query, key, value = split("query"), split("key"), split("value")
        scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (scores / scores.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(len(ids), -1)
        x = norm(x + linear(attended, at + "attention.output.dense"), at + "attention.output.LayerNorm")
        x = norm(x + linear(gelu(linear(x, at + "intermediate.dense")), at + "output.dense"), at + "output.LayerNorm")
    pooled = x.mean(0)
    return pooled / np.linalg.norm(pooled)


def output_difference(root: Path) -> dict:
    """Embeddings of the real small model with stored and with transported weights."""
    import models
    from tokenizers import Tokenizer

    source, store = models.minilm_source(), root / "minilm-store"
    wmount("-s", store, "import", source, "-n", "minilm")
    at = root / "mnt"
    with Mounted(store, at):
        raw, fp8 = at / "gds_export/minilm/latest", at / "gds_export/minilm/latest@fp8"
        stored, coded = Loader(raw, raw), Loader(fp8, raw)
        both = [{name: loader.load(name) for name in loader.names()} for loader in (stored, coded)]
        errors = relative_errors(fp8, raw)
    if coded.report.total()["fallbacks"]:
        raise SystemExit("the transport of MiniLM was not used")
    config = json.loads((source / "config.json").read_bytes())
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [tokenizer.encode(sentence).ids for sentence in SENTENCES]
    exact, moved = (np.stack([bert_embedding(weights, one, config) for one in ids]) for weights in both)
    likeness = [side @ side.T for side in (exact, moved)]
    return {
        "relative_error": [min(errors), statistics.median(errors), max(errors)],
        "cosine": [float((exact * moved).sum(-1).min()), float(np.median((exact * moved).sum(-1)))],
        "similarity_shift": float(np.abs(likeness[0] - likeness[1]).max()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-quality", action="store_true")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.dir))
    store, at = root / "store", root / "mnt"
    at.mkdir()
    try:
        make_model(root / "model", args.layers, args.hidden)
        wmount("-s", store, "import", root / "model", "-n", "m")
        shutil.rmtree(root / "model")
        wmount("-s", store, "prepare", "m@fp8")
        for name, inside in (("plain", "gds_export/m/latest"), ("plain-fp8", "gds_export/m/latest@fp8")):
            wmount("-s", store, "export", inside, root / name)
        ways = {
            "plain files": (None, root / "plain"),
            "mount, raw": (None, at / "gds_export/m/latest"),
            "plain fp8 files": (root / "plain-fp8", root / "plain"),
            "mount, fp8": (at / "gds_export/m/latest@fp8", at / "gds_export/m/latest"),
        }
        figures: dict = {}
        for state in ("warm", "cold"):
            runs = {name: [] for name in ways}
            for _ in range(args.rounds):
                for name, (transport, base) in ways.items():
                    with Mounted(store, at):
                        if state == "cold":
                            drop_caches()
                        elif name.startswith("mount"):
                            wmount("-s", store, "cat", "safetensors/m/latest/model.safetensors")
                        else:
                            stream(transport, base, "cpu")
                        runs[name].append(stream(transport, base, args.device))
            figures[state] = runs
        print(f"{args.layers} layers, hidden {args.hidden}, BF16, device {args.device}, {os.cpu_count()} cores, {args.rounds} rounds\n")
        print("| way | transport used | state | MB read | MB decoded | ratio | read s | check s | decode s | total s (min - max) | against plain files | scratch MB |")
        print("|---|---|---|---|---|---|---|---|---|---|---|---|")
        for state, runs in figures.items():
            for name, rounds in runs.items():
                middle = {key: statistics.median(run[key] for run in rounds) for key in ("read_seconds", "check_seconds", "decode_seconds", "seconds")}
                last = rounds[-1]
                against = statistics.median(plain["seconds"] / run["seconds"] for plain, run in zip(runs["plain files"], rounds))
                spread = f"{min(run['seconds'] for run in rounds):.2f} - {max(run['seconds'] for run in rounds):.2f}"
                used = max(last["transports"], key=last["transports"].get)
                print(
                    f"| {name} | {used} | {state} | {last['encoded_bytes'] / 1e6:.0f} | {last['decoded_bytes'] / 1e6:.0f} | {last['ratio']:.2f} "
                    f"| {middle['read_seconds']:.2f} | {middle['check_seconds']:.2f} | {middle['decode_seconds']:.2f} | {middle['seconds']:.2f} ({spread}) | {against:.2f} x "
                    f"| {last['scratch_bytes'] / 1e6:.0f} |"
                )
        with Mounted(store, at):
            stream(ways["mount, fp8"][0], ways["mount, fp8"][1], "cpu")
            counted = json.loads((at / ".wmount/status.json").read_bytes())
        errors = relative_errors(root / "plain-fp8", root / "plain")
        print(f"\nrelative error of the tensors: {min(errors):.4f} - {max(errors):.4f}, median {statistics.median(errors):.4f}")
        print("the mount's own count of one such stream: " + json.dumps(counted["layouts"]["gds_export@fp8"]))
        first_reads(store, at, root, args.rounds)
        if not args.no_quality:
            quality = figures["quality"] = output_difference(root)
            low, middle, high = quality["relative_error"]
            print(f"all-MiniLM-L6-v2: relative error of the tensors {low:.4f} - {high:.4f}, median {middle:.4f}; "
                  f"cosine of embeddings, stored against transported, {quality['cosine'][0]:.5f} at least, median {quality['cosine'][1]:.5f}; "
                  f"the similarity of two sentences moves by {quality['similarity_shift']:.4f} at most")  # fmt: skip
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
