"""What users do every day: rename a model, have two versions of one, stop an export, mount from /etc/fstab."""


import mlx_lm

from harness import BINARY, Mount, Store, digest, eventually, unmount


def files(root):
    return {str(path.relative_to(root)): digest(path) for path in root.rglob("*") if path.is_file()}


def test_a_model_gets_another_name_while_it_is_mounted_and_open(small, tmp_path):
    blobs = small.blobs()
    with Mount(small, tmp_path / "mnt") as mount:
        old, new = mount / "safetensors/tiny-llama/latest", mount / "safetensors/me/renamed/v2"
        before = files(old)
        assert small.json("cp", "tiny-llama", "me/renamed:v2") == {
            "model": "tiny-llama:latest",
            "copy": "me/renamed:v2",
        }
        assert eventually(new.is_dir) and files(new) == before
        with open(old / "model-00001-of-00003.safetensors", "rb") as still:
            small.run("rm", "tiny-llama")
            assert eventually(lambda: not old.exists())
            assert small.json("gc")["removed"] == 0
            assert len(still.read()) == (new / "model-00001-of-00003.safetensors").stat().st_size
        assert files(new) == before
        mlx_lm.load(str(new))
        assert {path.name for path in (mount / "original/me/renamed/v2").iterdir()} == {"tiny-llama"}
    assert small.blobs() == blobs
    assert {model["model"] for model in small.json("ls")} == {"me/renamed:v2", "mixed:latest"}


def test_a_copy_takes_no_other_models_place_unless_told_to(small):
    before = small.listing()
    for args, word in [
        (("tiny-llama", "mixed"), "has another model mixed:latest"),
        (("tiny-lama", "other"), "tiny-llama:latest"),
        (("tiny-llama:v9", "other"), "tiny-llama:latest"),
    ]:
        done = small.run("cp", *args, check=False)
        assert done.returncode == 1 and word in done.stderr.decode(), done.stderr.decode()
    assert small.listing() == before
    small.run("cp", "tiny-llama", "mixed", "--replace")
    shown = [small.json("show", model)["tensors"] for model in ("tiny-llama", "mixed")]
    assert shown[0] == shown[1]
    done = Store(small.path.parent / "none").run("cp", "a", "b", check=False)
    assert done.returncode == 1 and not (small.path.parent / "none").exists()
