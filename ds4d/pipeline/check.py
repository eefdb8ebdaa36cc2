"""Whether a model can be cut into the stages of a pipeline, known before any rank is started."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ds4d.pipeline.probe import probe


def why_not_staged(config: PreTrainedConfig) -> str | None:
    """Why the model of ``config`` can't be cut into stages; None: it can."""
    try:
        probe(config)
    except ValueError as error:
        return f"model_type {config.model_type} can't be cut into stages: {error}"
    return None
