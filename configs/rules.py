"""Which verification rule a way of decoding comes to, how its drafts are chosen, and which settings contradict each other.

One place decides both, because a rule is lossless only for drafts chosen the way it expects. `DecodeConfig` asks here; the
rules themselves are in `eval.judging` and what it imports. Imports no torch.
"""

from __future__ import annotations

from typing import Literal, Protocol

from configs.lossy import ParticleSampling, TypicalAcceptance
from configs.stopping import ConfidenceStopping, CostStopping, EntropyStopping
from configs.trees import Candidates, DynamicTree, StaticTree

Rule = Literal["greedy", "match", "token", "block", "without_replacement", "with_replacement", "k_seq", "typical", "smc"]
Verification = Literal["token", "block", "match"]


class Decoding(Protocol):
    """What is read of a `configs.decoding.DecodeConfig`."""

    @property
    def temperature(self) -> float: ...
    @property
    def verification(self) -> Verification | None: ...
    @property
    def tree(self) -> StaticTree | DynamicTree | None: ...
    @property
    def lossy(self) -> TypicalAcceptance | ParticleSampling | None: ...
    @property
    def stopping(self) -> ConfidenceStopping | EntropyStopping | CostStopping | None: ...


def rule_of(config: Decoding) -> Rule:
    """Return the rule in force: of a chain its verification, of a tree that is drawn the rule for its kind of candidates."""
    if config.temperature == 0:
        return "greedy"
    if config.lossy is not None:
        return config.lossy.kind
    if config.tree is None:
        return config.verification or "block"
    candidates = candidates_of(config.tree)
    return candidates if candidates != "top_k" and draws_drafts(config) else "match"


def draws_drafts(config: Decoding) -> bool:
    """Say whether drafts are drawn from the draft's law; else they are its likeliest tokens."""
    if config.temperature == 0 or (config.tree is not None and candidates_of(config.tree) == "top_k"):
        return False
    if isinstance(config.lossy, TypicalAcceptance):
        return config.lossy.drafts == "drawn"
    return config.verification != "match"


def candidates_of(tree: StaticTree | DynamicTree) -> Candidates:
    """Return how siblings are chosen where drafts are drawn. A dynamic tree leaves out drafts for their probability."""
    if isinstance(tree, DynamicTree):
        return "top_k"
    return tree.candidates or "without_replacement"


def check_tree_rule(config: Decoding) -> None:
    """Refuse a verification that does not go with the tree.

    Raises:
        ValueError: what contradicts what, and what to change.
    """
    if config.tree is None or config.temperature == 0:
        return
    if config.verification == "block":
        raise ValueError("verification block judges chains only: set it to null, token or match, or tree to null")
    if config.verification == "token" and isinstance(config.tree, DynamicTree):
        raise ValueError(
            "a dynamic tree leaves out drafts for their probability, so they cannot be drawn at a temperature above 0: "
            "set verification to match, or tree to a static one"
        )
    candidates = config.tree.candidates if isinstance(config.tree, StaticTree) else None
    if config.verification == "match" and candidates not in (None, "top_k"):
        raise ValueError(
            f"tree.candidates {candidates} are drawn, and verification match judges the draft's likeliest: set one of the two "
            "to null"
        )


def check_lossy(config: Decoding) -> None:
    """Refuse a lossy mode that has nothing to relax, or that does not go with the other settings.

    Raises:
        ValueError: what contradicts what, and what to change.
    """
    lossy = config.lossy
    if lossy is None:
        return
    if config.temperature == 0:
        raise ValueError("lossy has nothing to relax at temperature 0: raise temperature, or set lossy to null")
    if config.verification is not None:
        raise ValueError(
            f"lossy {lossy.kind} takes the place of verification {config.verification}: set one of the two to null"
        )
    if isinstance(lossy, ParticleSampling):
        if config.tree is not None or config.stopping is not None:
            raise ValueError("lossy smc drafts chains of one length: set tree and stopping to null")
        return
    if isinstance(config.tree, DynamicTree) and lossy.drafts == "drawn":
        raise ValueError("a dynamic tree takes the likeliest drafts: set lossy.drafts to likeliest, or tree to a static one")
    candidates = config.tree.candidates if isinstance(config.tree, StaticTree) else None
    if candidates is not None and (candidates == "top_k") != (lossy.drafts == "likeliest"):
        raise ValueError(
            f"tree.candidates {candidates} and lossy.drafts {lossy.drafts} contradict each other: set tree.candidates to null"
        )
