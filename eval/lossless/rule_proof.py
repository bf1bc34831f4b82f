"""The proof by enumeration that the rule in use keeps the target's distribution, for the shape in use.

It runs the functions that the decoder runs on toys (`eval.lossless.enumeration` for chains, `eval.lossless.tree_enumeration`
for trees): a chain of up to three drafts, a tree's first few nodes. Matching needs no proof: it puts the target's own draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from configs.schema.decoding import DecodeConfig
from eval.decoder.tree_rules import CANDIDATE_RULES, verify_tree
from eval.decoder.verifier import RULES
from eval.lossless.enumeration import EnumerationResult, enumerate_rule, random_toy
from eval.lossless.tree_enumeration import distribution_of_draws, enumerate_tree
from heads.sampling.sibling_draws import DRAWS
from heads.sampling.token_tree import Tree, tree_from

TOLERANCE = 1e-12
NUM_TOYS = 3
MOST_DRAFTS = 3  # of a chain
MOST_NODES = 5  # of a tree: every assignment of tokens is enumerated


def check_rule(config: DecodeConfig) -> dict[str, Any]:
    """Return the proof of the rule in use for the shape in use, at a temperature above 0; a lossy mode has none.

    Returns:
        `outcome` pass or fail, the `rule`, the `shape`, the parents (`heads.sampling.token_tree`) of what was enumerated, and
        the largest total variation from the target's distribution over the toys; no toys for matching.
    """
    parents = _enumerated(config)
    distances = [_enumerate(config.rule, parents, seed).total_variation for seed in range(NUM_TOYS if parents else 0)]
    worst = max(distances, default=0.0)
    return {
        "outcome": "pass" if worst <= TOLERANCE else "fail",
        "rule": config.rule,
        "shape": "chain" if config.tree is None else f"{config.tree.kind}_tree",
        "enumerated_parents": parents,
        "toys": len(distances),
        "max_total_variation": worst,
    }


def small_part(tree: Tree, size: int) -> Tree:
    """Return a tree's `size` foremost nodes, as wide and as deep as those allow.

    Foremost is what has the least sum of ranks, counted from 1, on the way down to it, so that no node comes before its parent
    or an elder sibling; of equals the one less deep.
    """
    paths: list[tuple[int, ...]] = [()]
    for draft, parent in enumerate(tree.parents):
        paths.append((*paths[parent], tree.parents[:draft].count(parent)))
    foremost = sorted(paths[1:], key=lambda path: (sum(path) + len(path), len(path), path))
    return Tree.of(foremost[:size], tree.candidates)


def _enumerated(config: DecodeConfig) -> list[int]:
    """Return the parents of what is enumerated; none for a rule that needs no proof, or where nothing is drafted."""
    if config.rule in RULES:
        return list(range(min(config.num_speculative_tokens, MOST_DRAFTS)))
    if config.rule not in CANDIDATE_RULES or config.tree is None:
        return []
    tree = tree_from(config.tree, config.num_speculative_tokens)
    return list(small_part(tree, MOST_NODES).parents) if isinstance(tree, Tree) else []


def _enumerate(rule: str, parents: Sequence[int], seed: int) -> EnumerationResult:
    """Enumerate a rule on one toy; a rule for chains on one whose draft looks its tokens up, too, and return the worse."""
    if rule in RULES:
        toys = [random_toy(seed, num_drafts=len(parents), looked_up=looked_up) for looked_up in (False, True)]
        return max((enumerate_rule(RULES[rule], toy) for toy in toys), key=lambda result: result.total_variation)
    depth = Tree(tuple(parents)).depth
    verify = partial(verify_tree, rule=CANDIDATE_RULES[rule])
    return enumerate_tree(verify, random_toy(seed, num_drafts=depth), [-1, *parents], distribution_of_draws(DRAWS[rule]))
