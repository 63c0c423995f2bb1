"""CoreML models of every kind: each constant by value, one weight file for all shapes, inline weights in a file."""

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import coreml_models
import models as made
import readers
from coreml_models import read_spec
from coreml_values import constants, each_value
from harness import BINARY, REPOSITORY, Mount, Store, digest

SHARED = ["places-s8", "swapped", "order-1", "order-2", "order-3", "head", "plain-s8", "unicode", "stranger"]
GROUPS = {
    "shapes": ["plain-s8", "plain-s16", "plain-s32"],
    "shared": SHARED,
    "inline-and-file": ["inline", "plain-s16", "inline-package"],
}
WEIGHTS = Path("Data/com.apple.CoreML/weights")


@dataclass
class Zoo:
    store: Store
    mount: Mount
    sources: dict[str, Path]
    model: dict[str, list[str]]

    def shown(self, model: str, name: str) -> Path:
        source = self.sources[name]
        name = source.name if source.suffix != ".mlmodel" else f"{source.stem}.mlpackage"
        return self.mount / f"coreml/{model}/latest/{name}"

    def members(self):
        return [(model, name) for model, names in self.model.items() for name in names]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    sources = coreml_models.make(root / "sources")
    store = Store(root / "store")
    model = GROUPS | {name: [name] for name in sources if not any(name in group for group in GROUPS.values())}
    for name, members in model.items():
        for member in members:
            store.add(sources[member], name=name)
    with Mount(store, root / "mnt") as mount:
        yield Zoo(store, mount, sources, model)


def weights_of(package: Path) -> Path:
    return package / WEIGHTS


def values(package: Path) -> dict:
    return constants(read_spec(package), weights_of(package))


def manifest_items(package: Path) -> dict[str, str]:
    items = json.loads((package / "Manifest.json").read_text())["itemInfoEntries"].values()
    return {item["name"]: item["path"] for item in items}


def test_every_constant_has_its_value(zoo):
    """Whatever file a constant is in, and wherever it was: the same bytes under the same path of the program."""
    compared = 0
    for model, name in zoo.members():
        if name != "compiled":
            before, after = values(zoo.sources[name]), values(zoo.shown(model, name))
            assert before == after, f"{name} in {model}"
            compared += len(before)
    assert compared > 500


def test_everything_was_kept(zoo):
    for model, name in zoo.members():
        source = zoo.sources[name]
        shown = zoo.mount / f"original/{model}/latest/{source.name}"
        files = [path for path in source.rglob("*") if path.is_file()] or [source]
        for path in files:
            assert digest(shown / path.relative_to(source)) == digest(path), path
        if source.is_dir():
            assert {p.relative_to(source) for p in source.rglob("*")} == {p.relative_to(shown) for p in shown.rglob("*")}


def test_coremltools_loads_every_package(zoo):
    import coremltools as ct

    for model, name in zoo.members():
        if name != "compiled":
            spec = ct.models.utils.load_spec(str(zoo.shown(model, name)))
            assert spec.WhichOneof("Type") == read_spec(zoo.sources[name]).WhichOneof("Type")


def test_only_places_of_weights_change(zoo):
    """A program that is pointed elsewhere is otherwise the same message."""
    for model, name in zoo.members():
        if name == "compiled" or "inline" in name:
            continue
        before, after = read_spec(zoo.sources[name]), read_spec(zoo.shown(model, name))
        for spec in (before, after):
            for _, value in each_value(spec):
                if value.WhichOneof("value") == "blobFileValue":
                    value.blobFileValue.offset = 0
        assert before == after, name


def test_shapes_written_in_any_order_share_one_file(zoo):
    files = [made.weight_bin(zoo.shown("shared", name)) for name in SHARED[:-1]]
    assert len({file.stat().st_ino for file in files}) == 1
    assert files[0].stat().st_nlink == len(files), "the stranger keeps all.mlpackage away"
    first = made.weight_bin(zoo.sources["places-s8"])
    assert files[0].read_bytes()[4 : first.stat().st_size] == first.read_bytes()[4:]
    blobs, before = readers.milblob(files[0]), readers.milblob(first)
    added = [blob.data for offset, blob in blobs.items() if offset not in before]
    assert added and len(set(added)) == len(added), "a blob was added twice"
    assert not set(added) & {blob.data for blob in before.values()}, "a blob was added that is there"
    # The package that was imported first needs no other program.
    shown, source = zoo.shown("shared", "places-s8"), zoo.sources["places-s8"]
    assert digest(shown / made.PACKAGE / "model.mlmodel") == digest(source / made.PACKAGE / "model.mlmodel")


