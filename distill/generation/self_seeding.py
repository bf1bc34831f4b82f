"""Self-seeded prompts: the target continues its own chat template where a user would begin to write.

An instruction-tuned model has seen many user turns and writes plausible ones (the idea of Magpie, 2406.08464). The template is
taken apart by rendering it around a marker text. Turn n is a function of (seed, n), and the prompts are the first usable turns
by number: neither the batch size nor the number of processes favours short turns, nor changes which turns are drawn. What the
target is led to write (`prompts.kinds`), and prompts of several turns, are in `distill.generation.steering`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from configs.runtime.errors import InputError
from configs.runtime.progress import Tokens, progress
from configs.schema.data import SELF_SEEDED, PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import Message, folded_text
from distill.generation.continuation import TargetSource, TokenRow, continue_rows, request_number
from distill.generation.prompts import DUPLICATE, Prompt
from distill.generation.sources import Admission
from distill.generation.split import NearDuplicates
from heads.frozen.chat_template import in_template
from heads.frozen.loading import Target
from heads.frozen.tokenizer import in_template

SENTINEL = "SELF-SEEDED-TURN-GOES-HERE"
MIN_CHARACTERS = 8
MIN_YIELD = 0.05
MIN_TURNS_JUDGED = 256  # the yield is not judged on fewer

UNUSABLE = "self_seeded_turn_unusable"  # not ended in time, with a special token inside, or filling the context
TOO_SHORT = "self_seeded_turn_too_short"
NEAR_DUPLICATE = "near_duplicate"

# A prompt's number, and what the user says in it, one turn or a list of them; None where it is unusable.
Turn = tuple[int, str | list[str] | None]
# Writes the turns of these numbers, in any order, and counts their tokens.
WriteTurns = Callable[["UserFrame", Sequence[int], Tokens], Iterator[Turn]]
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
    name: str = "",
    rank: int = 0,
    num_processes: int = 1,
    exchange: Exchange = lambda turns: turns,
    write: WriteTurns | None = None,
    kind_of: Callable[[int], str] | None = None,
    admission: Admission | None = None,
) -> tuple[list[Prompt], dict[str, int]]:
    """Let the target, or `write` in its place, write `config.num_prompts` distinct user turns, `batch_size` together.

    This process writes the share of its `rank`; `exchange` gathers the turns of all processes, the same everywhere. `name` is
    the source's, where there are several. Turns of kinds (`kind_of` a number) must also differ in more than a few words;
    `admission` may refuse further ones.

    Returns:
        The prompts, and how many turns were thrown away, by reason. Turns written beyond those needed are not counted.

    Raises:
        InputError: the template cannot be taken apart, or hardly any turn is usable.
    """
    frame = find_user_frame(target, config.max_prompt_tokens)
    choice = _Choice(config, kind_of, admission)
    chosen, dropped = choice.chosen, choice.dropped
    num_written = 0
    tokens = Tokens()
    with progress("self-seeded prompts", config.num_prompts, "prompts", tokens=tokens) as advance:
        while len(chosen) < config.num_prompts:
            before = len(chosen)
            # A quarter more than is missing: most turns are usable, and a second wave would begin with a nearly empty batch.
            num_wanted = (config.num_prompts - before) * 5 // 4
            wave = range(num_written, num_written + max(batch_size, num_wanted))
            mine = [number for number in wave if number % num_processes == rank]
            if write is None:
                turns = write_turns(target, frame, mine, tokens, config, batch_size=batch_size, seed=seed, name=name)
            else:
                turns = write(frame, mine, tokens)
            shown = _with_progress(turns, advance, step=num_processes, room=config.num_prompts - before)
            written = exchange(list(shown))
            choice.add(sorted(written, key=lambda turn: turn[0]))
            num_written = wave.stop
            _check_yield(len(chosen), num_written)
    return list(chosen.values()), dict(sorted(dropped.items()))


def find_user_frame(target: Target, max_prompt_tokens: int, before: Sequence[Message] = ()) -> UserFrame:
    """Take the chat template apart at a user's text, which follows the messages `before`.

    Raises:
        InputError: there is no template, it refuses the messages, or does not show a user's text once and unchanged with
            something before and after it, or the frame and the longest turn do not fit the target's context.
    """
    name, tokenizer = target.identity.name, target.tokenizer
    if tokenizer.chat_template is None:
        raise InputError(
            f"target {name} has no chat template; self-seeded prompts need one: give prompts.source file or dataset"
        )
    takes_parts = target.model.config.get_text_config() is not target.model.config
    messages = [*before, {"role": "user", "content": SENTINEL}]
    rendered = in_template(target, messages, answer_follows=False, in_parts=takes_parts)
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


def write_turns(
    target: Target,
    frame: UserFrame,
    numbers: Sequence[int],
    tokens: Tokens,
    config: PromptsConfig,
    *,
    batch_size: int,
    seed: int,
    name: str = "",
) -> Iterator[Turn]:
    """Let the target write the turns of these numbers; yield each as it ends. A turn that has ended makes room for the next."""
    tokens.expect(len(numbers) * config.max_prompt_tokens)
    limit = len(frame.prefix_ids) + config.max_prompt_tokens
    rows = (TokenRow(key=n, prompt_ids=frame.prefix_ids, limit=limit, request=turn_request(n, name)) for n in numbers)
    sampling = SamplingConfig(temperature=config.temperature, top_p=config.top_p)
    source = TargetSource(target, sampling)
    ended = turn_ended(target, frame)
    for row in continue_rows(source, rows, seed=seed, has_ended=ended, batch_size=batch_size, on_step=tokens.write):
        tokens.end(config.max_prompt_tokens, len(row.written))
        yield row.key, read_turn(target, frame, row.written)


def turn_ended(target: Target, frame: UserFrame) -> Callable[[TokenRow], bool]:
    """Return what says, after each token, whether the user's turn that a row writes has ended."""

    def has_ended(row: TokenRow) -> bool:
        if row.tokens[-1] in frame.end_ids or row.tokens[-1] in target.eos_token_ids:
            return True
        return not frame.end_ids and frame.end_text in target.tokenizer.decode(row.written)

    return has_ended


