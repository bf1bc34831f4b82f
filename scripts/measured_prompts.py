"""Which held-out prompts a comparison is measured on: none that chose a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.errors import InputError
from distill.conversations import Conversation, read_conversations
from eval.decode import Request


def measured_rows(path: Path, num_prompts: int, num_choosing: int) -> list[Conversation]:
    """Return the conversations of the last prompts of a held-out file, all turns of each.

    Args:
        path: `held_out.jsonl`.
        num_prompts: how many prompts.
        num_choosing: conversations at the file's beginning that choose checkpoints (`held_out.num_prompts` of a recipe);
            their prompts are left out.

    Raises:
        InputError: there are fewer.
    """
    rows = read_conversations(path)
    choosing = {row.prompt_id for row in rows[:num_choosing]}
    others = list(dict.fromkeys(row.prompt_id for row in rows if row.prompt_id not in choosing))
    if len(others) < num_prompts:
        raise InputError(
            f"num_prompts: {path} has {len(others)} prompts beside the {len(choosing)} that choose checkpoints, got "
            f"{num_prompts}; ask for fewer, or give held_out.num_prompts of the recipe a smaller number"
        )
    measured = set(others[-num_prompts:])
    return [row for row in rows if row.prompt_id in measured]


def to_request(row: Conversation) -> Request:
    """Return the prompt of a conversation as the decoder takes it."""
    return Request(prompt_id=f"{row.prompt_id}/{row.turn}", category=row.category, tokens=row.prompt_ids)


def first_requests(rows: Sequence[Conversation]) -> list[Request]:
    """Return the prompts of conversations as the decoder takes them, of each the first turn there is.

    The turns of one prompt are no independent evidence.
    """
    first_turns = {row.prompt_id: row for row in reversed(rows)}
    return [to_request(row) for row in reversed(first_turns.values())]
