"""`decode.tree: fastest`: chosen by prompts that are not measured, decoded by, reported, and kept by a run that goes on."""

import numpy as np
import pytest

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.loading import load_config
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import FastestTree, StaticTree
from configs.schema.evaluation import EvalConfig
from configs.schema.training import DistillConfig
from eval import evaluation
from eval.cost import tree_choice
from eval.cost.tree_choice import fastest_tree, measure_profile
from eval.decoder.records import SPECULATIVE, Generation, Round
from eval.evaluation import evaluate
from eval.measure.record_files import read_records
from heads.proposers.draft_lm import DraftLM
from tests.support.decoding import PROMPTS, requests_for
from tests.support.evaluations import report_in, tiny_evaluation
from tests.support.trees import expected_tokens

WIDE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
FASTEST = {"kind": "fastest", "num_prompts": 4, "num_nodes": 3, "branching": [2, 2]}


def test_an_evaluation_drafts_the_fastest_tree_by_prompts_that_it_does_not_measure(tiny_run, tmp_path, monkeypatch):
    shown, decode = [], tree_choice.decode

    def watched(*arguments, **settings):
        generations, timing = decode(*arguments, **settings)
        shown.extend(generations)
        return generations, timing

    def cut_off(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(tree_choice, "decode", watched)
    monkeypatch.setattr(tree_choice, "round_seconds", lambda *_, **__: ([1000.0] * 4, [0.0] * 4))  # only tokens count
    config = tiny_evaluation(tiny_run, tmp_path / "out", num_prompts=3, decode={"tree": FASTEST})
    measure_share = evaluation.measure_share
    monkeypatch.setattr(evaluation, "measure_share", cut_off)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config)
    monkeypatch.setattr(evaluation, "measure_share", measure_share)
    monkeypatch.setattr(tree_choice, "choose_tree", cut_off)  # the run that goes on has the tree already
    assert evaluate(config) == 0

    chosen = fastest_tree(measure_profile(shown, WIDE), [1000.0] * 4, [0.0] * 4)
    report = report_in(config)
    paths = StaticTree.model_validate(report.decode.tree).all_paths()
    assert paths == chosen.paths
    assert 1 <= len(paths) <= 3
    assert report.lossless.verdict in ("lossless", "lossless_up_to_ties")
    (said,) = (each for each in report.warnings if each.startswith("decode.tree was chosen"))
    assert f"size {len(paths)}, depth {max(map(len, paths))}, {chosen.tokens_per_round:.2f} tokens a round expected" in said
    records = [each for each in read_records(tmp_path / "out" / "records.jsonl") if isinstance(each, Generation)]
    drafted = [round_ for each in records if each.mode == SPECULATIVE for round_ in each.rounds if round_.drafted]
    assert max(round_.num_nodes for round_ in drafted) == len(paths)
    assert {round_.ranks for round_ in drafted} <= {(), *paths}
    assert len({each.prompt_id for each in shown}) == 4
    assert {each.prompt_id for each in shown}.isdisjoint(each.prompt_id for each in records)
    assert not list((tmp_path / "out").glob(".*tree*"))


@pytest.mark.parametrize(("kind", "expected"), [("draft_lm", 10.0 + 2 * 3.0), ("dflash", 10.0 + 3.0)])
def test_drafting_takes_a_depth_or_a_round_its_time(kind, expected, tiny_llama, as_target, monkeypatch):
    target = as_target(tiny_llama(seed=1))
    monkeypatch.setattr(tree_choice, "round_seconds", lambda *_, **__: ([10.0] * 3, [1.0, 2.0, 3.0]))
    settings = DecodeConfig(num_speculative_tokens=2, max_new_tokens=12)
    asked = FastestTree(kind="fastest", num_nodes=2, branching=[1, 1])
    draft = DraftLM(tiny_llama(seed=1), 64)  # always right, so that the deepest tree is the fastest
    chosen = tree_choice.choose_tree(target, draft, kind, requests_for(PROMPTS[:3]), settings, asked)
    assert (chosen.paths, chosen.seconds_per_round) == ([(0,), (0, 0)], pytest.approx(expected))


@pytest.mark.parametrize("at_once", [False, True])
def test_the_seconds_of_a_round_are_measured_at_a_few_sizes_and_interpolated(at_once, make_timing, monkeypatch):
    sizes = []

    def timed(target, requests, settings, draft, *, mode):
        sizes.append(len(settings.tree.all_paths()))
        slow = 100.0 if requests[0].prompt_id == "p1" else 0.0  # one prompt in three: a median does not see it
        rounds, shared_out = 2, 0.8  # the rest is drafting
        return [], make_timing(mode, ("p",), rounds * (10.0 + sizes[-1] ** 2 + slow) / shared_out, rounds)

    monkeypatch.setattr(tree_choice, "decode", timed)
    asked, settings = FastestTree(kind="fastest", num_nodes=5, branching=[3, 2]), DecodeConfig(num_speculative_tokens=2)
    profile = np.array([[0.6, 0.2, 0.1], [0.5, 0.4, 0.0]])
    arguments = (None, None, requests_for(PROMPTS[:3]), settings, profile, asked)
    others, drafting = tree_choice.round_seconds(*arguments, at_once=at_once)
    assert sizes == [1, 3, 5, 5, 3, 1, 1, 3, 5]
    np.testing.assert_allclose(others, [11.0, 11.0, 15.0, 19.0, 27.0, 35.0])
    one, three, five = 0.25 * 11.0, 0.25 * 19.0, 0.25 * 35.0
    if not at_once:  # trees of three and five tokens have two depths
        three, five = three / 2, five / 2
    np.testing.assert_allclose(drafting, [one, one, (one + three) / 2, three, (three + five) / 2, five])


def test_where_no_prompt_is_left_to_choose_by_the_evaluation_says_so(tiny_run, tmp_path):
    config = tiny_evaluation(tiny_run, tmp_path / "out", decode={"tree": "fastest"})
    assert config.decode.tree.measured(5).branching == [4, 3, 2, 1, 1]
    with pytest.raises(InputError, match=r"decode.tree fastest: no prompt of suite .* is left .* less than 17"):
        evaluate(config)


@pytest.mark.parametrize(
    ("schema", "changes", "words"),
    [
        (EvalConfig, ["decode.tree=fast"], r"tree must be null, fastest, or a section .*got 'fast'"),
        (EvalConfig, ["draft=[a, b]", "decode.tree=fastest"], "fastest is found for one draft: give a static tree"),
        (EvalConfig, ["decode.tree={kind: fastest, branching: [2, 2, 2, 2]}"], "tree is 4 tokens deep"),
        (DistillConfig, ["held_out.decode.tree=fastest"], "fastest is found by eval/run.py"),
    ],
)
def test_a_tree_that_cannot_be_found_is_one_sentence(schema, changes, words):
    with pytest.raises(ConfigError, match=words):
        load_config(schema, None, changes)


# --- the best tree and the profile --------------------------------------------------------------------------------


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
    target_seconds, steps = [1.0, 1.02, 1.1, 1.3, 2.0, 2.8], [step * (1 + 0.1 * size) for size in range(6)]
    chosen = fastest_tree(profile, target_seconds, steps)
    profile = -np.sort(-profile, axis=1)

    def rate(tree):
        depth = max(map(len, tree))
        return expected_tokens(list(tree), profile) / (target_seconds[len(tree)] + depth * steps[len(tree)])

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
