"""The YAML of config files: YAML 1.2's plain scalars, without repeated keys, tags, aliases and deep nesting.

PyYAML reads YAML 1.1, in which `3e-4` is text, `no` is false and the last of repeated keys wins. Only its scanner and composer
are used here: `3e-4` and `1e5` are numbers, and only `true` and `false` are booleans. Without aliases a file's size bounds its
memory.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from configs.runtime.errors import ConfigError

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 32
NULLS = {"", "~", "null", "Null", "NULL"}
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTEGER = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
FLOAT_WORDS = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of one YAML document: mappings with text keys, lists, text, numbers, booleans, None.

    Args:
        text: the document; an empty one is None.
        where: names the document in errors, such as its path.

    Raises:
        ConfigError: it is not YAML, or uses what is not accepted; names the line.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{where}: {len(text)} characters are too many for a configuration, at most {MAX_CHARACTERS}")
    try:
        node = yaml.compose(text, Loader=_Composer)
        return None if node is None else _value(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
    except (ValueError, OverflowError) as error:
        # PyYAML's scanner lets these two through for an escape such as "\UFFFFFFFF" and for malformed directives.
        raise ConfigError(f"{where}: not YAML: {error}") from error


class _Composer(yaml.BaseLoader):
    """PyYAML's composer, which stops at the first event that is not accepted."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node and what is below it."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refusal(f"aliases (*{event.anchor}) are not accepted, write the value out", event.start_mark)
        if event.tag is not None:
            raise _refusal(f"tags ({event.tag}) are not accepted, write a plain or quoted value", event.start_mark)
        if self._depth == MAX_DEPTH:
            raise _refusal(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node)
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style is not None else _plain_scalar(node)
    return [_value(item) for item in node.value]


def _mapping(node: yaml.MappingNode) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refusal("a key must be a word, not a list or a mapping", key_node.start_mark)
        if key_node.value in result:
            raise _refusal(f"key {key_node.value!r} is given twice", key_node.start_mark)
        result[key_node.value] = _value(value_node)
    return result


def _plain_scalar(node: yaml.ScalarNode) -> Any:
    """Resolve an unquoted scalar as YAML 1.2's core schema does, decimal integers only."""
    text = node.value
    if text in NULLS:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    if INTEGER.fullmatch(text):
        return _integer(node)
    if FLOAT.fullmatch(text):
        return float(text)
    if FLOAT_WORDS.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _integer(node: yaml.ScalarNode) -> int:
    try:
        return int(node.value)
    except ValueError as error:  # Python's limit on the digits it converts
        raise _refusal(f"a number of {len(node.value)} digits is too long", node.start_mark) from error


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
