"""gds_export: raw files, fp16 and fp8 computed on read against ml_dtypes, and the example loader."""

import hashlib
import json
import mmap
import os
import random
import shutil
import sys
import threading
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import readers
from harness import REPOSITORY, Mount, Store, eventually, run, unmount
from safetensors.numpy import save_file

sys.path.insert(0, str(REPOSITORY / "examples/transport"))
from wmount_transport import Invalid, Loader, Manifest  # noqa: E402

IMPORTED = ["minilm/latest", "minilm-float/v1", "tiny-llama/latest", "org/tiny-llama/hub"]
NUMPY = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16, "I64": np.int64}
TORCH = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "I64": "int64"}


def array(tensor) -> np.ndarray:
    return np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tensor.shape)


def fp8(values: np.ndarray) -> tuple[bytes, bytes]:
    """Codes and scales by the rule that is written down, with ml_dtypes' own rounding."""
    rows = values.astype(np.float32).reshape(values.shape[0], -1)
    with np.errstate(all="ignore"):
        peaks = np.where(np.isfinite(rows), np.abs(rows), 0).max(axis=1)
        scales = np.where(peaks == 0, np.float32(1), np.maximum(peaks / np.float32(448), np.finfo(np.float32).tiny))
        ratio = rows / scales[:, None]
        codes = np.where(np.isnan(ratio), ratio, np.clip(ratio, -448, 448)).astype(ml_dtypes.float8_e4m3fn)
    return codes.tobytes(), scales.astype("<f4").tobytes()


def check_export(directory, expected: dict, extension: str, cast=None):
    manifest = json.loads((directory / "manifest.json").read_bytes())
    assert manifest.keys() == expected.keys()
    for name, tensor in expected.items():
        entry = manifest[name]
        assert entry["path"] == name.replace(".", "__") + extension
        data, dtype = tensor.data, TORCH[tensor.dtype]
        if cast is not None and tensor.dtype in ("BF16", "F32"):
            data, dtype = array(tensor).astype(cast).tobytes(), np.dtype(cast).name
        assert (entry["dtype"], tuple(entry["shape"])) == (dtype, tensor.shape), name
        assert (directory / entry["path"]).read_bytes() == data, name
    assert {p.name for p in directory.iterdir()} == {e["path"] for e in manifest.values()} | {"manifest.json"}


def test_a_package_that_joins_takes_no_file_from_the_others(store, models):
    """A constant that differs stands below the name of its package, and no file name has a slash."""
    for package in ("minilm-s32", "minilm-other"):
        store.add(models / f"{package}.mlpackage", name="encoder")
    shown = store.json("show", "encoder")
    names = {tensor["name"]: tensor for tensor in shown["tensors"]}
    (joined,) = [name for name in names if name.startswith("minilm-other/")]
    assert shown["layouts"]["gds_export"]["shown"], shown["layouts"]["gds_export"]
    manifest = json.loads(store.run("cat", "gds_export/encoder/latest/manifest.json").stdout)
    assert manifest.keys() == names.keys()
    path = manifest[joined]["path"]
    assert path == joined.replace("/", "__") + ".bin"
    assert len(store.run("cat", f"gds_export/encoder/latest/{path}").stdout) == names[joined]["bytes"]


@pytest.mark.parametrize("model", IMPORTED)
def test_every_file_is_its_tensor(world, model):
    expected = readers.safetensors_dir(world.sources[model][0])
    check_export(world / "gds_export" / model, expected, ".bin")
    check_export(world / f"gds_export/{model}@raw", expected, ".raw")


@pytest.mark.parametrize("model", IMPORTED)
def test_f16_is_the_cast_of_every_float(world, model):
    expected = readers.safetensors_dir(world.sources[model][0])
    check_export(world / f"gds_export/{model}@f16", expected, ".bin", np.float16)


