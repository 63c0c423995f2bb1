"""Makes small CoreML models of every kind with coremltools, and rewrites some of them as other tools would.

    zoo = coreml_models.make(directory)      {name: path}
"""

import logging
import os
import random
import struct
from pathlib import Path

import numpy as np

import models as made
from coreml_values import each_value

WIDTH = 64


def weights(seed=5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    names = ("first", "second", "third")
    w = {name: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in names}
    w["bias"] = rng.standard_normal(WIDTH).astype(np.float32)
    w["places"] = rng.standard_normal((48, WIDTH)).astype(np.float32)
    return w


def network(w, length: int, target, places=False, head=None):
    """Three matrices; with `places` a table cut to the length, with `head` one matrix more."""
    from coremltools.converters.mil import Builder as mb

    @mb.program(input_specs=[mb.TensorSpec((length, WIDTH))], opset_version=target)
    def program(x):
        if places:
            x = mb.add(x=x, y=np.ascontiguousarray(w["places"][:length]), name="placed")
        for name in ("first", "second", "third"):
            x = mb.relu(x=mb.linear(x=x, weight=w[name], bias=w["bias"]), name=name)
        if head is not None:
            x = mb.linear(x=x, weight=head, name="head")
        return mb.identity(x=x, name="y")

    return program


def convert(program, target):
    import coremltools as ct

    return ct.convert(
        program,
        convert_to="mlprogram",
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=target,
        skip_model_load=True,
    )


def read_spec(path: Path):
    """The spec of a package or a bare model, read without coremltools, which would rewrite the manifest."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((path / made.PACKAGE / "model.mlmodel" if path.is_dir() else path).read_bytes())
    return spec


MANIFEST_OF_GO = """{
  "fileFormatVersion": "1.0.0",
  "itemInfoEntries": {%s
    "0b": {
      "author": "com.apple.CoreML",
      "description": "CoreML Model Specification",
      "name": "model.mlmodel",
      "path": "com.apple.CoreML/model.mlmodel"
    }
  },
  "rootModelIdentifier": "0b"
}"""
WEIGHT_ITEM_OF_GO = """
    "0a": {
      "author": "com.apple.CoreML",
      "description": "CoreML Model Weights",
      "name": "weight.bin",
      "path": "com.apple.CoreML/weights/weight.bin"
    },"""


def write_package(dest: Path, spec, weight_bin: bytes | None):
    """A package as go-coreml writes it: its manifest names the weight file and not the directory."""
    (dest / made.PACKAGE / "weights").mkdir(parents=True)
    (dest / made.PACKAGE / "model.mlmodel").write_bytes(spec.SerializeToString())
    named = weight_bin is not None and len(weight_bin) > 64
    (dest / "Manifest.json").write_text(MANIFEST_OF_GO % (WEIGHT_ITEM_OF_GO if named else ""))
    if weight_bin is not None:
        made.weight_bin(dest).write_bytes(weight_bin)


def weight_file(blobs: list[tuple[int, bytes, int]]) -> tuple[bytes, list[int]]:
    """A weight file of (type, data, padding bits), and the offset of each blob."""
    file, offsets = bytearray(struct.pack("<II56x", len(blobs), 2)), []
    for code, data, padding in blobs:
        file += bytes(-len(file) % 64)
        offsets.append(len(file))
        file += struct.pack("<IIQQQ32x", 0xDEADBEEF, code, len(data), len(file) + 64, padding) + data
    return bytes(file), offsets


def shuffled_within_sizes(file: bytes, offsets: list[int], seed: int) -> list[int]:
    size = {at: struct.unpack_from("<Q", file, at + 8)[0] for at in offsets}
    pools = {n: [at for at in offsets if size[at] == n] for n in set(size.values())}
    for pool in pools.values():
        random.Random(seed).shuffle(pool)
    return [pools[size[at]].pop() for at in offsets]


def in_another_order(source: Path, dest: Path, seed: int, same_sizes=False):
    """The package with its blobs shuffled and its offsets following them: what go-coreml's next run would write.

    With `same_sizes` only blobs of one size change places, so that every old offset still cites a blob.
    """
    spec, file = read_spec(source), made.weight_bin(source).read_bytes()
    references = [value.blobFileValue for _, value in each_value(spec) if value.WhichOneof("value") == "blobFileValue"]
    old = sorted({reference.offset for reference in references})
    old = shuffled_within_sizes(file, old, seed) if same_sizes else random.Random(seed).sample(old, len(old))
    blobs = []
    for at in old:
        _, code, size, offset, padding = struct.unpack_from("<IIQQQ", file, at)
        blobs.append((code, file[offset : offset + size], padding))
    shuffled, offsets = weight_file(blobs)
    moved = dict(zip(old, offsets))
    for reference in references:
        reference.offset = moved[reference.offset]
    write_package(dest, spec, shuffled)


FLOATS, IN_BYTES = 11, {10: 2, 13: 2, 21: 1, 31: 1, 25: 1, 35: 1}


def inlined(source: Path):
    """The spec of a package with every blob put into the message."""
    spec, file = read_spec(source), made.weight_bin(source).read_bytes()
    for _, value in each_value(spec):
        if value.WhichOneof("value") == "blobFileValue":
            _, _, size, offset, _ = struct.unpack_from("<IIQQQ", file, value.blobFileValue.offset)
            data, kind = file[offset : offset + size], value.type.tensorType.dataType
            tensor = value.immediateValue.tensor
            if kind == FLOATS:
                tensor.floats.values.extend(np.frombuffer(data, np.float32).tolist())
            elif kind in IN_BYTES:
                tensor.bytes.values = data
            else:
                tensor.ints.values.extend(np.frombuffer(data, np.int32).tolist())
    return spec


def rare_types(source: Path, dest: Path):
    """bf16 and both fp8 types, which coremltools cannot write: constants of a package get them by hand."""
    spec = read_spec(source)
    values = [value for _, value in each_value(spec) if value.WhichOneof("value") == "blobFileValue"][:3]
    rng, blobs = np.random.default_rng(9), []
    for value, (kind, code, width) in zip(values, [(13, 5, 2), (40, 16, 1), (41, 17, 1)], strict=True):
        value.type.tensorType.dataType = kind
        size = int(np.prod([d.constant.size for d in value.type.tensorType.dimensions])) * width
        blobs.append((code, rng.bytes(size), 0))
    file, offsets = weight_file(blobs)
    for value, offset in zip(values, offsets):
        value.blobFileValue.offset = offset
    for _, value in each_value(spec):
        if value.WhichOneof("value") == "blobFileValue" and value not in values:
            value.ClearField("blobFileValue")
            value.immediateValue.tensor.floats.values.append(0.0)
    spec.specificationVersion = 9
    write_package(dest, spec, file)


def compiled(source: Path, dest: Path):
    """What Core ML's compiler makes of a package, as far as Linux can: the text of its constants and their weights."""
    lines = []
    for path, value in each_value(read_spec(source)):
        if value.WhichOneof("value") == "blobFileValue":
            tensor = value.type.tensorType
            shape = ", ".join(str(d.constant.size) for d in tensor.dimensions)
            ty = f"tensor<{ {10: 'fp16', 11: 'fp32', 21: 'int8', 31: 'uint8'}[tensor.dataType]}, [{shape}]>"
            place = f'path = string("{value.blobFileValue.fileName}"), offset = uint64({value.blobFileValue.offset})'
            lines.append(f'  {ty} c{len(lines)} = const()[name = string("c"), val = {ty}(BLOBFILE({place}))];\n')
    (dest / "weights").mkdir(parents=True)
    (dest / "analytics").mkdir()
    (dest / "weights/weight.bin").write_bytes(made.weight_bin(source).read_bytes())
    (dest / "model.mil").write_text("program(1.0)\n{\n func main<ios17>() {\n" + "".join(lines) + " } -> (y);\n}\n")
    (dest / "metadata.json").write_text("[]\n")
    (dest / "coremldata.bin").write_bytes(b"\0\1\2\3")
    (dest / "analytics/coremldata.bin").write_bytes(b"\4\5")


def compressed(dest: Path) -> dict[str, Path]:
    """Palettised, quantised, sparse and joint weights, in the forms of iOS 16 and of iOS 18."""
    import coremltools as ct
    import coremltools.optimize.coreml as cto

    config = lambda op: cto.OptimizationConfig(global_config=op)  # noqa: E731
    palette = lambda bits, **kw: config(cto.OpPalettizerConfig(nbits=bits, mode="uniform", weight_threshold=64, **kw))  # noqa: E731
    prune = config(cto.OpMagnitudePrunerConfig(target_sparsity=0.7, weight_threshold=64))
    linear = lambda **kw: config(cto.OpLinearQuantizerConfig(weight_threshold=64, **kw))  # noqa: E731
    found = {}
    for target in (ct.target.iOS16, ct.target.iOS18):
        model = convert(network(weights(), 8, target), target)
        kinds = {
            "palette4": lambda m: cto.palettize_weights(m, palette(4)),
            "palette6": lambda m: cto.palettize_weights(m, palette(6)),
            "int8": lambda m: cto.linear_quantize_weights(m, linear()),
            "sparse": lambda m: cto.prune_weights(m, prune),
        }
        if target == ct.target.iOS18:
            kinds |= {
                "palette3": lambda m: cto.palettize_weights(m, palette(3)),
                "palette1": lambda m: cto.palettize_weights(m, palette(1)),
                "groups": lambda m: cto.palettize_weights(m, palette(4, granularity="per_grouped_channel", group_size=16)),
                "int4": lambda m: cto.linear_quantize_weights(m, linear(dtype="int4", granularity="per_block", block_size=32)),
                "sparse-palette": lambda m: cto.palettize_weights(cto.prune_weights(m, prune), palette(4), joint_compression=True),
                "sparse-int8": lambda m: cto.linear_quantize_weights(cto.prune_weights(m, prune), linear(), joint_compression=True),
            }  # fmt: skip
        for kind, compress in kinds.items():
            name = f"{kind}-{target.name.lower()}"
            found[name] = dest / f"{name}.mlpackage"
            compress(model).save(str(found[name]))
    return found


def state(dest: Path):
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    w = weights()["first"].astype(np.float16)
    ty = {"dtype": ct.converters.mil.mil.types.fp16}

    @mb.program(
        input_specs=[mb.TensorSpec((1, WIDTH), **ty), mb.StateTensorSpec((1, WIDTH), **ty)],
        opset_version=ct.target.iOS18,
    )
    def program(x, cache):
        seen = mb.add(x=mb.read_state(input=cache), y=mb.linear(x=x, weight=w))
        return mb.identity(x=mb.coreml_update_state(state=cache, value=seen), name="y")

    ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True).save(str(dest))


