"""What a chat template puts around a user's text, found by rendering the template around a marker text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.runtime.errors import InputError
from distill.dataset.conversations import Message
from distill.generation.continuation import TokenRow
from heads.frozen.loading import Target
from heads.frozen.tokenizer import in_template

SENTINEL = "SELF-SEEDED-TURN-GOES-HERE"


@dataclass(frozen=True, kw_only=True)
class UserFrame:
    """What the chat template puts around a user's text."""

    prefix_ids: tuple[int, ...]
    end_ids: frozenset[int]  # the token that ends the turn; empty where the template ends it with plain text
    end_text: str


def find_user_frame(target: Target, max_prompt_tokens: int, before: Sequence[Message] = ()) -> UserFrame:
    """Take the chat template apart at a user's text, which follows the messages `before`."""
    name, tokenizer = target.identity.name, target.tokenizer
    takes_parts = target.model.config.get_text_config() is not target.model.config
    messages = [*before, {"role": "user", "content": SENTINEL}]
    rendered = in_template(tokenizer, name, messages, answer_follows=False, in_parts=takes_parts)
    prefix, found, suffix = rendered.partition(SENTINEL)
    # A trailing space would become a token of its own, which ordinary text does not continue.
    prefix, end_text = prefix.rstrip(" "), suffix.strip()
    if not found or SENTINEL in suffix or not prefix or not end_text:
        raise InputError(
            f"the chat template of target {name} does not frame a user's text so that the target could write one: "
            "give prompts.source file or dataset"
        )
    prefix_ids = tuple(tokenizer(prefix, add_special_tokens=False)["input_ids"])
    suffix_ids = tokenizer(end_text, add_special_tokens=False)["input_ids"]
    if len(prefix_ids) + max_prompt_tokens > target.max_positions:
        raise InputError(
            f"prompts.max_prompt_tokens: {max_prompt_tokens} tokens after the chat template's {len(prefix_ids)} do not fit the "
            f"target's context of {target.max_positions}"
        )
    end_ids = frozenset(suffix_ids[:1]) & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return UserFrame(prefix_ids=prefix_ids, end_ids=end_ids, end_text=end_text)


def turn_ended(target: Target, frame: UserFrame, row: TokenRow) -> bool:
    """Return whether the user's turn that a row writes has ended, after each token."""
    if row.tokens[-1] in frame.end_ids or row.tokens[-1] in target.eos_token_ids:
        return True
    return not frame.end_ids and frame.end_text in target.tokenizer.decode(row.written)


def read_turn(target: Target, frame: UserFrame, ids: Sequence[int]) -> str | None:
    """Return the text of a turn, None where it is unusable: it did not end, holds special tokens, or fills the context."""
    content = list(ids[:-1] if frame.end_ids else ids)
    text = str(target.tokenizer.decode(content))
    proper = ids[-1] in frame.end_ids
    if not frame.end_ids:
        text, end, _ = text.partition(frame.end_text)
        proper = bool(end)
    # `all_special_ids` has only the tokens that the tokenizer's config names.
    added = {token for token, added in target.tokenizer.added_tokens_decoder.items() if added.special}
    if not proper or set(content) & {*target.tokenizer.all_special_ids, *added}:
        return None
    text = text.strip()
    return text if len(target.encode_chat([{"role": "user", "content": text}])) < target.max_positions else None
