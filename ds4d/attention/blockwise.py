"""Attention block by block (``visible.blocks``): with a fused kernel on the CPU, plainly anywhere.
What a GPU's kernels do is in ``flash_blocks``.

Letters: B sequences, H heads, K key/value heads, q queries, k keys, D head dim; of one block unless
said otherwise. Both are ways for ``flash.Attend``; see there what out and lse are.
"""

from __future__ import annotations

import torch

from ds4d.attention.visible import Block, Blocks, additive, block_mask, blocks, cut_mask

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class BlockKernel:
    """Computes blocks: cuts them out of the tensors, and puts the results together.

    Attributes:
        holds_scores: of a block: then blocks must be small.
        knows_causal: needs no mask for a lower triangle.
        knows_windows: needs no mask for a band: then bands need not be cut.
        equal_dims: wants D == Dv.
    """

    holds_scores: bool
    knows_causal: bool
    knows_windows: bool
    equal_dims: bool

    def __init__(self, call) -> None:
        self.scale, self.softcap, self.dropout = call.scale, call.softcap, call.dropout
        self.general = call.visible.general
        # Drawn from torch's generator: a recomputed forward pass drops the same weights.
        self.seed = int(torch.randint(2**31, ())) if call.dropout else None

    def add_forward(self, blocks: Blocks, query, key, value, bias, out, lse) -> None:
        """Args:
        out, lse: [B, q, H, D] and [B, q, H], of all blocks before; zeros and -inf where there was
            none.
        """
        for block in blocks:
            rows, queries = slice(*block.rows), slice(*block.queries)
            q, k, v, mask, b = self._cut(block, query, key, value, bias)
            block_out, block_lse = self.block_forward(block, q, k, v, mask, b)
            if block.general:  # some queries may see nothing in this block
                nothing = (additive(mask, block_lse.dtype) == float("-inf")).all(-1)
                block_lse = block_lse.masked_fill(nothing, float("-inf"))
            block_out, block_lse = block_out.transpose(1, 2), block_lse.transpose(1, 2)
            if not block.first:
                block_out, block_lse = merged(
                    out[rows, queries], lse[rows, queries], block_out, block_lse
                )
            out[rows, queries] = block_out
            lse[rows, queries] = block_lse

    def add_backward(self, blocks: Blocks, inputs, output, grads) -> None:
        """Args:
        inputs: query, key, value, bias.
        output: its gradient, itself, lse; of all blocks together.
        grads: of the inputs, which this adds to.
        """
        (grad_out, out, lse), (dq, dk, dv, dbias) = output, grads
        for block in blocks:
            rows, queries, keys = (slice(*block.rows), slice(*block.queries), slice(*block.keys))
            q, k, v, mask, b = self._cut(block, *inputs)
            # [B, q, H, ...] -> [B, H, q, ...]
            g, o, l = (x[rows, queries].transpose(1, 2) for x in (grad_out, out, lse))
            found = self.block_backward(block, g, q, k, v, mask, b, o, l)
            if block.first:
                dq[rows, :, queries] = found[0]
            else:
                dq[rows, :, queries] += found[0]
            dk[rows, :, keys] += found[1]
            dv[rows, :, keys] += found[2]
            if dbias is not None:
                part = cut_mask(dbias, block.rows, block.queries, block.keys)
                part += found[3].sum_to_size(part.shape)

    def _cut(self, block: Block, query, key, value, bias):
        """The block's query, key, value, mask and bias."""
        rows, queries, keys = slice(*block.rows), slice(*block.queries), slice(*block.keys)
        if self.knows_causal and block.is_plain_causal:
            mask = None
        else:
            mask = block_mask(block, self.general, query.device)
        b = None if bias is None else cut_mask(bias, block.rows, block.queries, block.keys)
        return query[rows, :, queries], key[rows, :, keys], value[rows, :, keys], mask, b


def merged(out, lse, block_out, block_lse):
    """The outputs of two sets of keys are those of both, weighed by their sums of exponentials
    (formulas.md 3, "CP")."""
    total = torch.logaddexp(lse, block_lse)
    base = total.masked_fill(total == float("-inf"), 0.0)  # neither has seen anything
    weight, block_weight = (lse - base).exp(), (block_lse - base).exp()
    return out * weight.unsqueeze(-1) + block_out * block_weight.unsqueeze(-1), total


class Blockwise:
    """A way for ``flash.Attend``: all blocks, one after the other, on one rank's tensors."""

    def __init__(self, call, kernel: BlockKernel) -> None:
        visible, (batch, heads, num_queries, _) = call.visible, call.query.shape
        self.kernel = kernel
        self.blocks = blocks(
            (batch, heads, num_queries, call.key.shape[2]),
            causal=visible.causal,
            window=visible.window,
            offset=visible.offset,
            lengths=() if visible.documents is None else visible.documents.lengths,
            general=visible.general is not None,
            split=kernel.holds_scores,
        )

    def forward(self, query, key, value, bias):
        out, lse = empty_output(query, value, query.dtype)
        self.kernel.add_forward(self.blocks, query, key, value, bias, out, lse)
        return out, lse.masked_fill_(lse == float("-inf"), 0.0)

    def backward(self, grad_out, query, key, value, bias, out, lse):
        grads = [zeros_by_token(x) for x in (query, key, value)]
        grads.append(None if bias is None else torch.zeros_like(bias))
        inputs, output = (query, key, value, bias), (grad_out, out, lse)
        self.kernel.add_backward(self.blocks, inputs, output, grads)
        return tuple(grads)


