"""From a YAML file and `--set` overrides to a checked, frozen config; every mistake becomes one sentence.

The order of precedence is schema default, file, overrides from left to right. `extends: other.yaml` in a file, relative to it,
names the one whose values it changes: section by section, lists as a whole. A key that is not given keeps its default at every
depth: `held_out: {decode: {seed: 1}}` keeps the other values that `held_out.decode` has by default.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import find_shipped, read_text
from configs.runtime.key_list import models_in
from configs.runtime.redaction import redact

T = TypeVar("T", bound=BaseModel)

MAX_SHOWN = 60  # characters of a wrong value repeated in an error
# What was expected, in words, by pydantic's name of the finding; braces are filled from its context.
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section of its own",
    "model_type": "a section of its own",
    "model_attributes_type": "a section of its own",
    "union_tag_invalid": "one of {expected_tags}",
    "greater_than_equal": "a number of at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "less_than": "a number below {lt:g}",
}


def load_config(schema: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """Return the config that a YAML file and overrides describe; a `ConfigError` says what is wrong with them.

    A recipe that came with draftsmith is found from any folder; `path` None, like an empty file, means the schema's defaults.
    Overrides are `dotted.key=value` texts; the value is YAML, a list is given as a whole.
    """
    where, given = ("the defaults", {}) if path is None else _read_file(find_shipped(path))
    values = _merge(_section_defaults(schema), given)
    keys = [_apply_override(values, override) for override in overrides]
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigError(_sentence(schema, first, where, keys) + more) from error


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Return changes by dotted keys as `--set` gives them."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]


def read_values(path: str | Path) -> dict[str, Any]:
    """Return what a config file gives, with what it extends, unchecked: what a command needs to know before it has a schema."""
    return _read_file(find_shipped(path))[1]


def _read_file(path: Path, children: tuple[Path, ...] = ()) -> tuple[str, dict[str, Any]]:
    """Return what errors call a file that `children` extend, and its values over those of the one that it extends itself."""
    try:
        values = parse_yaml(read_text(path, "config file"), str(path))
    except InputError as error:
        raise ConfigError(f"{children[-1]}: extends: {error}" if children else str(error)) from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines at the top, got {_shown(values)}")
    named = values.pop("extends", None)
    if named is None:
        return str(path), values
    if not isinstance(named, str):
        raise ConfigError(f"{path}: extends: expected the path of a config file, got {_shown(named)}")
    parent, files = path.parent / named, (*children, path)
    if parent.resolve() in [each.resolve() for each in files]:
        raise ConfigError(f"{path}: extends: {named} extends this file in turn")
    above, inherited = _read_file(parent, files)
    return f"{path} (extends {above})", _merge(inherited, values)


def _section_defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """Return what the schema's sections set by default beyond their own class's defaults, nested as in a file."""
    sections = {name: field.default for name, field in schema.model_fields.items() if isinstance(field.default, BaseModel)}
    defaults = {
        name: _merge(_section_defaults(type(section)), section.model_dump(exclude_unset=True))
        for name, section in sections.items()
    }
    return {name: values for name, values in defaults.items() if values}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `above` over `below`, section by section; neither is changed."""
    result = dict(below)
    for key, value in above.items():
        deeper = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merge(result[key], value) if deeper else value
    return result


