"""Self-seeded prompts: what the target writes where a user would, and the first usable ones of it by number.

Turn n is a function of (seed, n): what it is led to (`distill.generation.steering`), and the random numbers by which the target
writes first the text that it is about, for kinds with one, and then the rest of the turn. So neither the batch size nor the
number of processes favours short turns, nor changes which turns are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from configs.runtime.errors import InputError
from configs.runtime.terminal import Tokens, progress
from configs.schema.data import PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import folded_text
from distill.generation.continuation import Request, TargetSource, continue_requests
from distill.generation.prompts import DUPLICATE, Prompt
from distill.generation.split import NearDuplicates
from distill.generation.steering import Plan, find_user_frame, plan_prompt, read_turn
from heads.frozen.loading import Target
from heads.sampling.counter_rng import request_number

MIN_CHARACTERS = 8
MIN_TEXT = 80  # characters of a text that a prompt is about
MIN_YIELD = 0.05
MIN_TURNS_JUDGED = 256  # the yield is not judged on fewer
LONGEST_AROUND = 256  # tokens of a longest prompt's instructions and template, about

UNUSABLE = "self_seeded_turn_unusable"  # not ended in time, with a special token inside, or filling the context
TOO_SHORT = "self_seeded_turn_too_short"
NEAR_DUPLICATE = "near_duplicate"

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
    tokens, near = Tokens(), NearDuplicates()
    writer = Writer(target, config, tokens, batch_size=batch_size, seed=seed)
    chosen: dict[str, Prompt] = {}  # by normalised text
    dropped = Counter[str]()
    num_written = 0

    def objection(text: str | None) -> str | None:
        if text is None:
            return UNUSABLE
        if len(text) < MIN_CHARACTERS:
            return TOO_SHORT
        if folded_text(text) in chosen:
            return DUPLICATE
        return NEAR_DUPLICATE if config.kinds is not None and not near.add(text) else None

    with progress("self-seeded prompts", config.num_prompts, "prompts", tokens=tokens) as advance:
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
                kind = plan_prompt(config, seed, number).kind
                chosen[folded_text(text)] = Prompt(prompt_id=f"self-{number}", category=kind, turns=(text,))
            advance(len(chosen) - before)
            if num_written >= MIN_TURNS_JUDGED and len(chosen) < MIN_YIELD * num_written:
                raise InputError(
                    f"only {len(chosen)} of {num_written} self-seeded turns are usable: raise prompts.max_prompt_tokens, lower "
                    "prompts.temperature, or give prompts.source file or dataset"
                )
    return list(chosen.values()), dict(sorted(dropped.items()))


class Writer:
    """Lets the target write prompts by number."""

    def __init__(self, target: Target, config: PromptsConfig, tokens: Tokens, *, batch_size: int, seed: int) -> None:
        self.target, self.config, self.tokens = target, config, tokens
        self.batch_size, self.seed = batch_size, seed
        self.frame = find_user_frame(target, config.max_prompt_tokens)
        self._left: dict[int, int] = {}  # by prompt, the most tokens that its texts may still have
        self._written: dict[int, str | None] = {}

    def write(self, numbers: Sequence[int]) -> list[Turn]:
        """Return what the user says in each prompt, None where it is unusable."""
        plans = {number: plan_prompt(self.config, self.seed, number) for number in numbers}
        self._left = {number: plan.text_limit + plan.goes_on * self.config.max_prompt_tokens for number, plan in plans.items()}
        self._written = {}
        self.tokens.expect(sum(self._left.values()))
        longest = max(self._left.values(), default=0) + LONGEST_AROUND
        sampling = SamplingConfig(temperature=self.config.temperature, top_p=self.config.top_p)
        source = TargetSource(self.target, sampling, capacity=min(self.target.max_positions, longest))
        asked = (request for number, plan in plans.items() if (request := self._first(number, plan)) is not None)
        continue_requests(source, asked, seed=self.seed, batch_size=self.batch_size, tokens=self.tokens)
        return sorted(self._written.items())

    def _first(self, number: int, plan: Plan) -> Request | None:
        """Ask for the text that a prompt is about, or for its turn where it is about none."""
        if plan.text_request is None:
            return self._turn(number, plan, plan.opening)
        ids = self.target.encode_chat([{"role": "user", "content": plan.text_request}])
        return self._request(number, ids, plan.text_limit, "text", partial(self._take_text, number, plan), self._ends_answer)

    def _take_text(self, number: int, plan: Plan, written: list[int]) -> Request | None:
        """Ask for a turn about a text, up to its last whole sentence."""
        text = str(self.target.tokenizer.decode(written, skip_special_tokens=True))
        if written[-1] not in self.target.eos_token_ids:
            text = text[: 1 + max(text.rfind(mark) for mark in ".!?\n。")]
        if len(text.strip()) < MIN_TEXT:
            return self._finish(number, None)
        opening = plan.around(text.strip())
        return self._turn(number, plan, opening) if plan.goes_on else self._finish(number, opening)

    def _turn(self, number: int, plan: Plan, opening: str) -> Request | None:
        """Ask for the user's turn that begins with these words, which the target ends after some of its own."""
        begun = self.target.tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
        done = partial(self._take_turn, number, plan, opening, begun)
        return self._request(
            number, [*self.frame.prefix_ids, *begun], self.config.max_prompt_tokens, "turn-0", done, self._ends_turn
        )

    def _take_turn(self, number: int, plan: Plan, opening: str, begun: list[int], written: list[int]) -> Request | None:
        text = read_turn(self.target, self.frame, [*begun, *written])
        if text is not None and len(text) <= len(opening.strip()):
            text = None
        if text is not None and plan.text_request is not None and text.startswith(opening):
            # A question, without the answer that a target may add to it.
            text = f"{opening} {text.removeprefix(opening).strip().partition(chr(10))[0]}"
        return self._finish(number, text)

    def _finish(self, number: int, text: str | None) -> Request | None:
        if text is not None and len(self.target.encode_chat([{"role": "user", "content": text}])) >= self.target.max_positions:
            text = None
        self.tokens.end(self._left.pop(number), 0)
        self._written[number] = text
        return None  # nothing more is asked

    def _request(
        self,
        number: int,
        ids: Sequence[int],
        limit: int,
        stage: str,
        on_done: Callable[[list[int]], Request | None],
        has_ended: Callable[[Request], bool],
    ) -> Request | None:
        if len(ids) >= self.target.max_positions:
            return self._finish(number, None)
        self._left[number] -= limit
        name = f"self-{number}" if self.config.kinds is None else f"{number}/{stage}"
        limit = min(self.target.max_positions, len(ids) + limit)
        return Request(prompt_ids=ids, limit=limit, number=request_number(name), has_ended=has_ended, on_done=on_done)

    def _ends_answer(self, request: Request) -> bool:
        return request.tokens[-1] in self.target.eos_token_ids

    def _ends_turn(self, request: Request) -> bool:
        if request.tokens[-1] in self.frame.end_ids or self._ends_answer(request):
            return True
        return not self.frame.end_ids and self.frame.end_text in self.target.tokenizer.decode(request.written)
