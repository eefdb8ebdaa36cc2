"""Whether a model can be cut into the stages of a pipeline, known before any rank is started: it is
tried, without memory and without a process group."""

from __future__ import annotations

import inspect

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ds4d.pipeline.probe import SHAPE, Anatomy, Refusal, call_base, fake_model, probe, run_base
from ds4d.pipeline.stage import Stages


def why_not_staged(config: PreTrainedConfig) -> str | None:
    """Why the model of ``config`` can't be cut into stages; None: it can."""
    try:
        anatomy = probe(config)
        layers = len(anatomy.outputs)
        for stage in range(2) if layers > 1 else ():
            _rehearse(config, anatomy, ((0, 1), (1, layers)), stage)
    except ValueError as error:
        return f"model_type {config.model_type} can't be cut into stages: {error}"
    return None


def why_not_generated(config: PreTrainedConfig) -> str | None:
    """Why the stages of the model of ``config`` can't generate; None: they can, if it can be cut
    into stages. What a call hands to the next one must be in a cache of transformers: that is what
    ``cache.py`` keeps in step for the layers of other ranks."""
    try:
        with fake_model(config) as model:
            taken = inspect.signature(model.base_model.forward).parameters
            given = call_base(model, use_cache=True)
            for name, value in given.items():
                if name in taken and not isinstance(value, Cache):
                    raise Refusal(f"what it keeps of a text, {name}, is no cache of transformers")
    except ValueError as error:
        return f"model_type {config.model_type} can't generate in stages: {error}"
    return None


def _rehearse(
    config: PreTrainedConfig, anatomy: Anatomy, bounds: tuple[tuple[int, int], ...], stage: int
) -> None:
    """Raises:
    ValueError: the model's code does not work with what stands in for the other stages' parts.
    """
    with fake_model(config) as model:
        stages = Stages(model, anatomy, bounds, [stage])
        (chunk,) = stages.chunks
        hidden = None if chunk.first else stages.new_hidden(SHAPE)
        with stages.running(chunk, SHAPE, hidden) as stream:
            end = run_base(model, None if chunk.first else stages.embeds(SHAPE))
            output = end if chunk.last else stream.taken
        if output is None or output.shape[:2] != SHAPE:
            raise Refusal("a stage does not give what the next one takes")
