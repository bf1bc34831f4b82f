"""Self-seeded prompts: the target continues its own chat template where a user would begin to write.

An instruction-tuned model has seen many user turns and writes plausible ones (the idea of Magpie, 2406.08464). The template is
taken apart by rendering it around a marker text. Turn n is a function of (seed, n), and the prompts are the first usable turns
by number: neither the batch size nor the number of processes favours short turns, nor changes which turns are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from configs.runtime.errors import InputError
from configs.runtime.progress import progress
from configs.schema.data import PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import folded_text
from distill.generation.continuation import TargetSource, TokenRow, continue_rows, request_number
from distill.generation.prompts import DUPLICATE, Prompt
from heads.target.loading import Target

SENTINEL = "SELF-SEEDED-TURN-GOES-HERE"
MIN_CHARACTERS = 8
MIN_YIELD = 0.05
MIN_TURNS_JUDGED = 256  # the yield is not judged on fewer

UNUSABLE = "self_seeded_turn_unusable"  # not ended in time, with a special token inside, or filling the context
TOO_SHORT = "self_seeded_turn_too_short"

Turn = tuple[int, str | None]  # its number, and its text; None where it is unusable
WriteTurns = Callable[["UserFrame", Sequence[int]], Iterator[Turn]]  # writes the turns of these numbers, in any order
Exchange = Callable[[list[Turn]], list[Turn]]


@dataclass(frozen=True, kw_only=True)
class UserFrame:
    """What the chat template puts around a user's text: ids before it, and how the end is recognised."""

    prefix_ids: tuple[int, ...]
    end_ids: frozenset[int]  # the token that ends the turn; empty where the template ends it with plain text
    end_text: str


def self_seed(
    target: Target,
    config: PromptsConfig,
    *,
    batch_size: int,
    seed: int,
    rank: int = 0,
    num_processes: int = 1,
    exchange: Exchange = lambda turns: turns,
    write: WriteTurns | None = None,
) -> tuple[list[Prompt], dict[str, int]]:
    """Let the target, or `write` in its place, write `config.num_prompts` distinct user turns, `batch_size` together.

    This process writes the share of its `rank`; `exchange` gathers the turns of all processes, the same everywhere.

    Returns:
        The prompts, and how many turns were thrown away, by reason. Turns written beyond those needed are not counted.

    Raises:
        InputError: the template cannot be taken apart, or hardly any turn is usable.
    """
    frame = find_user_frame(target, config.max_prompt_tokens)
    chosen: dict[str, Prompt] = {}  # by normalised text
    dropped = Counter[str]()
    num_written = 0
    with progress("self-seeded prompts", config.num_prompts, "prompts") as advance:
        while len(chosen) < config.num_prompts:
            before = len(chosen)
            # A quarter more than is missing: most turns are usable, and a second wave would begin with a nearly empty batch.
            num_wanted = (config.num_prompts - before) * 5 // 4
            wave = range(num_written, num_written + max(batch_size, num_wanted))
            mine = [number for number in wave if number % num_processes == rank]
            if write is None:
                turns = write_turns(target, frame, mine, config, batch_size=batch_size, seed=seed)
            else:
                turns = write(frame, mine)
            shown = _with_progress(turns, advance, step=num_processes, room=config.num_prompts - before)
            written = exchange(list(shown))
            _choose(sorted(written), config, chosen, dropped)
            num_written = wave.stop
            _check_yield(len(chosen), num_written)
    return list(chosen.values()), dict(sorted(dropped.items()))


def find_user_frame(target: Target, max_prompt_tokens: int) -> UserFrame:
    """Take the chat template apart at a user's text.

    Raises:
        InputError: there is no template, it does not show a user's text once and unchanged with something before and after
            it, or the frame and the longest turn do not fit the target's context.
    """
    name, tokenizer = target.identity.name, target.tokenizer
    if tokenizer.chat_template is None:
        raise InputError(
            f"target {name} has no chat template; self-seeded prompts need one: give prompts.source file or dataset"
        )
    rendered = str(tokenizer.apply_chat_template([{"role": "user", "content": SENTINEL}], tokenize=False))
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
    end_ids = frozenset(suffix_ids[:1]) & set(tokenizer.all_special_ids)
    return UserFrame(prefix_ids=prefix_ids, end_ids=end_ids, end_text=end_text)


def write_turns(
    target: Target, frame: UserFrame, numbers: Sequence[int], config: PromptsConfig, *, batch_size: int, seed: int
) -> Iterator[Turn]:
    """Let the target write the turns of these numbers; yield each as it ends. A turn that has ended makes room for the next."""
    limit = len(frame.prefix_ids) + config.max_prompt_tokens
    rows = (TokenRow(key=n, prompt_ids=frame.prefix_ids, limit=limit, request=turn_request(n)) for n in numbers)
    sampling = SamplingConfig(temperature=config.temperature, top_p=config.top_p)
    source = TargetSource(target, sampling, shared_prompt=True)

    def has_ended(row: TokenRow) -> bool:
        if row.tokens[-1] in frame.end_ids or row.tokens[-1] in target.eos_token_ids:
            return True
        return not frame.end_ids and frame.end_text in target.tokenizer.decode(row.written)

    for row in continue_rows(source, rows, seed=seed, has_ended=has_ended, batch_size=batch_size):
        yield row.key, read_turn(target, frame, row.written)


def turn_request(number: int) -> int:
    """Return the number that names a turn's random numbers."""
    return request_number(f"self-{number}")


def read_turn(target: Target, frame: UserFrame, ids: Sequence[int]) -> str | None:
    """Return the text of a turn, None where it is unusable: it did not end, holds special tokens, or fills the context.

    Text encoded again may have more tokens than were written: broken characters come back as three bytes each.
    """
    content = list(ids[:-1] if frame.end_ids else ids)
    text = str(target.tokenizer.decode(content))
    proper = ids[-1] in frame.end_ids
    if not frame.end_ids:
        text, end, _ = text.partition(frame.end_text)
        proper = bool(end)
    if not proper or set(content) & set(target.tokenizer.all_special_ids):
        return None
    text = text.strip()
    return text if len(target.encode_chat([{"role": "user", "content": text}])) < target.max_positions else None


def _with_progress(turns: Iterator[Turn], advance: Callable[[int], None], *, step: int, room: int) -> Iterator[Turn]:
    """Pass turns on, adding `step` to the progress for each usable one (the other processes are as far), `room` at most."""
    for number, text in turns:
        if text is not None and room >= step:
            advance(step)
            room -= step
        yield number, text


def _choose(turns: Sequence[Turn], config: PromptsConfig, chosen: dict[str, Prompt], dropped: Counter[str]) -> None:
    """Add turns, in the order of their numbers, to the prompts or to the count of those dropped, until there are enough."""
    for number, text in turns:
        if len(chosen) == config.num_prompts:
            return
        if text is None:
            dropped[UNUSABLE] += 1
        elif len(text) < MIN_CHARACTERS:
            dropped[TOO_SHORT] += 1
        elif folded_text(text) in chosen:
            dropped[DUPLICATE] += 1
        else:
            chosen[folded_text(text)] = Prompt(prompt_id=f"self-{number}", category=config.category, turns=(text,))


def _check_yield(num_chosen: int, num_written: int) -> None:
    if num_written >= MIN_TURNS_JUDGED and num_chosen < MIN_YIELD * num_written:
        raise InputError(
            f"only {num_chosen} of {num_written} self-seeded turns are usable: raise prompts.max_prompt_tokens, lower "
            "prompts.temperature, or give prompts.source file or dataset"
        )
