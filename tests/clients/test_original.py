"""original/ gives back what was imported."""

import os
import stat

from harness import digest


def pairs(world):
    """(source, shown) for every path imported, directories included."""
    for model, sources in world.sources.items():
        for source in sources:
            shown = world / "original" / model / source.name
            yield source, shown
            for here, directories, files in os.walk(source):
                inside = os.path.relpath(here, source)
                for name in directories + files:
                    yield source / inside / name, shown / inside / name


def test_every_file_has_the_sha256_size_and_mtime_of_its_source(world):
    count = 0
    for source, shown in pairs(world):
        if source.is_file():
            assert shown.stat().st_size == source.stat().st_size, shown
            assert shown.stat().st_mtime_ns == source.stat().st_mtime_ns, shown
            assert digest(shown) == digest(source), shown
            count += 1
    assert count > 40


def test_the_set_of_paths_is_equal_empty_directories_included(world):
    expected = {str(shown.resolve()): source.is_dir() for source, shown in pairs(world)}
    found = {}
    for model in world.sources:
        for path in (world / "original" / model).rglob("*"):
            found[str(path.resolve())] = stat.S_ISDIR(path.lstat().st_mode)
    assert found == expected
    assert os.listdir(world / "original/minilm/latest/minilm/empty") == []
