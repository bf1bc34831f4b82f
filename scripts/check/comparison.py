"""What two runs of an engine on the same prompts say, one plain and one with the draft: tokens, speeds, acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.stats import Interval, paired_ratio_interval, ratio_interval


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine answered to a prompt, and when; without a time of the first tokens it is all one time."""

    prompt_id: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    seconds: float
    first_seconds: float = 0.0
    first_tokens: int = 0
    rounds: int = 0  # of drafts that the target checked
    accepted: int = 0  # drafts


@dataclass(kw_only=True)
class EngineCheck:
    """What an engine says of an export; as `check.json`, of which `eval.report.schema.ServedSection` is what the gate reads."""

    engine: str
    checked: bool
    passed: bool | None = None  # None: not checked
    reason: str | None = None  # why it was not checked, or did not pass
    version: str | None = None
    dtype: str | None = None
    draft_sha256: str | None = None  # of the artifact that the export was made of
    num_speculative_tokens: int | None = None  # a round
    prompts_sha256: str | None = None  # of their file, as in a report; None: general ones
    num_prompts: int = 0
    max_new_tokens: int = 0
    tokens_per_target_step: float | None = None  # by the engine's counts
    per_prompt: dict[str, list[int]] = field(default_factory=dict)  # prompt id -> [committed tokens, rounds], as in a report
    acceptance: list[float] = field(default_factory=list)  # by position: accepted drafts over rounds
    tokens_per_second_plain: float | None = None  # after an answer's first tokens, where these have a time of their own
    tokens_per_second: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None  # bounds at 95 %, over prompts
    speedup_high: float | None = None
    same_answers: int = 0
    sampling: dict[str, Any] | None = None  # above temperature 0, of a second pass; None: not asked for
    sampled_per_prompt: dict[str, list[int]] = field(default_factory=dict)  # of that, as `per_prompt`
    lossless: dict[str, Any] | None = None  # as in a report, of the engine's answers with the draft beside its plain ones

    def compare(self, plain: Sequence[Answer], drafted: Sequence[Answer]) -> None:
        """Fill in what two runs on the same prompts say of speed and acceptance."""
        self.num_prompts = len(plain)
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
        self.per_prompt = counts_of(drafted)
        self.tokens_per_target_step = tau_of(self.per_prompt).point

    def judge(self) -> None:
        """Decide whether it passes: some drafts are accepted, and the answers are the target's as much as plain ones are."""
        failed = (self.lossless or {}).get("failed_checks", [])
        self.reason = None
        if "greedy_autoregressive" in failed:
            self.checked = False
            self.reason = "the engine's plain answers are not the target's choice either, so that they judge no draft"
            return
        if failed:
            wrong = (self.lossless or {})["checks"][failed[0]]
            self.reason = (
                f"answers with the draft are not the target's choice as plain ones are: {wrong['wrong_tokens']} wrong tokens, "
                f"{wrong['wrong_ends']} wrong ends, p = {wrong['p_value']:.2g} for all tokens together"
            )
        elif self.tokens_per_target_step is None or self.tokens_per_target_step <= 1.0:
            self.reason = "no drafted token was accepted: the engine gains nothing from this draft"
        elif self.sampling is not None and (tau_of(self.sampled_per_prompt).point or 0.0) <= 1.0:
            self.reason = f"no drafted token was accepted at temperature {self.sampling['temperature']:g}"
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
        if self.sampling is not None:
            tau = tau_of(self.sampled_per_prompt)
            shown = "" if tau.low is None else f" [{tau.low:.2f}, {tau.high:.2f}]"
            rows.append((f"at temperature {self.sampling['temperature']:g}", "1.00", f"{tau.point or 0.0:.2f}{shown}"))
        rows.append(("same answers", "", f"{self.same_answers} of {self.num_prompts}"))
        head = f"{self.engine} {self.version}, {self.dtype}: {self.num_prompts} prompts, batch 1, greedy, "
        lines = [f"  {name:24}  {plain:>8}  {drafted}" for name, plain, drafted in rows]
        verdict = "  passed" if self.passed else f"  failed: {self.reason}"
        return "\n".join([f"{head}{self.max_new_tokens} tokens at most", *lines, verdict])


def counts_of(answers: Sequence[Answer]) -> dict[str, list[int]]:
    """Return `{prompt id: [committed tokens, rounds]}`, as a report has them."""
    return {each.prompt_id: [each.rounds + each.accepted, each.rounds] for each in answers}


def tau_of(per_prompt: Mapping[str, Sequence[int]]) -> Interval:
    """Return the tokens per target step, with the interval over prompts."""
    return ratio_interval(*zip(*per_prompt.values(), strict=True))


def _decode_seconds(answer: Answer) -> float:
    return answer.seconds - answer.first_seconds