class CpuFlash(BlockKernel):
    """torch's fused kernel for CPUs: never holds the scores."""

    holds_scores = False
    knows_causal = True
    knows_windows = False
    equal_dims = True

    def block_forward(self, block, q, k, v, mask, bias):
        is_causal, options = self._options(block, q, mask)
        return _flash(q, k, v, 0.0, is_causal, **options)

    def block_backward(self, block, grad_out, q, k, v, mask, bias, out, lse):
        is_causal, options = self._options(block, q, mask)
        return _flash_backward(grad_out, q, k, v, out, lse, 0.0, is_causal, **options)

    def _options(self, block: Block, q: torch.Tensor, mask: torch.Tensor | None):
        mask = None if mask is None else additive(mask, q.dtype)
        return block.is_plain_causal, {"attn_mask": mask, "scale": self.scale}


class CausalOnCpu:
    """A way for ``flash.Attend``: plain causal attention by torch's fused kernel, which takes 512
    keys at a time, those behind its queries too. So the backward pass goes by ``STEP`` queries,
    each with the keys before them and, causally, with their own: for 512 tokens 5/8 of the work.
    It sums in the inputs' dtype: for fp32 or better."""

    STEP = 128

    def __init__(self, call) -> None:
        self._scale = call.scale

    def forward(self, query, key, value, bias):
        out, lse = _flash(query, key, value, 0.0, True, scale=self._scale)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(self, grad_out, query, key, value, bias, out, lse):
        grads = [zeros_by_token(x) for x in (query, key, value)]
        grad_out, out, lse = (x.transpose(1, 2) for x in (grad_out, out, lse))
        length = query.shape[2]
        for start in range(0, length, self.STEP):
            mine = slice(start, min(start + self.STEP, length))
            g, q, o, l = (x[:, :, mine] for x in (grad_out, query, out, lse))
            for keys in (mine, slice(start)) if start else (mine,):
                k, v = key[:, :, keys], value[:, :, keys]
                found = _flash_backward(g, q, k, v, o, l, 0.0, keys is mine, scale=self._scale)
                for grad, part, tokens in zip(grads, found, (mine, keys, keys), strict=True):
                    grad[:, :, tokens] += part
        return *grads, None


class PlainBlocks(BlockKernel):
    """The definition of attention, in fp32 or better, for what no kernel does."""

    holds_scores = True
    knows_causal = False
    knows_windows = False
    equal_dims = False

    def block_forward(self, block, q, k, v, mask, bias):
        scores, _ = self._scores(q, k, mask, bias)
        lse = scores.logsumexp(-1)
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # a query that sees nothing
        weights = (scores - lse.unsqueeze(-1)).exp() * self._kept(block, scores)
        out = _grouped(weights, k) @ v.to(weights.dtype)
        return out.view(*q.shape[:3], -1), lse

    def block_backward(self, block, grad_out, q, k, v, mask, bias, out, lse):
        scores, slope = self._scores(q, k, mask, bias)
        weights, kept = (scores - lse.unsqueeze(-1)).exp(), self._kept(block, scores)
        g, q_sums, k_sums, v_sums = (x.to(scores.dtype) for x in (grad_out, q, k, v))
        dv = _grouped(weights * kept, k).mT @ _grouped(g, k)
        dweights = (_grouped(g, k) @ v_sums.mT).view_as(scores) * kept
        dscores = weights * (dweights - (g * out).sum(-1, keepdim=True))
        dlogits = dscores * slope * self.scale
        dq = (_grouped(dlogits, k) @ k_sums).view_as(q)
        dk = _grouped(dlogits, k).mT @ _grouped(q_sums, k)
        return dq, dk, dv, dscores

    def _scores(self, q, k, mask, bias) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The scores [b, H, q, k], and their slope in the scaled product of query and key."""
        sums = torch.promote_types(q.dtype, torch.float32)
        scores = (_grouped(q.to(sums), k) @ k.to(sums).mT).view(*q.shape[:3], -1) * self.scale
        slope = 1.0
        if self.softcap is not None:
            bent = (scores / self.softcap).tanh()
            scores, slope = bent * self.softcap, 1 - bent.square()
        if bias is not None:
            scores = scores + bias
        return scores if mask is None else scores + additive(mask, sums), slope

    def _kept(self, block: Block, weights: torch.Tensor) -> torch.Tensor | float:
        """What dropout multiplies the weights with; the same in the backward pass."""
        if self.seed is None:
            return 1.0
        generator = torch.Generator(weights.device)
        (q0, k0), row = block.origin, block.rows[0]
        place = (row, block.queries[0] + q0, block.keys[0] + k0)
        generator.manual_seed(hash((self.seed, *place)) % 2**63)
        kept = torch.empty_like(weights).bernoulli_(1 - self.dropout, generator=generator)
        return kept.div_(1 - self.dropout)


def _grouped(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[b, H, q, *] -> [b, K, H / K * q, *]: the queries of all heads that share a key head."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def empty_output(query, value, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of no block yet: out [B, q, H, Dv] and lse fp32 [B, q, H]."""
    batch, heads, num_queries, _ = query.shape
    out = query.new_zeros(batch, num_queries, heads, value.shape[-1], dtype=dtype)
    sums = torch.promote_types(query.dtype, torch.float32)
    return out, query.new_full((batch, num_queries, heads), float("-inf"), dtype=sums)


def zeros_by_token(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros like [B, H, s, D] that lie in memory as [B, s, H, D], as models make them."""
    batch, heads, num_tokens, depth = x.shape
    return x.new_zeros(batch, num_tokens, heads, depth, dtype=dtype).transpose(1, 2)
