"""Trees are what their settings say, and what is no tree is refused; which tokens see each other is tested with models."""

import pytest
from pydantic import TypeAdapter, ValidationError

from configs.schema.decoding import StaticTree, TreeConfig
from heads.sampling.token_tree import DynamicTreeSpec, Tree, tree_from


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"kind": "static"}, "exactly one of paths and branching"),
        ({"kind": "static", "paths": []}, "at least one token"),
        ({"kind": "static", "paths": [[0], [0]]}, "each token once"),
        ({"kind": "static", "paths": [[0], [1, 0]]}, r"\[1, 0\] is there, its parent \[1\] is not"),
        ({"kind": "static", "paths": [[0], [0, 1]]}, r"\[0, 1\] is there, \[0, 0\] is not"),
        ({"kind": "static", "branching": []}, "at least one depth"),
    ],
)
def test_settings_that_are_no_tree_are_refused_with_the_reason(settings_, reason):
    with pytest.raises(ValidationError, match=reason):
        TypeAdapter(TreeConfig).validate_python(settings_)


def test_paths_and_branching_say_the_same_tree():
    by_paths = StaticTree(kind="static", paths=[[1], [0, 0], [0], [1, 0], [1, 1], [0, 1]])
    by_branching = StaticTree(kind="static", branching=[2, 2])
    assert tree_from(by_paths, 2) == tree_from(by_branching, 2) == Tree((0, 0, 1, 1, 2, 2))
    assert by_paths.depth == by_branching.depth == 2


def test_a_tree_knows_its_measures_and_can_be_cut():
    tree = Tree((0, 0, 0, 1, 1, 3, 4))
    assert (tree.num_nodes, tree.depth, tree.width, tree.depths) == (7, 3, 3, (0, 1, 1, 1, 2, 2, 2, 3))
    assert tree.cut(2) == Tree((0, 0, 0, 1, 1, 3))
    assert tree.cut(0) == Tree(())
    assert (Tree(()).depth, Tree(()).width) == (0, 0)
    grown = DynamicTreeSpec(num_nodes=6, width=4, depth=5)
    assert (grown.cut(2).depth, grown.num_slots, grown.cut(2).num_slots) == (2, 16, 6)
    assert DynamicTreeSpec(num_nodes=2, width=1, depth=5).num_slots == 5  # a chain in its place may be as long as it is deep
