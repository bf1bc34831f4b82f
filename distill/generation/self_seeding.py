"""Self-seeded prompts: the target continues its own chat template where a user would begin to write.

An instruction-tuned model has seen many user turns and writes plausible ones (the idea of Magpie, 2406.08464). Turn n is a
function of (seed, n), and the prompts are the first usable turns by number: neither the batch size nor the number of processes
favours short turns, nor changes which turns are drawn. What the target is led to write (`prompts.kinds`), and prompts of
several turns, are in `distill.generation.steering`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from configs.runtime.errors import InputError
from configs.runtime.terminal import Tokens, progress
from configs.schema.data import SELF_SEEDED, PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import folded_text
from distill.generation.continuation import TargetSource, TokenRow, continue_rows, request_number
from distill.generation.prompts import DUPLICATE, Prompt
from distill.generation.sources import Admission
from distill.generation.split import NearDuplicates
from distill.generation.steering import Turn, plan_prompt, write_steered
from distill.generation.user_frame import UserFrame, find_user_frame, read_turn, turn_ended
from heads.frozen.loading import Target

MIN_CHARACTERS = 8
MIN_YIELD = 0.05
MIN_TURNS_JUDGED = 256  # the yield is not judged on fewer

UNUSABLE = "self_seeded_turn_unusable"  # not ended in time, with a special token inside, or filling the context
TOO_SHORT = "self_seeded_turn_too_short"
NEAR_DUPLICATE = "near_duplicate"

Exchange = Callable[[list[Turn]], list[Turn]]


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
    admission: Admission | None = None,
) -> tuple[list[Prompt], dict[str, int]]:
    """Let the target write `config.num_prompts` distinct prompts, `batch_size` together.

    This process writes the share of its `rank`; `exchange` gathers the turns of all processes, the same everywhere. `name` is
    the source's, where there are several. Prompts of `config.kinds` must also differ in more than a few words; `admission` may
    refuse further ones.

    Returns:
        The prompts, and how many turns were thrown away, by reason. Turns written beyond those needed are not counted.

    Raises:
        InputError: the template cannot be taken apart, or hardly any turn is usable.
    """
    frame = find_user_frame(target, config.max_prompt_tokens)
    choice = _Choice(config, seed, name, admission)
    write = write_turns if config.kinds is None else write_steered
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
            turns = write(target, frame, mine, tokens, config, batch_size=batch_size, seed=seed, name=name)
            shown = _with_progress(turns, advance, step=num_processes, room=config.num_prompts - before)
            written = exchange(list(shown))
            choice.add(sorted(written, key=lambda turn: turn[0]))
            num_written = wave.stop
            _check_yield(len(chosen), num_written)
    return list(chosen.values()), dict(sorted(dropped.items()))


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
    rows = (
        TokenRow(key=n, prompt_ids=frame.prefix_ids, limit=limit, request=request_number(f"{name}/self-{n}".lstrip("/")))
        for n in numbers
    )
    sampling = SamplingConfig(temperature=config.temperature, top_p=config.top_p)
    source = TargetSource(target, sampling)
    ended = turn_ended(target, frame)
    for row in continue_rows(source, rows, seed=seed, has_ended=ended, batch_size=batch_size, on_step=tokens.write):
        tokens.end(config.max_prompt_tokens, len(row.written))
        text = read_turn(target, frame, row.written)
        yield row.key, None if text is None else [text]


def _with_progress(turns: Iterator[Turn], advance: Callable[[int], None], *, step: int, room: int) -> Iterator[Turn]:
    """Pass turns on, adding `step` to the progress for each usable one (the other processes are as far), `room` at most."""
    for number, text in turns:
        if text is not None and room >= step:
            advance(step)
            room -= step
        yield number, text


class _Choice:
    """The prompts so far, by normalised text, and how many turns were dropped."""

    def __init__(self, config: PromptsConfig, seed: int, name: str, admission: Admission | None) -> None:
        self.config, self.seed, self.name, self.admission = config, seed, name, admission
        self.chosen: dict[str, Prompt] = {}
        self.dropped = Counter[str]()
        self._near = NearDuplicates()

    def add(self, turns: Sequence[Turn]) -> None:
        """Add turns, in the order of their numbers, to the prompts or to the count of those dropped, until there are enough."""
        for number, said in turns:
            if len(self.chosen) == self.config.num_prompts:
                return
            category, kinds = self.config.category or SELF_SEEDED, self.config.kinds
            if kinds is not None:
                category = plan_prompt(kinds, self.seed, self.name, number).kind
            prompt = Prompt(prompt_id=f"self-{number}", category=category, turns=tuple(said or ()))
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
        if self.config.kinds is not None and not self._near.add(prompt.user_text):
            return NEAR_DUPLICATE
        return None if self.admission is None else self.admission.objection(prompt)


def _check_yield(num_chosen: int, num_written: int) -> None:
    if num_written >= MIN_TURNS_JUDGED and num_chosen < MIN_YIELD * num_written:
        raise InputError(
            f"only {num_chosen} of {num_written} self-seeded turns are usable: raise prompts.max_prompt_tokens, lower "
            "prompts.temperature, or give prompts.source file or dataset"
        )