def test_a_package_with_nothing_in_common_keeps_its_file(zoo):
    shown = made.weight_bin(zoo.shown("shared", "stranger"))
    assert shown.stat().st_nlink == 1
    assert shown.read_bytes() == made.weight_bin(zoo.sources["stranger"]).read_bytes()


def test_equal_files_are_shown_as_they_were_imported(zoo):
    files = [made.weight_bin(zoo.shown("shapes", name)) for name in GROUPS["shapes"]]
    assert len({file.stat().st_ino for file in files}) == 1
    assert files[0].read_bytes() == made.weight_bin(zoo.sources["plain-s8"]).read_bytes()


def test_a_link_to_the_first_weight_file_binds_wrong_weights(zoo, tmp_path):
    """Offsets that fit another order of the same blobs read without an error, and wrong; ours cannot."""
    first, second = zoo.sources["swapped"], zoo.sources["places-s8"]
    linked = tmp_path / "linked.mlpackage"
    shutil.copytree(second, linked)
    made.weight_bin(linked).unlink()
    made.weight_bin(linked).symlink_to(made.weight_bin(first))
    spec = read_spec(second)
    right = constants(spec, weights_of(second))
    wrong = constants(spec, weights_of(linked))
    assert wrong.keys() == right.keys() and wrong != right
    for name in ("swapped", "order-1", "places-s8"):
        assert values(zoo.shown("shared", name)) == right, name


def test_blobs_keep_their_places_when_a_shape_joins(zoo, store, tmp_path):
    names = ["places-s8", "order-2", "order-3", "head"]
    before, programs = b"", {}
    for count in range(1, len(names) + 1):
        store.add(zoo.sources[names[count - 1]], name="m")
        with Mount(store, tmp_path / "mnt") as mount:
            shown = [mount / f"coreml/m/latest/{zoo.sources[name].name}" for name in names[:count]]
            file = made.weight_bin(shown[0]).read_bytes()
            assert file[4 : len(before)] == before[4:]
            assert len(file) > len(before)
            for package in shown:
                program = (package / made.PACKAGE / "model.mlmodel").read_bytes()
                assert programs.setdefault(package.name, program) == program, "a program changed"
                assert made.weight_bin(package).stat().st_nlink == count + (count > 1)
            before = file


@pytest.mark.parametrize("model", ["shapes", "inline-and-file"])
def test_all_shapes_are_functions_of_one_package(zoo, model):
    """coremltools reads the functions and their descriptions; each constant of each function has its value."""
    import coremltools as ct

    package = zoo.mount / f"coreml/{model}/latest/all.mlpackage"
    spec = ct.models.utils.load_spec(str(package))
    names = {name.replace("-", "_"): name for name in GROUPS[model]}
    assert spec.specificationVersion >= 9
    assert list(spec.mlProgram.functions) and set(spec.mlProgram.functions) == set(names)
    assert [function.name for function in spec.description.functions] == list(names)
    assert spec.description.defaultFunctionName == list(names)[0]
    found = constants(spec, weights_of(package))
    for function in spec.description.functions:
        source = read_spec(zoo.sources[names[function.name]])
        assert list(function.input) == list(source.description.input)
        assert list(function.output) == list(source.description.output)
        at = "/mlProgram/functions[{}]"
        mine = {k: v for k, v in found.items() if k.startswith(at.format(function.name))}
        theirs = {k.replace(at.format("main"), at.format(function.name)): v for k, v in values(zoo.sources[names[function.name]]).items() if at.format("main") in k}
        assert mine == theirs and mine
    inode = made.weight_bin(package).stat().st_ino
    assert {made.weight_bin(zoo.shown(model, name)).stat().st_ino for name in GROUPS[model]} == {inode}
    model = ct.models.MLModel(str(package), skip_model_load=True, function_name=list(names)[1])
    assert model.weights_dir is not None


