"""What a script's JSON file says, completed by what the script itself says.

The file of a script is that of ``ds4d train`` without model, data and length: these are the
script's. Numbers that the file leaves open ("auto", or missing) are taken from the script, as
Accelerate and the Trainer do; numbers that contradict the script are refused together.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ds4d.config import batch, validate
from ds4d.config.draft import AUTO, Draft
from ds4d.config.errors import ConfigError, Problem, show
from ds4d.config.load import load
from ds4d.config.read import read
from ds4d.config.resolve import build
from ds4d.config.types import ContextConfig, ParallelConfig, RunConfig
from ds4d.model.config import BOOKKEEPING

VARIABLE = "DS4D_CONFIG"
ACCELERATES = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
MISSING = (
    "ds4d.accelerate: no JSON file is given. Name it on the command line "
    "(accelerate launch --use_deepspeed --deepspeed_config_file FILE ...), in the environment "
    f"({VARIABLE}=FILE), in the script (Accelerator(config=FILE), or a DeepSpeedPlugin), or in "
    "TrainingArguments(deepspeed=FILE)"
)
# Sections that a script has no use for: what they say, it says.
SCRIPTS = ("model", "data")
TOKENS = 4096  # of a sample, for what is estimated from it, where neither file nor model says more
SIZES = (batch.TRAIN, batch.MICRO, batch.ACCUMULATION)


@dataclass(frozen=True)
class ScriptFile:
    """Attributes:
    content: the file, without the sections that are the script's.
    name: for messages.
    """

    content: dict[str, Any]
    name: str

    @classmethod
    def find(cls, given: Any) -> ScriptFile:
        """Args:
            given: a path, a dict, or transformers' object around one; None: by the environment.

        Raises:
            ConfigError: there is none, or it is not JSON.
        """
        of_plugin, given = hasattr(given, "config"), getattr(given, "config", given)
        named = os.environ.get(ACCELERATES), os.environ.get(VARIABLE)
        source = given or next((n for n in named if n and n != "none"), None)
        if source is None:
            raise ConfigError([Problem("", MISSING)], name="ds4d.accelerate")
        document = read(source if isinstance(source, Mapping) else Path(source))
        content = _without_accelerates(document.content) if of_plugin else document.content
        return cls(_scripts_part(content), document.name)

    @property
    def content_for_accelerate(self) -> dict[str, Any]:
        """What Accelerate's plugin wants to see: a ZeRO block, and batch words to be filled."""
        content = copy.deepcopy(self.content)
        content.setdefault("zero_optimization", {"stage": 0})
        for word in SIZES[1:]:
            content.setdefault(word, AUTO)
        return content

    def layout(self, world_size: int) -> tuple[ParallelConfig, ContextConfig]:
        """What the file says of ranks, before there is a model.

        Raises:
            ConfigError: the form of the file is wrong, or the degrees do not fit.
        """
        content = _whole(self.content, _SOME_MODEL, TOKENS)
        problems = validate.find_problems(content)
        draft = Draft(content, world_size)
        degrees = {axis: draft.degree(axis) for axis in ("tp", "pp", "cp")}
        problems += [
            Problem(f"ds4d.parallel.{axis}", '"auto" needs the model, which a script makes later')
            for axis, degree in degrees.items()
            if degree == AUTO
        ]
        if problems:
            raise ConfigError(problems, name=self.name)
        try:
            parallel = ParallelConfig(**degrees, dp=draft.dp)
        except batch.Unsolvable as error:
            raise ConfigError([Problem(error.path, str(error))], name=self.name) from None
        context = dict(content["ds4d"].get("context", {}))
        if context.get("method") == "hybrid":
            context["ulysses_size"] = draft.ulysses_size
        return parallel, build(ContextConfig, context | {"exchange": "p2p"})

    def run(
        self,
        model: PreTrainedConfig,
        *,
        world_size: int,
        micro: int,
        accumulation: int,
        fills: Mapping[str, Any],
        precision: str | None = None,
    ) -> RunConfig:
        """The file as ds4d trains by it.

        Args:
            model: the script's.
            micro: sequences in a batch of the script's loader.
            accumulation: batches of an optimizer step.
            fills: dotted key -> what "auto" stands for there.
            precision: "bf16" or "fp16", as the script or its launcher asks for; None: it does not.

        Raises:
            ConfigError: everything that is wrong.
        """
        content = copy.deepcopy(self.content)
        matches = {batch.MICRO: micro, batch.ACCUMULATION: accumulation}
        for name in ("bf16", "fp16"):
            if precision == name:
                content.setdefault(name, {"enabled": True})
                matches[f"{name}.enabled"] = True
            elif _at(content, f"{name}.enabled") == AUTO:
                content[name]["enabled"] = False
        problems = [
            Problem(
                key,
                f"{show(value)} in the file, {show(matches[key])} in the script; make them equal, "
                'or set the file\'s to "auto"',
            )
            for key in matches
            if (value := _at(content, key)) not in (None, AUTO) and value != matches[key]
        ]
        for key, value in {**matches, **fills}.items():
            _fill(content, key, value)
        content |= {batch.MICRO: micro, batch.ACCUMULATION: accumulation}
        if content.get(batch.TRAIN) == AUTO:
            del content[batch.TRAIN]
        text = model.get_text_config(decoder=True)
        tokens = min(getattr(text, "max_position_embeddings", None) or TOKENS, TOKENS)
        fields = {k: v for k, v in model.to_dict().items() if not _is_bookkeeping(k)}
        whole = _whole(content, {"model_type": model.model_type, **fields}, tokens)
        try:
            run = load(whole, world_size=world_size)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems, name=self.name)
        return run


_SOME_MODEL = {"model_type": "llama"}


def _scripts_part(content: dict[str, Any]) -> dict[str, Any]:
    """Without the sections that the script is."""
    content = copy.deepcopy(content)
    block = content.setdefault("ds4d", {})
    if isinstance(block, dict):
        for section in SCRIPTS:
            block.pop(section, None)
    return content


def _without_accelerates(content: dict[str, Any]) -> dict[str, Any]:
    """Without what Accelerate writes into the dict of its plugin."""
    content = copy.deepcopy(content)
    if math.isinf(content.get("steps_per_print") or 0):
        del content["steps_per_print"]
    content.pop("zero_allow_untested_optimizer", None)
    for name in ("bf16", "fp16"):
        if content.get(name) == {"enabled": False}:
            del content[name]
    return content


def _whole(content: dict[str, Any], model: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """With the sections that ``ds4d train`` needs; nothing is read of data and length."""
    content = copy.deepcopy(content)
    content.setdefault("optimizer", {"type": "AdamW"})
    content.setdefault(batch.MICRO, 1)
    block = dict(content.get("ds4d", {}))
    training = {k: v for k, v in block.get("training", {}).items() if k != "epochs"}
    block["model"] = {"config": dict(model)}
    source = {"type": "tokens", "path": __file__}  # some file that is there
    block["data"] = {"seq_len": tokens, "packing": "concat", "train": source}
    block["training"] = {"steps": 1, **training}
    return {**content, "ds4d": block}


def _is_bookkeeping(key: str) -> bool:
    return key in BOOKKEEPING or key.startswith("_") or key == "transformers_version"


def _at(content: Mapping[str, Any], path: str) -> Any:
    value: Any = content
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _fill(content: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    holder: Any = content
    for key in parents:
        holder = holder.get(key) if isinstance(holder, dict) else None
    if isinstance(holder, dict) and holder.get(last) == AUTO:
        holder[last] = value
