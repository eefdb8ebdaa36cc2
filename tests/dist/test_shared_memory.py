"""Shared memory between ranks: to the bit what it stands for, and never a hang."""

from __future__ import annotations

import datetime
import functools
import os
import re
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, run_distributed

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
SIZES = [0, 1, 7, 5_000, 300_001]  # the last is more than any buffer has at first


def mine(rank: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def channel():
    from ds4d.shared_memory import channel_of

    found = channel_of(dist.group.WORLD)
    assert found is not None
    return found


def collectives():
    over, rank, size = channel(), dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for count in SIZES:
            everyone = [mine(r, size, count, dtype=dtype) for r in range(size)]
            total = functools.reduce(torch.add, everyone)  # in the order of ranks
            own = everyone[rank].clone()
            over.all_reduce(own, dist.ReduceOp.SUM).wait()
            assert torch.equal(own, total)
            own = everyone[rank].t().clone().t()  # with gaps between neighbours
            over.all_reduce(own, dist.ReduceOp.MAX).wait()
            assert torch.equal(own, functools.reduce(torch.maximum, everyone))
            own = torch.empty_like(total[0])
            over.reduce_scatter(own, everyone[rank]).wait()
            assert torch.equal(own, total[rank])
            gathered = total.new_empty(size, *total.shape)
            over.all_gather(gathered, everyone[rank]).wait()
            assert torch.equal(gathered, torch.stack(everyone))
            exchanged = torch.empty_like(total)
            over.all_to_all(exchanged, everyone[rank]).wait()
            assert torch.equal(exchanged, torch.stack([parts[rank] for parts in everyone]))
    number = torch.tensor(rank + 0.5)
    over.all_reduce(number, dist.ReduceOp.SUM).wait()
    assert number.shape == () and number == size**2 / 2


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_are_exact_in_any_size_and_dtype(world):
    run_distributed(collectives, world)


def comm_without_gloo():
    from ds4d import comm

    group, rank = dist.group.WORLD, dist.get_rank()
    channel()
    with mock.patch.object(comm, "_Native", side_effect=AssertionError):
        x = comm.all_reduce(torch.ones(2, 2, 3), group, purpose="p")
        x = comm.gather_sequence(x, group, purpose="p")
        x = comm.reduce_scatter_sequence(x * (rank + 1), group, purpose="p")
    assert torch.equal(x, torch.full((2, 2, 3), 6.0))


def test_comm_takes_it():
    run_distributed(comm_without_gloo, 2)


def many_under_way():
    over, rank, size = channel(), dist.get_rank(), dist.get_world_size()
    for _ in range(5):  # the second time with buffers that have been used
        begun = []
        for number in range(20):
            x = torch.full((1000,), float(number + rank))
            begun.append((number, x, over.all_reduce(x, dist.ReduceOp.SUM)))
        for number, x, work in reversed(begun):
            waiting = threading.Thread(target=work.wait)
            waiting.start()
            waiting.join()
            work.wait()  # once more is nothing
            assert torch.equal(x, torch.full_like(x, size * number + sum(range(size))))
    assert sum(map(len, over._own.values())) <= 40  # a rank may be one round ahead


def test_many_collectives_under_way():
    run_distributed(many_under_way, 3)


def messages():
    over, rank, size = channel(), dist.get_rank(), dist.get_world_size()
    peers = [peer for peer in range(size) if peer != rank]
    for _ in range(2):
        for count in SIZES:
            for peer in peers:
                x = mine(100 * rank + 10 * peer, count)
                assert over.send(x, peer).is_completed()
                x.zero_()
        total = torch.ones(10)
        over.all_reduce(total, dist.ReduceOp.SUM).wait()  # is not taken for a message
        assert total[0] == size
        works = [
            (out := torch.empty(count), mine(100 * peer + 10 * rank, count), over.recv(out, peer))
            for peer in reversed(peers) for count in SIZES
        ]  # fmt: skip
        for out, sent, work in reversed(works):
            work.wait()
            assert torch.equal(out, sent)


@pytest.mark.parametrize("world", [2, 3])
def test_messages_in_both_directions(world):
    run_distributed(messages, world)


def many_groups():
    from ds4d import comm
    from ds4d.shared_memory import channel_of

    rank, files = dist.get_rank(), []
    of_all = channel()
    for _ in range(6):
        members = [[0, 1], [1, 2], [0, 2]]
        groups = [(dist.new_group(ranks), ranks) for ranks in members]
        groups = [(group, ranks) for group, ranks in groups if rank in ranks]
        for group, ranks in [*groups, (dist.group.WORLD, range(3))] * 2:
            x = comm.all_reduce(torch.tensor(float(rank)), group, purpose="p")
            assert x == sum(ranks)
        found = [channel_of(group) for group, _ in groups]
        assert len({of_all, *found}) == 3 and None not in found
        dist.barrier()
        while groups:
            dist.destroy_process_group(groups.pop()[0])
        del group, found
        files.append(sum("socket" in _target(fd) for fd in os.listdir("/proc/self/fd")))
    assert files[-1] <= files[1], files


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_each_group_has_its_own_and_takes_it_along():
    run_distributed(many_groups, 3)


def without(function: str, on_rank: int, fails):
    from ds4d import comm, shared_memory

    real = getattr(shared_memory, function)
    broken = fails if dist.get_rank() == on_rank else real
    with mock.patch.object(shared_memory, function, broken):
        assert shared_memory.channel_of(dist.group.WORLD) is None
    x = comm.all_reduce(torch.ones(100), dist.group.WORLD, purpose="p")
    assert x[0] == dist.get_world_size()


def no_socket(size):
    return None


def no_neighbours(rank, addresses):
    return {}


def no_mapping(fd):
    raise OSError


@pytest.mark.parametrize("on_rank", [1, 2])  # rank 0 connects to nobody
@pytest.mark.parametrize(
    "function, fails",
    [("_listen", no_socket), ("_connect", no_neighbours), ("_Buffer", no_mapping)],
)
def test_where_one_rank_cannot_all_take_the_native_way(function, fails, on_rank):
    run_distributed(without, 3, function=function, fails=fails, on_rank=on_rank)


def last_rank_dies(died: str, with_child: bool):
    over, rank, size = channel(), dist.get_rank(), dist.get_world_size()
    dist.barrier()
    if rank == size - 1:
        if with_child and os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        time.sleep(0.3)
        Path(died).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):  # while it waits, and when it begins afterwards
        with pytest.raises(RuntimeError, match=rf"ranks \[{size - 1}\] ended"):
            over.all_reduce(torch.ones(1000), dist.ReduceOp.SUM).wait()
    assert time.monotonic() - float(Path(died).read_text()) < 1


@pytest.mark.parametrize("with_child", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_the_others_hear_of_a_death_at_once(world, with_child, tmp_path):
    died = str(tmp_path / "died")
    with pytest.raises(RankFailure) as failure:
        run_distributed(last_rank_dies, world, died=died, with_child=with_child)
    # nobody else failed
    assert re.findall(r"rank (\d) of", str(failure.value)) == [str(world - 1)]


def one_is_silent():
    from ds4d.shared_memory import channel_of

    over = channel_of(dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1)))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"ranks \[1\] sent nothing in 1 s"):
            over.recv(torch.empty(1), 1).wait()
    dist.barrier()
    over = channel()
    over.send(torch.ones(3), 1 - dist.get_rank())
    with pytest.raises(RuntimeError, match="sent 12 bytes to rank ., which expected 16"):
        over.recv(torch.empty(4), 1 - dist.get_rank()).wait()


def test_silence_and_other_sizes_are_errors():
    run_distributed(one_is_silent, 2)