def test_packages_that_share_no_file_have_no_common_package(zoo):
    assert "all.mlpackage" not in os.listdir(zoo.mount / "coreml/shared/latest")


def test_show_tells_the_shapes_and_what_they_do_not_share(zoo):
    shapes = {shape["name"]: shape for shape in zoo.store.json("show", "shared")["shapes"]}
    assert len(shapes) == len(SHARED)
    first = shapes["order-2.mlpackage"]
    assert first["inputs"] == [{"name": "x", "dtype": "F32", "shape": [16, coreml_models.WIDTH]}]
    assert first["outputs"][0]["shape"] == [16, coreml_models.WIDTH]
    why = {name: {c["name"]: c["why"] for c in shape["unshared"]} for name, shape in shapes.items()}
    assert why["order-2.mlpackage"] == {"placed_y_0": "[8, 64] in places-s8.mlpackage"}
    assert why["places-s8.mlpackage"] == {}
    assert why["head.mlpackage"]["head_weight_0"] == "no other package has one of this name"
    assert why["stranger.mlpackage"]["linear_0_weight_0"] == "other values in places-s8.mlpackage"
    assert "order-2.mlpackage: placed_y_0" in zoo.store.run("show", "shared").stdout.decode()


def test_nine_shapes_load_at_once(zoo, store, tmp_path):
    """The example that loads them in nine processes."""
    for index in range(9):
        package = tmp_path / f"s{index}.mlpackage"
        shutil.copytree(zoo.sources[f"places-s{8 << index % 3}"], package)
        store.add(package, name="nine")
    with Mount(store, tmp_path / "mnt") as mount:
        command = [sys.executable, REPOSITORY / "examples/load_shapes.py", mount / "coreml/nine/latest"]
        done = subprocess.run(command, capture_output=True, timeout=300)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0 and len(lines) == 10 and lines[-1].startswith("9 shapes at once"), done.stderr.decode()


def test_a_tenth_shape_costs_its_graph(zoo):
    """Shapes of the same weights add a program and a recipe, no tensor."""
    report = zoo.store.add(zoo.sources["plain-s16"], name="another")
    assert report["added"]["tensors"] == 0
    assert report["present"]["tensors"] == len(readers.milblob(made.weight_bin(zoo.sources["plain-s16"])))


@pytest.mark.parametrize("name", ["inline", "inline-bytes", "inline-package"])
def test_inline_weights_are_in_a_weight_file(zoo, name):
    model = name if name in zoo.model else "inline-and-file"
    source, shown = read_spec(zoo.sources[name]), read_spec(zoo.shown(model, name))
    size = lambda value: len(value.immediateValue.tensor.bytes.values) or 4 * len(value.immediateValue.tensor.floats.values)  # noqa: E731
    large = {path for path, value in each_value(source) if size(value) >= 1024}
    filed = {path for path, value in each_value(shown) if value.WhichOneof("value") == "blobFileValue"}
    assert large and filed == large
    assert manifest_items(zoo.shown(model, name))["weights"] == "com.apple.CoreML/weights"


def test_inline_and_filed_weights_are_one(zoo):
    """The same weights inside a program and in a file: one tensor in the store, one blob in one file."""
    files = [made.weight_bin(zoo.shown("inline-and-file", name)) for name in GROUPS["inline-and-file"]]
    assert len({file.stat().st_ino for file in files}) == 1
    blobs = list(readers.milblob(files[0]).values())
    assert len({blob.data for blob in blobs}) == len(blobs)


def test_inline_weights_are_shared_with_safetensors(zoo, store, tmp_path):
    from safetensors.numpy import save_file

    w = coreml_models.weights()
    save_file({name: w[name] for name in ("first", "second", "third")}, tmp_path / "model.safetensors")
    store.add(tmp_path / "model.safetensors", name="tensors")
    report = store.add(zoo.sources["inline"], name="program")
    assert report["present"]["tensors"] == 3
    assert report["added"]["tensors"] == 0


