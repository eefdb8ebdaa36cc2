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

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ds4d.comm import broadcast
from ds4d.mesh import Mesh
from ds4d.pipeline.p2p import begin_receive_from, begin_send_to, open_lanes
from ds4d.pipeline.stage import Stages

PURPOSE = "generation"


def join_stages(stages: Stages, mesh: Mesh) -> None:
    """Make a call of ``stages.model`` one of the whole model, for its ``generate``.

    Its output then has the fp32 logits of the last position alone, the same on all ranks.

    Args:
        stages: of one chunk.

    Collective: pp and what the model's forward is, each call; all give the same tokens.
    """
    model, (chunk,) = stages.model, stages.chunks
    rank, last = mesh.coordinate.pp, mesh.parallel.pp - 1
    all_stages = mesh.group("pp")
    vocabulary = model.get_output_embeddings().out_features
    open_lanes(mesh, model.device)
    forward = model.forward

    @wraps(forward)  # generate looks at what it takes
    def joined(input_ids: Tensor, **inputs: Any) -> ModelOutput:
        hidden = None
        if chunk.first:
            inputs["input_ids"] = input_ids
        else:
            hidden = stages.new_hidden(input_ids.shape)
            begin_receive_from(rank - 1, hidden, mesh).wait()
            inputs["inputs_embeds"] = stages.embeds(input_ids.shape)
        with stages.running(chunk, input_ids.shape, hidden) as stream:
            output = forward(**inputs)
            if not chunk.last:
                begin_send_to(rank + 1, stream.taken.contiguous(), mesh, purpose=PURPOSE).wait()
        if chunk.last:
            logits = output.logits[:, -1:].float().contiguous()
        else:
            shape = (len(input_ids), 1, vocabulary)
            logits = torch.empty(shape, dtype=torch.float32, device=input_ids.device)
        output.logits = broadcast(logits, last, all_stages, purpose=PURPOSE)
        return output

    model.forward = joined
