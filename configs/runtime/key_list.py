"""What `--keys` and `--print-config` print: every key of a schema with type, default and sentence, and a config as YAML.

A key's sentence is the comment beside or above it in `configs/schema`, which is where people read it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel

from configs.runtime.redaction import mask_secrets

FIELD = re.compile(r"    (?P<name>[a-z]\w*): ")
COMMENT = re.compile(r"(?:^|  )\s*# (?!type: ignore)(?P<text>.*)$")
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TYPES = {"boolean": "true or false", "string": "text", "null": "null", "integer": "integer", "number": "number"}


class Key(NamedTuple):
    """One key of a config."""

    path: str  # dotted, `*` in place of a list's index
    kind: str  # of the section it stands in, where that is one of several kinds (`kind: medusa`); else empty
    type: str  # what it accepts, in words
    default: str  # as YAML; empty where it must be given
    sentence: str  # what it means; may be empty


def render_keys(schema: type[BaseModel], prefix: str = "") -> str:
    """Return the keys of a schema whose path begins with `prefix` as text, one or two lines each."""
    lines = []
    for key in keys_of(schema):
        if key.path.startswith(prefix):
            default = f" = {key.default}" if key.default else ""
            kind = f"  [{key.kind}]" if key.kind else ""
            lines.append(f"{key.path}: {key.type}{default}{kind}")
            if key.sentence:
                lines.append(f"    {key.sentence}")
    return "\n".join(lines)


def render_config(config: BaseModel) -> str:
    """Return a config as YAML that loads as the same, secrets masked."""
    return yaml.safe_dump(mask_secrets(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True).rstrip()


def models_in(annotation: Any, index: tuple[str, ...] = ()) -> Iterator[tuple[type[BaseModel], tuple[str, ...]]]:
    """Yield the models named in a field's type, each with `("0",)` where it is the entry of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, index
    for argument in get_args(annotation):
        yield from models_in(argument, ("0",) if get_origin(annotation) is list else index)


def keys_of(
    model: type[BaseModel], above: str = "", kind: str = "", defaults: Mapping[str, Any] | None = None
) -> Iterator[Key]:
    """Yield the keys of a schema, top-down; `defaults` holds those that the section above sets for it."""
    schema, sentences, defaults = model.model_json_schema(), _sentences(model), defaults or {}
    for name, field in model.model_fields.items():
        found, sections = schema["properties"][name], list(models_in(field.annotation))
        is_section = isinstance(field.default, BaseModel)
        default = defaults.get(name, found.get("default"))
        yield Key(
            path=above + name,
            kind=kind,
            type=_type(found),
            default="" if field.is_required() or is_section else json.dumps(default),
            sentence=sentences.get(name) or _summary([model] if "const" in found else [section for section, _ in sections]),
        )
        for section, index in sections:
            inner = f"{above}{name}." + ("*." if index else "")
            properties = section.model_json_schema()["properties"]
            tags = [f"{tag}: {each['const']}" for tag, each in properties.items() if "const" in each]
            inner_kind = next(iter(tags), "") if len(sections) > 1 else kind
            yield from keys_of(section, inner, inner_kind, default if is_section and isinstance(default, dict) else {})


def _type(found: dict[str, Any]) -> str:
    """Return a property of a JSON schema in words."""
    if "$ref" in found or "discriminator" in found:
        return "section"
    if "allOf" in found:
        return _type(found["allOf"][0])
    if "anyOf" in found:
        return " | ".join(dict.fromkeys(_type(each) for each in found["anyOf"]))
    if "enum" in found or "const" in found:
        return " | ".join(map(str, found.get("enum", [found.get("const")])))
    if found.get("type") == "array":
        return f"list of {_type(found['items'])}" if "items" in found else "list"
    bounds = "".join(f" {sign} {found[name]:g}" for name, sign in BOUNDS.items() if name in found)
    return TYPES.get(str(found.get("type")), "map") + bounds


def _summary(models: list[type[BaseModel]]) -> str:
    """Return the first line of a section's docstring, where it is of one kind only."""
    return (inspect.getdoc(models[0]) or "").partition("\n")[0] if len(models) == 1 else ""


def _sentences(model: type[BaseModel]) -> dict[str, str]:
    """Return the comments above or beside the fields of a model, inherited ones included."""
    found, above = dict[str, str](), list[str]()
    parents = [each for each in model.__mro__ if issubclass(each, BaseModel) and each is not BaseModel]
    for line in "".join(map(inspect.getsource, reversed(parents))).splitlines():
        comment = [text["text"]] if (text := COMMENT.search(line)) else []
        if field := FIELD.match(line):
            found[field["name"]] = " ".join(above + comment) or found.get(field["name"], "")
        above = above + comment if line.strip().startswith("# ") else []
    return found
