"""Writes ``schema.json``: ``python -m ds4d.config.make_schema``. Run it after a change of
``types.py`` or of DeepSpeed's version; a unit test compares the file with what this makes.

The ``"ds4d"`` part comes from the dataclasses of ``types.py``, the DeepSpeed part from
DeepSpeed's own config models and constants (``deepspeed_schema.py``). This is a tool: it imports
DeepSpeed and torch, which nothing else in ``config/`` does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds4d.config.deepspeed_schema import deepspeed_properties
from ds4d.config.reflect import class_schema
from ds4d.config.types import SECTIONS

PATH = Path(__file__).with_name("schema.json")

# Keys that also take "auto", which load resolves: path -> the default of the file.
AUTO_DEFAULTS = {
    ("parallel", "tp"): 1,
    ("parallel", "pp"): 1,
    ("parallel", "cp"): 1,
    ("parallel", "dp"): "auto",
    ("parallel", "sequence_parallel"): "auto",
    ("context", "exchange"): "auto",
}

RECOMPUTE = {
    "enum": ["none", "selective", "full", "auto"],
    "default": "auto",
    "description": "Recompute activations in the backward pass instead of keeping them: those "
    "between the matrix products (selective), or all inside a layer (full). \"auto\": full where "
    "the file has DeepSpeed's activation_checkpointing block, else none.",
}
RESOLVED = {
    "type": "object",
    "description": "Facts that ds4d writes into config.resolved.json; not read back.",
}

MODEL_CONFIG = {
    "type": ["object", "null"],
    "properties": {
        "model_type": {
            "type": "string",
            "description": "Architecture, by transformers' name.",
            "examples": ["llama", "qwen3", "gpt2"],
        },
        "vocab_size": {
            "anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}],
            "description": 'Size of the vocabulary; "auto": the size of the tokenizer.',
        },
    },
    "required": ["model_type"],
    # the other fields are the architecture's own: checks.py asks transformers about them
    "additionalProperties": True,
}


def allow_auto(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema that also takes "auto"; description and default stay outside."""
    outer = {k: schema[k] for k in ("description", "default") if k in schema}
    inner = {k: v for k, v in schema.items() if k not in outer}
    return {"anyOf": [inner, {"const": "auto"}], **outer}


def ds4d_schema() -> dict[str, Any]:
    sections = {name: class_schema(section) for name, section in SECTIONS.items()}
    for (section, key), default in AUTO_DEFAULTS.items():
        properties = sections[section]["properties"]
        properties[key] = {**allow_auto(properties[key]), "default": default}
    model = sections["model"]["properties"]
    model["config"] = {**model["config"], **MODEL_CONFIG}
    return {
        "type": "object",
        "description": "All that is not DeepSpeed's: model, data, layout, length of the training.",
        "properties": {**sections, "recompute": RECOMPUTE, "resolved": RESOLVED},
        "required": ["model", "data", "training"],
        "additionalProperties": False,
    }


def make_schema() -> dict[str, Any]:
    """The JSON Schema of a whole file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ds4d",
        "description": 'A DeepSpeed config with one more block, "ds4d".',
        "type": "object",
        "properties": {
            "$schema": {"type": "string", "description": "This schema, for editors."},
            **deepspeed_properties(allow_auto),
            "ds4d": ds4d_schema(),
        },
        "required": ["optimizer", "ds4d"],
        "additionalProperties": False,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(make_schema(), indent=2, ensure_ascii=False) + "\n")
    print(f"wrote {PATH}")