def neural_network(dest: Path):
    import coremltools as ct

    shape = ct.models.datatypes.Array(WIDTH)
    builder = ct.models.neural_network.NeuralNetworkBuilder([("x", shape)], [("y", shape)])
    builder.add_inner_product("dense", weights()["first"], weights()["bias"], WIDTH, WIDTH, True, "x", "y")
    dest.with_suffix(".mlmodel").write_bytes(builder.spec.SerializeToString())
    ct.models.MLModel(builder.spec, skip_model_load=True).save(str(dest))


def make(dest: Path) -> dict[str, Path]:
    import coremltools as ct

    os.environ["TQDM_DISABLE"] = "1"
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    dest.mkdir(parents=True, exist_ok=True)
    zoo, w = {}, weights()

    def save(name, program, target=ct.target.iOS17):
        zoo[name] = dest / f"{name}.mlpackage"
        convert(program, target).save(str(zoo[name]))

    for length in (8, 16, 32):
        save(f"plain-s{length}", network(w, length, ct.target.iOS17))
        save(f"places-s{length}", network(w, length, ct.target.iOS17, places=True))
    save("head", network(w, 8, ct.target.iOS17, head=weights(6)["first"]))
    save("stranger", network(weights(7), 8, ct.target.iOS17))
    for seed in (1, 2, 3):
        zoo[f"order-{seed}"] = dest / f"order-{seed}.mlpackage"
        in_another_order(zoo[f"places-s{8 << (seed - 1)}"], zoo[f"order-{seed}"], seed)
    zoo["swapped"] = dest / "swapped.mlpackage"
    in_another_order(zoo["places-s8"], zoo["swapped"], 2, same_sizes=True)
    zoo |= compressed(dest)

    zoo["state"] = dest / "state.mlpackage"
    state(zoo["state"])
    zoo["functions"] = dest / "functions.mlpackage"
    description = ct.utils.MultiFunctionDescriptor()
    for length in (8, 16):
        description.add_function(str(zoo[f"plain-s{length}"]), "main", f"s{length}")
    description.default_function_name = "s8"
    ct.utils.save_multifunction(description, str(zoo["functions"]))
    zoo["pipeline"] = dest / "pipeline.mlpackage"
    halves = []
    for name in ("first", "second"):
        model = convert(network(weights(5 if name == "first" else 8), 8, ct.target.iOS17), ct.target.iOS17)
        spec = model.get_spec()
        if name == "second":
            ct.utils.rename_feature(spec, "x", "y0")
        else:
            ct.utils.rename_feature(spec, "y", "y0")
        halves.append(ct.models.MLModel(spec, weights_dir=model.weights_dir, skip_model_load=True))
    ct.utils.make_pipeline(*halves).save(str(zoo["pipeline"]))
    zoo["network"] = dest / "network.mlpackage"
    neural_network(zoo["network"])
    zoo["network-bare"] = dest / "network.mlmodel"

    zoo["inline"] = dest / "inline.mlmodel"
    zoo["inline"].write_bytes(inlined(zoo["plain-s8"]).SerializeToString())
    zoo["inline-package"] = dest / "inline-package.mlpackage"
    write_package(zoo["inline-package"], inlined(zoo["places-s16"]), None)
    zoo["inline-bytes"] = dest / "inline-bytes.mlmodel"
    zoo["inline-bytes"].write_bytes(inlined(zoo["state"]).SerializeToString())
    zoo["rare"] = dest / "rare.mlpackage"
    rare_types(zoo["plain-s8"], zoo["rare"])
    zoo["unicode"] = dest / "mod\u00e8le \u6a21\u578b.mlpackage"
    in_another_order(zoo["plain-s8"], zoo["unicode"], 4)
    zoo["short"] = dest / "short.mlpackage"
    write_package(zoo["short"], small_spec(), struct.pack("<II48x", 0, 2))
    zoo["compiled"] = dest / "compiled.mlmodelc"
    compiled(zoo["plain-s8"], zoo["compiled"])
    return zoo


def small_spec():
    """A program whose constants are all too small for a file."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    @mb.program(input_specs=[mb.TensorSpec((1, 2))])
    def program(x):
        return mb.linear(x=x, weight=np.eye(2, dtype=np.float32), name="y")

    return convert(program, ct.target.iOS17).get_spec()
