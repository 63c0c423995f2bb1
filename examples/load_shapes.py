"""Loads all shapes of a mounted model at once, each in a process of its own, and times it.

    python examples/load_shapes.py /mnt/w/coreml/NAME/TAG

On macOS each process compiles and loads its package with Core ML. Elsewhere coremltools cannot, so each one loads the
program and reads every constant that it refers to.
"""

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path


def offsets(message) -> list[int]:
    """The places of all constants in the weight file, wherever they are in the program."""
    if message.DESCRIPTOR.name == "BlobFileValue":
        return [message.offset]
    found = []
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                continue
            value = value.values()
        for part in [value] if hasattr(value, "DESCRIPTOR") else value:
            found += offsets(part)
    return found


def read_weights(package: Path, spec) -> int:
    import struct

    total = 0
    path = package / "Data/com.apple.CoreML/weights/weight.bin"
    places = set(offsets(spec))
    if places:
        with open(path, "rb") as file:
            for at in places:
                file.seek(at)
                sentinel, _, size, data = struct.unpack("<IIQQ", file.read(24))
                if sentinel != 0xDEADBEEF:
                    raise ValueError(f"{path}: no blob at {at}")
                file.seek(data)
                if len(file.read(size)) != size:
                    raise ValueError(f"{path}: the blob at {at} is cut off")
                total += size
    return total


def load(package: Path) -> tuple[float, str]:
    start = time.perf_counter()
    import coremltools as ct

    if sys.platform == "darwin":
        ct.models.MLModel(str(package))
        what = "loaded by Core ML"
    else:
        spec = ct.models.utils.load_spec(str(package))
        what = f"version {spec.specificationVersion}, {read_weights(package, spec)} bytes of constants"
    return time.perf_counter() - start, what


def main():
    directory = Path(sys.argv[1])
    packages = sorted(p for p in directory.glob("*.mlpackage") if p.name != "all.mlpackage")
    if not packages:
        raise SystemExit(f"{directory}: no packages")
    start = time.perf_counter()
    with ProcessPoolExecutor(len(packages), mp_context=get_context("spawn")) as pool:
        for package, (seconds, what) in zip(packages, pool.map(load, packages)):
            print(f"{package.name}: {seconds:.2f} s, {what}")
    print(f"{len(packages)} shapes at once: {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