def test_the_threshold(zoo, store, tmp_path):
    for threshold, tensors in ((1 << 20, 0), (1024, 3), (100, 6)):
        name = f"from-{threshold}"
        store.json("import", zoo.sources["inline"], "-n", name, "--blob-threshold", threshold)
        assert len(store.json("show", name)["tensors"]) == tensors
    with Mount(store, tmp_path / "mnt") as mount:
        # The three biases are equal: one blob.
        for threshold, tensors in ((1 << 20, 0), (1024, 3), (100, 4)):
            weights = weights_of(mount / f"coreml/from-{threshold}/latest/inline.mlpackage")
            count = len(readers.milblob(weights / "weight.bin")) if tensors else len(os.listdir(weights.parent)) - 1
            assert count == tensors


def test_a_large_inline_model_takes_little_memory(store, tmp_path):
    """A tensor of 512 MB in the message, most of it a hole in the file."""
    size = 512 << 20
    spec = coreml_models.small_spec()
    value = next(value for path, value in each_value(spec) if value.immediateValue.tensor.floats.values)
    value.type.tensorType.dataType = 10
    del value.type.tensorType.dimensions[1:]
    value.type.tensorType.rank, value.type.tensorType.dimensions[0].constant.size = 1, size // 2
    value.immediateValue.tensor.bytes.values = b"MARK" * 256
    marked = spec.SerializeToString()
    file = tmp_path / "large.mlmodel"
    file.write_bytes(grown(marked, marked.index(b"MARK" * 256), 1024, size))
    command = [str(BINARY), "-s", str(store.path), "import", str(file), "-n", "large"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    code = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:]).returncode; print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r)"
    done = subprocess.run(["python3", "-c", code, *command], capture_output=True, check=True)
    assert before >= 0 and int(done.stdout.split()[-1]) < 256 << 10, "over 256 MiB"
    file.unlink()


def grown(message: bytes, at: int, old: int, new: int) -> bytes:
    """The message with the bytes field at `at` grown from `old` to `new` bytes, and all lengths around it."""
    def varint(data, i):
        value = shift = 0
        while True:
            value |= (data[i] & 127) << shift
            shift, i = shift + 7, i + 1
            if data[i - 1] < 128:
                return value, i

    def encode(value):
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def grow(start, end) -> bytes:
        i = start
        while i < end:
            tag, after = varint(message, i)
            if tag & 7 == 2:
                length, body = varint(message, after)
                if body <= at < body + length:
                    inner = bytes(new) if (body, length) == (at, old) else grow(body, body + length)
                    head = message[start:after] + encode(len(inner))
                    return head + inner + message[body + length : end]
                i = body + length
            else:
                i = varint(message, after)[1] if tag & 7 == 0 else after + (8 if tag & 7 == 1 else 4)
        raise AssertionError("not there")

    return grow(0, len(message))


def test_manifests_name_the_weights_directory(zoo):
    """coremltools finds weights by the directory's item; go-coreml names the file or nothing."""
    import coremltools as ct

    for model, name in (("shared", "order-1"), ("rare", "rare"), ("shared", "unicode")):
        assert "weights" not in manifest_items(zoo.sources[name])
        shown = zoo.shown(model, name)
        assert manifest_items(shown) == {"model.mlmodel": f"{WEIGHTS.parent.name}/model.mlmodel", "weights": "com.apple.CoreML/weights"}
        assert ct.models.MLModel(str(shown), skip_model_load=True).weights_dir is not None


def test_tools_of_coremltools_work_on_mounted_packages(zoo, tmp_path):
    import coremltools as ct
    import coremltools.optimize.coreml as cto

    shown = zoo.shown("shared", "order-1")
    w = coreml_models.weights()
    model = ct.models.MLModel(str(shown), skip_model_load=True)
    metadata = cto.get_weights_metadata(model, weight_threshold=1000)
    found = {data.val.tobytes() for data in metadata.values()}
    assert {w[name].tobytes() for name in ("first", "second", "third")} <= found
    palettised = ct.models.MLModel(str(zoo.shown("palette4-ios18", "palette4-ios18")), skip_model_load=True)
    cto.decompress_weights(palettised)
    description = ct.utils.MultiFunctionDescriptor()
    for name in ("places-s8", "order-2"):
        description.add_function(str(zoo.shown("shared", name)), "main", name.replace("-", "_"))
    description.default_function_name = "places_s8"
    ct.utils.save_multifunction(description, str(tmp_path / "both.mlpackage"))
    spec = read_spec(tmp_path / "both.mlpackage")
    assert sorted(spec.mlProgram.functions) == ["order_2", "places_s8"]


