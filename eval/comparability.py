"""What two reports were made with otherwise: the reasons why their numbers may not be put side by side.

A token count means something for one target, one set of prompts and one way of decoding; seconds also for one machine. The
gate refuses a baseline report over these differences (`eval.gating`), and `eval.comparison` lists them beside the numbers.
Seeds are left out: they choose among samples of the same law. Versions are left out too: comparing them is often the purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eval.wording import short

Aspect = Literal["target", "suite", "num_speculative_tokens", "decode", "machine"]
IDENTITY = {"weights_sha256": "target weights", "tokenizer_sha256": "tokenizer", "chat_template_sha256": "chat template"}
MACHINE = ("cpu", "cores", "device", "threads", "processes")
SAME_LAW = ("seed", "warmup_prompts", "num_speculative_tokens")  # the last is an aspect of its own
NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that two reports were made with otherwise."""

    aspect: Aspect
    what: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.what} ({self.ours} here, {self.theirs} there)"


def differences(report: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Return what `report` (ours, here) and `other` (theirs, there) differ in, the gravest first; both checked reports."""
    return [
        *_target(report["target"], other["target"]),
        *_suite(report["prompts"], other["prompts"]),
        *_settings(report["decode"], other["decode"]),
        *_machine(report["hardware"], other["hardware"]),
    ]


def _target(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    def name(target: Mapping[str, Any], key: str) -> str:
        return f"{target['name']}, {short(target[key])}" if target.get(key) else NOT_RECORDED

    return [
        Difference(aspect="target", what=what, ours=name(ours, key), theirs=name(theirs, key))
        for key, what in IDENTITY.items()
        if ours.get(key) != theirs.get(key)
    ]


def _suite(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """Compare the prompts: the same file by its hash, and the same ones of it, in any order."""
    if ours["sha256"] != theirs["sha256"]:
        names = [f"{prompts['source']}, {short(prompts['sha256'])}" for prompts in (ours, theirs)]
        return [Difference(aspect="suite", what="prompts", ours=names[0], theirs=names[1])]
    for key, what in (("format", "format of the suite"), ("num_turns", "turns asked")):
        if None not in (ours.get(key), theirs.get(key)) and ours[key] != theirs[key]:  # reports of before it was kept hold none
            return [Difference(aspect="suite", what=what, ours=str(ours[key]), theirs=str(theirs[key]))]
    only_ours, only_theirs = set(ours["ids"]) - set(theirs["ids"]), set(theirs["ids"]) - set(ours["ids"])
    if not only_ours and not only_theirs:
        return []
    counts = [f"{len(prompts['ids'])} of {prompts['source']}" for prompts in (ours, theirs)]
    return [
        Difference(
            aspect="suite",
            what="prompts",
            ours=f"{counts[0]}, {len(only_ours)} of them only",
            theirs=f"{counts[1]}, {len(only_theirs)} of them only",
        )
    ]


def _settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """Compare how was decoded; a setting that one report does not name is taken for off."""
    gammas = [str(decode["num_speculative_tokens"]) for decode in (ours, theirs)]
    found: list[Difference] = []
    if gammas[0] != gammas[1]:
        aspect: Aspect = "num_speculative_tokens"
        found.append(Difference(aspect=aspect, what=aspect, ours=gammas[0], theirs=gammas[1]))
    greedy = ours.get("temperature") == theirs.get("temperature") == 0  # every rule is the same one then
    ignored = (*SAME_LAW, "verification") if greedy else SAME_LAW
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if key not in ignored]
    return found + [
        Difference(aspect="decode", what=f"decode.{key}", ours=str(ours.get(key)), theirs=str(theirs.get(key)))
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]


def _machine(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    def described(hardware: Mapping[str, Any]) -> dict[str, Any]:
        return {**{key: hardware.get(key) for key in MACHINE}, "gpus": [gpu.get("name") for gpu in hardware.get("gpus") or []]}

    one, another = described(ours), described(theirs)
    return [
        Difference(aspect="machine", what=f"hardware {key}", ours=str(one[key]), theirs=str(another[key]))
        for key in one
        if one[key] != another[key]
    ]
