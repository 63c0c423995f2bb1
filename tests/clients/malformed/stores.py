"""Stores whose manifests, layers, blobs and recipes break their formats: ollama's, and those that wmount wrote.

A broken model is shown as damaged, with the words, and hurts no other.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from malformed.tensors import ONE, TWO, of, raw

IMAGE, OWN = "application/vnd.ollama.image.", "application/vnd.wmount."
CONFIG = "application/vnd.docker.container.image.v1+json"
LIBRARY = "manifests/registry.ollama.ai/library"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Blob:
    """A layer, and the bytes that are in `blobs/` under its digest, if any."""

    kind: str
    name: str
    data: bytes
    change: dict | None = None
    stored: bytes | None = b""

    def layer(self) -> dict:
        media_type = self.kind if "/" in self.kind else IMAGE + self.kind
        layer = {
            "mediaType": media_type,
            "digest": f"sha256:{digest(self.data)}",
            "size": len(self.data),
            "name": self.name,
        }
        return layer | (self.change or {})


W = Blob("tensor", "w", of({"w": ONE["a"]}, 16))
FILE = Blob("json", "config.json", b"{}")
SEED = Blob("tensor", "w", of({"data": ONE["a"]}, 16), {"dtype": "F32", "shape": [4]})
IMAGE_CONFIG = Blob(CONFIG, "", b'{"model_format":"safetensors"}')


@dataclass
class Model:
    name: str
    manifest: bytes
    blobs: list
    words: tuple[str, ...]
    # Whether a copy takes it over as it is: what is wrong with it are names that ollama does not look at.
    copied: bool = False


MODELS: list[Model] = []


def manifest(name: str, text: bytes, *words: str, blobs=(W, FILE)):
    MODELS.append(Model(f"m{len(MODELS)}-{name.replace(' ', '-')}", text, [IMAGE_CONFIG, *blobs], words))


def document(*layers: dict, **change) -> bytes:
    whole = {"schemaVersion": 2, "config": IMAGE_CONFIG.layer(), "layers": list(layers)} | change
    return json.dumps({k: v for k, v in whole.items() if v is not ...}).encode()


def layers(name: str, *blobs: Blob, words: tuple[str, ...], copied=False):
    manifest(name, document(*(blob.layer() for blob in blobs)), *words, blobs=blobs)
    MODELS[-1].copied = copied


GOOD = document(W.layer(), FILE.layer())
for name, text, word in [
    ("empty", b"", "EOF"),
    ("text", b"no json", "expected ident"),
    ("a list", b"[]", "invalid length 0"),
    ("null", b"null", "invalid type: null"),
    ("binary", bytes(range(200, 256)), "no UTF-8"),
    ("cut off", GOOD[:-1], "EOF"),
    ("two documents", GOOD + GOOD, "trailing characters"),
    ("no UTF-8", b'{"mediaType":"\xff"}', "no UTF-8"),
    ("deep", b"[" * 200_000, "invalid type: sequence"),
    ("deep inside", b'{"x":' + b"[" * 200_000, "EOF"),
    ("nothing", b"{}", "missing field `schemaVersion`"),
    ("no config", document(config=...), "missing field `config`"),
    ("config null", document(config=None), "invalid type: null"),
    ("version 1", document(schemaVersion=1), "schemaVersion is 1, not 2"),
    ("version as text", document(schemaVersion="2"), "expected u32"),
    ("version negative", document(schemaVersion=-1), "expected u32"),
    ("layers as text", document(layers="x"), "expected a sequence"),
    ("layers of numbers", document(layers=[1, 2]), "invalid type: integer"),
    ("layers of null", document(layers=[None]), "invalid type: null"),
    ("seventeen million values", b'{"layers":[' + b"0," * 17_000_000, "values and separators"),
]:
    manifest(name, text, "latest: ", word, "(at byte")
for name, change, word in [
    ("no digest", {"digest": ...}, "missing field `digest`"),
    ("digest null", {"digest": None}, "invalid type: null"),
    ("digest empty", {"digest": ""}, '"" is no sha256 digest'),
    ("digest leads out", {"digest": "sha256:../../../etc/passwd"}, '"sha256:../../../etc/passwd" is no sha256 digest'),
    ("digest short", {"digest": "sha256:" + "a" * 63}, "is no sha256 digest"),
    ("digest long", {"digest": "sha256:" + "a" * 5000}, "is no sha256 digest"),
    ("digest no hex", {"digest": "sha256:" + "g" * 64}, "is no sha256 digest"),
    ("digest of another kind", {"digest": "sha512:" + "a" * 64}, "is no sha256 digest"),
    ("digest with NUL", {"digest": "sha256:" + "a" * 63 + "\0"}, "is no sha256 digest"),
    ("digest a number", {"digest": 7}, "expected a string"),
    ("no size", {"size": ...}, "missing field `size`"),
    ("size negative", {"size": -1}, "expected u64"),
    ("size a text", {"size": "32"}, "expected u64"),
    ("size a fraction", {"size": 1.5}, "expected u64"),
    ("size beyond 64 bits", {"size": 1 << 64}, "expected u64"),
    ("name a number", {"name": 1}, "expected a string"),
    ("shape a number", {"shape": 1}, "expected a sequence"),
    ("shape negative", {"shape": [-1]}, "expected u64"),
    ("named no digest", {"named": "x"}, "is no sha256 digest"),
]:
    layer = {k: v for k, v in (W.layer() | change).items() if v is not ...}
    manifest(name, document(layer, FILE.layer()), "latest: ", "no manifest: ", word, "(at byte")
layers(
    "sizes that overflow",
    *[Blob("tensor", "w", W.data, {"size": (1 << 64) - 1})] * 3,
    words=("latest: ", "the sizes of its layers cannot be true"),
)
layers(
    "sizes of an exabyte",
    Blob("tensor", "w", W.data, {"size": 1 << 61}),
    words=("the sizes of its layers cannot be true",),
)
# Blobs that are not what the manifest says.
for name, size in [
    ("long", 1 << 40),
    ("a byte long", len(W.data) + 1),
    ("a byte short", len(W.data) - 1),
    ("nothing", 0),
]:
    layers(
        f"size {name}",
        Blob("tensor", "w", W.data, {"size": size}),
        FILE,
        words=(f"blob sha256:{digest(W.data)}", f" has {len(W.data)} bytes, its manifest says {size}"),
    )
layers("blob missing", Blob("tensor", "w", b"gone" * 9, stored=None), FILE, words=("is missing",))
layers("file missing", W, Blob("json", "config.json", b"{gone}", stored=None), words=("is missing",))
cut = of({"short": ONE["a"]}, 16)
layers(
    "blob cut off",
    Blob("tensor", "w", cut, stored=cut[:-1]),
    FILE,
    words=(f"has {len(cut) - 1} bytes, its manifest says {len(cut)}",),
)
layers("blob empty", Blob("tensor", "w", cut + b"1", stored=b"\0"), FILE, words=("has 1 bytes",))
# Headers of blobs, which say what the tensors are.
for name, data, word in [
    ("no header", b"seven b", "8 bytes are needed but the file has 7"),
    ("header too long", raw(b"{}", bytes(8), 1 << 40), "the header claims 1099511627776 bytes"),
    ("header no JSON", raw(b"{no}"), "header: key must be a string"),
    ("header overlapping", of({"w": ONE["a"], "v": ONE["a"]}, 16), "overlaps the tensor before it"),
    ("header past the end", of(TWO, 16), "past the end of the file"),
    ("header dtype", of({"w": ONE["a"] | {"dtype": "X"}}, 16), '"X" is no known dtype'),
]:
    layers(
        name, Blob("tensor", "w", data), FILE, words=(f"blob sha256:{digest(data)}: ", word, "(at byte"), copied=True
    )
for name, change, word in [
    ("dtype unknown", {"dtype": "Q7", "shape": [4]}, 'tensor "w": "Q7" is no known dtype'),
    ("dtype missing", {"shape": [4]}, 'tensor "w": "" is no known dtype'),
    ("dtype long", {"dtype": "F" * 100_000, "shape": [4]}, "is no known dtype"),
    ("shape too large", {"dtype": "F32", "shape": [400]}, "F32 [400] does not fit into"),
    ("shape overflowing", {"dtype": "F32", "shape": [1 << 63, 4]}, "does not fit into"),
    ("shape of thousands", {"dtype": "F32", "shape": [7] * 5000}, "does not fit into"),
]:
    layers(
        name,
        Blob("tensor", "w", SEED.data, change),
        FILE,
        words=(f"blob sha256:{digest(SEED.data)}: ", word),
        copied=True,
    )
# Names of layers.
for number, name in enumerate(
    ["../../../etc/passwd", "/etc/passwd", "a/../b", "..", ".", "", "a//b", "a/", "nul\0", "tab\t", "line\n", "\x1b[2J", "\x85",
     "x" * 5000, "a/" * 3000 + "b", "a/" * 2000 + "b"]
):  # fmt: skip
    layers(
        f"name {number}",
        W,
        FILE,
        Blob("json", name, b"[]"),
        words=("the layer of blob sha256:", "is no plain relative path"),
        copied=True,
    )
layers(
    "file twice", W, FILE, Blob("json", "config.json", b"[]"), words=('file "config.json" occurs twice',), copied=True
)
layers(
    "tensor twice",
    W,
    FILE,
    Blob("tensor", "w", of({"w": TWO["a"], "v": TWO["b"]}, 32)),
    words=('tensor "w" occurs twice',),
    copied=True,
)

# Recipes.
NO = digest(b"nothing")


def recipe(name: str, text, *words: str, blobs=(), source="dir"):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    own = Blob(OWN + "recipe", source, data)
    layers(
        f"recipe {name}",
        own,
        SEED,
        *blobs,
        words=(f"blob sha256:{digest(data)}: ", f"recipe of {json.dumps(source)[:20]}"[:-1], *words),
    )


def put(**change) -> dict:
    file = {"path": "model.safetensors", "mtime": [0, 0], "extents": [[0, 0]]}
    blobs = [[digest(SEED.data), len(SEED.data)]]
    whole = {"version": 1, "kind": "safetensors", "blobs": blobs, "dirs": [], "files": [file]} | change
    return {k: v for k, v in whole.items() if v is not ...}


def extents(*extents, **change) -> dict:
    file = {"path": "f", "mtime": [0, 0], "extents": list(extents)} | change
    return put(files=[{k: v for k, v in file.items() if v is not ...}])


for name, text, word in [
    ("empty", b"", "EOF"),
    ("no JSON", b"recipe", "expected value"),
    ("a list", b"[]", "invalid length 0"),
    ("deep", b'{"x":' + b"[" * 100_000, "EOF"),
    ("five million values", b'{"files":[' + b"0," * 5_000_000, "values and separators"),
    ("of version 2", put(version=2), "version 2 was written by a newer wmount"),
    ("of no version", put(version=...), "missing field `version`"),
    ("of no kind", put(kind=...), "missing field `kind`"),
    ("of another kind", put(kind="pickle"), 'kind "pickle" is not known'),
    ("of no blobs", put(blobs=...), "missing field `blobs`"),
    ("blob no digest", put(blobs=[["xyz", 1]]), "is no sha256"),
    ("blob of one value", put(blobs=[[NO]]), "invalid length 1"),
    ("blob negative", put(blobs=[[NO, -1]]), "expected u64"),
    ("no files", put(files=...), "missing field `files`"),
    ("file leads out", extents(path="../../etc/passwd"), '"../../etc/passwd" is no plain relative path'),
    ("file absolute", extents(path="/etc/passwd"), '"/etc/passwd" is no plain relative path'),
    ("file with NUL", extents(path="a\0b"), "is no plain relative path"),
    ("file of 5000", extents(path="x" * 5000), "is no plain relative path"),
    ("no time", extents(mtime=...), "missing field `mtime`"),
    ("time of a second and more", extents(mtime=[0, 1 << 30]), "is no time"),
    ("time never", extents(mtime=[(1 << 63) - 1, 0], extents=[]), ""),
    ("no extents", extents(extents=...), "has not one of extents and map"),
    ("extents and map", extents(1, map=[NO, 1]), "has not one of extents and map"),
    ("extent unknown", extents([9, 0]), "f: there is no blob 9"),
    ("extent past the end", extents([0, 1 << 40]), "f: byte 1099511627776 is not within"),
    ("part past the end", extents([0, 0, 1 << 40]), "f: 1099511627776 bytes at 0 are not within"),
    ("part that overflows", extents([0, (1 << 64) - 1, 2]), "are not within"),
    ("zeros that overflow", extents((1 << 64) - 1, 5), "f: its size overflows"),
    ("zeros again and again", extents(*[1 << 61] * 4), "f: its size overflows"),
    ("hex of odd length", extents("abc"), "f: inline bytes: Odd number of digits"),
    ("no hex", extents("zz"), "f: inline bytes: Invalid character"),
    ("extent a fraction", extents(1.5), "did not match any variant"),
    ("extent negative", extents(-1), "did not match any variant"),
    ("extent of four", extents([0, 0, 1, 1]), "did not match any variant"),
    ("dir leads out", put(dirs=[{"path": "..", "mtime": [0, 0]}]), '".." is no plain relative path'),
    ("dir without time", put(dirs=[{"path": "a"}]), "missing field `mtime`"),
]:
    if name != "time never":
        recipe(name, text, word)
for name, length, word in [
    ("missing", 7, "it is missing"),
    ("too long", 300 << 20, "314572800 bytes are too many for what it is"),
    ("far too long", 1 << 40, "its programs, recipes, maps and headers have more than"),
]:
    own = Blob(OWN + "recipe", "dir", json.dumps(extents(extents=..., map=[NO, length])).encode())
    fault = word if length >> 40 else f'blob sha256:{NO}: {word}; it is part of the recipe of "dir"'
    layers(f"recipe map {name}", own, SEED, Blob(OWN + "fragment", "", b"nothing", stored=None), words=(fault,))
foreign = json.dumps(extents(extents=..., map=[NO, 10])).encode()
layers(
    "recipe map of no layer", Blob(OWN + "recipe", "dir", foreign), SEED, words=(f"names blob sha256:{NO}, and no layer",)
)
for name, text, word in [
    ("no JSON", b"[", "EOF"),
    ("of version 7", b'{"version":7,"blobs":[],"extents":[]}', "version 7 was written by a newer wmount"),
    ("past its blobs", b'{"version":1,"blobs":[],"extents":[[0,0]]}', "f: there is no blob 0"),
]:
    map_ = Blob(OWN + "fragment", "", text)
    recipe(f"map {name}", extents(extents=..., map=[digest(text), len(text)]), word, blobs=[map_])
for name in ("..", "a/../b", "/dir", "", "nul\0"):
    source = Blob(OWN + "recipe", name, json.dumps(put()).encode())
    layers(f"recipe for {name.encode().hex() or 'nothing'}", source, SEED, words=("is no plain relative path",))


def write(root: Path):
    """The store of all models and a whole one."""
    (root / "blobs").mkdir(parents=True)
    whole = Model("whole", GOOD, [IMAGE_CONFIG, W, FILE], ())
    for model in [*MODELS, whole]:
        for blob in model.blobs:
            if blob.stored is not None:
                (root / f"blobs/sha256-{digest(blob.data)}").write_bytes(blob.stored or blob.data)
        path = root / LIBRARY / model.name / "latest"
        path.parent.mkdir(parents=True)
        path.write_bytes(model.manifest)
    # What is no manifest at all.
    library = root / LIBRARY
    (library / "directory/latest").mkdir(parents=True)
    for name in ("loop", "fifo", "gone", "device", "large"):
        (library / name).mkdir()
    (library / "loop/latest").symlink_to("latest")
    (library / "gone/latest").symlink_to("nothing-there")
    (library / "device/latest").symlink_to("/dev/zero")
    os.mkfifo(library / "fifo/latest")
    with open(library / "large/latest", "wb") as file:
        file.write(b'{"layers":[')
        file.truncate(100 << 20)
    (root / "manifests/loop").symlink_to("loop")
    (library / "file").write_bytes(b"")
    (library / "-ill").mkdir()
    (library / "-ill/latest").write_bytes(GOOD)
    os.mkdir(bytes(library) + b"/\xff\xfe")
