"""Attention over one rank's tokens: the one place that picks a kernel.

Letters: B sequences, H heads, K key/value heads, q queries, k keys, D head dim, T = B * q.

``KERNELS`` is a table in order of preference; the first that fits a call does it. All of them give
the same numbers up to rounding, accumulate in fp32 and keep memory linear in the sequence. What
fits is known from shapes, dtypes and Python ints alone: a GPU is never waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from ds4d.attention.blockwise import (
    BlockKernel,
    Blockwise,
    CausalOnCpu,
    CpuFlash,
    PlainBlocks,
)
from ds4d.attention.flash import Attend, CudaFlash, Way, rows_together
from ds4d.attention.flash_blocks import CudaBlocks
from ds4d.attention.flash_ops import flash_ops
from ds4d.attention.visible import Visible

# A mask with at most this many numbers is made whole and given to torch's own attention.
SMALL_MASK = 2**20


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention.

    Attributes:
        query: [B, H, q, D].
        key: [B, K, k, D]; H is a multiple of K.
        value: [B, K, k, Dv].
        visible: which keys each query may see.
        scale: of the scores.
        dropout: probability to drop an attention weight.
        softcap: scores become softcap * tanh(score / softcap); None: they don't.
        sinks: [H] or [B, q, H], a score that each query spends on no key; None: nothing.
        bias: [B | 1, H | 1, q, k], added to the scores; None: nothing.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: Visible
    scale: float
    dropout: float = 0.0
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Softmax of scaled scores and nothing else."""
        return self.softcap is None and self.sinks is None and self.bias is None


@dataclass(frozen=True)
class Kernel:
    name: str
    fits: Callable[[Call], bool]
    run: Callable[[Call], torch.Tensor]
    equal_dims_on: tuple[str, ...] = ()  # devices where it wants D == Dv


def attend(call: Call) -> torch.Tensor:
    """Returns: [B, q, H, Dv]."""
    kernel = choose(call)
    depth, value_depth = call.query.shape[-1], call.value.shape[-1]
    if depth != value_depth and call.query.device.type in kernel.equal_dims_on:
        # Zeros at the end of a head change no score and only add zeros to the output.
        wide = max(depth, value_depth)
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) for x in (call.query, call.key, call.value))
        return kernel.run(replace(call, query=q, key=k, value=v))[..., :value_depth]
    return kernel.run(call)


def choose(call: Call) -> Kernel:
    return next(kernel for kernel in KERNELS if kernel.fits(call))


# torch's own attention, whole: plain causal, everything visible, or with a small mask.


def _fits_sdpa(call: Call) -> bool:
    visible = call.visible
    is_upper_left = call.query.shape[2] == call.key.shape[2] and visible.offset == 0
    return (
        call.is_plain
        and visible.window is None
        and visible.documents is None
        and visible.general is None
        and (is_upper_left or not visible.causal)
        and _sdpa_drops(call)
    )


def _fits_cpu_causal(call: Call) -> bool:
    query = call.query
    return (
        _fits_sdpa(call)
        and call.visible.causal
        and query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and query.shape[2] > CausalOnCpu.STEP
    )


def _sdpa(call: Call) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        dropout_p=call.dropout,
        is_causal=call.visible.causal,
        scale=call.scale,
        enable_gqa=call.query.shape[1] != call.key.shape[1],
    )
    return out.transpose(1, 2)


def _fits_masked_sdpa(call: Call) -> bool:
    (batch, _, num_queries, _), num_keys = call.query.shape, call.key.shape[2]
    return (
        call.is_plain
        and (call.visible.general is not None or num_queries != num_keys)
        and call.visible.documents is None
        and batch * num_queries * num_keys <= SMALL_MASK
        and _sdpa_drops(call)
    )