def check_fp8(directory, expected: dict):
    manifest = json.loads((directory / "manifest.json").read_bytes())
    assert manifest.keys() == expected.keys()
    for name, tensor in expected.items():
        entry = manifest[name]
        if len(tensor.shape) < 2 or tensor.dtype == "I64":
            assert "transport" not in entry and entry["dtype"] == TORCH[tensor.dtype]
            assert (directory / entry["path"]).read_bytes() == tensor.data
            continue
        codes, scales = fp8(array(tensor))
        assert (directory / entry["path"]).read_bytes() == codes, name
        transport = entry["transport"]
        assert (directory / transport["scale_path"]).read_bytes() == scales, name
        assert (entry["dtype"], tuple(entry["shape"])) == ("float8_e4m3fn", tensor.shape)
        assert transport == {
            "encoding": "fp8-e4m3fn-rows",
            "encoded_dtype": "float8_e4m3fn",
            "encoded_nbytes": len(codes),
            "decoded_dtype": TORCH[tensor.dtype],
            "decoded_shape": list(tensor.shape),
            "decoded_nbytes": len(tensor.data),
            "scale_encoding": "fp32-rows",
            "scale_path": name.replace(".", "__") + ".scale",
            "checksum": "sha256:" + hashlib.sha256(codes).hexdigest(),
            "decode_location": "cuda-upcast",
        }


@pytest.mark.parametrize("model", IMPORTED)
def test_fp8_is_that_of_ml_dtypes_bit_for_bit(world, model):
    check_fp8(world / f"gds_export/{model}@fp8", readers.safetensors_dir(world.sources[model][0]))


