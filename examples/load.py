"""Loads one model from a mount the way its users do: with mlx-lm, safetensors and coremltools.

    python examples/load.py /mnt/w NAME[/TAG]

Each part is skipped, and says so, where its library is not installed or the layout does not show the model.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def mlx(directory: Path):
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(directory))
    print("mlx-lm:", mlx_lm.generate(model, tokenizer, prompt="Hello", max_tokens=8))


def safetensors(directory: Path):
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            print("safetensors:", file.name, len(list(tensors.keys())), "tensors")


def coreml(directory: Path):
    import coremltools

    for package in sorted(directory.glob("*.mlpackage")):
        spec = coremltools.models.utils.load_spec(str(package))
        weights = package / "Data/com.apple.CoreML/weights/weight.bin"
        inode = weights.stat().st_ino if weights.exists() else None
        print("coremltools:", package.name, "version", spec.specificationVersion, "weights in inode", inode)


def main():
    mount, model = Path(sys.argv[1]), sys.argv[2]
    model = model if "/" in model else model + "/latest"
    parts = [
        ("mlx_lm", mlx, "safetensors"),
        ("safetensors", safetensors, "safetensors"),
        ("coremltools", coreml, "coreml"),
    ]
    for library, load, layout in parts:
        directory = mount / layout / model
        if not directory.is_dir():
            print(f"{layout}: {model} is not there; `wmount show` says why")
        elif find_spec(library) is None:
            print(f"{library}: not installed")
        else:
            load(directory)


if __name__ == "__main__":
    main()
