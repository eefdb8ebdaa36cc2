"""JSON Schema of a dataclass or of one of DeepSpeed's pydantic models, from its fields.

Name, type, default and bounds come from the field; the description is the string literal under
it, a habit that DeepSpeed's models and ``types.py`` share. References are not used: each schema
holds its parts, so that reading it needs no resolver.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds4d.config.types import key_of

SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
BOUNDS = {"Gt": "exclusiveMinimum", "Ge": "minimum", "Lt": "exclusiveMaximum", "Le": "maximum"}
MISSING = dataclasses.MISSING


@dataclasses.dataclass
class Field:
    name: str
    annotation: Any
    default: Any = MISSING
    metadata: tuple[Any, ...] = ()
    description: str | None = None
    refused: str | None = None


def class_schema(cls: type) -> dict[str, Any]:
    """The schema of an object with the fields of ``cls``; unknown keys are refused."""
    properties, required = {}, []
    for field in _fields(cls):
        schema = annotation_schema(field.annotation, field.metadata)
        if field.description:
            schema["description"] = field.description
        if field.refused:
            schema = {"not": {}, "description": field.refused}
        elif field.default is MISSING:
            required.append(field.name)
        elif isinstance(field.default, (bool, int, float, str, list)):
            schema["default"] = field.default
        properties[field.name] = schema
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if cls.__doc__:
        schema["description"] = " ".join(cls.__doc__.split())
    if required:
        schema["required"] = required
    return schema


def block(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with just these keys."""
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "additionalProperties": False,
    }


def annotation_schema(annotation: Any, metadata: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The schema of a type; ``metadata`` holds its bounds, annotated-types or (word, value)."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return annotation_schema(args[0], (*metadata, *args[1:]))
    if origin in (typing.Union, types.UnionType):
        return _union(args, metadata)
    schema = _plain(annotation, origin, args)
    for item in metadata:
        word, value = item if isinstance(item, tuple) else _bound(item)
        schema[word] = value
    return schema


def _bound(item: Any) -> tuple[str, Any]:
    """From an annotated-types bound such as ``Gt(gt=0)``."""
    name = type(item).__name__
    return BOUNDS[name], getattr(item, name.lower())


def _plain(annotation: Any, origin: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    if annotation in SIMPLE:
        return {"type": SIMPLE[annotation]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (list, tuple) or annotation in (list, tuple):
        items = annotation_schema(args[0]) if args else {}
        return {"type": "array", "items": items}
    if origin in (dict, Mapping) or annotation is dict:
        return {"type": "object"}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return {"enum": list(dict.fromkeys(member.value for member in annotation))}
    if dataclasses.is_dataclass(annotation) or hasattr(annotation, "model_fields"):
        return class_schema(annotation)
    raise TypeError(f"no JSON Schema for {annotation!r}")


def _union(args: tuple[Any, ...], metadata: tuple[Any, ...]) -> dict[str, Any]:
    """Unions as a list of types or of values, never as a choice of objects: errors stay plain."""
    merged: dict[str, Any] = {"type": []}
    for arg in args:
        schema = {"type": "null"} if arg is type(None) else annotation_schema(arg, metadata)
        if "enum" in schema:
            merged = {"enum": [*schema["enum"], None]}
            break
        merged["type"].append(schema.pop("type"))
        merged.update(schema)
    else:
        if type(None) in args:  # written last, for readers
            merged["type"] = [*(t for t in merged["type"] if t != "null"), "null"]
    return merged


def _fields(cls: type) -> Iterator[Field]:
    texts = field_texts(cls)
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            yield Field(
                key_of(field.name),
                hints[field.name],
                field.default,
                description=texts.get(field.name),
            )
        return
    for name, info in cls.model_fields.items():
        if info.exclude:  # DeepSpeed's own notes to itself
            continue
        extra = info.json_schema_extra or {}
        refused = f"Deprecated; write {extra['new_param']}." if extra.get("deprecated") else None
        default = MISSING if info.is_required() else info.get_default(call_default_factory=True)
        if isinstance(default, int) and not isinstance(default, bool):
            default = int(default)  # DeepSpeed's pp_int
        yield Field(
            info.alias or name, info.annotation, default, tuple(info.metadata),
            info.description or texts.get(name), refused,
        )  # fmt: skip


def field_texts(cls: type) -> dict[str, str]:
    """Field name -> the string literal that follows it in the class body, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    texts = {}
    for field, after in zip(body.body, body.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                texts[field.target.id] = " ".join(after.value.value.split())
    return texts
