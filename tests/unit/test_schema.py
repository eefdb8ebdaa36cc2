"""The schema against what it describes: DeepSpeed, the dataclasses, the code that reads them."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import ds4d
from ds4d.config.load import load
from ds4d.config.make_schema import AUTO_DEFAULTS, make_schema
from ds4d.config.types import SECTIONS, key_of
from ds4d.config.validate import schema
from tests.unit.config_files import changed

ROOT = Path(ds4d.__file__).parent


def objects(part, path=""):
    """(path, schema) of every object schema."""
    if "properties" in part:
        yield path, part
        for key, inner in part["properties"].items():
            yield from objects(inner, f"{path}.{key}".lstrip("."))
    for choice in part.get("allOf", []):
        yield from objects(choice["then"], path)


def test_the_file_is_what_deepspeed_and_the_dataclasses_say():
    made = json.loads(json.dumps(make_schema()))
    assert made == schema(), "run: python -m ds4d.config.make_schema"


def test_it_is_a_json_schema():
    Draft202012Validator.check_schema(schema())


def test_every_field_has_a_description():
    for path, part in objects(schema()):
        for key, inner in part["properties"].items():
            if not inner.get("description") and "then" not in part:
                assert key in ("type", "params"), f"{path}.{key}"


def test_unknown_keys_are_refused_wherever_keys_are_known():
    open_ones = [
        path for path, part in objects(schema())
        if part.get("additionalProperties") is not False and set(part["properties"]) != {"params"}
    ]  # fmt: skip
    assert open_ones == ["ds4d.model.config"]  # transformers knows those


def test_choices_are_never_between_objects():
    """Else an error inside one would be reported as "matches none of them"."""

    def walk(part):
        for branch in part.get("anyOf", []):
            assert "properties" not in branch
        for inner in part.values():
            if isinstance(inner, dict):
                walk(inner)

    walk(schema())


class Asked(dict):
    """A dict that remembers which keys were asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


def test_every_key_that_deepspeed_reads_is_known():
    from deepspeed.runtime.config import DeepSpeedConfig

    config = Asked({"train_micro_batch_size_per_gpu": 1})
    DeepSpeedConfig(config)
    assert len(config.asked) > 50
    assert config.asked <= set(schema()["properties"])


def test_deepspeed_accepts_the_defaults():
    """Each block with each default written out."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def defaults(part):
        values = {}
        for key, inner in part.get("properties", {}).items():
            if "default" in inner:
                values[key] = inner["default"]
            elif inner.get("type") == "object" and "allOf" not in inner:
                values[key] = defaults(inner)
        return values

    config = defaults(schema())
    del config["ds4d"]
    DeepSpeedConfig({**config, "train_micro_batch_size_per_gpu": 1})


@pytest.mark.parametrize("name", SECTIONS)
def test_dataclasses_and_schema_agree(name):
    def compare(cls, part, path):
        fields = {key_of(f.name): f for f in dataclasses.fields(cls)}
        assert list(fields) == list(part["properties"]), path
        needed = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
        assert part.get("required", []) == needed, path
        for key, field in fields.items():
            inner = part["properties"][key]
            if (name, key) in AUTO_DEFAULTS:
                assert inner["default"] == AUTO_DEFAULTS[name, key]
            elif dataclasses.is_dataclass(field.default):
                compare(type(field.default), inner, f"{path}.{key}")
            else:
                missing = field.default is dataclasses.MISSING
                assert inner.get("default") == (None if missing else field.default), f"{path}.{key}"

    compare(SECTIONS[name], schema()["properties"]["ds4d"]["properties"][name], name)


def test_every_field_is_read_by_code():
    read = {
        key_of(node.attr)
        for file in ROOT.rglob("*.py")
        if ROOT / "config" not in file.parents or file.name == "layout.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    fields = {
        (section, key)
        for section, part in schema()["properties"]["ds4d"]["properties"].items()
        for path, inner in objects(part, section)
        for key in inner["properties"]
        if not path.startswith("model.config")
    }
    assert not {pair for pair in fields if pair[1] not in read}


OPTIMIZERS = schema()["properties"]["optimizer"]["properties"]["type"]["enum"]
SCHEDULERS = schema()["properties"]["scheduler"]["properties"]["type"]["enum"]


def test_optimizers_are_those_that_can_be_built():
    from ds4d.optim import OPTIMIZERS as BUILT

    assert {name.lower() for name in OPTIMIZERS} == set(BUILT)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_every_default_steps(name):
    import torch

    from ds4d.optim import build_optimizer

    run = load(changed(optimizer={"type": name}))
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    build_optimizer([("w", weight)], run.deepspeed["optimizer"], decay_all=False).step()
    assert (weight < 1).all()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_with_every_default_steps(name):
    import torch

    from ds4d.optim import build_optimizer, build_scheduler

    needed = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False},
        "WarmupDecayLR": {"total_num_steps": "auto"},
        "WarmupCosineLR": {"total_num_steps": "auto"},
    }
    given = {"type": name, "params": needed.get(name, {})}
    run = load(changed(scheduler=given))
    weights = [("w", torch.nn.Parameter(torch.ones(2, 2)))]
    optimizer = build_optimizer(weights, run.deepspeed["optimizer"], decay_all=False)
    schedule = build_scheduler(optimizer, run.deepspeed["scheduler"], total_steps=10)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] >= 0
