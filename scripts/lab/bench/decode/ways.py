"""The ways of decoding that the decode benchmark's table compares: verification rule x shape of the proposal x proposer.

Every draft drafts chains, and trees where it can. Left out: rules for trees other than the draft LM's, whose tables would only
repeat its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.schema.decoding import DecodeConfig, ParticleSampling, TypicalAcceptance, Verification
from configs.schema.drafting import Candidates, DynamicTree, Path, StaticTree
from heads.artifact import Draft
from heads.families.registry import drafts_in_one_forward
from heads.frozen.hidden_states import num_blocks
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup, SuffixLookup
from heads.proposers.merged import MergedDrafts
from heads.proposers.protocol import Proposer, TreeProposer
from heads.proposers.self_speculation import early_exit
from scripts.lab.bench.decode.setup import DRAFT_LM, DecodeSetup

MERGED = "hydra"  # whose chain is merged with suffix lookup's
LONGEST_CHAIN = 8  # that the stopping rule may draft
BRANCHING = [3, 2, 1]  # children by depth of the static trees
CHAIN_RULES: tuple[Verification, ...] = ("token", "block", "match")
TREE_CANDIDATES: tuple[Candidates, ...] = ("without_replacement", "with_replacement", "k_seq")
LOSSY: tuple[TypicalAcceptance | ParticleSampling, ...] = (TypicalAcceptance(kind="typical"), ParticleSampling(kind="smc"))
# Ratios of tokens per target step that the results file holds: of the first way to the second.
COMPARED = {
    "block_vs_token_verification": (f"block, chain, {DRAFT_LM}", f"token, chain, {DRAFT_LM}"),
    "static_tree_vs_chain_at_equal_rows": (f"greedy, static tree, {DRAFT_LM}", f"greedy, long chain, {DRAFT_LM}"),
    "dynamic_tree_vs_chain_at_equal_rows": (f"greedy, dynamic tree, {DRAFT_LM}", f"greedy, long chain, {DRAFT_LM}"),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """A row of the table."""

    rule: str
    shape: str
    proposer: str
    settings: DecodeConfig
    draft: Proposer
    fastest: bool = True  # by the target's fastest forward; else by transformers' own

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.shape}, {self.proposer}"


def list_ways(setup: DecodeSetup) -> list[Way]:
    settings = setup.settings(0.0)
    ways = chain_ways(setup.drafts, settings)
    for name, loaded in setup.drafts.items():
        draft = loaded.proposer
        if isinstance(draft, TreeProposer):
            paths = StaticTree(kind="static", branching=BRANCHING).all_paths()
            ways += tree_ways(name, draft, settings, paths)
            if name == DRAFT_LM:
                ways.append(_greedy("long chain", name, draft, settings, num_speculative_tokens=len(paths)))
                ways += sampled_ways(draft, setup.settings(1.0), paths)
    return [*ways, *free_ways(setup, settings), *merged_ways(setup, settings)]


def chain_ways(drafts: Mapping[str, Draft], settings: DecodeConfig) -> list[Way]:
    """Return a greedy chain, or a block drafted in one forward, for every draft; a head's is as long as its artifact says."""
    ways = []
    for name, draft in drafts.items():
        own = draft.metadata
        length = settings.num_speculative_tokens if name == DRAFT_LM else own.num_speculative_tokens
        shape = "one-pass block" if drafts_in_one_forward(own.kind) else "chain"
        ways.append(_greedy(shape, name, draft.proposer, settings, num_speculative_tokens=length))
    return ways


def tree_ways(name: str, draft: TreeProposer, settings: DecodeConfig, paths: Sequence[Path]) -> list[Way]:
    """Return greedy decoding with one draft's static tree, and with one grown anew each round, of as many tokens."""
    static = StaticTree(kind="static", paths=[list(path) for path in paths])
    grown = DynamicTree(kind="dynamic", num_nodes=len(paths), width=min(4, len(paths)))
    depth = max(static.depth, settings.num_speculative_tokens)
    return [
        _greedy(f"{tree.kind} tree", name, draft, settings, tree=tree, num_speculative_tokens=depth) for tree in (static, grown)
    ]


def sampled_ways(draft: Proposer, settings: DecodeConfig, paths: Sequence[Path]) -> list[Way]:
    """Return sampling with the draft LM by every rule, in chains and in its tree, and by the modes that are lossy."""
    changes: list[dict[str, Any]] = [{"verification": rule} for rule in CHAIN_RULES]
    for candidates in TREE_CANDIDATES:
        tree = StaticTree(kind="static", paths=[list(path) for path in paths], candidates=candidates)
        changes.append({"tree": tree, "num_speculative_tokens": tree.depth})
    changes += [{"lossy": lossy} for lossy in LOSSY]
    ways = [settings.model_copy(update=change) for change in changes]
    shapes = ["chain" if each.tree is None else "static tree" for each in ways]
    return [
        Way(rule=each.rule, shape=shape, proposer=DRAFT_LM, settings=each, draft=draft)
        for each, shape in zip(ways, shapes, strict=True)
    ]


def free_ways(setup: DecodeSetup, settings: DecodeConfig) -> list[Way]:
    """Return greedy chains that no training made: copied from the text or from earlier answers, or by the target itself."""
    target = setup.target
    own = DraftLM(early_exit(target.model, max(1, num_blocks(target.model) // 4)), target.vocab_size)
    return [
        _greedy("chain", "prompt_lookup", PromptLookup(target.device), settings),
        _greedy("chain", "suffix_lookup", _suffix_lookup(setup), settings),
        replace(_greedy("chain", "self_speculation", own, settings), fastest=False),
    ]


def merged_ways(setup: DecodeSetup, settings: DecodeConfig) -> list[Way]:
    """Return a tree of two chains, each by a proposer of its own: a head where it is there, and suffix lookup."""
    head = MERGED if MERGED in setup.drafts else DRAFT_LM
    chain = StaticTree(kind="static", branching=[1] * settings.num_speculative_tokens)
    merged = MergedDrafts([setup.drafts[head].proposer, _suffix_lookup(setup)], setup.target.device)
    return [_greedy("two chains", f"{head} + suffix_lookup", merged, settings, tree=chain)]


def _suffix_lookup(setup: DecodeSetup) -> Proposer:
    return SuffixLookup(setup.target.device, setup.past_answers)


def _greedy(shape: str, proposer: str, draft: Proposer, settings: DecodeConfig, **changes: Any) -> Way:
    return Way(rule="greedy", shape=shape, proposer=proposer, settings=settings.model_copy(update=changes), draft=draft)