def test_a_compiled_model_shares_every_tensor(zoo):
    report = zoo.store.add(zoo.sources["compiled"], name="shapes")
    assert report["added"]["tensors"] == 0
    shown = zoo.mount / "coreml/compiled/latest/compiled.mlmodelc"
    for path in zoo.sources["compiled"].rglob("*"):
        if path.is_file():
            assert digest(shown / path.relative_to(zoo.sources["compiled"])) == digest(path)


def test_neural_networks_are_kept_whole(zoo):
    for name in ("network", "network-bare"):
        shown = zoo.shown(name, name)
        assert read_spec(shown) == read_spec(zoo.sources[name])
        assert "weights" not in manifest_items(shown)
    blob = zoo.store.json("show", "network-bare")["files"][0]
    assert blob["digest"] in {file["digest"] for file in zoo.store.json("show", "network")["files"]}


def test_a_pipeline_has_its_files(zoo):
    shown = zoo.shown("pipeline", "pipeline")
    assert sorted(os.listdir(weights_of(shown))) == ["0-weight.bin", "1-weight.bin"]


def test_packages_of_go_coreml(store, tmp_path):
    """go-coreml's own serializer puts every weight into the program: shown as packages with one weight file."""
    if shutil.which("go") is None:
        pytest.skip("Go is not installed: go-coreml's packages are not tested")
    here = Path(__file__).parent / "gocoreml"
    subprocess.run(["go", "run", ".", tmp_path], cwd=here, check=True, capture_output=True, timeout=600)
    packages = sorted(tmp_path.glob("*.mlpackage"))
    assert len(packages) == 3
    first, *others = [store.add(package, name="go") for package in packages]
    assert first["added"]["tensors"] == 12
    assert {report["added"]["tensors"] for report in others} == {0}
    with Mount(store, tmp_path / "mnt") as mount:
        shown = [mount / "coreml/go/latest" / package.name for package in packages]
        for source, package in zip(packages, shown):
            assert values(package) == constants(read_spec(source), tmp_path)
            assert len(readers.milblob(made.weight_bin(package))) == 12
            assert manifest_items(package)["weights"] == "com.apple.CoreML/weights"
            assert digest(mount / "original/go/latest" / source.name / made.PACKAGE / "model.mlmodel") == digest(source / made.PACKAGE / "model.mlmodel")
        assert len({made.weight_bin(package).stat().st_ino for package in shown}) == 1


# --- Bad input: a named error at import, nothing stored. ---


def first_reference(spec):
    return next(value for _, value in each_value(spec) if value.WhichOneof("value") == "blobFileValue")


def change_spec(change):
    def apply(package: Path):
        spec = read_spec(package)
        change(spec)
        (package / made.PACKAGE / "model.mlmodel").write_bytes(spec.SerializeToString())

    return apply


def change_reference(**fields):
    def change(spec):
        for name, value in fields.items():
            setattr(first_reference(spec).blobFileValue, name, value)

    return change_spec(change)


def change_weights(form: str, at: int, value: int):
    def apply(package: Path):
        data = bytearray(made.weight_bin(package).read_bytes())
        struct.pack_into(form, data, at, value)
        made.weight_bin(package).write_bytes(data)

    return apply


def append_to_model(record: bytes):
    def apply(package: Path):
        with open(package / made.PACKAGE / "model.mlmodel", "ab") as file:
            file.write(record)

    return apply


def deep(spec):
    main = spec.mlProgram.functions["main"]
    block = next(iter(main.block_specializations.values()))
    for _ in range(60):
        operation = block.operations.add(type="cond")
        block = operation.blocks.add()


def other_dtype(spec):
    first_reference(spec).type.tensorType.dataType = 10


def other_shape(spec):
    first_reference(spec).type.tensorType.dimensions[0].constant.size += 1


def stand_still(package: Path):
    data = bytearray(made.weight_bin(package).read_bytes())
    struct.pack_into("<IIIIQQ", data, 0, 0xFFFFFFFF, 2, 0, 0, 0, 0)
    struct.pack_into("<QQ", data, 72, 0, 64)
    made.weight_bin(package).write_bytes(data)


