"""The chosen tree is the best there is, found by trying them all; the profile counts what was tried and no more."""

import numpy as np
import pytest

from configs.schema.drafting import StaticTree
from eval.cost.tree_choice import fastest_tree, measure_profile
from eval.decoder.records import Round
from tests.support.trees import expected_tokens

FALLING = np.array([[0.6, 0.25, 0.1], [0.5, 0.3, 0.05], [0.45, 0.2, 0.15]])
RISING = np.array([[0.1, 0.25, 0.6], [0.5, 0.05, 0.3]])  # by chance
WITH_GAPS = np.array([[0.5, 0.0], [0.9, 0.0], [0.0, 0.0]])


def every_tree(depth, num_ranks, num_nodes):
    """Return all trees of exactly so many tokens whose siblings leave out no rank, as sets of paths."""
    trees = {frozenset()}
    for _ in range(num_nodes):
        grown = set()
        for tree in trees:
            for parent in [(), *tree]:
                rank = sum(path[:-1] == parent for path in tree)
                if len(parent) < depth and rank < num_ranks:
                    grown.add(tree | {(*parent, rank)})
        trees = grown
    return trees


@pytest.mark.parametrize("profile", [FALLING, RISING, WITH_GAPS], ids=["falling", "rising", "with_gaps"])
@pytest.mark.parametrize("step", [0.0, 0.15])
def test_the_fastest_tree_has_the_most_tokens_a_second_of_all_trees(profile, step):
    target_seconds = [1.0, 1.02, 1.1, 1.3, 2.0, 2.8]
    chosen = fastest_tree(profile, target_seconds, step)
    profile = -np.sort(-profile, axis=1)

    def rate(tree):
        depth = max(map(len, tree))
        return expected_tokens(list(tree), profile) / (target_seconds[len(tree)] + depth * step)

    best = max(rate(tree) for size in range(1, 6) for tree in every_tree(*profile.shape, size))
    assert chosen.tokens_per_round / chosen.seconds_per_round == pytest.approx(best, abs=1e-12)
    assert rate(chosen.paths) == pytest.approx(best, abs=1e-12)
    assert StaticTree(kind="static", paths=[list(path) for path in chosen.paths]).all_paths() == chosen.paths


def test_the_profile_counts_children_that_were_tried_only(make_generation):
    paths = [(0,), (1,), (0, 0), (0, 1), (0, 1, 0)]

    def round_(ranks, num_drafted, *, cut=False):
        tokens = tuple(range(10, 10 + num_drafted))
        committed = tokens[: len(ranks)] + (() if cut else (99,))
        return Round(drafted=tokens, num_accepted=len(ranks), committed=committed, ranks=ranks, num_nodes=5)

    rounds = [
        round_((), 3),
        round_((1,), 1),  # the second child has no children: nothing was tried below it
        round_((0,), 3),
        round_((0, 1), 3),
        round_((0, 1, 0), 3),
        round_((0,), 3, cut=True),  # the text ended there
        round_((0,), 1),  # no room for more
        Round(drafted=(), num_accepted=0, committed=(99,)),
    ]
    profile = measure_profile([make_generation(rounds)], paths)
    np.testing.assert_allclose(profile, [[5 / 7, 1 / 7], [0.0, 2 / 3], [1 / 2, 0.0]])
    with pytest.raises(ValueError, match="does not hold"):
        measure_profile([make_generation([round_((1, 0), 2)])], paths)
