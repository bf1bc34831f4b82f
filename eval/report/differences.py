"""What two reports differ in: target, prompts, decoding settings, machine. Torch-free.

A token count means something for one target, one set of prompts and one way of decoding; seconds also for one machine, one
version of torch and transformers, and one dtype. Seeds are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eval.report.schema import DecodeSection, DraftSection, PromptsSection, Report, TargetSection
from eval.report.text import short

Aspect = Literal["target", "suite", "num_speculative_tokens", "decode", "machine"]
IDENTITY = {"weights_sha256": "target weights", "tokenizer_sha256": "tokenizer", "chat_template_sha256": "chat template"}
MACHINE = ("cpu", "cores", "device", "threads", "processes")
SOFTWARE = ("torch", "transformers")  # whose versions decide the seconds too
SAME_DISTRIBUTION = ("seed", "warmup_prompts", "num_speculative_tokens")  # the last is an aspect of its own
NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that two reports differ in."""

    aspect: Aspect
    what: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.what} ({self.ours} here, {self.theirs} there)"


def differences(report: Report, other: Report) -> list[Difference]:
    """Return what `report` (ours, here) and `other` (theirs, there) differ in, the most important first."""
    return [
        *_target(report.target, other.target),
        *prompt_differences(report.prompts, other.prompts),
        *_settings(report.decode, other.decode),
        *_lookups(report.draft, other.draft),
        *_machine(report, other),
    ]


def _target(ours: TargetSection, theirs: TargetSection) -> list[Difference]:
    def name(target: TargetSection, key: str) -> str:
        digest = getattr(target, key)
        return f"{target.name}, {short(digest)}" if digest else NOT_RECORDED

    return [
        Difference(aspect="target", what=what, ours=name(ours, key), theirs=name(theirs, key))
        for key, what in IDENTITY.items()
        if getattr(ours, key) != getattr(theirs, key)
    ]


def prompt_differences(ours: PromptsSection, theirs: PromptsSection) -> list[Difference]:
    """Compare the prompts of a suite: the same file by its hash, and the same ones of it, in any order."""
    if ours.sha256 != theirs.sha256:
        names = [f"{prompts.source}, {short(prompts.sha256)}" for prompts in (ours, theirs)]
        return [Difference(aspect="suite", what="prompts", ours=names[0], theirs=names[1])]
    for what, one, other in (
        ("format of the suite", ours.format, theirs.format),
        ("turns asked", ours.num_turns, theirs.num_turns),
    ):
        if None not in (one, other) and one != other:  # reports of an earlier version hold neither
            return [Difference(aspect="suite", what=what, ours=str(one), theirs=str(other))]
    only_ours, only_theirs = set(ours.ids) - set(theirs.ids), set(theirs.ids) - set(ours.ids)
    if not only_ours and not only_theirs:
        return []
    return [
        Difference(
            aspect="suite",
            what="prompts",
            ours=f"{len(ours.ids)} of {ours.source}, {len(only_ours)} of them only",
            theirs=f"{len(theirs.ids)} of {theirs.source}, {len(only_theirs)} of them only",
        )
    ]


def _settings(ours: DecodeSection, theirs: DecodeSection) -> list[Difference]:
    """Compare the decoding settings; one that a report does not name counts as off."""
    found: list[Difference] = []
    gammas = (ours.num_speculative_tokens, theirs.num_speculative_tokens)
    if gammas[0] != gammas[1]:
        aspect: Aspect = "num_speculative_tokens"
        found.append(Difference(aspect=aspect, what=aspect, ours=str(gammas[0]), theirs=str(gammas[1])))
    greedy = ours.temperature == theirs.temperature == 0  # every rule is the same one then
    ignored = (*SAME_DISTRIBUTION, "verification") if greedy else SAME_DISTRIBUTION
    one, other = (decode.model_dump(exclude_unset=True) for decode in (ours, theirs))
    return found + [
        Difference(aspect="decode", what=f"decode.{key}", ours=str(one.get(key)), theirs=str(other.get(key)))
        for key in dict.fromkeys([*one, *other])
        if key not in ignored and one.get(key) != other.get(key)
    ]


def _lookups(ours: DraftSection, theirs: DraftSection) -> list[Difference]:
    """Compare the lookups that drafted together with the draft: their tokens are counted with its own."""
    named = [", ".join(each.lookups) or "none" for each in (ours, theirs)]
    if named[0] == named[1]:
        return []
    return [Difference(aspect="decode", what="lookups with the draft", ours=named[0], theirs=named[1])]


def _machine(ours: Report, theirs: Report) -> list[Difference]:
    def described(report: Report) -> dict[str, Any]:
        hardware, versions = report.hardware, report.versions
        gpus = [gpu.get("name") for gpu in hardware.get("gpus") or []]
        return {
            **{f"hardware {key}": hardware.get(key) for key in MACHINE},
            "hardware gpus": gpus,
            **{f"version of {name}": versions.get(name) for name in SOFTWARE},
        }

    one, another = described(ours), described(theirs)
    return [
        Difference(aspect="machine", what=what, ours=str(one[what]), theirs=str(another[what]))
        for what in one
        if one[what] != another[what]
    ]
