"""Each benchmark once on the tiny target: it runs, and its results file has the ratios and rows of its name."""

import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT
from configs.runtime.loading import load_config
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig, HeadsConfig
from eval.decoder.decode import generate
from heads.frozen.loading import load_target
from heads.metadata import VOCABULARY_FILE
from heads.vocabulary import read_draft_vocabulary
from scripts.bench import (
    compare_commits,
    decode,
    distill,
    gpu,
    harness,
    heads,
    modalities,
    mutants,
    proof,
    serve,
    serve_engines,
    tables,
    turns,
)
from tests.support.caches import conversation
from train.launch import run_distillation


@pytest.fixture
def in_process(monkeypatch):
    """Commands run in this process, which has imported what they need."""

    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
        AcceleratorState._reset_state(reset_partial_state=True)
        assert not ended.value.code, (module, arguments)

    for each in (harness, heads):
        monkeypatch.setattr(each, "run_module", run)
    monkeypatch.setattr("eval.evaluation.render_html", lambda report: "")  # drawing takes longer than all the rest
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """A file of conversations with the tiny target."""
    path = tmp_path_factory.mktemp("held_out") / "held_out.jsonl"
    rows = [conversation((2, 5 + n, 5 + 2 * n, 12, 1, 3), (6, 7, 8, 9), f"q{n}") for n in range(12)]
    path.write_text("".join(row.to_line() for row in rows))
    return str(path)


def target_of(tiny_run):
    return {"name": str(tiny_run / "target"), "dtype": "float32", "device": "cpu"}


def results_of(run, schema, settings, code=DONE):
    config = schema.model_validate(settings)
    assert run(config) == code
    return json.loads(Path(config.output).read_text())


def test_decode(tiny_run, recipe, in_process, monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "CANDIDATES", ())
    monkeypatch.setattr(decode, "LOSSY", ("smc",))
    monkeypatch.setattr(decode, "RULES", ("token", "block"))
    settings = {"target": target_of(tiny_run), "draft": str(tiny_run / "artifact"), "held_out": recipe["data"]["held_out"]}
    settings |= {"past_answers": recipe["data"]["train"], "num_prompts": 4, "max_new_tokens": 6, "branching": [2, 1]}
    settings |= {"repeats": 1, "output": str(tmp_path / "decode.json")}
    results = results_of(decode.compare_decoding, decode.DecodeBenchConfig, settings)
    names = {"speed_vs_transformers_assisted", "plain_speed_vs_transformers_generate"}
    assert results["ratios"].keys() >= names | {f"lean_{name}" for name in names} | decode.COMPARED.keys()
    rows = {(row["rule"], row["shape"], row["proposer"]): row for row in results["rows"]}
    assert rows["greedy", "chain", "draft_lm"]["speedup"] > 0
    assert {"draft_lm", "prompt_lookup", "suffix_lookup", "suffix_lookup + draft_lm"} == {proposer for *_, proposer in rows}
    assert all(each["not_ties"] == 0 for each in results["agreement"].values())


def test_proof_which_keeps_what_the_planted_bugs_came_to(tiny_run, tmp_path, monkeypatch):
    (tmp_path / "proof.json").write_text('{"ratios": {"noise_02_found_share": 0.5}}')
    mutants.add_result(tmp_path / "proof.json", 4, 3)
    monkeypatch.setattr(proof, "NOISE", 3.0)
    settings = {
        "target": target_of(tiny_run),
        "suite": {"path": str(tiny_run / "suite.jsonl")},
        "num_prompts": 8,
        "num_draws": 5,
    }
    settings |= {"num_simulations": 40, "decode": {"max_new_tokens": 12, "batch_size": 4}}
    settings["output"] = str(tmp_path / "proof.json")
    results = results_of(proof.prove, proof.ProofBenchConfig, settings)
    assert (results["ratios"]["noise_02_found_share"], results["ratios"]["false_alarm_share"]) == (1, 0)
    assert {"wrong_cache_dtype_found_share", "interval_coverage_8_clusters"} <= results["ratios"].keys()
    assert (results["ratios"]["mutants"], results["ratios"]["mutants_killed_share"]) == (4, 0.75)
    assert results["mutants"]["git"].keys() == {"commit", "dirty"}