def _apply_override(values: dict[str, Any], override: str) -> str:
    """Write one `dotted.key=value` into `values` and return its key."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected dotted.key=value")
    *above, last = parts
    holder: Any = values
    for depth, part in enumerate(above, 1):
        holder = holder.setdefault(part, {})
        name = ".".join(parts[:depth])
        if isinstance(holder, list):
            raise ConfigError(f"--set {key.strip()}: {name} is a list; give it as a whole: --set {name}=[...]")
        if not isinstance(holder, dict):
            raise ConfigError(f"--set {key.strip()}: {name} is {_shown(holder)}, which has no keys")
    value = parse_yaml(text, f"--set {key.strip()}")
    both_sections = isinstance(value, dict) and isinstance(holder.get(last), dict)
    holder[last] = _merge(holder[last], value) if both_sections else value
    return ".".join(parts)


# --- error messages ----------------------------------------------------------------------------------------------------------


def _sentence(schema: type[BaseModel], finding: ErrorDetails, where: str, override_keys: Sequence[str]) -> str:
    """Return one of pydantic's findings as a sentence that begins with the place to change."""
    kind, context = finding["type"], finding.get("ctx", {})
    keys = _keys(schema, finding["loc"])
    if kind in ("union_tag_invalid", "union_tag_not_found"):  # the finding stands at the section, the mistake in its tag
        keys = [*keys, context["discriminator"].strip("'")]
    key = ".".join(keys)
    places = [
        f"--set {given}" for given in override_keys if f"{given}.".startswith(f"{key}.") or f"{key}.".startswith(f"{given}.")
    ]
    place = places[-1] if places else where
    subject = place if not key or place == f"--set {key}" else f"{place}: {key}"
    got = _shown(context["tag"] if kind == "union_tag_invalid" else finding["input"])
    if kind == "extra_forbidden":
        return f"{place}: unknown key {key!r}{_suggestion(schema, keys)}"
    if kind in ("missing", "union_tag_not_found"):
        return f"{place}: {key!r} is missing"
    if kind == "value_error":
        return f"{subject}: {context['error']}"
    expected = EXPECTED[kind].format(**context) if kind in EXPECTED else finding["msg"].removeprefix("Input should be ")
    return f"{subject}: expected {expected}, got {got}"


def _keys(schema: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of a finding as a file has them: pydantic also gives the kind of a section that is one of several."""
    keys: list[str] = []
    models: list[type[BaseModel]] = [schema]
    for part in location:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if not fields and any(part in _tags(model) for model in models):
            models = [model for model in models if part in _tags(model)]
            continue
        keys.append(str(part))
        if isinstance(part, str):
            models = [model for field in fields for model, _ in models_in(field.annotation)]
    return keys


def _tags(model: type[BaseModel]) -> set[Any]:
    """Return every value that a field of a model names as one of few; the kind of a section is among them."""
    literals = [field.annotation for field in model.model_fields.values() if get_origin(field.annotation) is Literal]
    return {value for literal in literals for value in get_args(literal)}


def _suggestion(schema: type[BaseModel], keys: list[str]) -> str:
    """Return what an unknown key may have been meant to be: its name elsewhere, or a close one, beside it before others."""
    *above, name = ["0" if part.isdigit() else part for part in keys]
    known = list(_known_keys(schema))
    if [*above, name] in known:
        return "; another kind of this section has it"
    beside = [key for key in known if key[:-1] == above]
    for candidates, cutoff in ((known, 1.0), (beside, 0.6), (known, 0.6)):
        if close := difflib.get_close_matches(name, [key[-1] for key in candidates], n=1, cutoff=cutoff):
            nearest = next(key for key in candidates if key[-1] == close[0])
            return f"; the nearest known key is {'.'.join(nearest)!r}"
    return "; --keys lists the known ones"


def _known_keys(schema: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Yield the path of every key of a schema, top-down; entries of a list stand under the index 0."""
    inner: list[tuple[type[BaseModel], tuple[str, ...]]] = []
    for name, field in schema.model_fields.items():
        yield [*above, name]
        inner.extend((model, (*above, name, *index)) for model, index in models_in(field.annotation))
    for model, path in inner:
        yield from _known_keys(model, path)


def _shown(value: Any) -> str:
    """Return a value as the file would spell it, cut to a readable length."""
    spelled = {None: "null", True: "true", False: "false"}
    text = spelled[value] if value is None or isinstance(value, bool) else redact(repr(value))  # before it is cut
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# --- YAML --------------------------------------------------------------------------------------------------------------------


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of one YAML document: mappings with text keys, lists, text, numbers, booleans, None.

    `where` names the document in errors (`ConfigError`), which say the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # such as the escape "\UFFFFFFFF"
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's plain scalars (`3e-4` is a number, `no` is text), no aliases, no repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node; aliases are refused, so that a file's size bounds its memory."""
        if self.check_event(yaml.AliasEvent):
            raise _refusal("aliases are not accepted, write the value out", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, whose keys are words as they stand there, each once."""
        result: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key must be a word, not a list or a mapping", key.start_mark)
            if key.value in result:
                raise _refusal(f"key {key.value!r} is given twice", key.start_mark)
            result[key.value] = self.construct_object(value, deep=True)
        return result

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return a whole number in decimal digits: PyYAML would read 010 as 8."""
        return int(node.value)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
