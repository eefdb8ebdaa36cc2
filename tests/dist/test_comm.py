"""Every collective against what it stands for, forward and backward, on odd sizes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_distributed

B, PART, WIDTH = 2, 3, 5


def mine(rank: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def plain_collectives(dtype):
    from ds4d import comm

    group = dist.group.WORLD
    rank, size = group.rank(), group.size()
    everyone = [mine(r, B, size * PART, WIDTH, dtype=dtype) for r in range(size)]
    whole = torch.stack(everyone).sum(0)
    own = everyone[rank]
    pending = [
        comm.begin_all_reduce(own.clone(), group, purpose="a"),
        comm.begin_reduce_scatter(own, group, purpose="b"),
        comm.begin_gather(own, group, purpose="c"),
    ]  # several under way at once, waited for in another order
    gathered, scattered, summed = (each.wait() for each in reversed(pending))
    close = dict(rtol=1e-2, atol=3e-2) if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(summed, whole, **close)
    torch.testing.assert_close(scattered, whole[:, rank * PART : (rank + 1) * PART], **close)
    assert torch.equal(gathered, torch.cat(everyone, 1))
    largest = comm.all_reduce(own.clone(), group, purpose="d", op=dist.ReduceOp.MAX)
    assert torch.equal(largest, torch.stack(everyone).amax(0))
    odd = comm.all_reduce(mine(rank, 7, dtype=dtype), group, purpose="e")
    empty = comm.all_reduce(torch.empty(0), group, purpose="f")
    return summed, odd, empty.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_plain_collectives(world, dtype):
    first, *others = run_distributed(plain_collectives, world, dtype=dtype)
    for other in others:  # the same to the bit on every rank
        assert all(torch.equal(a, b) for a, b in zip(first[:2], other[:2], strict=True))


def parts_and_parcels(shared: bool):
    """A part for each rank; tensors to some ranks and from others, of different sizes."""
    from ds4d import comm, shared_memory

    group = dist.group.WORLD
    rank, size = group.rank(), group.size()
    everyone = [mine(r, size, PART, WIDTH) for r in range(size)]
    transport = {} if shared else {"return_value": None}
    with mock.patch.object(
        shared_memory, "channel_of", wraps=None if transport else shared_memory.channel_of,
        **transport,
    ):  # fmt: skip
        from_each = comm.all_to_all(everyone[rank], group, purpose="a")
        assert torch.equal(from_each, torch.stack([parts[rank] for parts in everyone]))
        gathered = comm.begin_all_gather(everyone[rank], group, purpose="b").wait()
        assert torch.equal(gathered, torch.stack(everyone))
        with comm.count_traffic() as traffic:
            for distance in range(1, size):  # the first rank sends nothing, all others do
                to, source = (rank + distance) % size, (rank - distance) % size
                sends = [(everyone[rank][to, : rank + 1].contiguous(), to)] if rank else []
                out = torch.empty(source + 1, WIDTH)
                receives = [(out, source)] if source else []
                comm.begin_exchange(sends, receives, group, purpose="c").wait()
                assert not source or torch.equal(out, everyone[source][rank, : source + 1])
        sent = (size - 1) * (rank + 1) * WIDTH * 4 if rank else 0
        assert traffic.of("c") == sent


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_parts_and_parcels(world, shared):
    run_distributed(parts_and_parcels, world, shared=shared)


def of_autograd():
    from ds4d import comm

    group = dist.group.WORLD
    rank, size = group.rank(), group.size()

    def run(function, *shape):
        """(outputs, the gradient of the input where that of the output is ``mine``)."""
        x = mine(rank, *shape).requires_grad_()
        y = function(x.clone())
        grads = [mine(100 + r, *y.shape) for r in range(size)]
        (dx,) = torch.autograd.grad(y, x, grads[rank])
        return y, dx, [mine(r, *shape) for r in range(size)], grads

    same = torch.testing.assert_close
    rows, columns = slice(rank * PART, (rank + 1) * PART), slice(rank * WIDTH, (rank + 1) * WIDTH)
    for kept in (False, True):
        y, dx, xs, grads = run(
            lambda x: comm.reduce(x, group, purpose="p", kept=kept), B, PART, WIDTH
        )
        same(y, sum(xs)), same(dx, grads[rank])
        y, dx, xs, grads = run(
            lambda x: comm.scatter_sum(x, group, purpose="p", kept=kept), B, size * PART, WIDTH
        )
        same(y, sum(xs)[:, rows]), same(dx, torch.cat(grads, 1))
    y, dx, xs, grads = run(lambda x: comm.gather_complete(x, group, purpose="p"), B, PART, WIDTH)
    same(y, torch.cat(xs, 1)), same(dx, grads[rank][:, rows])
    y, dx, xs, grads = run(lambda x: comm.gather_last(x, group, purpose="p"), B, PART, WIDTH)
    same(y, torch.cat(xs, -1)), same(dx, sum(grads)[..., columns])
    y, dx, xs, grads = run(
        lambda x: comm.gather_last_complete(x, group, purpose="p"), B, PART, WIDTH
    )
    same(y, torch.cat(xs, -1)), same(dx, grads[rank][..., columns])
    y, dx, xs, grads = run(lambda x: comm.split_last(x, group), B, PART, size * WIDTH)
    zeros = torch.zeros_like(dx)
    zeros[..., columns] = grads[rank]
    same(y, xs[rank][..., columns]), same(dx, zeros)
    y, dx, xs, grads = run(lambda x: comm.sum_both_ways(x, group, purpose="p"), B, PART)
    same(y, sum(xs)), same(dx, sum(grads))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_forward_and_backward(world):
    run_distributed(of_autograd, world)
