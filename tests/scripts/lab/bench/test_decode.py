"""The decode benchmark, end to end on a tiny target: what it writes, what it counts, and when it refuses its own result."""

import dataclasses
import json
from pathlib import Path

import pytest

from configs.runtime.command import DONE, GATE_FAILED
from configs.schema.target import TargetConfig
from scripts.lab.bench.decode import benchmark as decode_benchmark
from scripts.lab.bench.decode.benchmark import compare_decoding, load_setup, measure_ways
from scripts.lab.bench.decode.ways import chain_ways, free_ways
from scripts.lab.bench.peers.transformers_generate import TransformersPeer
from scripts.lab.settings import BenchDecodeConfig
from tests.support.caches import conversation

RATIOS = {
    "speed_vs_transformers_assisted",
    "plain_speed_vs_transformers_generate",
    "overhead_share",
    "block_vs_token_verification",
    "static_tree_vs_chain_at_equal_rows",
    "dynamic_tree_vs_chain_at_equal_rows",
    "batch8_vs_batch1",
    "lean_speed_vs_transformers_assisted",
    "lean_plain_speed_vs_transformers_generate",
    "lean_overhead_share",
}
NUM_PROMPTS, NUM_CHOOSING = 9, 4


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """A file of conversations with the tiny target, in its own template."""
    path = tmp_path_factory.mktemp("held_out") / "held_out.jsonl"
    # <user> wN w2N w7 <end> <assistant>
    numbers = range(NUM_CHOOSING + NUM_PROMPTS)
    rows = [conversation((2, 5 + n, 5 + 2 * n, 12, 1, 3), (6, 7, 8, 9), f"q{n}") for n in numbers]
    path.write_text("".join(row.to_line() for row in rows))
    return path


@pytest.fixture
def config(tiny_run, held_out, tmp_path):
    return BenchDecodeConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        draft=str(tiny_run / "artifact"),
        heads=None,
        held_out=str(held_out),
        past_answers=str(held_out),
        num_choosing=NUM_CHOOSING,
        num_prompts=NUM_PROMPTS,
        max_new_tokens=12,
        repeats=2,
        bootstrap_samples=100,
        output=str(tmp_path / "decode.json"),
    )


@pytest.fixture
def few(config):
    """The benchmark on two prompts, once."""
    return config.model_copy(update={"repeats": 1, "num_prompts": 2, "max_new_tokens": 6})


def results_of(config, code=DONE):
    assert compare_decoding(config) == code
    return json.loads(Path(config.output).read_text())


def test_the_file_holds_every_ratio_with_its_interval_and_a_row_for_every_way(config):
    config = config.model_copy(update={"repeats": 1, "max_new_tokens": 8})
    results = results_of(config)
    ratios = results["ratios"]
    assert ratios.keys() == {name + end for name in RATIOS for end in ("", "_low", "_high")}
    assert all(ratios[f"{name}_low"] <= ratios[name] <= ratios[f"{name}_high"] for name in RATIOS - {"batch8_vs_batch1"})
    assert ratios["batch8_vs_batch1_low"] is None  # of a single batch
    assert 0 < ratios["overhead_share"] < 1
    rows = results["rows"]
    greedy = ("chain", "static tree", "dynamic tree", "long chain", "chain, stopped by cost")
    tree_rules = ("without_replacement", "with_replacement", "k_seq", "match")
    free = ("prompt_lookup", "suffix_lookup", "self_speculation")
    assert [(row["rule"], row["shape"], row["proposer"]) for row in rows] == [
        *(("greedy", shape, "draft_lm") for shape in greedy),
        *((rule, "chain", "draft_lm") for rule in ("token", "block", "match")),
        *((rule, "static tree", "draft_lm") for rule in tree_rules),
        *((rule, "chain", "draft_lm") for rule in ("typical", "smc")),
        *(("greedy", "chain", proposer) for proposer in free),
        ("greedy", "two chains", "draft_lm + suffix_lookup"),
    ]
    lossless = {"greedy": "lossless", "typical": "lossy_by_design", "smc": "lossy_by_design"}
    assert all(row["lossless"] == lossless.get(row["rule"], "by its rule") for row in rows)
    assert {row["perplexity_vs_plain"] for row in rows if row["rule"] in ("greedy", "match")} == {1.0}
    assert {row["temperature"] for row in rows if row["rule"] == "greedy"} == {0.0}
    assert {row["temperature"] for row in rows if row["rule"] != "greedy"} == {1.0}
    assert all(row["speedup"] > 0 for row in rows)
    assert all(1 <= row["tau"] <= 1 + row["drafts_a_round"] for row in rows if row["rule"] != "smc")
    assert {(row["tau"], row["drafts_a_round"]) for row in rows if row["rule"] == "smc"} == {(None, None)}
    assert all(found == {"prompts": NUM_PROMPTS, "differing": 0, "not_ties": 0} for found in results["agreement"].values())
    assert len(results["agreement"]) == 4


def test_an_answer_that_no_rounding_explains_fails_the_benchmark(few, monkeypatch):
    honest = TransformersPeer.generate

    def wrong(peer, request, *, assisted):
        generation = honest(peer, request, assisted=assisted)
        worst = (generation.tokens[0] + 1) % 64
        return dataclasses.replace(generation, tokens=(worst, *generation.tokens[1:])) if assisted else generation

    monkeypatch.setattr(TransformersPeer, "generate", wrong)
    monkeypatch.setattr(decode_benchmark, "list_ways", lambda setup: [])
    agreement = results_of(few, GATE_FAILED)["agreement"]
    assert agreement["speculative_and_transformers_assisted"] == {"prompts": 2, "differing": 2, "not_ties": 2}
    assert agreement["plain_and_transformers_generate"]["differing"] == 0
    assert agreement["lean_and_transformers_assisted"]["not_ties"] == 2
    assert agreement["lean_plain_and_transformers_generate"]["differing"] == 0


def test_a_way_that_changes_the_answers_fails_the_benchmark(few, monkeypatch):
    def one_too_many(logits_BV):
        return (logits_BV.argmax(-1) + (logits_BV.shape[1] > 1)) % 64

    monkeypatch.setattr("eval.decoder.verifier.greedy_token", one_too_many)
    monkeypatch.setattr(decode_benchmark, "list_ways", lambda setup: chain_ways(setup.drafts, setup.settings(0.0)))
    assert compare_decoding(few) == GATE_FAILED


def test_suffix_lookup_learns_nothing_from_the_prompts_that_are_measured(config):
    bench = load_setup(config.model_copy(update={"num_prompts": 2}))
    way = next(way for way in free_ways(bench, bench.settings(0.0)) if way.proposer == "suffix_lookup")
    (again,) = measure_ways(bench, [way])[way.name][:1]
    assert again[0].result.generations[0].rounds == again[1].result.generations[0].rounds
