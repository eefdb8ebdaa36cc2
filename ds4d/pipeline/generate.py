"""Generation by the stages of a pipeline: Hugging Face's own loop runs on every rank, and each call
of the model goes through all of them.

In a call, with the new tokens known everywhere,

1. a stage receives their hidden states from the stage before, [B, S, E];
2. it runs the model's own forward with its layers and their part of the KV cache;
3. it sends the hidden states on, and the last stage, which has the logits, sends those of the last
   position to all, [B, 1, V]: so all ranks pick the same token and stop together.

One batch has one next token at a time, so the stages work in turn: a pipeline makes room for a
large model, it does not make it faster.

Letters: B sequences, S new tokens (of the prompts, then 1), E hidden size, V vocabulary.
"""

from __future__ import annotations

from copy import deepcopy
from functools import wraps
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ds4d.comm import broadcast
from ds4d.mesh import Mesh
from ds4d.pipeline.actions import Placement
from ds4d.pipeline.p2p import begin_receive_from, begin_send_to, open_lanes
from ds4d.pipeline.stage import Chunk, Stages

PURPOSE = "generation"


def join_stages(stages: Stages, mesh: Mesh, placement: Placement) -> None:
    """Make a call of ``stages.model`` one of the whole model, for its ``generate``.

    Its output then has the fp32 logits of the last position alone, the same on all ranks. Of
    several chunks each has a KV cache of its own beside the one that ``generate`` holds: so texts
    that change places in that one (beams) need a rank to have one chunk.

    Args:
        placement: of the virtual stages.

    Collective: pp and what the model's forward is, each call; all give the same tokens.
    """
    model, rank, places = stages.model, mesh.coordinate.pp, placement.places
    mine = sorted(zip(placement.of_rank(rank), stages.chunks, strict=True), key=itemgetter(0))
    vocabulary = model.get_output_embeddings().out_features
    open_lanes(mesh, model.device)
    forward, caches = model.forward, _Caches()

    def through(stage: int, chunk: Chunk, inputs: dict[str, Any], here: Tensor | None):
        """One chunk; what it is given by this rank's last one, and gives to its next one."""
        tokens = inputs["input_ids"].shape
        if not chunk.first:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = stages.embeds(tokens)
            sender = places[stage - 1].rank
            if sender != rank:
                here = stages.new_hidden(tokens)
                begin_receive_from(sender, here, mesh).wait()
        with stages.running(chunk, tokens, None if chunk.first else here) as stream:
            output = forward(**inputs)
            taken = None if chunk.last else stream.taken.contiguous()
        if taken is not None and (to := places[stage + 1].rank) != rank:
            begin_send_to(to, taken, mesh, purpose=PURPOSE).wait()
        return output, taken

    @wraps(forward)  # generate looks at what it takes
    def joined(input_ids: Tensor, **inputs: Any) -> ModelOutput:
        shape = (len(input_ids), 1, vocabulary)
        logits = torch.empty(shape, dtype=torch.float32, device=input_ids.device)
        outputs, here = [], None
        for (stage, chunk), own in zip(mine, caches.dealt(inputs, len(mine)), strict=True):
            own["input_ids"] = input_ids
            output, here = through(stage, chunk, own, here)
            outputs.append(output)
            if chunk.last:
                logits = output.logits[:, -1:].float().contiguous()
        last = places[-1].rank
        outputs[0].logits = broadcast(logits, last, mesh.group("pp"), purpose=PURPOSE)
        return outputs[0]

    model.forward = joined


class _Caches:
    """Of a rank's chunks, for each cache that ``generate`` holds: that one is the first chunk's."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[Cache, list[Cache]] = WeakKeyDictionary()

    def dealt(self, inputs: dict[str, Any], chunks: int) -> list[dict[str, Any]]:
        """What each chunk is called with. The caches of the others are copied from the first one's
        while that is empty."""
        named = [(name, x) for name, x in inputs.items() if isinstance(x, Cache)]
        if not named:
            return [dict(inputs) for _ in range(chunks)]
        ((name, cache),) = named
        if cache not in self._held:
            self._held[cache] = [deepcopy(cache) for _ in range(chunks - 1)]
        return [inputs | {name: x} for x in (cache, *self._held[cache])]