def _masked_sdpa(call: Call) -> torch.Tensor:
    key, value, groups = call.key, call.value, call.query.shape[1] // call.key.shape[1]
    shape = (call.query.shape[0], call.query.shape[2], key.shape[2])
    on_cpu = call.query.device.type == "cpu"
    if groups > 1 and not on_cpu:  # CUDA's kernels take a mask or grouped heads, not both
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(
        call.query,
        key,
        value,
        attn_mask=call.visible.dense(shape, call.query.dtype, call.query.device),
        dropout_p=call.dropout,
        scale=call.scale,
        enable_gqa=groups > 1 and on_cpu,
    )
    return out.transpose(1, 2)


def _sdpa_drops(call: Call) -> bool:
    return not call.dropout or call.query.device.type == "cuda"  # a CPU would make s x s scores


# ds4d's own autograd function around flash kernels, or around plain sums.


# Their backward pass for heads wider than 192 needs more shared memory than other GPUs have.
_WIDE_HEADS = ((8, 0), (9, 0), (10, 0), (10, 3))


def _has_cuda_flash(call: Call) -> bool:
    query = call.query
    if query.device.type != "cuda" or call.bias is not None or call.visible.general is not None:
        return False
    capability = torch.cuda.get_device_capability(query.device)
    depths = query.shape[-1], call.value.shape[-1]
    return (
        capability >= (8, 0)
        and {x.dtype for x in (query, call.key, call.value)} < {torch.float16, torch.bfloat16}
        and max(depths) <= (256 if capability in _WIDE_HEADS else 192)
        and not any(depth % 8 for depth in depths)
        and (call.softcap is None or (flash_ops().knows_softcap and not call.dropout))
    )


def _fits_cuda_flash(call: Call) -> bool:
    visible = call.visible
    return (
        _has_cuda_flash(call)
        and visible.causal
        and visible.offset == 0
        and call.query.shape[2] == call.key.shape[2]
    )


def _fits_cuda_blocks(call: Call) -> bool:
    return _has_cuda_flash(call) and not call.dropout


def _fits_cpu_flash(call: Call) -> bool:
    is_plain = call.softcap is None and call.bias is None and not call.dropout
    return call.query.device.type == "cpu" and is_plain


def run_way(call: Call, make: Callable[[Call], Way]) -> torch.Tensor:
    """Returns: [B, q, H, Dv]."""
    # the operators take it for granted that a head's numbers are neighbours, unasked
    query, key, value = (rows_together(x) for x in (call.query, call.key, call.value))
    call = replace(call, query=query, key=key, value=value)
    return Attend.apply(query, key, value, call.sinks, call.bias, make(call))


def _blockwise(make: type[BlockKernel]) -> Callable[[Call], torch.Tensor]:
    return partial(run_way, make=lambda call: Blockwise(call, make(call)))


KERNELS = (
    Kernel(
        "cpu causal", _fits_cpu_causal, partial(run_way, make=CausalOnCpu), equal_dims_on=("cpu",)
    ),
    Kernel("sdpa", _fits_sdpa, _sdpa, equal_dims_on=("cpu",)),
    Kernel("sdpa with a small mask", _fits_masked_sdpa, _masked_sdpa, equal_dims_on=("cpu",)),
    Kernel(
        "cuda flash", _fits_cuda_flash, partial(run_way, make=CudaFlash), equal_dims_on=("cuda",)
    ),
    Kernel("cpu flash", _fits_cpu_flash, _blockwise(CpuFlash), equal_dims_on=("cpu",)),
    Kernel("plain", lambda call: True, _blockwise(PlainBlocks)),
)

# What computes single blocks, where keys come from several ranks (``ring.py``).
BLOCK_KERNELS: tuple[tuple[Callable[[Call], bool], type[BlockKernel]], ...] = (
    (_fits_cuda_blocks, CudaBlocks),
    (_fits_cpu_flash, CpuFlash),
    (lambda call: True, PlainBlocks),
)


def block_kernel(call: Call) -> BlockKernel:
    return next(make for fits, make in BLOCK_KERNELS if fits(call))(call)
