"""A checkpoint saved in one layout and loaded in others, bit for bit, on several ranks."""

import itertools
import os
import resource

import torch
import torch.distributed as dist

from ds4d.checkpoint.errors import CheckpointError
from ds4d.checkpoint.find import find, list_checkpoints
from ds4d.checkpoint.load import load
from ds4d.checkpoint.logical import LogicalTensor, Piece, boxes_of_range
from ds4d.checkpoint.save import save
from tests.harness import run_distributed

SHAPES = [(7, 5), (3, 4, 5), (), (1,), (129,), (2, 3, 1, 2), (4, 1), (0,), (31, 8)]
DTYPES = {"weight": torch.float32, "exp_avg": torch.bfloat16, "buffer": torch.int64}


def full_tensors():
    """The same on every rank, random bits."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"{kind}/layer.{i}": torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
        for kind, dtype in DTYPES.items()
        for i, shape in enumerate(SHAPES)
    }


def flat_cut(full, bounds):
    """This rank's [bounds[rank], bounds[rank + 1]) per cent of all elements in a row, as ZeRO cuts
    a group: views on one flat buffer."""
    total = sum(tensor.numel() for tensor in full.values())
    rank = dist.get_rank()
    left, right = (total * bounds[rank] // 100, total * bounds[rank + 1] // 100)
    state, start = {}, 0
    for name, tensor in full.items():
        a, b = (min(max(edge - start, 0), tensor.numel()) for edge in (left, right))
        flat, pieces = tensor.reshape(-1)[a:b].clone(), []
        for offsets, sizes in boxes_of_range(tensor.shape, a, b):
            count = torch.Size(sizes).numel()
            pieces.append(Piece(offsets, flat[:count].view(sizes)))
            flat = flat[count:]
        state[name] = LogicalTensor(tuple(tensor.shape), tensor.dtype, tuple(pieces))
        start += tensor.numel()
    return state


def column_cut(full):
    """The last dim over the ranks (tensor parallel): pieces that are not contiguous."""
    state = {}
    for name, tensor in full.items():
        if tensor.dim() < 2:
            state[name] = replicated(tensor)
            continue
        width = tensor.shape[-1]
        rank, size = dist.get_rank(), dist.get_world_size()
        start, stop = width * rank // size, width * (rank + 1) // size
        offsets = (0,) * (tensor.dim() - 1) + (start,)
        pieces = (Piece(offsets, tensor.clone()[..., start:stop]),) if start < stop else ()
        state[name] = LogicalTensor(tuple(tensor.shape), tensor.dtype, pieces)
    return state


def stage_cut(full):
    """Whole tensors, dealt out (pipeline): a rank does not even know the names of the others."""
    names = sorted(full)[dist.get_rank() :: dist.get_world_size()]
    return {name: replicated(full[name]) for name in names}


def replicated(tensor):
    return LogicalTensor(
        tuple(tensor.shape), tensor.dtype, (Piece((0,) * tensor.dim(), tensor.clone()),)
    )


def cut(layout, full):
    if isinstance(layout, str):
        return {"columns": column_cut, "stages": stage_cut}[layout](full)
    return flat_cut(full, layout) if layout else {n: replicated(t) for n, t in full.items()}


SAVED_BY_4 = [(0, 13, 13, 70, 100), (0, 0, 50, 75, 100), "columns", "stages", None]
LOADED_BY = {  # bounds in per cent (a rank may have nothing), a cut's name, or None: all replicated
    1: [None],
    2: [(0, 37, 100), "stages"],
    4: [(0, 25, 50, 75, 100), "columns"],
}
ELEMENTS = len(DTYPES) * sum(torch.Size(shape).numel() for shape in SHAPES)


def save_layouts(root, layouts):
    full, rank = full_tensors(), dist.get_rank()
    for layout in layouts:
        rank_state = {"random": torch.full((3,), rank)}
        extra = {"layout": str(layout)}
        save(root / str(layout), 1, cut(layout, full), extra=extra, rank_state=rank_state, keep=3)


def load_layouts(root, saved, layouts, saved_by):
    """How many elements this rank has compared, for each pair of layouts."""
    full, compared = full_tensors(), []
    for before, after in itertools.product(saved, layouts):
        expected = cut(after, full)
        state = cut(after, {name: torch.zeros_like(tensor) for name, tensor in full.items()})
        extra, rank_state = load(find(root / str(before), "latest"), state, verify=True)
        assert extra == {"layout": str(before)}
        if saved_by == dist.get_world_size():
            assert torch.equal(rank_state["random"], torch.full((3,), dist.get_rank()))
        else:
            assert rank_state is None
        compared.append(0)
        for name, tensor in state.items():
            for mine, right in zip(tensor.pieces, expected[name].pieces, strict=True):
                assert torch.equal(mine.tensor, right.tensor), (before, after, name)
                compared[-1] += right.tensor.numel()
    return compared


def test_any_layout_loads_into_any_other(tmp_path):
    run_distributed(save_layouts, 4, root=tmp_path, layouts=SAVED_BY_4)
    for world_size, layouts in LOADED_BY.items():
        compared = run_distributed(
            load_layouts, world_size, root=tmp_path, saved=SAVED_BY_4, layouts=layouts, saved_by=4
        )
        assert all(sum(pair) >= ELEMENTS for pair in zip(*compared, strict=True))


def save_replicas(root):
    state = {f"weight/{i}": replicated(torch.full((1000 + i,), float(i))) for i in range(40)}
    save(root, 1, state, extra={}, rank_state={}, keep=None)
    return 4 * sum(torch.Size(t.shape).numel() for t in state.values())


def payloads(folder, ranks):
    """Bytes of tensors that each rank wrote."""
    sizes = [0] * ranks
    for path in folder.glob("data-*.safetensors"):
        data = path.read_bytes()
        sizes[int(path.stem[5:])] = len(data) - 8 - int.from_bytes(data[:8], "little")
    return sizes


def test_every_byte_is_written_once_and_the_work_is_spread(tmp_path):
    total = run_distributed(save_replicas, 4, root=tmp_path)[0]
    sizes = payloads(find(tmp_path, "latest"), 4)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 4 * 1040


def errors_of(do):
    try:
        do()
    except CheckpointError as error:
        return str(error)
    return None


def fill_the_disk_of_rank_1(root):
    """The kernel refuses rank 1's bytes after the first 1000."""
    full = full_tensors()
    save(root, 1, flat_cut(full, (0, 50, 100)), extra={}, rank_state={}, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        state = flat_cut(full, (0, 50, 100))
        message = errors_of(lambda: save(root, 2, state, extra={}, rank_state={}, keep=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    load(find(root, "latest"), state, verify=True)
    return message


def test_a_failed_write_on_one_rank_is_one_error_on_all(tmp_path):
    first, *others = run_distributed(fill_the_disk_of_rank_1, 2, root=tmp_path, timeout=20)
    assert others == [first]
    assert "step 2 was not saved: File too large: " in first
    assert "data-00001.safetensors (rank 1); it needs " in first
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000001"]


def load_misfits(root):
    """Rank r asks for a tensor that is not there; both have one of another shape."""
    save(root, 1, flat_cut(full_tensors(), (0, 37, 100)), extra={}, rank_state={}, keep=1)
    state = {
        f"weight/only.{dist.get_rank()}": replicated(torch.zeros(2)),
        "weight/layer.0": replicated(torch.zeros(5, 7)),
        "weight/layer.4": replicated(torch.ones(129)),
    }
    message = errors_of(lambda: load(find(root, "latest"), state))
    assert torch.equal(state["weight/layer.4"].pieces[0].tensor, torch.ones(129))  # untouched
    return message


def test_misfits_of_all_ranks_are_one_error(tmp_path):
    first, second = run_distributed(load_misfits, 2, root=tmp_path)
    assert first == second
    assert "weight/layer.0: (7, 5) saved, (5, 7) here" in first
    assert "weight/only.0" in first and "weight/only.1" in first


def save_disagreeing(root):
    shape = (4, 4) if dist.get_rank() == 0 else (4, 5)
    state = {"weight/a": replicated(torch.zeros(shape))}
    return errors_of(lambda: save(root, 1, state, extra={}, rank_state={}, keep=None))


def test_ranks_that_disagree_are_refused(tmp_path):
    first, second = run_distributed(save_disagreeing, 2, root=tmp_path)
    assert first == second and "weight/a: two ranks hold different boxes" in first
    assert list_checkpoints(tmp_path) == []


def save_run(root, beside):
    """Three saves of one run: the second as the first was cut, the third otherwise on rank 0 only.
    How often the ranks had to agree anew, and what was loaded after each."""
    from ds4d.checkpoint.save import Saving
    from ds4d.checkpoint.saver import Saver
    from ds4d.mesh import Mesh

    group = Mesh.second_world(timeout_seconds=60) if beside else None
    full, agreed, right = full_tensors(), 0, []
    agree = Saving._agree

    def counted(saving, *args):
        nonlocal agreed
        agreed += 1
        agree(saving, *args)

    Saving._agree = counted
    try:
        with Saver(root, keep=1, group=group) as saver:
            for step, more in enumerate((0, 0, 1)):
                full = {name: tensor + step for name, tensor in full.items()}
                state = flat_cut(full, (0, 37, 100))
                own = replicated(torch.full((3 + more,), 1.0 + step))
                state |= {"weight/rank 0's": own} if dist.get_rank() == 0 else {}
                saver.save(step, state, extra={}, rank_state={})
                saver.wait()
                loaded = flat_cut({n: torch.zeros_like(t) for n, t in full.items()}, (0, 37, 100))
                loaded["weight/rank 0's"] = replicated(torch.zeros(3 + more))
                load(saver.take_saved().folder, loaded, verify=True)
                expected = state | {"weight/rank 0's": own}
                right += [
                    torch.equal(mine.tensor, other.tensor)
                    for name, tensor in loaded.items()
                    for mine, other in zip(tensor.pieces, expected[name].pieces, strict=True)
                ]
    finally:
        Saving._agree = agree
    return agreed, all(right), len(right)


def test_a_run_plans_anew_only_where_something_has_changed(tmp_path):
    for beside in (False, True):
        root = tmp_path / str(beside)
        for agreed, right, count in run_distributed(save_run, 2, root=root, beside=beside):
            assert (agreed, right) == (2, True) and count > 30
