"""The decode benchmark, end to end on a tiny target: what it writes, what it counts, and when it refuses its own result."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.runtime.command import BAD_INPUT, DONE, GATE_FAILED
from configs.runtime.errors import InputError
from configs.schema.benchmarks import BenchDecodeConfig, BenchHeadsConfig
from configs.schema.target import TargetConfig
from distill.dataset.conversations import Conversation
from eval.decoder.decode import decode
from heads.target.loading import load_target
from scripts.bench.decode import benchmark as decode_benchmark
from scripts.bench.decode import setup as decode_setup
from scripts.bench.decode.benchmark import compare_decoding, load_setup, measure_batches
from scripts.bench.decode.setup import DRAFT_LM
from scripts.bench.decode.table import PLAIN, measure_ways
from scripts.bench.decode.ways import chain_ways, free_ways, sampled_ways
from scripts.bench.peers.transformers_generate import TransformersPeer
from scripts.benchmark import run

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
    "compiled_speed_vs_eager",
    "lean_overhead_share",
}
NUM_PROMPTS, NUM_CHOOSING = 17, 4


@pytest.fixture(scope="module")
def held_out(tiny_run, tmp_path_factory):
    """A file of conversations with the tiny target, in its own template."""
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    path = tmp_path_factory.mktemp("held_out") / "held_out.jsonl"
    rows = []
    for number in range(NUM_CHOOSING + NUM_PROMPTS):
        question = {"role": "user", "content": f"w{number} w{2 * number} w7"}
        messages = (question, {"role": "assistant", "content": "w1 w2 w3 w4"})
        rows.append(
            Conversation(
                prompt_id=f"q{number}",
                category="any",
                turn=0,
                messages=messages,
                prompt_ids=tuple(target.encode_chat([question])),
                answer_ids=tuple(target.tokenizer.encode("w1 w2 w3 w4", add_special_tokens=False)),
                ended=True,
            )
        )
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
    config = config.model_copy(update={"repeats": 1})
    results = results_of(config)
    ratios = results["ratios"]
    assert ratios.keys() == {name + end for name in RATIOS for end in ("", "_low", "_high")}
    assert all(ratios[f"{name}_low"] <= ratios[name] <= ratios[f"{name}_high"] for name in RATIOS)
    assert 0 < ratios["overhead_share"] < 1
    rows = results["rows"]
    assert [(row["rule"], row["shape"], row["proposer"]) for row in rows] == [
        ("greedy", "chain", "draft_lm"),
        ("greedy", "static tree", "draft_lm"),
        ("greedy", "dynamic tree", "draft_lm"),
        ("greedy", "long chain", "draft_lm"),
        ("greedy", "chain, stopped by cost", "draft_lm"),
        ("token", "chain", "draft_lm"),
        ("block", "chain", "draft_lm"),
        ("match", "chain", "draft_lm"),
        ("without_replacement", "static tree", "draft_lm"),
        ("with_replacement", "static tree", "draft_lm"),
        ("k_seq", "static tree", "draft_lm"),
        ("match", "static tree", "draft_lm"),
        ("typical", "chain", "draft_lm"),
        ("smc", "chain", "draft_lm"),
        ("greedy", "chain", "prompt_lookup"),
        ("greedy", "chain", "suffix_lookup"),
        ("greedy", "chain", "self_speculation"),
        ("greedy", "two chains", "draft_lm + suffix_lookup"),
    ]
    assert all((row["lossless"] == "lossless") == (row["rule"] not in ("typical", "smc")) for row in rows)
    assert {row["lossless"] for row in rows} == {"lossless", "lossy_by_design"}
    assert {row["perplexity_vs_plain"] for row in rows if row["rule"] in ("greedy", "match")} == {1.0}
    assert {row["temperature"] for row in rows if row["rule"] == "greedy"} == {0.0}
    assert {row["temperature"] for row in rows if row["rule"] != "greedy"} == {1.0}
    assert all(row["speedup"] > 0 for row in rows)
    assert all(1 <= row["tau"] <= 1 + row["drafts_a_round"] for row in rows)
    assert all(found == {"prompts": NUM_PROMPTS, "differing": 0, "not_ties": 0} for found in results["agreement"].values())
    assert len(results["agreement"]) == 4
    assert results["memory_floor"].keys() == {"bytes_per_token", "gigabytes_per_second", "share_transformers", "share_lean"}

    bench = load_setup(config)
    rounds = [
        round_
        for request in bench.requests
        for round_ in decode(bench.target, [request], bench.settings(0.0), bench.proposer)[0][0].rounds
    ]
    tau = sum(len(round_.committed) for round_ in rounds) / len(rounds)
    assert 1.0 < tau < 4.0
    assert rows[0]["tau"] == pytest.approx(tau)


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


def test_a_target_without_a_lean_forward_is_measured_without(few, monkeypatch, caplog):
    def refuse(model):
        raise InputError("the lean forward does not know it")

    monkeypatch.setattr(decode_setup, "lean_twin", refuse)
    results = results_of(few)
    assert "compiled_speed_vs_eager" not in results["ratios"]
    assert len(results["rows"]) == 18
    assert "lean forwards are not measured: the lean forward does not know it" in caplog.text


def test_eight_prompts_together_give_the_answers_of_one_by_one_and_fewer_are_not_measured(config):
    turns = measure_batches(load_setup(config))
    (together, _), (alone, _) = turns["together"], turns["alone"]
    assert len(together[0].result.generations) == 8
    assert [each.tokens for each in together[0].result.generations] == [each.tokens for each in alone[0].result.generations]
    fewer = config.model_copy(update={"num_prompts": 7})
    assert measure_batches(load_setup(fewer)) == {}


def test_each_repeat_of_a_sampled_run_has_its_own_seed_and_matching_equals_plain_sampling(config):
    bench = load_setup(config.model_copy(update={"num_prompts": 2}))
    sampled = sampled_ways(bench.drafts[DRAFT_LM], bench.settings(1.0), [(0,)])
    ways = [way for way in sampled if way.rule == "match" and way.shape == "chain"]
    turns = measure_ways(bench, ways)
    first, second = ([each.tokens for each in turn.result.generations] for turn in turns[ways[0].name][0])
    plain = [each.tokens for each in turns[PLAIN[1.0, True]][0][0].result.generations]
    assert first != second
    assert first == plain


def test_a_way_that_changes_the_answers_fails_the_benchmark(few, monkeypatch):
    def one_too_many(logits_BV):
        return (logits_BV.argmax(-1) + (logits_BV.shape[1] > 1)) % 64

    monkeypatch.setattr("eval.decoder.verifier.greedy_token", one_too_many)
    monkeypatch.setattr(
        decode_benchmark, "list_ways", lambda setup: chain_ways(setup.drafts, setup.settings(0.0), setup.lengths)
    )
    assert compare_decoding(few) == GATE_FAILED


def test_a_trained_head_joins_the_table_under_its_recipes_name(config, monkeypatch, tiny_run, as_target):
    run = SimpleNamespace(name="medusa", artifact=tiny_run / "artifact")
    monkeypatch.setattr(decode_setup, "train_recipes", lambda heads: [run])
    bench = load_setup(config.model_copy(update={"heads": BenchHeadsConfig(), "num_prompts": 2}))
    assert list(bench.drafts) == ["draft_lm", "medusa"]
    assert bench.lengths == {"medusa": 3}
    ways = chain_ways(bench.drafts, bench.settings(0.0), {"medusa": 2})
    assert [(way.proposer, way.settings.num_speculative_tokens) for way in ways] == [("draft_lm", 3), ("medusa", 2)]


def test_suffix_lookup_learns_nothing_from_the_prompts_that_are_measured(config):
    bench = load_setup(config.model_copy(update={"num_prompts": 2}))
    way = next(way for way in free_ways(bench, bench.settings(0.0)) if way.proposer == "suffix_lookup")
    (again,) = measure_ways(bench, [way])[way.name][:1]
    assert again[0].result.generations[0].rounds == again[1].result.generations[0].rounds


def test_a_draft_that_is_not_there_is_one_sentence_and_code_2(config, tmp_path, capsys):
    settings = [
        f"target.name={config.target.name}",
        f"held_out={config.held_out}",
        "heads=null",
        "num_prompts=2",
        "num_choosing=1",
        f"draft={tmp_path}",
    ]
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert run(["decode", *arguments]) == BAD_INPUT
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint == f"error: {tmp_path} is no artifact: it holds no draftsmith.json"


# --- the memory floor ---------------------------------------------------------------------------------------------


def test_a_tied_matrix_is_read_as_output_and_an_embedding_of_its_own_is_not(tiny_llama):
    tied = tiny_llama(tie_word_embeddings=True, dtype=torch.float32)
    untied = tiny_llama(dtype=torch.float32)
    assert decode_benchmark.weight_bytes(tied) == decode_benchmark.weight_bytes(untied)
    assert decode_benchmark.weight_bytes(tied) == 4 * sum(parameter.numel() for parameter in tied.parameters())


def test_a_forward_that_takes_twice_the_floors_time_reaches_half_its_speed(tiny_llama, monkeypatch):
    model = tiny_llama(dtype=torch.float32)
    monkeypatch.setattr(decode_benchmark, "read_bandwidth", lambda device: 1e9)
    least = decode_benchmark.weight_bytes(model) / 1e9
    shares = decode_benchmark.floor_shares(model, {"transformers": 4 * least, "lean": 2 * least})
    assert shares["gigabytes_per_second"] == 1.0
    assert shares["share_lean"] == pytest.approx(0.5)
    assert shares["share_transformers"] == pytest.approx(0.25)


def test_the_bandwidth_is_a_number_of_bytes_a_second(monkeypatch):
    monkeypatch.setattr(decode_benchmark, "READ_BYTES", 2**22)
    assert 1e6 < decode_benchmark.read_bandwidth(torch.device("cpu")) < 1e14
