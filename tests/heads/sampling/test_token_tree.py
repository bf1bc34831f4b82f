"""A tree is what it says it is; each of its tokens sees its own branch only; what stays is as if nothing else had been read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig

from configs.schema.drafting import StaticTree, TreeConfig
from heads.inference.causal_lm import backbone, forward_rows, new_cache
from heads.sampling.token_tree import DynamicTreeSpec, Tree, ancestor_mask, check_parents, depths_of, tree_attention, tree_from

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "grouped_queries": LlamaConfig(**GROUPED),
    "sliding": MistralConfig(**GROUPED, sliding_window=3),
    "mixed": Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=3, layer_types=["sliding_attention", "full_attention"], pad_token_id=None
    ),
    "learned_positions": GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    ),
}
TEXTS = [list(range(1, 15)), list(range(20, 34)), list(range(40, 54))]
LENGTHS = [5, 9, 6]
PARENTS = [[0, 0, 1, 1, 2, 3, 5], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 3, 4, 5, 6]]
PATHS = [[1, 3, 6], [1, 2, 3], []]  # by row, the rows of the tree that stay

parents_of_trees = st.integers(1, 12).flatmap(lambda n: st.tuples(*(st.integers(0, draft) for draft in range(n))))


def way_to(parents, row):
    """Return the rows from the first draft down to a row."""
    return [] if row == 0 else [*way_to(parents, parents[row - 1]), row]


@given(parents_of_trees)
@settings(max_examples=30, deadline=None)
def test_the_lineage_of_a_row_is_the_way_to_it(parents):
    seen = ancestor_mask(torch.tensor([parents]))[0]
    for row in range(len(parents) + 1):
        assert seen[row].nonzero().squeeze(1).tolist() == [0, *way_to(parents, row)]
    assert depths_of(parents) == (seen.sum(-1) - 1).tolist()


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_tokens_of_a_tree_see_their_own_path_and_the_accepted_one_is_kept(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float64).eval()

    def whole(ids):
        return backbone(model)(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    cache = new_cache(model, 24)
    forward_rows(model, cache, torch.tensor([text[:9] for text in TEXTS]), [0, 0, 0])
    drafts = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(2))
    ids = torch.cat([torch.tensor([[text[length]] for text, length in zip(TEXTS, LENGTHS, strict=True)]), drafts], 1)
    attention = tree_attention(torch.tensor(PARENTS), LENGTHS)
    hidden = forward_rows(model, cache, ids, attention.starts, attention)
    texts = []
    for row, (text, length, parents) in enumerate(zip(TEXTS, LENGTHS, PARENTS, strict=True)):
        for node in range(8):
            branch = [int(ids[row, each]) for each in way_to(parents, node)]
            torch.testing.assert_close(hidden[row, node], whole([*text[: length + 1], *branch])[-1])
        texts.append([*text[: length + 1], *(int(ids[row, each]) for each in PATHS[row]), 60, 61])
    cache.keep_path(LENGTHS, [[0, *path] for path in PATHS])
    then = forward_rows(model, cache, torch.full((3, 2), 60) + torch.arange(2), [len(text) - 2 for text in texts])
    for row, text in enumerate(texts):
        torch.testing.assert_close(then[row], whole(text)[-2:])


def test_a_padded_proposal_still_hides_its_branches_from_one_another():
    seen = ancestor_mask(torch.tensor([[0, 0, -1, -1]]).clamp(min=0))[0]
    assert seen[2].tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("parents", [[1], [0, 2], [-1], [0, 1, 3]])
def test_parents_that_are_no_tree_are_refused(parents):
    with pytest.raises(ValueError, match="is no tree"):
        check_parents(parents)
    with pytest.raises(ValueError, match="is no tree"):
        Tree(tuple(parents))


def test_a_tree_out_of_order_is_refused():
    with pytest.raises(ValueError, match="breadth first"):
        Tree((0, 1, 0))


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"kind": "static"}, "exactly one of paths and branching"),
        ({"kind": "static", "paths": [[0]], "branching": [1]}, "exactly one of paths and branching"),
        ({"kind": "static", "paths": []}, "at least one token"),
        ({"kind": "static", "paths": [[0], []]}, "at least one token"),
        ({"kind": "static", "paths": [[0], [0]]}, "each token once"),
        ({"kind": "static", "paths": [[0], [1, 0]]}, r"\[1, 0\] is there, its parent \[1\] is not"),
        ({"kind": "static", "paths": [[0], [0, 1]]}, r"\[0, 1\] is there, \[0, 0\] is not"),
        ({"kind": "static", "branching": []}, "at least one depth"),
        ({"kind": "static", "branching": [2, 0]}, "greater than or equal to 1"),
        ({"kind": "dynamic", "num_nodes": 0}, "greater than or equal to 1"),
        ({"kind": "bush"}, "kind"),
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
