"""The forms that evaluation prompts come in, and what each row of them asks.

    turns      question_id, category, turns [reference]     Spec-Bench, MT-bench, our own suites
    messages   messages [question_id, category]             chats that end with the user, or with an answer to leave out
    humaneval  task_id, prompt                              the prompt as it stands is the user's one turn
    gsm8k      question, answer                             the answer is kept as the reference, not asked
    column     one column, named by the config              a text, a list of turns, or chat messages

Rows are those of a JSONL file or of a `datasets` data set; keys that are not named here are nobody's business. Left out:
running HumanEval's tests, and few-shot preambles: what is measured is the text that a served model would be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from configs.errors import InputError
from distill.prompts import Prompt, parse_row

# Format -> the keys by which it is known, tried in this order.
KEYS = {
    "turns": ("turns",),
    "messages": ("messages",),
    "humaneval": ("task_id", "prompt"),
    "gsm8k": ("question", "answer"),
}
ID_KEYS = ("question_id", "id", "prompt_id", "task_id")
UNCATEGORISED = "uncategorised"


def detect_format(row: Mapping[str, Any], where: str) -> str:
    """Return the format whose keys a row has.

    Raises:
        InputError: it has those of none; `where` names the row.
    """
    for name, keys in KEYS.items():
        if all(key in row for key in keys):
            return name
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in KEYS.items())
    raise InputError(
        f"{where}: the keys {', '.join(row) or '(none)'} are those of no known format ({known}); name the one that holds the "
        "prompts with suite.column"
    )


def to_prompt(row: Mapping[str, Any], number: int, *, format: str, column: str | None, where: str) -> Prompt:
    """Return the prompt that a row asks.

    Args:
        row: its keys and values.
        number: its place among the rows, from 0; names it where it brings no id (`row-7`), except for `turns` and `messages`
            without one, which are named by their content.
        format: one of `KEYS`, or `column`.
        column: the key that holds the prompt; with format `column`.
        where: names the row in complaints.

    Raises:
        InputError: the row does not have this format.
    """
    if format == "column":
        asked = _from_column(row, number, str(column), where)
    elif missing := [key for key in KEYS[format] if key not in row]:
        raise InputError(
            f"{where}: format {format} needs {', '.join(missing)}; the row has the keys {', '.join(row) or '(none)'}"
        )
    elif format == "humaneval":
        asked = {"question_id": row["task_id"], "turns": [row["prompt"]], "category": _category(row, format)}
    elif format == "gsm8k":
        asked = {"question_id": _id(row, number), "turns": [row["question"]], "category": _category(row, format)}
    else:
        other = "messages" if format == "turns" else "turns"
        asked = {key: value for key, value in row.items() if key != other}
    prompt = parse_row(asked, default_category=UNCATEGORISED, where=where)
    return _with_reference(prompt, row.get("answer") if format == "gsm8k" else row.get("reference"))


def _from_column(row: Mapping[str, Any], number: int, column: str, where: str) -> dict[str, Any]:
    if column not in row:
        raise InputError(f"{where}: no column {column!r} (suite.column); there are {', '.join(row) or 'none'}")
    value = row[column]
    is_chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    content = {"messages": value} if is_chat else {"turns": [value] if isinstance(value, str) else value}
    return {**content, "question_id": _id(row, number), "category": _category(row, UNCATEGORISED)}


def _id(row: Mapping[str, Any], number: int) -> Any:
    return next((row[key] for key in ID_KEYS if row.get(key) is not None), f"row-{number}")


def _category(row: Mapping[str, Any], otherwise: str) -> Any:
    given = row.get("category")
    return otherwise if given is None else given


def _with_reference(prompt: Prompt, reference: Any) -> Prompt:
    """Keep the reference answer of a prompt with one turn; MT-bench gives a list of them, one a turn."""
    if isinstance(reference, list) and len(reference) == 1:
        (reference,) = reference
    known = isinstance(reference, str) and len(prompt.turns) == 1
    return replace(prompt, answer=reference) if known else prompt
