"""One store with every model, mounted once, for the tests that only look; small fresh stores for those that change.

Without /dev/fuse or without the built program the tests fail; they never skip.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

import models as made
from harness import REPOSITORY, Mount, Store


@dataclass
class World:
    """The mounted store, and for every model (by its path in the tree) what was imported."""

    store: Store
    mount: Mount
    models: Path
    sources: dict[str, list[Path]]

    def __truediv__(self, inside) -> Path:
        return self.mount / inside


@pytest.fixture(scope="session")
def models() -> Path:
    """The inputs, kept between runs below target/."""
    return made.cached(Path(os.environ.get("WMOUNT_TEST_MODELS", REPOSITORY / "target/client-models")))


@pytest.fixture(scope="session", autouse=True)
def fuse():
    if not os.path.exists("/dev/fuse"):
        pytest.fail("/dev/fuse is missing: these tests mount for real", pytrace=False)


@pytest.fixture(scope="session")
def world(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    store = Store(root / "store")
    shapes = [models / f"minilm-s{n}.mlpackage" for n in made.SHAPES]
    imports = [
        ("minilm", [models / "minilm"]),
        ("minilm", shapes),
        ("minilm", [models / "minilm-other.mlpackage"]),
        ("minilm-float:v1", [models / "minilm-float"]),
        ("encoder", shapes[:2]),
        ("mixed", [models / "mixed.mlpackage"]),
        ("subbyte", [models / "subbyte.mlpackage"]),
        ("inline", [models / "inline.mlpackage"]),
        ("tiny-llama", [models / "tiny-llama"]),
        ("org/tiny-llama:hub", [made.hub_snapshot(models)]),
    ]
    sources: dict[str, list[Path]] = {}
    for name, paths in imports:
        store.add(*paths, name=name)
        base, _, tag = name.partition(":")
        sources.setdefault(f"{base}/{tag or 'latest'}", []).extend(paths)
    with Mount(store, root / "mnt") as mount:
        yield World(store, mount, models, sources)


@pytest.fixture
def store(tmp_path) -> Store:
    """A store that does not exist yet."""
    return Store(tmp_path / "store")


@pytest.fixture
def small(store, models) -> Store:
    """A store of two small models."""
    store.add(models / "tiny-llama", name="tiny-llama")
    store.add(models / "mixed.mlpackage", name="mixed")
    return store


@pytest.fixture
def mounted(small, tmp_path):
    """The small store, mounted."""
    with Mount(small, tmp_path / "mnt") as mount:
        yield mount