def test_heads_and_the_curve_through_their_sizes(tiny_data, recipe, in_process, tmp_path):
    own = {"head": {"kind": "medusa", "num_depths": 2}, "sanity": {"enabled": False}}
    (tmp_path / "medusa.yaml").write_text(json.dumps(recipe | own))
    settings = {"data": None, "cache": None, "recipes": [str(tmp_path / "medusa.yaml")], "runs": str(tmp_path / "runs")}
    settings |= {"num_prompts": 3, "suites": [], "max_new_tokens": 8, "baselines": ["prompt_lookup"]}
    settings["output"] = str(tmp_path / "heads.json")
    rows = results_of(heads.compare_heads, heads.HeadsBenchConfig, settings)["rows"]
    assert {row["family"] for row in rows} >= {"medusa", "prompt_lookup"}
    names = {"suite", "tau", "tau_low", "speedup", "speedup_high", "alpha_by_position", "answer_tokens"}
    assert names <= rows[0].keys()
    settings["points"] = [{"share": 0.5, "epochs": 1}, {"share": 1}]
    rows = results_of(heads.compare_heads, heads.HeadsBenchConfig, settings)["rows"]
    assert [row["row"] for row in rows] == ["measured", "measured", "law"]


def test_turns(recipe, in_process, tmp_path):
    own = {"head": {"kind": "medusa", "num_depths": 2}, "sanity": {"enabled": False}}
    (tmp_path / "medusa.yaml").write_text(json.dumps(recipe | own))
    rows = [{"turns": [f"w{number} w{number + 1}", f"w{number + 2}", "w3"]} for number in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "prompts": str(tmp_path / "chats.jsonl"),
        "recipe": str(tmp_path / "medusa.yaml"),
        "runs": str(tmp_path / "runs"),
    }
    settings |= {"num_chats": 40, "max_new_tokens": 6, "output": str(tmp_path / "turns.json")}
    results = results_of(turns.compare_turns, turns.TurnsBenchConfig, settings)
    labels = {row["recipe"]: row["answer_tokens"] for row in results["rows"] if row["answer_tokens"] is not None}
    assert labels["all_turns"] > labels["last_turns"] > 0
    assert {f"all_vs_last_turns_tau_turn_{number}" for number in (1, 2, 3)} <= results["ratios"].keys()


def test_the_law_of_a_curve_is_the_power_that_it_was_made_by():
    sizes = {tokens: 4 - 20 * tokens**-0.25 for tokens in (10_000, 40_000, 160_000)}
    named = {"family": "eagle3", "suite": "home", "num_speculative_tokens": 3}
    *_, law = heads.curve_of([named | {"answer_tokens": tokens, "tau": tau} for tokens, tau in sizes.items()])
    assert law["exponent"] == pytest.approx(0.25)
    assert law["tau_at_4_times"] == pytest.approx(4 - 20 * 640_000**-0.25)


