"""The attention function that ds4d registers with transformers.

Letters: B sequences, H heads, K key/value heads, q queries, k keys, D head dim.
"""

from __future__ import annotations

from functools import partial

import torch

from ds4d.attention.context import Context
from ds4d.attention.documents import PADDING, Documents
from ds4d.attention.kernels import Call, attend
from ds4d.attention.mask import LazyMask
from ds4d.attention.query_scale import scaled_by_document
from ds4d.attention.visible import Visible, cut_mask
from ds4d.tensor_parallel.dropout import own_dropout
from ds4d.tensor_parallel.state import TensorParallel


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LazyMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    documents: Documents | None = None,
    context: Context | None = None,
    output_attentions: bool | None = False,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """ds4d's entry in transformers' ``AttentionInterface``; the arguments are transformers'.

    Args:
        query: [B, H, q, D]; key [B, K, k, D]; value [B, K, k, Dv].
        attention_mask: what ``lazy_mask`` made; or a user's own mask [B | 1, H | 1, q, k], boolean
            or to be added to the scores; or None: causal if ``is_causal`` (default: the module's).
        s_aux: attention sinks, [H]; or ``sinks``, [B, H, q, 1].
        documents: attention inside each of them only, whatever else the mask says.
        context: the tokens are a part of a sequence that a cp group shares, and these are its
            documents.

    Returns:
        [B, q, H, Dv], and None: attention weights never exist.
    """
    if output_attentions:
        raise ValueError(
            "output_attentions=True: ds4d's attention never holds the attention weights; build the "
            'model with attn_implementation="eager" to look at them'
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if kwargs.get("indices") is not None:
        raise ValueError(
            "this model picks the keys that each query sees itself, which ds4d's attention does "
            'not take; build it with attn_implementation="sdpa"'
        )
    tp = getattr(module, "ds4d_tp", None)
    num_queries, num_keys = lengths = query.shape[2], key.shape[2]
    context = getattr(attention_mask, "context", None) if context is None else context
    if context is not None:
        num_queries = num_keys = context.cut.length
        documents = context.documents
    elif documents is not None:
        _check_documents(documents, query.shape[0], *lengths)
    if context is None:
        query = scaled_by_document(module, query, documents, None)
    else:
        query = scaled_by_document(module, query, context.cut.documents, context.cut.places)
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        visible = _unmasked(num_queries, num_keys, is_causal, sliding_window, documents)
    elif context is not None:
        visible = _of_whole(attention_mask, context).visible(documents)
    elif isinstance(attention_mask, LazyMask) and attention_mask.shape[2:] == lengths:
        visible = attention_mask.visible(documents)
    elif isinstance(attention_mask, LazyMask) and _is_of_a_shard(tp, attention_mask, lengths):
        visible = attention_mask.of_whole_sequence(lengths).visible(documents)
    else:
        visible = _given(attention_mask, *lengths, documents)
    if visible.causal and context is None:  # a static cache holds keys that are not there yet
        num_keys = min(num_keys, num_queries + visible.offset)
    call = Call(
        query,
        key[:, :, :num_keys],  # where a cp group shares a sequence, all of this rank's
        value[:, :, :num_keys],
        visible.simplified(num_queries, num_keys),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux if sinks is None else sinks[..., 0].transpose(1, 2),
        bias=None if position_bias is None else position_bias[..., :num_keys],
    )
    with own_dropout(tp if dropout else None):
        out = (attend if context is None else context.attend)(call)
    return _without_padding(out, documents, context), None


def _without_padding(
    out: torch.Tensor, documents: Documents | None, context: Context | None
) -> torch.Tensor:
    """[B, s, H, D] with zeros where ``blind_padding`` asks for them."""
    whole = documents if context is None else context.cut.documents
    if whole is None or not whole.blind_padding:
        return out
    ids = whole.ids if context is None else whole.ids[:, context.cut.places]
    return out.masked_fill((ids == PADDING)[:, :, None, None], 0)


def _of_whole(mask: LazyMask | torch.Tensor, context: Context) -> LazyMask:
    if not isinstance(mask, LazyMask):
        raise ValueError(
            "ds4d.parallel.cp: this model makes its own attention mask, of the tokens of one rank"
        )
    return mask.of_cut(context.cut)


def _is_of_a_shard(tp: TensorParallel | None, mask: LazyMask, lengths: tuple[int, int]) -> bool:
    """transformers made the mask from a residual stream that is cut along the sequence."""
    if tp is None or not tp.scattered:
        return False
    return tuple(length * tp.size for length in mask.shape[2:]) == lengths


def _check_documents(documents: Documents, batch: int, num_queries: int, num_keys: int) -> None:
    if documents.ids.shape != (batch, num_queries):
        raise ValueError(
            f"documents describe {list(documents.ids.shape)} tokens, but the model was given "
            f"{[batch, num_queries]}"
        )
    if num_queries != num_keys:
        raise ValueError(
            f"documents with a key/value cache ({num_queries} queries, {num_keys} keys): call the "
            "model with use_cache=False"
        )


def _given(
    mask: torch.Tensor, num_queries: int, num_keys: int, documents: Documents | None
) -> Visible:
    """A mask that the user, or the model itself, made."""
    fits = mask.ndim == 4 and mask.shape[2] in (1, num_queries) and mask.shape[3] >= num_keys
    if isinstance(mask, LazyMask) or not fits:  # a lazy one has the lengths of another layer
        raise ValueError(
            f"an attention mask of shape {list(mask.shape)} reached ds4d's attention, which takes "
            f"[batch or 1, heads or 1, {num_queries} queries, {num_keys} keys]"
        )
    if mask.requires_grad:
        raise ValueError(
            "this model learns its attention mask, which ds4d's attention does not; build it with "
            'attn_implementation="sdpa"'
        )
    mask = mask[..., :num_keys].expand(-1, -1, num_queries, -1)
    return Visible(
        offset=num_keys - num_queries, documents=documents, general=partial(cut_mask, mask)
    )


def _unmasked(
    num_queries: int,
    num_keys: int,
    is_causal: bool,
    window: int | None,
    documents: Documents | None,
) -> Visible:
    """As transformers' "sdpa": one query sees every key, several see the keys up to them."""
    if not is_causal or num_queries == 1:
        return Visible(documents=documents)
    if num_queries != num_keys:
        raise ValueError(
            f"causal attention of {num_queries} queries over {num_keys} keys needs a mask to say "
            "where the queries stand, but this model passes none"
        )
    return Visible(causal=True, window=window, documents=documents)