BAD = {
    "wrong sentinel": (change_weights("<I", 64, 0x12345678), "sentinel"),
    "a count that is too large": (change_weights("<I", 0, 1000), "bytes"),
    "size past the end": (change_weights("<Q", 72, 1 << 40), "not within"),
    "size that wraps": (change_weights("<Q", 72, (1 << 64) - 64), "not within"),
    "offset past the end": (change_weights("<Q", 80, 1 << 40), "not within"),
    "a walk that stands still": (stand_still, "before its metadata"),
    "an offset that cites no blob": (change_reference(offset=128), "cites no blob"),
    "an offset past the end": (change_reference(offset=1 << 60), "cites no blob"),
    "an offset of the last byte": (change_reference(offset=(1 << 64) - 1), "cites no blob"),
    "another dtype": (change_spec(other_dtype), "its type is"),
    "another shape": (change_spec(other_shape), "does not fill"),
    "a file in the directory above": (change_reference(fileName="@model_path/weights/../weight.bin"), "is not of the form"),
    "an absolute path": (change_reference(fileName="/etc/passwd"), "is not of the form"),
    "another directory": (change_reference(fileName="@model_path/other/weight.bin"), "is not of the form"),
    "a file that is not there": (change_reference(fileName="@model_path/weights/none.bin"), "missing"),
    "messages nested too deep": (change_spec(deep), "more than 100 deep"),
    "a length past the end": (append_to_model(b"\xb2\x1f\x80\x80\x80\x80\x08"), "ends after"),
    "a string of 2 GB": (append_to_model(b"\x12\xff\xff\xff\xff\x07"), "ends after"),
    "a field that says it again": (append_to_model(b"\x08\x07"), "says again"),
    "a second program": (append_to_model(b"\xb2\x1f\x00"), "says again"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(zoo, store, tmp_path, case):
    apply, word = BAD[case]
    package = tmp_path / "bad.mlpackage"
    shutil.copytree(zoo.sources["plain-s8"], package)
    apply(package)
    done = store.run("import", package, "-n", "bad", check=False, timeout=20)
    line = done.stderr.decode().strip()
    assert done.returncode == 1 and "\n" not in line and word in line, line
    assert not (store.path / "blobs").exists() or not os.listdir(store.path / "blobs")


def test_a_count_that_is_too_small(zoo, store, tmp_path):
    """Apple's reader goes where the program says, and so does the import."""
    from coremltools.libmilstoragepython import _BlobStorageReader

    package = tmp_path / "few.mlpackage"
    shutil.copytree(zoo.sources["plain-s8"], package)
    change_weights("<I", 0, 1)(package)
    store.run("import", package, "-n", "few")
    reader = _BlobStorageReader(str(made.weight_bin(package)))
    right = values(zoo.sources["plain-s8"])
    for path, value in each_value(read_spec(package)):
        if value.WhichOneof("value") == "blobFileValue":
            data = np.array(reader.read_float_data(value.blobFileValue.offset), np.float32).tobytes()
            assert data == right[path][1]


def test_a_bare_model_cannot_be_in_a_file(zoo, store, tmp_path):
    bare = tmp_path / "bare.mlmodel"
    bare.write_bytes((zoo.sources["plain-s8"] / made.PACKAGE / "model.mlmodel").read_bytes())
    done = store.run("import", bare, "-n", "bare", check=False)
    assert done.returncode == 1 and "whole package" in done.stderr.decode()


def test_the_readers_agree(zoo):
    """Apple's own reader reads what the sources' values are, for the types that it can read."""
    from coremltools.libmilstoragepython import _BlobStorageReader

    reader = _BlobStorageReader(str(made.weight_bin(zoo.shown("shared", "order-2"))))
    spec = read_spec(zoo.shown("shared", "order-2"))
    right = values(zoo.sources["order-2"])
    for path, value in each_value(spec):
        if value.WhichOneof("value") == "blobFileValue":
            data = np.array(reader.read_float_data(value.blobFileValue.offset), np.float32).tobytes()
            assert data == right[path][1]