def test_distill_and_the_loss_and_transformers_drafts_the_tokens_that_ours_does(tiny_run, recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(distill, "measure_pass", lambda config, name, *_: distill.forward_backward(config, name))
    student, artifact = {"layers": [0], "draft_vocab_size": 8}, tmp_path / "run" / "artifact"
    run_distillation(DistillConfig.model_validate(recipe | {"student": student, "output": str(tmp_path / "run")}))
    compared = decode.DecodeBenchConfig(target=target_of(tiny_run), draft=str(artifact))
    assistant = decode.load_assistant(compared, load_target(compared.target))
    drafted_1T = assistant(input_ids=torch.arange(40)[None]).logits.argmax(-1)
    assert read_draft_vocabulary(artifact / VOCABULARY_FILE).is_drafted_V[drafted_1T].all()
    settings = {"draft": str(artifact), "num_batches": 2}
    settings |= {"vocab_size": 512, "width": 16, "positions": 64, "chunk_size": 16, "repeats": 2}
    settings["output"] = str(tmp_path / "distill.json")
    results = results_of(distill.compare_distillation, distill.DistillBenchConfig, settings)
    assert {"loss_peak_memory_vs_unchunked", "loss_time_vs_unchunked"} <= results["ratios"].keys()
    assert "ours, the same work" in {row.get("training") for row in results["rows"]}


@pytest.mark.parametrize(("fewer", "code"), [(0, DONE), (1, GATE_FAILED)])
def test_serve_agrees_where_an_engine_accepts_what_ours_does_and_only_there(
    tiny_run, held_out, monkeypatch, tmp_path, fewer, code
):
    def run(job):
        """Answer as our decoder does, with as many accepted drafts fewer."""
        target, answers = load_target(TargetConfig.model_validate(target_of(tiny_run))), []
        counts = serve.count_ours(target, job, tiny_run / "artifact", engine, "draft_lm")
        for (tokens, length), own in zip(job.prompts, counts, strict=True):
            (plain,) = generate(target, [tokens], DecodeConfig(num_speculative_tokens=0, max_new_tokens=length))
            answers.append(serve_engines.Answer(tuple(plain), own._replace(accepted=own.accepted - fewer)))
        return "1.0", answers

    engine = replace(serve.ENGINES["vllm"], run=run)
    monkeypatch.setitem(serve.ENGINES, "vllm", engine)
    (tmp_path / "venvs" / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "venvs" / "vllm" / "bin" / "vllm").touch()
    settings = {"cases": [{"engine": "vllm", "draft": str(tiny_run / "artifact")}], "target": target_of(tiny_run)}
    settings |= {"prompts": held_out, "num_prompts": 4, "max_new_tokens": 12, "environments": str(tmp_path / "venvs")}
    results = results_of(serve.check_engines, serve.ServeBenchConfig, settings | {"output": str(tmp_path / "serve.json")}, code)
    assert results["rows"][0]["same_tokens"] == 1


def test_the_round_that_reaches_an_answers_end_counts_whole():
    assert serve.count_rounds([3, 0, 2, 1], length=7) == serve.Counts(rounds=3, accepted=5)
    with pytest.raises(ValueError, match="answer has 12"):
        serve.count_rounds([3, 0, 2, 1], length=12)


def test_gpu_measures_whatever_device_there_is(tiny_run, tiny_llama, tiny_tokenizer, in_process, tmp_path):
    tiny_llama(seed=1, dtype=torch.float32, layers=8).save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    settings = {"target": str(tmp_path / "target"), "prompts": str(tiny_run / "suite.jsonl"), "num_prompts": 16}
    settings |= {"max_new_tokens": 8, "dtype": "float32", "training_steps": 4, "batch_size": 2, "least_speed": 1e-3}
    config = gpu.GpuBenchConfig.model_validate(settings | {"output": str(tmp_path)})
    assert gpu.measure_device(config) == DONE
    measured = json.loads((tmp_path / "gpu-check.json").read_text())["measured"]
    assert measured.keys() == {"tflops", "memory_gb_per_second", "utilisation"}
    assert all(value > 0 for value in measured.values())


def test_modalities_draws_trains_and_decodes_both_ways(in_process, tmp_path):
    settings = {"num_drawn": 300, "num_codes": 32, "epochs": 2, "num_prompts": 80, "num_asked": 20}
    config = modalities.ModalitiesConfig.model_validate(settings | {"output": str(tmp_path)})
    assert modalities.show_modality(config) == DONE
    rows = json.loads((tmp_path / "modalities.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["plain", "strict", "relaxed"]


def test_a_commit_compared_with_itself_is_equal_and_a_changed_loss_is_a_difference(monkeypatch, tmp_path):
    monkeypatch.setattr(compare_commits, "DRAFTS", {"medusa": compare_commits.DRAFTS["medusa"]})
    monkeypatch.setattr(compare_commits, "DECODINGS", {"medusa": {"greedy": {}}})
    monkeypatch.setattr("eval.evaluation.render_html", lambda report: "")
    compare_commits.make_target(tmp_path / "target", width=16)
    assert len(list(compare_commits.do_work(CHECKOUT, tmp_path / "run"))) == 3
    found = compare_commits.results(tmp_path / "run")
    assert len(found["medusa: losses"]) == 20
    other = compare_commits.results(tmp_path / "run")
    assert compare_commits.print_differences(found, other) == 0
    other["medusa: losses"][-1] = math.nextafter(other["medusa: losses"][-1], 9)
    assert compare_commits.print_differences(found, other) == 1


def test_sides_take_turns_and_the_ratio_is_of_amounts_a_second(monkeypatch):
    order = []
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    sides = {name: lambda case, repeat, name=name: order.append(name) or len(name) for name in ("a", "bb")}
    turns = harness.take_turns(sides, ["case", "case"], 1, description="turns")
    assert order[2:] == ["a", "bb", "bb", "a"]
    assert harness.speed_ratio(turns["bb"], turns["a"], float).point == 2


def test_a_part_of_a_results_file_is_shown_and_one_that_is_empty_is_refused(tmp_path):
    rows = [{"family": "eagle3", "suite": suite, "tau": 2.0, "tau_low": 1.5, "tau_high": 2.5} for suite in ("home", "house")]
    (tmp_path / "heads.json").write_text(json.dumps({"rows": rows, "ratios": {"speed": 1.25}, "source": "a run"}))
    page = "<!-- table: heads {rows: {suite: [home]}, columns: [family, tau]} -->\n<!-- end -->"
    filled = tables.fill_tables(page, tmp_path)
    assert "| family | tau |\n| --- | --- |\n| eagle3 | 2.00 [1.50, 2.50] |" in filled
    assert tables.fill_tables(filled, tmp_path) == filled
    with pytest.raises(InputError, match="nothing of"):
        tables.fill_tables(page.replace("home", "nowhere"), tmp_path)


SCHEMAS = {"cache": CacheConfig, "data": DataConfig, "heads": HeadsConfig, "serve": serve.ServeBenchConfig}


def test_every_config_loads():
    folder = CHECKOUT / "scripts" / "bench" / "configs"
    for path in [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]:
        load_config(SCHEMAS.get(path.parent.name, heads.HeadsBenchConfig), path)