def odd_tensors() -> dict:
    """Every code and what lies between two, numbers too small and too large, none, and rows of nothing."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.sort(codes[np.isfinite(codes)])
    between = (finite[1:] + finite[:-1]) / 2
    rng = np.random.default_rng(5)
    rows = [
        codes,
        np.resize(np.concatenate([between, np.nextafter(between, 1e9), np.nextafter(between, -1e9), [448]]), 256 * 3)[:256],
        np.zeros(256),
        -np.zeros(256),
        np.resize(np.float32([np.nan, -np.nan, np.inf, -np.inf, 1, -3]), 256),
        np.resize(np.float32([np.inf, np.nan, 0]), 256),
        np.resize(np.float32([1e-45, 3e-40, -1e-38, 0]), 256),
        np.resize(np.float32([3.4e38, 1e38, -1, 1e-30]), 256),
        rng.standard_normal(256),
        np.exp(rng.uniform(-60, 60, 256)),
    ]
    with np.errstate(all="ignore"):
        odd = np.stack([np.asarray(row, np.float32) for row in rows])
        return {
            "odd.f32": odd,
            "odd.bf16": odd.astype(ml_dtypes.bfloat16),
            "odd.f16": odd.astype(np.float16),
            "cube": rng.standard_normal((3, 5, 7)).astype(np.float32),
            "long": rng.standard_normal((2, 600_001)).astype(np.float16),
            "one": np.ones(9, np.float32),
            "scalar": np.array(2, np.float32),
            "empty": np.zeros((0, 4), np.float32),
        }


def test_fp8_of_odd_values(store, tmp_path):
    save_file(odd_tensors(), tmp_path / "model.safetensors")
    store.add(tmp_path / "model.safetensors", name="odd")
    expected = readers.safetensors(tmp_path / "model.safetensors")
    directory = tmp_path / "out"
    store.run("export", "gds_export/odd/latest@fp8", directory)
    manifest = json.loads((directory / "manifest.json").read_bytes())
    assert "transport" not in manifest["empty"] and "transport" not in manifest["scalar"]
    for name, tensor in expected.items():
        if len(tensor.shape) > 1 and tensor.data:
            codes, scales = fp8(array(tensor))
            assert (directory / manifest[name]["transport"]["scale_path"]).read_bytes() == scales, name
            assert (directory / manifest[name]["path"]).read_bytes() == codes, name
            assert manifest[name]["transport"]["checksum"] == "sha256:" + hashlib.sha256(codes).hexdigest(), name


def test_f16_is_refused_where_values_would_become_infinite(store, tmp_path):
    values = np.float32([[65519.9, 65520, -1e30], [np.inf, np.nan, 1]])
    save_file({"layer.weight": values, "fine": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    store.add(tmp_path / "model.safetensors", name="wide")
    for unasked in ("gds_export@f16", "amb@f16"):
        assert "wide:latest@f16" in store.json("show", "wide")["layouts"][unasked]["unless"]
    for layout in ("gds_export", "amb"):
        shown = store.json("show", "wide@f16")["layouts"][layout]
        assert shown["shown"] is False
        assert "2 values" in shown["reason"] and "2 in" in shown["reason"] and "layer.weight" in shown["reason"]
        assert store.json("show", "wide")["layouts"][f"{layout}@f16"] == shown, "what was found out is remembered"
    with Mount(store, tmp_path / "mnt") as mount:
        assert (mount / "gds_export/wide/latest").is_dir()
        assert not (mount / "gds_export/wide/latest@f16").exists()
        assert (mount / "amb/wide/latest@int8.amb").is_file()
        assert not (mount / "amb/wide/latest@f16.amb").exists()
        status = json.loads((mount / ".wmount/status.json").read_bytes())
        assert status["layouts"]["gds_export@f16"]["fallbacks"] >= 1
    with np.errstate(over="ignore"):
        infinite = values.astype(np.float16).tobytes()
    for place in ("gds_export/wide/latest@f16/layer__weight.bin", "amb/wide/latest@f16.amb"):
        refused = store.run("cat", place, check=False)
        assert refused.returncode == 1 and "--allow-overflow" in refused.stderr.decode()
        assert infinite in store.run("cat", "--allow-overflow", place).stdout
    store.run("export", "--allow-overflow", "gds_export/wide/latest@f16", tmp_path / "exported")
    assert (tmp_path / "exported/layer__weight.bin").read_bytes() == infinite
    at = tmp_path / "mnt"
    run("--allow-overflow", store.path, at)
    try:
        data = (at / "gds_export/wide/latest@f16/layer__weight.bin").read_bytes()
        assert data == infinite
    finally:
        unmount(at)


@pytest.mark.parametrize(
    "names, word", [(["a.b", "a__b"], "same file"), (["a.b", "a/b"], "same file"), (["x" * 260], "file name")]
)
def test_names_that_make_no_files_hide_the_model(store, tmp_path, names, word):
    save_file({name: np.ones(2, np.float32) for name in names}, tmp_path / "model.safetensors")
    store.add(tmp_path / "model.safetensors", name="named")
    shown = store.json("show", "named")["layouts"]["gds_export"]
    assert shown["shown"] is False and word in shown["reason"] and names[0] in shown["reason"]


# Import


@pytest.fixture
def export(small, tmp_path):
    """A plain export of the small model, written out."""
    small.run("export", "gds_export/tiny-llama/latest", tmp_path / "gds_export")
    return tmp_path / "gds_export"


def test_an_export_comes_back_as_it_was(small, export):
    (export / "config.json").write_text("{}")
    report = small.add(export, name="again")
    assert report["added"]["tensors"] == 0
    for path in export.iterdir():
        done = small.run("cat", f"original/again/latest/gds_export/{path.name}")
        assert done.stdout == path.read_bytes(), path.name
    tensors = [small.json("show", model)["tensors"] for model in ("again", "tiny-llama")]
    assert tensors[0] == tensors[1]


def edit(directory, change):
    manifest = json.loads((directory / "manifest.json").read_bytes())
    change(manifest, next(iter(manifest.values())))
    (directory / "manifest.json").write_text(json.dumps(manifest))


# The loader


@pytest.fixture
def exports(small, tmp_path):
    """The plain and the encoded export of the small model, written out."""
    for variant in ("", "@fp8"):
        small.run("export", f"gds_export/tiny-llama/latest{variant}", tmp_path / f"export{variant}")
    return tmp_path / "export@fp8", tmp_path / "export"


def relative_error(loaded, stored) -> float:
    loaded, stored = loaded.astype(np.float64), stored.astype(np.float64)
    return float(np.linalg.norm(loaded - stored) / (np.linalg.norm(stored) or 1))


def test_the_loader_decodes_on_the_cpu_and_reports_it(world):
    base = world / "gds_export/tiny-llama/latest"
    loader = Loader(world / "gds_export/tiny-llama/latest@fp8", base)
    stored = readers.safetensors_dir(world.sources["tiny-llama/latest"][0])
    for name in loader.names():
        loaded, tensor = loader.load(name), array(stored[name])
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        error = relative_error(loaded, tensor)
        figures = loader.report.tensors[name]
        if tensor.ndim < 2:
            assert error == 0 and (figures.transport, figures.fallback) == ("raw", None)
        else:
            assert error < 0.04, (name, error)
            assert figures.transport == "cpu-decode-then-transfer" and figures.decode_seconds > 0
            assert figures.encoded_bytes == tensor.size + 4 * tensor.shape[0]
            assert figures.decoded_bytes == tensor.nbytes and figures.scratch_bytes > 0
    total = loader.report.total()
    assert 1.8 < total["ratio"] < 2 and not total["fallbacks"]
    assert total["decoded_bytes"] == sum(len(tensor.data) for tensor in stored.values())
    assert total["check_seconds"] > 0
    json.dumps(loader.report.as_dict())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(300, 1000), (3, 100_000), (40_000, 3)])
def test_the_loader_takes_no_more_memory_than_it_says(store, tmp_path, dtype, shape):
    values = np.random.default_rng(2).standard_normal(shape, np.float32)
    save_file({"w": values.astype(getattr(ml_dtypes, dtype, dtype))}, tmp_path / "model.safetensors")
    store.add(tmp_path / "model.safetensors", name="m")
    for variant in ("", "@fp8"):
        store.run("export", f"gds_export/m/latest{variant}", tmp_path / f"export{variant}")
    loader = Loader(tmp_path / "export@fp8", tmp_path / "export")
    tracemalloc.start()
    try:
        loader.load("w")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    figures = loader.report.tensors["w"]
    taken = most - figures.decoded_bytes
    # Beside it stand what numpy and Python need in any case.
    assert figures.encoded_bytes < figures.scratch_bytes <= taken + 4096
    assert taken <= figures.scratch_bytes + (256 << 10)


def test_every_type_that_an_export_has_is_loaded(store, tmp_path):
    """Types that torch names and numpy does not, too: a base must not be refused for one of them."""
    names = [n for n in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16") if hasattr(ml_dtypes, n)]
    tensors = {name: np.arange(4, dtype=np.float32).reshape(2, 2).astype(getattr(ml_dtypes, name)) for name in names}
    tensors |= {np.dtype(code).name: np.ones((2, 2), code) for code in "?bBhHiIqQefdF"}
    save_file(tensors, tmp_path / "model.safetensors")
    store.add(tmp_path / "model.safetensors", name="types")
    store.run("export", "gds_export/types/latest", tmp_path / "export")
    store.run("export", "gds_export/types/latest@fp8", tmp_path / "export@fp8")
    loader = Loader(tmp_path / "export@fp8", tmp_path / "export")
    assert loader.reason is None
    for name, tensor in tensors.items():
        loaded = loader.load(name)
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        if loader.report.tensors[name].transport == "raw":
            assert loaded.tobytes() == tensor.tobytes()


@pytest.mark.parametrize("device, word", [("mps", "unsupported device: mps"), ("cuda", "unsupported device")])
def test_an_unsupported_device_gets_the_raw_bytes_and_the_reason(exports, device, word):
    try:
        import torch

        if device == "cuda" and torch.cuda.is_available():
            pytest.skip("this machine has a cuda device")
    except ImportError:
        pass
    loader = Loader(*exports, device=device)
    name = loader.names()[0]
    assert loader.load(name).tobytes() == (exports[1] / (name.replace(".", "__") + ".bin")).read_bytes()
    figures = loader.report.tensors[name]
    assert figures.transport == "raw" and word in figures.fallback


def transport(entry_change):
    return lambda d: edit(d, lambda m, e: e["transport"].update(entry_change))


def flip(directory):
    path = directory / "lm_head__weight.fp8"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def link_out(directory):
    path = directory / "lm_head__weight.fp8"
    shutil.move(path, directory.parent / "outside.fp8")
    path.symlink_to(directory.parent / "outside.fp8")


def link_to_itself(directory):
    (directory / "circle.fp8").symlink_to("circle.fp8")
    edit(directory, lambda m, e: e.update(path="circle.fp8"))


def scales_with(directory, value) -> bytes:
    """The scales of a tensor, the second of them this."""
    scales = np.fromfile(directory / "lm_head__weight.scale", "<f4")
    scales[1] = value
    return scales.tobytes()


RULES = {
    "path out of the root": (lambda d: edit(d, lambda m, e: e.update(path="../x.fp8")), "outside"),
    "link out of the root": (link_out, "outside"),
    "scale out of the root": (transport({"scale_path": "/tmp/x.scale"}), "outside"),
    "wrong extension": (lambda d: edit(d, lambda m, e: e.update(path="lm_head__weight.bin")), "extension"),
    "pickle": (lambda d: edit(d, lambda m, e: e.update(path="lm_head__weight.pt")), "pickle"),
    "pickled dtype": (lambda d: edit(d, lambda m, e: e.update(dtype="torch.float8")), "pickled"),
    "packed": (lambda d: edit(d, lambda m, e: e.update(packed="mxfp4")), "mxfp4"),
    "unknown encoding": (transport({"encoding": "lz4"}), "unknown encoding"),
    "unknown scale encoding": (transport({"scale_encoding": "u8"}), "unknown scale encoding"),
    "unknown decode location": (transport({"decode_location": "moon"}), "unknown decode location"),
    "unknown decoded dtype": (transport({"decoded_dtype": "int4"}), "unknown decoded dtype"),
    "no checksum": (transport({"checksum": "md5:0"}), "checksum"),
    "wrong checksum": (flip, "wrong checksum"),
    "missing scale file": (lambda d: (d / "lm_head__weight.scale").unlink(), "missing"),
    "missing encoded file": (lambda d: (d / "lm_head__weight.fp8").unlink(), "missing"),
    "short scale file": (lambda d: os.truncate(d / "lm_head__weight.scale", 4), "scales"),
    "shape mismatch": (transport({"decoded_shape": [1, 2]}), "shape mismatch"),
    "size mismatch": (lambda d: edit(d, lambda m, e: e.update(shape=[1, 2])), "shape mismatch"),
    "field too many": (transport({"hint": 1}), "ten"),
    "field too few": (lambda d: edit(d, lambda m, e: e["transport"].pop("checksum")), "ten"),
    "incomplete": (lambda d: edit(d, lambda m, e: m.pop("lm_head.weight")), "base model"),
    "unknown tensor": (lambda d: edit(d, lambda m, e: m.update(other=m["model.norm.weight"])), "base model"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json"),
    "path too long": (lambda d: edit(d, lambda m, e: e.update(path="x" * 300 + ".fp8")), "leads nowhere"),
    "path that is no text": (lambda d: edit(d, lambda m, e: e.update(path="\ud800.fp8")), "leads nowhere"),
    "links in a circle": (link_to_itself, "circle.fp8"),
    "deep manifest": (lambda d: (d / "manifest.json").write_text('{"a":' * 100_000), "recursion"),
    "infinite scale": (lambda d: (d / "lm_head__weight.scale").write_bytes(scales_with(d, np.inf)), "no scale"),
    "scale that is no number": (lambda d: (d / "lm_head__weight.scale").write_bytes(scales_with(d, np.nan)), "no scale"),
    "scale of zero": (lambda d: (d / "lm_head__weight.scale").write_bytes(scales_with(d, 0)), "no scale"),
    "key twice": (lambda d: (d / "manifest.json").write_text('{"a": 1, "a": 2}'), "twice"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_transport_is_never_used_and_the_reason_is_told(exports, rule):
    encoded, base = exports
    change, word = RULES[rule]
    for path in encoded.iterdir():
        path.chmod(0o644)
    change(encoded)
    loader = Loader(encoded, base)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert loader.load(name).tobytes() == (base / (name.replace(".", "__") + ".bin")).read_bytes()
        figures = loader.report.tensors[name]
        assert figures.transport == "raw" and word in figures.fallback, figures.fallback


def test_a_broken_base_is_an_error(exports):
    (exports[1] / "lm_head__weight.bin").unlink()
    with pytest.raises(Invalid):
        Loader(*exports)


def test_the_plain_export_is_valid_too(exports):
    assert not any(tensor.transport for tensor in Manifest(exports[1]).tensors.values())


# The mount


def test_direct_and_unaligned_reads(world):
    directory = world / "gds_export/minilm-float/v1@fp8"
    path = max((p for p in directory.iterdir() if p.suffix == ".fp8"), key=lambda p: p.stat().st_size)
    whole = path.read_bytes()
    assert len(whole) == path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, 1 << 20)
        for offset in range(0, len(whole), 1 << 20):
            size = os.preadv(descriptor, [buffer], offset)
            assert buffer[:size] == whole[offset : offset + size]
    finally:
        os.close(descriptor)
    chance = random.Random(1)
    with open(path, "rb", buffering=0) as file:
        for _ in range(200):
            offset, size = chance.randrange(len(whole)), chance.randrange(1, 70_000)
            assert os.pread(file.fileno(), size, offset) == whole[offset : offset + size]


def test_a_variant_prepares_itself_and_is_counted(small, tmp_path):
    with Mount(small, tmp_path / "mnt") as mount:
        directory = mount / "gds_export/tiny-llama/latest@fp8"
        status = lambda: json.loads((mount / ".wmount/status.json").read_bytes())["layouts"]["gds_export@fp8"]  # noqa: E731
        manifest = json.loads((directory / "manifest.json").read_bytes())
        encoded = sum("transport" in entry for entry in manifest.values())
        for entry in manifest.values():
            (directory / entry["path"]).read_bytes()
        assert eventually(lambda: status()["preparations"] == encoded)
        figures = status()
        assert figures["fallbacks"] == len(manifest) - encoded
        assert figures["blob_bytes"] > 0 and figures["bytes"] > 0 and figures["compute_seconds"] > 0
        assert figures["ratio"] == pytest.approx(figures["blob_bytes"] / figures["bytes"], abs=0.01)
        text = run("status", mount.at).stdout.decode()
        assert "gds_export@fp8" in text and "preparations" in text


def test_other_files_are_read_while_a_variant_prepares_itself(small, tmp_path):
    """The manifest waits for the digest of every encoded tensor; nothing else does."""
    source = tmp_path / "large"
    source.mkdir()
    rng = np.random.default_rng(9)
    large = {f"model.layers.{n}.weight": rng.standard_normal((1024, 8192), dtype=np.float32) for n in range(12)}
    save_file(large, source / "model.safetensors")
    small.add(source, name="large")
    with Mount(small, tmp_path / "m") as mount:
        other = mount / "safetensors/tiny-llama/latest"
        files = [path for path in other.iterdir() if path.is_file()]
        read, ended = [], []

        def open_variant():
            read.append((mount / "gds_export/large/latest@fp8/manifest.json").read_bytes())
            ended.append(time.monotonic())

        waiting = threading.Thread(target=open_variant)
        began = time.monotonic()
        waiting.start()
        finished = []
        while waiting.is_alive():
            content = random.choice(files).read_bytes()
            assert content
            finished.append(time.monotonic())
        waiting.join()
        assert len(json.loads(read[0])) == len(large)
        meanwhile = [at for at in finished if began < at < ended[0]]
        assert len(meanwhile) > 5, "reads of another model waited for the variant"


def test_prepare_finds_out_once_and_a_damaged_memo_is_not_used(small, tmp_path):
    first = small.json("prepare", "tiny-llama@fp8")
    assert first["tensors"] == 16 and first["bytes"] > 0
    memos = list((small.path / ".wmount/memo").iterdir())
    assert len(memos) == 16
    before = small.run("cat", "gds_export/tiny-llama/latest@fp8/manifest.json").stdout
    for memo in memos:
        data = bytearray(memo.read_bytes())
        data[-1] ^= 1
        memo.write_bytes(data)
    assert small.run("cat", "gds_export/tiny-llama/latest@fp8/manifest.json").stdout == before
    with Mount(small, tmp_path / "mnt") as mount:
        assert (mount / "gds_export/tiny-llama/latest@fp8/manifest.json").read_bytes() == before
        status = json.loads((mount / ".wmount/status.json").read_bytes())["layouts"]["gds_export@fp8"]
        assert status["preparations"] == 0, "the memos were mended before"


def test_prepare_says_what_is_wrong(small):
    for name, status, word in [("tiny-llama", 2, "MODEL@VARIANT"), ("tiny-llama@fp7", 2, "fp8"), ("nothing@fp8", 1, "not found")]:
        done = small.run("prepare", name, check=False)
        assert done.returncode == status and word in done.stderr.decode(), done.stderr


def test_prepare_fails_where_nothing_can_be_kept(small):
    (small.path / ".wmount/memo").write_bytes(b"")
    done = small.run("prepare", "tiny-llama@fp8", check=False)
    assert done.returncode == 1 and ".wmount/memo: Not a directory" in done.stderr.decode(), done.stderr


def test_prepare_prepares_what_some_layout_shows(store, models):
    """AMB has no code for the type of one tensor; gds_export has."""
    store.add(models / "minilm", name="minilm")
    assert not store.json("show", "minilm@f16")["layouts"]["amb"]["shown"]
    store.run("prepare", "minilm@f16")
    refused = store.run("prepare", "minilm@int8", check=False)
    assert refused.returncode == 1 and "position_ids" in refused.stderr.decode()


def test_variants_are_not_listed(world):
    names = {p.name for p in (world / "gds_export/tiny-llama").iterdir()}
    assert names == {"latest"}
    assert isinstance(world.store, Store) and (world / "gds_export/tiny-llama/latest@fp8").is_dir()
