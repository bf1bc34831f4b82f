"""Self-seeded prompts: what the target writes where a user would, and the first usable ones of it by number.

The idea is Magpie's (2406.08464): the target continues its own chat template where a user would begin to write. Turn n is a
function of (seed, n), so neither the batch size nor the number of processes favours short turns, nor changes what is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.runtime.errors import InputError
from configs.runtime.terminal import progress
from configs.schema.data import LONGEST_TURN, SELF_SEEDED, PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import folded_text
from distill.generation.continuation import Request, TargetSource, continue_requests
from distill.generation.prompts import DUPLICATE, Prompt
from heads.frozen.loading import Target
from heads.frozen.tokenizer import in_template
from heads.sampling.draws import request_number

SENTINEL = "SELF-SEEDED-TURN-GOES-HERE"
MIN_CHARACTERS = 8
MIN_YIELD = 0.05
MIN_TURNS_JUDGED = 256  # the yield is not judged on fewer

UNUSABLE = "self_seeded_turn_unusable"  # not ended in time, with a special token inside, or filling the context
TOO_SHORT = "self_seeded_turn_too_short"

Turn = tuple[int, str | None]  # a prompt's number and what the user says; None where it is unusable


def self_seed(
    target: Target,
    config: PromptsConfig,
    *,
    batch_size: int,
    seed: int,
    rank: int = 0,
    num_processes: int = 1,
    exchange: Callable[[list[Turn]], list[Turn]] = lambda turns: turns,
) -> tuple[list[Prompt], dict[str, int]]:
    """Let the target write `config.num_prompts` distinct prompts, and count the turns thrown away by reason.

    This process writes the share of its `rank`; `exchange` gathers the turns of all processes, the same everywhere.
    """
    writer = Writer(target, config, batch_size=batch_size, seed=seed)
    chosen: dict[str, Prompt] = {}  # by normalised text
    dropped = Counter[str]()
    num_written = 0

    def objection(text: str | None) -> str | None:
        if text is None:
            return UNUSABLE
        if len(text) < MIN_CHARACTERS:
            return TOO_SHORT
        return DUPLICATE if folded_text(text) in chosen else None

    with progress("self-seeded prompts", config.num_prompts, "prompts") as advance:
        while (before := len(chosen)) < config.num_prompts:
            # A quarter more than is missing: most turns are usable, and a second wave would begin with a nearly empty batch.
            wave = range(num_written, num_written + max(batch_size, (config.num_prompts - before) * 5 // 4))
            num_written = wave.stop
            for number, text in sorted(exchange(writer.write([each for each in wave if each % num_processes == rank]))):
                if len(chosen) == config.num_prompts:
                    break
                if (reason := objection(text)) is not None or text is None:
                    dropped[str(reason)] += 1
                    continue
                category = config.category or SELF_SEEDED
                chosen[folded_text(text)] = Prompt(prompt_id=f"self-{number}", category=category, turns=(text,))
            advance(len(chosen) - before)
            if num_written >= MIN_TURNS_JUDGED and len(chosen) < MIN_YIELD * num_written:
                usable = f"only {len(chosen)} of {num_written} self-seeded turns are usable"
                raise InputError(f"{usable}: raise prompts.max_prompt_tokens, or lower prompts.temperature")
    return list(chosen.values()), dict(sorted(dropped.items()))


class Writer:
    """Lets the target write prompts by number."""

    def __init__(self, target: Target, config: PromptsConfig, *, batch_size: int, seed: int) -> None:
        self.target, self.config = target, config
        self.batch_size, self.seed = batch_size, seed
        self.longest = config.max_prompt_tokens or LONGEST_TURN
        self.frame = find_user_frame(target, self.longest)

    def write(self, numbers: Sequence[int]) -> list[Turn]:
        found: dict[int, str | None] = {}
        sampling = SamplingConfig(temperature=self.config.temperature, top_p=self.config.top_p)
        asked = (self._request(number, found) for number in numbers)
        continue_requests(TargetSource(self.target, sampling), asked, seed=self.seed, batch_size=self.batch_size)
        return sorted(found.items())

    def _request(self, number: int, found: dict[int, str | None]) -> Request:
        ids = self.frame.prefix_ids

        def done(written: list[int]) -> None:
            found[number] = read_turn(self.target, self.frame, written)

        return Request(
            prompt_ids=ids,
            limit=min(self.target.max_positions, len(ids) + self.longest),
            number=request_number(f"self-{number}"),
            has_ended=self._has_ended,
            on_done=done,
        )

    def _has_ended(self, request: Request) -> bool:
        return request.tokens[-1] in self.frame.end_ids or request.tokens[-1] in self.target.eos_token_ids


@dataclass(frozen=True, kw_only=True)
class UserFrame:
    """What the chat template puts around a user's text."""

    prefix_ids: tuple[int, ...]
    end_ids: frozenset[int]  # the special token that ends the turn


def find_user_frame(target: Target, max_prompt_tokens: int) -> UserFrame:
    name, tokenizer = target.identity.name, target.tokenizer
    takes_parts = target.model.config.get_text_config() is not target.model.config
    messages = [{"role": "user", "content": SENTINEL}]
    rendered = in_template(tokenizer, name, messages, answer_follows=False, in_parts=takes_parts)
    prefix, found, suffix = rendered.partition(SENTINEL)
    # A trailing space would become a token of its own, which ordinary text does not continue.
    prefix, end_text = prefix.rstrip(" "), suffix.strip()
    suffix_ids = tokenizer(end_text, add_special_tokens=False)["input_ids"]
    end_ids = frozenset(suffix_ids[:1]) & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if not found or SENTINEL in suffix or not prefix or not end_ids:
        framed = f"the chat template of target {name} puts no text before a user's, or no special token after it"
        raise InputError(f"prompts.source: {framed}; give a file")
    prefix_ids = tuple(tokenizer(prefix, add_special_tokens=False)["input_ids"])
    if len(prefix_ids) + max_prompt_tokens > target.max_positions:
        around = f"after the chat template's {len(prefix_ids)}"
        raise InputError(f"prompts.max_prompt_tokens: {max_prompt_tokens} {around} do not fit {target.max_positions} positions")
    return UserFrame(prefix_ids=prefix_ids, end_ids=end_ids)


def read_turn(target: Target, frame: UserFrame, ids: Sequence[int]) -> str | None:
    """Return the text of a turn, None where it is unusable: it did not end, holds special tokens, or fills the context."""
    content = list(ids[:-1])
    # `all_special_ids` has only the tokens that the tokenizer's config names.
    added = {token for token, added in target.tokenizer.added_tokens_decoder.items() if added.special}
    if ids[-1] not in frame.end_ids or set(content) & {*target.tokenizer.all_special_ids, *added}:
        return None
    text = str(target.tokenizer.decode(content)).strip()
    return text if len(target.encode_chat([{"role": "user", "content": text}])) < target.max_positions else None
