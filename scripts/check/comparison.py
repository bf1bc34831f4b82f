"""What two runs of an engine on the same prompts say, one plain and one with the draft: tokens, speeds, acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eval.stats import paired_ratio_interval

# How far apart the log-probabilities of two tokens may lie that rounding swaps: logits of some tens are spaced by an eighth in
# bfloat16, and a forward over several tokens sums in another order than one over a single one.
TIE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine answered to a prompt, and when; without a time of the first tokens it is all one time."""

    tokens: Sequence[int]
    seconds: float
    first_seconds: float = 0.0
    first_tokens: int = 0


@dataclass(kw_only=True)
class Difference:
    """Where an answer with the draft first departs from the plain one; a token is None where the answer has ended."""

    prompt: int  # counted from 0
    position: int  # in the answer
    plain: int | None
    drafted: int | None
    # How much likelier the engine finds the drafted token there than the plain one; None: it does not name both
    gap: float | None = None
    is_tie: bool = False

    def weigh(self, gap: float, dtype: str) -> None:
        """Note the gap, and whether rounding explains it; what an engine chose for itself may be bfloat16."""
        self.gap, self.is_tie = gap, abs(gap) <= TIE.get(dtype, TIE["bfloat16"])


@dataclass(kw_only=True)
class EngineCheck:
    """What an engine says of an export; as `check.json`."""

    engine: str
    checked: bool
    passed: bool | None = None  # None: not checked
    reason: str | None = None  # why it was not checked, or did not pass
    version: str | None = None
    dtype: str | None = None
    num_prompts: int = 0
    max_new_tokens: int = 0
    tokens_per_target_step: float | None = None  # by the engine's counts
    acceptance: list[float] = field(default_factory=list)  # by position: accepted drafts over rounds
    tokens_per_second_plain: float | None = None  # after an answer's first tokens, where these have a time of their own
    tokens_per_second: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None  # bounds at 95 %, over prompts
    speedup_high: float | None = None
    same_answers: int = 0
    differences: list[Difference] = field(default_factory=list)

    def compare(self, plain: Sequence[Answer], drafted: Sequence[Answer]) -> None:
        """Fill in what two runs on the same prompts say."""
        self.num_prompts = len(plain)
        self.differences = find_differences(plain, drafted)
        self.same_answers = len(plain) - len(self.differences)
        columns = [
            [value(answer) for answer in side]
            for side in (drafted, plain)
            for value in (lambda answer: float(len(answer.tokens) - answer.first_tokens), _decode_seconds)
        ]
        speedup = paired_ratio_interval(*columns)
        self.speedup, self.speedup_low, self.speedup_high = speedup.point, speedup.low, speedup.high
        self.tokens_per_second, self.tokens_per_second_plain = (
            sum(tokens) / sum(seconds) if sum(seconds) else None for tokens, seconds in (columns[:2], columns[2:])
        )

    def judge(self) -> None:
        """Decide whether it passes: some drafts are accepted, and tokens differ by rounding only."""
        wrong = [each for each in self.differences if not each.is_tie]
        if wrong:
            first = wrong[0]
            self.reason = (
                f"{len(wrong)} of {self.num_prompts} answers with the draft differ from the plain ones by more than rounding, "
                f"first at token {first.position} of prompt {first.prompt} ({first.drafted} in place of {first.plain})"
            )
        elif self.tokens_per_target_step is None or self.tokens_per_target_step <= 1.0:
            self.reason = "no drafted token was accepted: the engine gains nothing from this draft"
        self.passed = self.reason is None

    def table(self) -> str:
        """Return the result as a few lines."""
        if not self.checked:
            return f"{self.engine}: not checked; {self.reason}"
        if not self.num_prompts:
            return f"{self.engine} {self.version}: failed; {self.reason}"
        rows = [("", "plain", "with the draft")]
        if self.tokens_per_second is not None and self.tokens_per_second_plain is not None and self.speedup is not None:
            bounds = "" if self.speedup_low is None else f" [{self.speedup_low:.2f}, {self.speedup_high:.2f}]"
            faster = f"{self.tokens_per_second:.1f}  ({self.speedup:.2f} times{bounds})"
            rows.append(("tokens/s", f"{self.tokens_per_second_plain:.1f}", faster))
        if self.tokens_per_target_step is not None:
            rows.append(("tokens per target step", "1.00", f"{self.tokens_per_target_step:.2f}"))
        if self.acceptance:
            rows.append(("accepted by position", "", " ".join(f"{share:.2f}" for share in self.acceptance)))
        ties = sum(each.is_tie for each in self.differences)
        said = f" (in {ties} the first other token is as good within {self.dtype}'s rounding)" if ties else ""
        rows.append(("same answers", "", f"{self.same_answers} of {self.num_prompts}{said}"))
        head = f"{self.engine} {self.version}, {self.dtype}: {self.num_prompts} prompts, batch 1, greedy, "
        lines = [f"  {name:24}  {plain:>8}  {drafted}" for name, plain, drafted in rows]
        verdict = "  passed" if self.passed else f"  failed: {self.reason}"
        return "\n".join([f"{head}{self.max_new_tokens} tokens at most", *lines, verdict])


def find_differences(plain: Sequence[Answer], drafted: Sequence[Answer]) -> list[Difference]:
    """Return where answers first differ, one for each prompt whose answers are not the same."""
    found = []
    for prompt, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        pairs = [*zip(one.tokens, other.tokens, strict=False)]
        position = next((place for place, (mine, its) in enumerate(pairs) if mine != its), len(pairs))
        if list(one.tokens) != list(other.tokens):
            mine, its = (dict(enumerate(each.tokens)).get(position) for each in (one, other))
            found.append(Difference(prompt=prompt, position=position, plain=mine, drafted=its))
    return found


def _decode_seconds(answer: Answer) -> float:
    return answer.seconds - answer.first_seconds