def turn_request(number: int, name: str = "") -> int:
    """Return the number that names a turn's random numbers, of the source of that name."""
    return request_number(f"{name}/self-{number}" if name else f"self-{number}")


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
    # `all_special_ids` has only the tokens that the tokenizer's config names.
    added = {token for token, added in target.tokenizer.added_tokens_decoder.items() if added.special}
    if not proper or set(content) & {*target.tokenizer.all_special_ids, *added}:
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


class _Choice:
    """The prompts so far, by normalised text, and how many turns were dropped."""

    def __init__(self, config: PromptsConfig, kind_of: Callable[[int], str] | None, admission: Admission | None) -> None:
        self.config, self.kind_of, self.admission = config, kind_of, admission
        self.chosen: dict[str, Prompt] = {}
        self.dropped = Counter[str]()
        self._near = NearDuplicates()

    def add(self, turns: Sequence[Turn]) -> None:
        """Add turns, in the order of their numbers, to the prompts or to the count of those dropped, until there are enough."""
        for number, said in turns:
            if len(self.chosen) == self.config.num_prompts:
                return
            category = (self.config.category or SELF_SEEDED) if self.kind_of is None else self.kind_of(number)
            texts = (said,) if isinstance(said, str) else tuple(said or ())
            prompt = Prompt(prompt_id=f"self-{number}", category=category, turns=texts)
            reason = self._objection(prompt)
            if reason is None:
                self.chosen[folded_text(prompt.user_text)] = prompt
            else:
                self.dropped[reason] += 1

    def _objection(self, prompt: Prompt) -> str | None:
        """Return why a prompt is dropped, None where it is not."""
        if not prompt.turns:
            return UNUSABLE
        if len(prompt.user_text) < MIN_CHARACTERS:
            return TOO_SHORT
        if folded_text(prompt.user_text) in self.chosen:
            return DUPLICATE
        if self.kind_of is not None and not self._near.add(prompt.user_text):
            return NEAR_DUPLICATE
        return None if self.admission is None else self.admission.objection(prompt)


def _check_yield(num_chosen: int, num_written: int) -> None:
    if num_written >= MIN_TURNS_JUDGED and num_chosen < MIN_YIELD * num_written:
        raise InputError(
            f"only {num_chosen} of {num_written} self-seeded turns are usable: raise prompts.max_prompt_tokens, lower "
            "prompts.temperature, or give prompts.source file or dataset"
        )
