"""From a YAML file and `--set` overrides to a checked, frozen config; every mistake becomes one sentence.

The order of precedence is schema default, file, overrides from left to right. `extends: other.yaml` in a file, relative to it,
names the one whose values it changes: section by section, lists as a whole. A key that is not given keeps its default at every
depth: `held_out: {decode: {seed: 1}}` keeps the other values that `held_out.decode` has by default. A key's sentence, which
`--keys` prints, is the comment beside or above it in `configs/schema`, where people read it.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import find_shipped, read_text
from configs.runtime.redaction import mask_secrets, redact

T = TypeVar("T", bound=BaseModel)

MAX_SHOWN = 60  # characters of a wrong value repeated in an error
SECTION = ("dict_type", "model_type", "model_attributes_type")  # findings of pydantic's for a value in place of a section
FIELD = re.compile(r"    (?P<name>[a-z]\w*): ")
COMMENT = re.compile(r"(?:^|  )\s*# (?!type: ignore)(?P<text>.*)$")
TOLD = ("missing", "union_tag_not_found", "union_tag_invalid")  # those that say all there is to say


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
    kind = finding["type"]
    kinds = [model.model_fields["kind"] for _, model in _sections(schema) if "kind" in model.model_fields]
    tags = {tag for field in kinds for tag in get_args(field.annotation)}
    keys = [str(part) for part in finding["loc"] if part not in tags]  # where a section is of several kinds, pydantic names it
    key = ".".join(keys)
    given = [each for each in override_keys if f"{each}.".startswith(f"{key}.") or f"{key}.".startswith(f"{each}.")]
    place = f"--set {given[-1]}" if given else where
    if kind == "extra_forbidden":
        return f"{place}: unknown key {key!r}{_suggestion(schema, keys)}"
    subject = place if not key or place == f"--set {key}" else f"{place}: {key}"
    if kind == "value_error":
        return f"{subject}: {finding['ctx']['error']}"
    said = "Input should be a section of keys" if kind in SECTION else redact(finding["msg"])
    got = "" if kind in TOLD else f", got {_shown(finding['input'])}"
    return f"{subject}: {said[0].lower()}{said[1:]}{got}"


def _suggestion(schema: type[BaseModel], keys: list[str]) -> str:
    """Return what an unknown key may have been meant to be: its name elsewhere, or a close one, beside it before others."""
    *above, name = ["0" if part.isdigit() else part for part in keys]
    known = [[*path, each] for path, model in _sections(schema) for each in model.model_fields]
    if [*above, name] in known:
        return "; another kind of this section has it"
    beside = [key for key in known if key[:-1] == above]
    for candidates, cutoff in ((known, 1.0), (beside, 0.6), (known, 0.6)):
        if close := difflib.get_close_matches(name, [key[-1] for key in candidates], n=1, cutoff=cutoff):
            nearest = next(key for key in candidates if key[-1] == close[0])
            return f"; the nearest known key is {'.'.join(nearest)!r}"
    return "; --keys lists the known ones"


def models_in(annotation: Any, index: tuple[str, ...] = ()) -> Iterator[tuple[type[BaseModel], tuple[str, ...]]]:
    """Yield the models named in a field's type, each with `("0",)` where it is the entry of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, index
    for argument in get_args(annotation):
        yield from models_in(argument, ("0",) if get_origin(annotation) is list else index)


def _sections(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Yield the path of a schema and of every section below it, top-down; entries of a list stand under the index 0."""
    yield above, model
    for name, field in model.model_fields.items():
        for inner, index in models_in(field.annotation):
            yield from _sections(inner, (*above, name, *index))


def _shown(value: Any) -> str:
    """Return a value as the file would spell it, cut to a readable length."""
    spelled = {None: "null", True: "true", False: "false"}
    text = spelled[value] if value is None or isinstance(value, bool) else redact(repr(value))  # before it is cut
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# --- keys with type, default and sentence ------------------------------------------------------------------------------------


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
    for key in dict.fromkeys(keys_of(schema)):  # kinds of a section may have sections alike
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


def keys_of(schema: type[BaseModel]) -> Iterator[Key]:
    """Yield the keys of a schema, a section after the other."""
    set_above = _section_defaults(schema)
    for path, model in _sections(schema):
        defaults, sentences = set_above, _sentences(model)
        for part in path:
            defaults = defaults.get(part, {}) if isinstance(defaults, dict) else {}
        kinds = get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()
        above = "".join(f"{part}." for part in path).replace(".0.", ".*.")
        for name, found in model.model_json_schema()["properties"].items():
            field = model.model_fields[name]
            described = [model] if "const" in found else [each for each, _ in models_in(field.annotation)]
            summary = (inspect.getdoc(described[0]) or "").partition("\n")[0] if len(described) == 1 else ""
            has_default = not field.is_required() and not isinstance(field.default, BaseModel)
            yield Key(
                path=above + name,
                kind=f"kind: {kinds[0]}" if kinds else "",
                type=_type(found),
                default=json.dumps(defaults.get(name, found.get("default"))) if has_default else "",
                sentence=sentences.get(name) or summary,
            )


def _type(found: dict[str, Any]) -> str:
    """Return a property of a JSON schema in words."""
    if "anyOf" in found:
        return " | ".join(dict.fromkeys(map(_type, found["anyOf"])))
    if "enum" in found or "const" in found:
        return " | ".join(map(str, found.get("enum", [found.get("const")])))
    if found.get("type") == "array":
        return f"list of {_type(found['items'])}" if "items" in found else "list"
    return str(found.get("type", "section"))


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
    """PyYAML's safe loader with YAML 1.2's plain scalars: `3e-4` is a number, `no` is text, `010` as well."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, whose keys are words as they stand there, each once."""
        result: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in result:
                problem = "a key must be a word, and given once"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if ":" in key.value and key.style is None and value.start_mark.index == value.end_mark.index:  # {key:value}
                problem = f"write a blank after the colon of {key.value!r}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            result[key.value] = self.construct_object(value, deep=True)
        return result


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
