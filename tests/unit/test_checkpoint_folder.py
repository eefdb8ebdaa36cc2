"""Saving, finding and loading in one process: which folders count, and what errors say."""

import errno
import json
import os
import subprocess

import pytest
import torch
from safetensors import safe_open

from ds4d.checkpoint.errors import CheckpointError
from ds4d.checkpoint.find import find, list_checkpoints, locate
from ds4d.checkpoint.load import load, read_extra
from ds4d.checkpoint.logical import LogicalTensor, Piece
from ds4d.checkpoint.manage import remove
from ds4d.checkpoint.save import save
from ds4d.checkpoint.storage import SAFETENSORS_NAMES


def whole(tensor):
    return LogicalTensor(
        tuple(tensor.shape), tensor.dtype, (Piece((0,) * tensor.dim(), tensor),)
    )


def state_of(value, count=1000):
    return {
        "weight/a": whole(torch.full((count,), float(value))),
        "weight/b": whole(torch.full((3, 5), value, dtype=torch.bfloat16)),
        "buffer/c": whole(torch.tensor(value)),
    }


def put(root, step, *, keep=None, count=1000):
    return save(
        root,
        step,
        state_of(step, count),
        extra={"step": step},
        rank_state={"random": torch.get_rng_state()},
        keep=keep,
    )


def value_in(folder):
    state = state_of(0)
    extra, rank_state = load(folder, state, verify=True)
    values = {float(each.pieces[0].tensor.float().mean()) for each in state.values()}
    assert values == {float(extra["step"])}
    assert rank_state["random"].dtype == torch.uint8
    return extra["step"]


def names(root):
    return sorted(path.name for path in (root / "checkpoints").iterdir())


