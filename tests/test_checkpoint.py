"""Whatever happens while a checkpoint is saved, the run can go on from a whole one."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opd.checkpoint import Checkpoint, checkpoints_in, newest_checkpoint, save_checkpoint
from opd.errors import CheckpointError

ROOT = Path(__file__).resolve().parent.parent


def parts_of(step: int, elements: int = 64) -> dict[str, dict[str, torch.Tensor]]:
    weight = torch.full((elements, 4), float(step))
    moments = {"layer.weight.exp_avg": weight / 3, "layer.weight.step": torch.tensor(float(step))}
    return {"model": {"layer.weight": weight, "layer.bias": torch.arange(4.0)}, "optimizer": moments}


def save(folder: Path, step: int, *, keep_last: int = 2, elements: int = 64) -> Path:
    return save_checkpoint(folder, step, parts_of(step, elements), {"prompts": {"epoch": step}}, keep_last=keep_last)


def newest(folder: Path) -> Checkpoint:
    """Returns the newest checkpoint of a folder in which none is torn."""
    checkpoint = newest_checkpoint(folder, pytest.fail)
    assert checkpoint is not None
    return checkpoint


def test_a_checkpoint_gives_back_every_bit_and_holds_no_pickle(tmp_path):
    path = save(tmp_path, 7)
    loaded = newest(tmp_path)
    assert (loaded.path, loaded.step, loaded.state) == (path, 7, {"prompts": {"epoch": 7}})
    found = loaded.tensors(like=parts_of(0))
    for part, tensors in parts_of(7).items():
        assert found[part].keys() == tensors.keys()
        assert all(torch.equal(found[part][name], tensor) for name, tensor in tensors.items())
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


def test_tensors_that_are_views_or_transposed_are_saved_by_value(tmp_path):
    weight = torch.arange(12.0).view(3, 4)
    parts = {"model": {"a": weight.T, "b": weight[:, 1]}, "optimizer": {}}
    save_checkpoint(tmp_path, 1, parts, {}, keep_last=1)
    loaded = newest(tmp_path).tensors()["model"]
    assert torch.equal(loaded["a"], weight.T)
    assert torch.equal(loaded["b"], weight[:, 1])


def test_the_last_n_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-000004", "step-000005"]


def test_steps_are_ordered_as_numbers(tmp_path):
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000)
    assert newest(tmp_path).path.name == "step-1000000"


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    assert newest_checkpoint(tmp_path, pytest.fail) is None
    assert newest_checkpoint(tmp_path / "absent", pytest.fail) is None


def cut(path: Path) -> None:
    file = path / "optimizer.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def blank_the_end(path: Path) -> None:
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8] + bytes(8))


def flip_in_the_middle(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "optimizer.safetensors has"),
        (blank_the_end, "checksum"),
        (flip_in_the_middle, "model.safetensors is not what was saved"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text('{"files": {"mod'), "manifest.json is missing or unreadable"),
        (lambda path: (path / "manifest.json").write_text('{"files": [1]}'), "manifest.json is missing or unreadable"),
        (
            lambda path: (path / "manifest.json").write_text('{"files": {"a": 1}}'),
            "manifest.json is missing or unreadable",
        ),
    ],
)
def test_a_torn_checkpoint_is_passed_over_and_named_with_the_reason_and_the_step_used_instead(tmp_path, damage, said):
    # Larger than the ends that a scan reads, so that there is a middle.
    whole, torn = save(tmp_path, 1), save(tmp_path, 2, elements=200_000)
    damage(torn)
    warnings: list[str] = []
    assert newest_checkpoint(tmp_path, warnings.append).path == whole
    (warning,) = warnings
    assert str(torn) in warning
    assert said in warning
    assert "step 1 is used" in warning


def test_where_all_checkpoints_are_torn_none_is_chosen_and_nobody_begins_again_unasked(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2, elements=200_000)
    cut(first)
    flip_in_the_middle(second)
    with pytest.raises(CheckpointError, match="none of them is whole") as caught:
        newest_checkpoint(tmp_path, pytest.fail)
    assert "step-000001: optimizer.safetensors has" in caught.value.why
    assert "step-000002: model.safetensors is not" in caught.value.why
    assert f"remove {tmp_path}" in caught.value.fix


def test_a_checkpoint_from_before_the_checksum_of_all_bytes_still_loads(tmp_path):
    path = save(tmp_path, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    for file in manifest["files"].values():
        del file["crc32"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert newest(tmp_path).step == 3


def test_a_torn_checkpoint_of_a_later_step_does_not_push_out_whole_ones(tmp_path):
    save(tmp_path, 1)
    flip_in_the_middle(save(tmp_path, 9, elements=200_000))
    save(tmp_path, 2, keep_last=1)
    assert newest(tmp_path).path.name == "step-000002"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_saving_a_step_again_replaces_it(tmp_path):
    cut(save(tmp_path, 3))
    save(tmp_path, 3)
    assert newest(tmp_path).step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.parametrize(
    ("change", "tensor", "shapes"),
    [
        (lambda model: model.update({"layer.weight": torch.zeros(64, 5)}), "layer.weight", ("[64, 4]", "[64, 5]")),
        (lambda model: model.update({"head.weight": torch.zeros(2)}), "head.weight", ("absent", "[2]")),
        (lambda model: model.pop("layer.bias"), "layer.bias", ("[4]", "absent")),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_its_first_difference(tmp_path, change, tensor, shapes):
    save(tmp_path, 1)
    current = parts_of(1)
    change(current["model"])
    with pytest.raises(CheckpointError, match="another model") as caught:
        newest(tmp_path).tensors(like=current)
    assert tensor in caught.value.where
    assert all(shape in caught.value.why for shape in shapes)


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="another version"):
        newest(tmp_path)


SAVE_FOREVER = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoint import save
for step in itertools.count(1):
    save(Path(sys.argv[1]), step, elements=200_000)
    print(step, flush=True)
"""


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    script = SAVE_FOREVER.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    saved = 0
    # Lines come between two saves, so the kill falls somewhere inside the next one.
    for _ in range(random.Random(os.getpid()).randint(1, 5)):
        saved = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    saved = int((process.stdout.read().split() or [saved])[-1])
    process.wait()
    loaded = newest(tmp_path)
    weights = loaded.tensors(like=parts_of(0, 200_000))["model"]
    assert loaded.step >= saved
    assert torch.equal(weights["layer.weight"], parts_of(loaded.step, 200_000)["model"]["layer.weight"])
    save(tmp_path, loaded.step + 1)
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir()), "leftovers of the kill are gone"


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB, where the tests may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_checkpoint_larger_than_the_disk_is_refused_before_a_byte_is_written(small_disk):
    save(small_disk, 1, elements=1000)
    with pytest.raises(CheckpointError, match="no room") as caught:
        save(small_disk, 2, elements=400_000)
    assert "12.21 MiB" in caught.value.why
    assert [path.name for path in small_disk.iterdir()] == ["step-000001"]


def test_a_disk_that_fills_up_while_saving_keeps_the_previous_checkpoint_and_no_rest(small_disk, monkeypatch):
    save(small_disk, 1, elements=1000)
    free = type("Usage", (), {"free": 10**9})
    monkeypatch.setattr("opd.checkpoint.shutil.disk_usage", lambda folder: free)
    with pytest.raises(CheckpointError, match="no room"):
        save(small_disk, 2, elements=400_000)
    assert [path.name for path in small_disk.iterdir()] == ["step-000001"]
    assert newest(small_disk).step == 1


LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoint import save
from opd.errors import CheckpointError
save(Path(sys.argv[1]), 1, elements=1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    save(Path(sys.argv[1]), 2, elements=400_000)
except CheckpointError as error:
    print(error)
"""


def test_a_write_that_fails_keeps_the_previous_checkpoint_and_says_why(tmp_path):
    script = LIMITED.format(tests=str(Path(__file__).parent))
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "could not be written" in result.stdout
    assert "File too large" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert newest(tmp_path).step == 1
