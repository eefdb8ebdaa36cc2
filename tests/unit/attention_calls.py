"""Calls of attention on small tensors, and the definition of what they give."""

from __future__ import annotations

from functools import partial

import torch

from ds4d.attention.documents import Documents
from ds4d.attention.kernels import Call
from ds4d.attention.visible import Visible, cut_mask

B, H, K, S, D = 2, 4, 2, 150, 8


def documents() -> Documents:
    lengths = torch.tensor([70, 3, 4, 1, 72, 100, 2, 48])
    return Documents.from_ids(torch.arange(8).repeat_interleave(lengths).view(B, S))


def general_mask() -> torch.Tensor:
    """A mask of the user's: odd holes, and one query that sees nothing."""
    mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.8
    mask |= torch.eye(S, dtype=torch.bool)
    mask[0, 0, 5] = False
    return mask


VISIBLE = {
    "all": lambda: Visible(),
    "causal": lambda: Visible(causal=True),
    "window": lambda: Visible(causal=True, window=20),
    "documents": lambda: Visible(causal=True, documents=documents()),
    "documents, both ways": lambda: Visible(documents=documents()),
    "documents, window": lambda: Visible(causal=True, window=20, documents=documents()),
    "documents, tiny window": lambda: Visible(causal=True, window=2, documents=documents()),
    "general": lambda: Visible(general=partial(cut_mask, general_mask())),
    "general, documents": lambda: Visible(
        causal=True,
        documents=documents(),
        general=partial(cut_mask, general_mask() & torch.ones(S, S).tril().bool()),
    ),
}
EXTRAS = {
    "": {},
    "sinks": {"sinks": (H,)},
    "a sink each": {"sinks": (B, S, H)},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": (1, H, S, S)},
    "all": {"sinks": (H,), "softcap": 1.5, "bias": (B, 1, S, S)},
}


def make_call(visible: Visible, extras: dict, dtype=torch.float64, value_dim: int = D) -> Call:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    extras = {n: random(*x) if isinstance(x, tuple) else x for n, x in extras.items()}
    q, k, v = random(B, S, H, D), random(B, S, K, D), random(B, S, K, value_dim)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Call(q, k, v, visible, scale=0.3, **extras)


def definition(call: Call) -> torch.Tensor:
    (batch, heads, size, _), groups = call.query.shape, call.query.shape[1] // call.key.shape[1]
    q, k, v = call.query, *(x.repeat_interleave(groups, dim=1) for x in (call.key, call.value))
    scores = q @ k.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if call.bias is not None:
        scores = scores + call.bias
    seen, i = torch.ones(batch, 1, size, size, dtype=torch.bool), torch.arange(size)
    if call.visible.general is not None:
        seen = call.visible.general((0, batch), (0, size), (0, size))
    if call.visible.causal:
        seen = seen & (i <= i[:, None])
    if call.visible.window is not None:
        seen = seen & (i > i[:, None] - call.visible.window)
    if call.visible.documents is not None:
        ids = call.visible.documents.ids
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    sink = torch.full((1, 1, 1), -torch.inf, dtype=q.dtype) if call.sinks is None else call.sinks
    sink = sink.expand(batch, size, heads).transpose(1, 2).unsqueeze(-1)
    scores = torch.cat([scores.masked_fill(~seen, -torch.inf), sink], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :-1]
    return (weights @ v).transpose(1, 2)


def inputs(call: Call) -> list[torch.Tensor]:
    return [x for x in (call.query, call.key, call.value, call.sinks, call.bias) if x is not None]