def test_layout_on_the_disk(tmp_path):
    folder = put(tmp_path, 100)
    assert folder == tmp_path / "checkpoints" / "step-00000100"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000100\n"
    assert sorted(p.name for p in folder.iterdir()) == [
        "data-00000.safetensors", "index.json", "manifest.json", "rank-00000.pt"
    ]  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 100 and manifest["world_size"] == 1
    assert {"ds4d", "torch"} <= set(manifest["versions"])
    sizes = {each["name"]: each["bytes"] for each in manifest["files"]}
    assert sizes == {
        p.name: p.stat().st_size for p in folder.iterdir() if p.name != "manifest.json"
    }
    with safe_open(folder / "data-00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"weight/a@0", "weight/b@0,0", "buffer/c@"}
        assert torch.equal(file.get_tensor("weight/a@0"), torch.full((1000,), 100.0))
    assert read_extra(folder) == {"step": 100}


def test_keep(tmp_path):
    for step in range(1, 6):
        put(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005"]
    for step in range(6, 9):
        put(tmp_path, step)
    assert len(list_checkpoints(tmp_path)) == 5


def test_saving_a_step_again_replaces_it(tmp_path):
    put(tmp_path, 1)
    rank_state = {"random": torch.get_rng_state()}
    folder = save(tmp_path, 1, state_of(9), extra={"step": 9}, rank_state=rank_state, keep=1)
    assert value_in(folder) == 9
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_a_run_that_went_back_continues_from_what_it_saved_last(tmp_path):
    for step in (100, 200, 300, 150):
        put(tmp_path, step, keep=2)
    assert find(tmp_path, "latest").name == "step-00000150"
    assert names(tmp_path) == ["latest", "step-00000150", "step-00000300"]


@pytest.mark.parametrize("which", ["auto", "latest"])
def test_nothing_there(tmp_path, which):
    if which == "auto":
        assert find(tmp_path, which) is None
        assert find(tmp_path / "no such folder", which) is None
    else:
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            find(tmp_path, which)


def truncate(folder):
    with open(folder / "data-00000.safetensors", "r+b") as file:
        file.truncate(100)


DAMAGES = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
    "half a manifest": (
        lambda f: (f / "manifest.json").write_text('{"format": 1, "st'),
        "manifest.json: cannot be read",
    ),
    "another format": (
        lambda f: (f / "manifest.json").write_text('{"format": 99}'),
        "checkpoint format 99; this ds4d reads format 1",
    ),
    "a file cut": (truncate, r"data-00000.safetensors: 100 bytes; \d+ were written"),
    "a file gone": (lambda f: (f / "rank-00000.pt").unlink(), "rank-00000.pt: No such file"),
    "a shard gone": (
        lambda f: (f / "data-00000.safetensors").unlink(),
        "data-00000.safetensors: No such file",
    ),
    "an empty folder": (
        lambda f: [path.unlink() for path in f.iterdir()],
        "has no manifest.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_passed_over_and_named(tmp_path, damage, caplog):
    put(tmp_path, 1)
    bad = put(tmp_path, 2)
    act, message = DAMAGES[damage]
    act(bad)
    assert value_in(find(tmp_path, "auto")) == 1
    assert value_in(find(tmp_path, str(tmp_path))) == 1
    assert "passed over" in caplog.text and "step-00000002" in caplog.text
    with pytest.raises(CheckpointError, match=message):
        find(tmp_path, str(bad))
    with pytest.raises(CheckpointError, match=message):
        load(bad, state_of(0))
    good, unusable = list_checkpoints(tmp_path)
    assert (good.step, unusable.step) == (1, 2) and unusable.manifest is None
    assert value_in(put(tmp_path, 2, keep=1)) == 2  # the leftover is replaced
    assert names(tmp_path) == ["latest", "step-00000002"]


def test_a_flipped_byte_is_found_when_asked(tmp_path):
    folder = put(tmp_path, 1)
    path = folder / "data-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="data-00000.safetensors is damaged"):
        load(folder, state_of(0), verify=True)


def test_a_path_names_a_checkpoint_or_a_run(tmp_path):
    first, second = put(tmp_path, 1), put(tmp_path, 2)
    assert locate(first) == first
    assert locate(tmp_path) == second
    copy = tmp_path / "a copy"
    first.rename(copy)
    assert value_in(locate(copy)) == 1


def test_the_set_aside_one_counts_until_it_is_replaced(tmp_path):
    folder = put(tmp_path, 1)
    aside = folder.with_name(".old-" + folder.name)
    folder.rename(aside)  # killed between the two renames of a save
    assert value_in(find(tmp_path, "auto")) == 1
    put(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]


def test_leftovers_are_cleaned(tmp_path):
    put(tmp_path, 1)
    (tmp_path / "checkpoints" / ".tmp-step-00000002-abc").mkdir()
    (tmp_path / "checkpoints" / ".tmp-step-00000002-abc" / "data").write_text("half")
    (tmp_path / "checkpoints" / ".tmp-latest-abc").write_text("half")
    put(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]


def test_tensors_that_do_not_fit_are_all_named(tmp_path):
    folder = put(tmp_path, 1)
    state = state_of(0) | {
        "weight/a": whole(torch.zeros(999)),
        "weight/b": whole(torch.zeros(3, 5)),
        "weight/new": whole(torch.zeros(2)),
    }
    with pytest.raises(CheckpointError) as error:
        load(folder, state)
    text = str(error.value)
    assert "weight/a: (1000,) saved, (999,) here" in text
    assert "weight/b: torch.bfloat16 saved, torch.float32 here" in text
    assert "weight/new (2,): not in the checkpoint" in text
    assert "buffer/c" not in text


def test_part_of_a_checkpoint_can_be_loaded(tmp_path):
    folder = put(tmp_path, 7)
    state = {"weight/a": whole(torch.zeros(1000)), "weight/none": whole(torch.zeros(0))}
    load(folder, state)
    assert torch.equal(state["weight/a"].pieces[0].tensor, torch.full((1000,), 7.0))


@pytest.mark.parametrize(
    "pieces, message",
    [
        ([(0, 4), (5, 10)], "hold 9 elements, the tensor .* has 10"),
        ([(0, 6), (4, 10)], "hold 12 elements"),
        ([(0, 6), (5, 9)], "overlapping"),
        ([(0, 6), (6, 12)], "hold 12 elements"),
        ([(0, 10), (0, 5)], "two ranks hold different boxes"),
    ],
)
def test_pieces_that_do_not_tile_a_tensor_are_refused(tmp_path, pieces, message):
    data = torch.arange(12.0)
    tensor = LogicalTensor(
        (10,), torch.float32, tuple(Piece((a,), data[a:b]) for a, b in pieces)
    )
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 1, {"weight/a": tensor}, extra={}, rank_state={}, keep=None)
    assert names(tmp_path) == []


def test_a_state_that_could_not_be_loaded_is_refused_at_once(tmp_path):
    with pytest.raises(CheckpointError, match="was not saved"):
        save(tmp_path, 1, state_of(1), extra={}, rank_state={"x": os.getpid}, keep=None)
    assert names(tmp_path) == []


def test_all_dtypes(tmp_path):
    bits = torch.randint(0, 2, (24,), dtype=torch.uint8)
    saved = {f"buffer/{d}": whole(bits.view(d).clone()) for d in SAFETENSORS_NAMES}
    folder = save(tmp_path, 1, saved, extra={}, rank_state={}, keep=None)
    loaded = {name: whole(torch.zeros_like(t.pieces[0].tensor)) for name, t in saved.items()}
    load(folder, loaded)
    for name, tensor in loaded.items():
        assert torch.equal(tensor.pieces[0].tensor.view(torch.uint8), bits), name


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError, match="step 1 was not saved: File exists: .*checkpoints"):
        put(tmp_path, 1)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system needs root: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_disk_full(small_disk):
    put(small_disk, 1, count=50_000)
    with pytest.raises(CheckpointError) as error:
        put(small_disk, 2, count=100_000)
    text = str(error.value)
    assert os.strerror(errno.ENOSPC) in text and str(small_disk) in text
    assert "it needs 400,038 bytes, and " in text and " are free in " in text
    assert names(small_disk) == ["latest", "step-00000001"]
    state = state_of(0, 50_000)
    load(find(small_disk, "latest"), state, verify=True)
    assert torch.equal(state["weight/a"].pieces[0].tensor, torch.ones(50_000))
    put(small_disk, 2, count=1000)


def test_a_folder_that_can_only_be_read(small_disk):
    """What was saved is still found, nothing is half gone, and what cannot be written is named."""
    for step in (1, 2):
        put(small_disk, step)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="step 3 was not saved: Read-only file system: "):
        put(small_disk, 3, keep=1)
    with pytest.raises(ValueError, match="cannot write to the run folder: .*Read-only"):
        remove(small_disk, [1])
    assert value_in(find(small_disk, "auto")) == 2
    assert names(small_disk) == ["latest", "step-00000001", "step-00000002"]
