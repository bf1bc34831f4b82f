"""The decode benchmark, end to end on a tiny target: what it writes, what it counts, and when it refuses its own result."""

import dataclasses
import json

import pytest

from configs.benchmarks import BenchDecodeConfig
from configs.command import BAD_INPUT, DONE, GATE_FAILED, run_command
from configs.errors import InputError
from configs.schema import SuiteConfig, TargetConfig
from eval.decode import decode
from scripts import decode_setup
from scripts.bench_decode import main
from scripts.decode_comparison import compare_decoding, measure_batches, measure_sampled, open_bench
from scripts.transformers_peer import TransformersPeer

RATIOS = {
    "speed_vs_transformers_assisted",
    "plain_speed_vs_transformers_generate",
    "overhead_share",
    "block_vs_token_verification",
    "batch8_vs_batch1",
    "lean_speed_vs_transformers_assisted",
    "lean_plain_speed_vs_transformers_generate",
    "compiled_speed_vs_eager",
    "lean_overhead_share",
}


@pytest.fixture
def config(tiny_run, tmp_path):
    return BenchDecodeConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        draft=str(tiny_run / "artifact"),
        suite=SuiteConfig(path=str(tiny_run / "suite.jsonl")),
        max_new_tokens=12,
        repeats=2,
        bootstrap_samples=100,
        output=str(tmp_path / "decode.json"),
    )


@pytest.fixture
def results(config):
    assert compare_decoding(config) == DONE
    with open(config.output, encoding="utf-8") as file:
        return json.load(file)


def test_the_file_holds_every_ratio_with_its_interval_and_a_row_for_every_way_of_decoding(results, config):
    ratios = results["ratios"]
    assert ratios.keys() == {name + end for name in RATIOS for end in ("", "_low", "_high")}
    assert all(ratios[f"{name}_low"] <= ratios[name] <= ratios[f"{name}_high"] for name in RATIOS)
    assert 0 < ratios["overhead_share"] < 1
    rows = results["rows"]
    assert [(row["rule"], row["proposer"], row["forward"]) for row in rows] == [
        ("greedy", "draft_lm", "transformers"),
        ("greedy", "draft_lm", "lean"),
        ("greedy", "prompt_lookup", "transformers"),
        ("token", "draft_lm", "transformers"),
        ("block", "draft_lm", "transformers"),
        ("match", "draft_lm", "transformers"),
    ]
    assert rows[1]["tau"] == rows[0]["tau"]
    assert {row["lossless"] for row in rows} == {"lossless"}
    assert {row["shape"] for row in rows} == {"chain"}
    assert all(row["speedup"] > 0 for row in rows)
    assert all(found == {"prompts": 17, "differing": 0, "not_ties": 0} for found in results["agreement"].values())
    assert len(results["agreement"]) == 4
    assert results["memory_floor"].keys() == {"bytes_per_token", "gigabytes_per_second", "share_transformers", "share_lean"}

    bench = open_bench(config)
    rounds = [
        round_
        for request in bench.requests
        for round_ in decode(bench.target, [request], bench.settings(0.0), bench.proposer)[0][0].rounds
    ]
    tau = sum(len(round_.committed) for round_ in rounds) / len(rounds)
    assert 1.0 < tau < 4.0
    assert rows[0]["tau"] == pytest.approx(tau)


def test_an_answer_that_no_rounding_explains_fails_the_benchmark(config, monkeypatch):
    honest = TransformersPeer.generate

    def wrong(peer, request, *, assisted):
        generation = honest(peer, request, assisted=assisted)
        worst = (generation.tokens[0] + 1) % 64
        return dataclasses.replace(generation, tokens=(worst, *generation.tokens[1:])) if assisted else generation

    monkeypatch.setattr(TransformersPeer, "generate", wrong)
    assert compare_decoding(config) == GATE_FAILED
    with open(config.output, encoding="utf-8") as file:
        agreement = json.load(file)["agreement"]
    assert agreement["speculative_and_transformers_assisted"] == {"prompts": 17, "differing": 17, "not_ties": 17}
    assert agreement["plain_and_transformers_generate"]["differing"] == 0
    assert agreement["lean_and_transformers_assisted"]["not_ties"] == 17
    assert agreement["lean_plain_and_transformers_generate"]["differing"] == 0


def test_a_target_without_a_lean_forward_is_measured_without(config, monkeypatch, caplog):
    def refuse(model):
        raise InputError("the lean forward does not know it")

    monkeypatch.setattr(decode_setup, "lean_twin", refuse)
    few = config.model_copy(update={"repeats": 1, "suite": config.suite.model_copy(update={"num_prompts": 2})})
    assert compare_decoding(few) == DONE
    with open(config.output, encoding="utf-8") as file:
        results = json.load(file)
    assert "compiled_speed_vs_eager" not in results["ratios"]
    assert [row["forward"] for row in results["rows"]] == ["transformers"] * 5
    assert "lean forwards are not measured: the lean forward does not know it" in caplog.text


def test_eight_prompts_together_give_the_answers_of_one_by_one_and_a_smaller_batch_is_not_called_eight(config):
    turns = measure_batches(open_bench(config))
    (together, _), (alone, _) = turns["together"], turns["alone"]
    assert len(together[0].result.generations) == 8
    assert [each.tokens for each in together[0].result.generations] == [each.tokens for each in alone[0].result.generations]
    fewer = config.model_copy(update={"suite": config.suite.model_copy(update={"num_prompts": 7})})
    assert measure_batches(open_bench(fewer)) == {}


def test_each_repeat_of_a_sampled_run_has_its_own_seed_and_matching_gives_what_plain_sampling_gives(config):
    turns = measure_sampled(open_bench(config))
    first, second = ([each.tokens for each in turn.result.generations] for turn in turns["match"][0])
    plain = [each.tokens for each in turns["autoregressive"][0][0].result.generations]
    assert first != second
    assert first == plain
    assert sum(len(case[0].result.generations) for case in turns["block"]) == 17


def test_a_draft_that_is_not_there_is_one_sentence_and_code_2(config, tmp_path, capsys):
    settings = [
        f"target.name={config.target.name}",
        f"suite.path={config.suite.path}",
        "suite.num_prompts=2",
        f"draft={tmp_path}",
    ]
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert run_command(BenchDecodeConfig, main, description="", argv=arguments) == BAD_INPUT
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint == f"error: {tmp_path} is no artifact: it holds no draftsmith.json"
