"""Compares a file with ``schema.json`` and says what differs in words for people."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators

from ds4d.config.errors import Problem, nearest, show
from ds4d.config.words import FOREIGN_WORDS, REFUSED_OPTIMIZERS

Schema = Mapping[str, Any]

TYPE_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "array": "a list",
    "object": "an object { }",
    "null": "null",
}
BOUND_WORDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
LISTED_KEYS = 12  # an unknown key without a near one: show so many of those allowed


@functools.cache
def schema() -> Schema:
    """The JSON Schema of a whole file, as ``ds4d schema`` prints it."""
    text = resources.files("ds4d.config").joinpath("schema.json").read_text(encoding="utf-8")
    return json.loads(text)


@functools.cache
def _validator() -> Draft202012Validator:
    def properties(validator, value, instance, schema):
        """As usual, but 5e8 is the whole number 500000000 where one is meant."""
        if isinstance(instance, dict):
            for key, subschema in value.items():
                number = instance.get(key)
                if isinstance(number, float) and number.is_integer() and _is_whole(subschema):
                    instance[key] = int(number)
        yield from Draft202012Validator.VALIDATORS["properties"](
            validator, value, instance, schema
        )

    return validators.extend(Draft202012Validator, {"properties": properties})(schema())


def _is_whole(schema: Schema) -> bool:
    branches = schema.get("anyOf", [schema])
    types = {t for b in branches for t in _types(b)}
    return "integer" in types and "number" not in types


def _types(schema: Schema) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def find_problems(content: dict[str, Any]) -> list[Problem]:
    """Every difference from the schema. Whole numbers written as 5e8 become ints in place."""
    problems = []
    for error in _validator().iter_errors(content):
        describe = _DESCRIBERS.get(error.validator, _wrong_value)
        problems += describe(error, ".".join(map(str, error.absolute_path)))
    return list(dict.fromkeys(problems))  # a missing key is found once for each missing key


def _unknown_keys(error: ValidationError, path: str) -> Iterator[Problem]:
    known = error.schema["properties"]
    for key in error.instance:
        if key not in known:
            yield Problem(_join(path, key), f"unknown key; {_where_it_belongs(key, known)}")


def _missing_keys(error: ValidationError, path: str) -> Iterator[Problem]:
    properties = error.schema.get("properties", {})
    for key in error.validator_value:
        if key not in error.instance:
            text = properties.get(key, {}).get("description", "")
            yield Problem(_join(path, key), f"missing. {text}".strip())


def _refused(error: ValidationError, path: str) -> Iterator[Problem]:
    yield Problem(path, error.schema["description"])


def _wrong_value(error: ValidationError, path: str) -> Iterator[Problem]:
    hint = _hint(error.instance, error.schema)
    message = f"{show(error.instance)} is not allowed; allowed: {allowed(error.schema)}"
    yield Problem(path, message + (f"; {hint}" if hint else ""))


_DESCRIBERS = {
    "additionalProperties": _unknown_keys,
    "required": _missing_keys,
    "not": _refused,
}


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def allowed(schema: Schema) -> str:
    """What a schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(map(allowed, schema["anyOf"]))
    if "const" in schema:
        return show(schema["const"])
    if "enum" in schema:
        return ", ".join(map(show, schema["enum"]))
    bounds = "".join(f", {w.format(schema[b])}" for b, w in BOUND_WORDS.items() if b in schema)
    words = []
    for name in _types(schema):
        word = TYPE_WORDS[name]
        if name in ("integer", "number"):
            word += bounds
        elif name == "array" and schema.get("minItems") == schema.get("maxItems", -1):
            word += f" of {schema['minItems']} numbers"
        elif name == "string" and "examples" in schema:
            word += f" such as {show(schema['examples'][0])}"
        words.append(word)
    return " or ".join(words)


def _hint(value: Any, schema: Schema) -> str | None:
    """What was probably meant."""
    if isinstance(value, str):
        if value in REFUSED_OPTIMIZERS:
            return f"{value} {REFUSED_OPTIMIZERS[value]}"
        choices = [v for v in schema.get("enum", []) if isinstance(v, str)]
        if near := nearest(value, choices):
            return f"did you mean {show(near)}?"
        meant = _without_quotes(value)
        if meant is not None and Draft202012Validator(schema).is_valid(meant):
            return f"write {value.strip().lower()} without quotes"
    if "boolean" in _types(schema) and value in (0, 1):
        return f"write {show(bool(value))}"
    if isinstance(value, bool) and "enabled" in schema.get("properties", {}):
        return f"write {show({'enabled': value})}"
    return None


def _without_quotes(value: str) -> Any:
    try:
        return json.loads(value.strip().lower())
    except json.JSONDecodeError:
        return None


def _where_it_belongs(key: str, known: Mapping[str, Schema]) -> str:
    """The nearest right key of an unknown one."""
    usable = [k for k, s in known.items() if "not" not in s]
    if key in FOREIGN_WORDS:
        return f"ds4d's key for it is {FOREIGN_WORDS[key]}"
    elsewhere = _places().get(key, [])
    if 0 < len(elsewhere) <= 3:
        return f"it belongs at {' or '.join(elsewhere)}"
    if near := nearest(key, usable):
        return f'did you mean "{near}"?'
    if near := nearest(key, _places()):
        return f"did you mean {' or '.join(_places()[near][:3])}?"
    more = " ..." if len(usable) > LISTED_KEYS else ""
    return f"allowed here: {', '.join(usable[:LISTED_KEYS])}{more}"


@functools.cache
def _places() -> dict[str, list[str]]:
    """Key -> the dotted paths at which the schema has it."""
    places: dict[str, list[str]] = {}

    def walk(properties: Mapping[str, Schema], path: str) -> None:
        for key, part in properties.items():
            if "not" not in part:
                places.setdefault(key, []).append(_join(path, key))
                walk(part.get("properties", {}), _join(path, key))

    walk(schema()["properties"], "")
    return places


def default(path: str) -> Any:
    """The schema's default of a dotted key; None where there is none."""
    part: Mapping[str, Any] = schema()
    for key in path.split("."):
        part = part.get("properties", {}).get(key, {})
    return part.get("default")


def params_schema(block: str, kind: str) -> Mapping[str, Schema]:
    """Parameters of an optimizer or scheduler, by the block's and the type's name."""
    for choice in schema()["properties"][block]["allOf"]:
        if choice["if"]["properties"]["type"]["const"] == kind:
            return choice["then"]["properties"]["params"]["properties"]
    raise KeyError(kind)
