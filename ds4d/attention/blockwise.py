"""Attention block by block (``visible.blocks``): with a fused kernel on the CPU, plainly anywhere.

Letters: B sequences, H heads, K key/value heads, q queries, k keys, D head dim; of one block unless
said otherwise. Both are ways for ``flash.Attend``; see there what out and lse are.
"""

from __future__ import annotations

import torch

from ds4d.attention.visible import Block, additive, block_mask, blocks, cut_mask

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Blockwise:
    """Cuts the tensors into blocks and puts the results together."""

    holds_scores: bool  # of a block: then blocks must be small
    knows_causal: bool  # needs no mask for a lower triangle

    def __init__(self, call) -> None:
        visible, (batch, heads, num_queries, _) = call.visible, call.query.shape
        self.scale, self.softcap, self.dropout = call.scale, call.softcap, call.dropout
        self.general = visible.general
        self.blocks = blocks(
            (batch, heads, num_queries, call.key.shape[2]),
            causal=visible.causal,
            window=visible.window,
            offset=visible.offset,
            lengths=() if visible.documents is None else visible.documents.lengths,
            general=visible.general is not None,
            split=self.holds_scores,
        )
        # Drawn from torch's generator: a recomputed forward pass drops the same weights.
        self.seed = int(torch.randint(2**31, ())) if call.dropout else None

    def forward(self, query, key, value, bias):
        batch, heads, num_queries, _ = query.shape
        sums = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(batch, num_queries, heads, value.shape[-1])
        lse = query.new_zeros(batch, num_queries, heads, dtype=sums)
        for block in self.blocks:
            rows, queries = slice(*block.rows), slice(*block.queries)
            q, k, v, mask, b = self._cut(block, query, key, value, bias)
            block_out, block_lse = self.block_forward(block, q, k, v, mask, b)
            out[rows, queries] = block_out.transpose(1, 2)
            lse[rows, queries] = block_lse.transpose(1, 2)
        return out, lse

    def backward(self, grad_out, query, key, value, bias, out, lse):
        dq, dk, dv = (_zeros_by_token(x) for x in (query, key, value))
        dbias = None if bias is None else torch.zeros_like(bias)
        for block in self.blocks:
            rows, queries, keys = slice(*block.rows), slice(*block.queries), slice(*block.keys)
            q, k, v, mask, b = self._cut(block, query, key, value, bias)
            # [B, q, H, ...] -> [B, H, q, ...]
            g, o, l = (x[rows, queries].transpose(1, 2) for x in (grad_out, out, lse))
            grads = self.block_backward(block, g, q, k, v, mask, b, o, l)
            dq[rows, :, queries] = grads[0]
            dk[rows, :, keys] += grads[1]
            dv[rows, :, keys] += grads[2]
            if dbias is not None:
                part = cut_mask(dbias, block.rows, block.queries, block.keys)
                part += grads[3].sum_to_size(part.shape)
        return dq, dk, dv, dbias

    def _cut(self, block: Block, query, key, value, bias):
        """The block's query, key, value, mask and bias."""
        rows, queries, keys = slice(*block.rows), slice(*block.queries), slice(*block.keys)
        if self.knows_causal and block.is_plain_causal:
            mask = None
        else:
            mask = block_mask(block, self.general, query.device)
        b = None if bias is None else cut_mask(bias, block.rows, block.queries, block.keys)
        return query[rows, :, queries], key[rows, :, keys], value[rows, :, keys], mask, b


class CpuFlash(_Blockwise):
    """torch's fused kernel for CPUs: never holds the scores."""

    holds_scores = False
    knows_causal = True

    def block_forward(self, block, q, k, v, mask, bias):
        is_causal, options = self._options(block, q, mask)
        return _flash(q, k, v, 0.0, is_causal, **options)

    def block_backward(self, block, grad_out, q, k, v, mask, bias, out, lse):
        is_causal, options = self._options(block, q, mask)
        return _flash_backward(grad_out, q, k, v, out, lse, 0.0, is_causal, **options)

    def _options(self, block: Block, q: torch.Tensor, mask: torch.Tensor | None):
        mask = None if mask is None else additive(mask, q.dtype)
        return block.is_plain_causal, {"attn_mask": mask, "scale": self.scale}


class PlainBlocks(_Blockwise):
    """The definition of attention, in fp32 or better, for what no kernel does."""

    holds_scores = True
    knows_causal = False

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
        generator.manual_seed(self.seed + block.rows[0] * 2**32 + block.queries[0])
        kept = torch.empty_like(weights).bernoulli_(1 - self.dropout, generator=generator)
        return kept.div_(1 - self.dropout)


def _grouped(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[b, H, q, *] -> [b, K, H / K * q, *]: the queries of all heads that share a key head."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def _zeros_by_token(x: torch.Tensor) -> torch.Tensor:
    """Zeros like [B, H, s, D] that lie in memory as [B, s, H, D], as models make them."""
    batch, heads, num_tokens, depth = x.shape
    return x.new_zeros(batch, num_tokens, heads, depth).transpose(1, 2)
