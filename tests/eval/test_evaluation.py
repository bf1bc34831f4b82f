"""An evaluation end to end: what it writes, in which turns it measures, what it refuses; and the report of given records."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from configs.runtime.command import BAD_INPUT, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import folder_lock
from configs.schema.decoding import DynamicTree, ParticleSampling, TypicalAcceptance
from configs.schema.evaluation import EvalConfig, GateConfig, GateRule, LosslessConfig
from distill.dataset.conversations import text_hash
from eval.decoder.decode import Request, decode
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, WITH_LOOKUP
from eval.decoder.rules import ChainVerification
from eval.evaluation import evaluate
from eval.release import judge, read_artifact
from eval.report.schema import load_report
from eval.run import main
from heads.metadata import PROMPTS_FILE
from heads.proposers.lookup import PromptLookup
from tests.support.evaluations import measure, report_in, tiny_evaluation, write_suite
from tests.support.reports import REMOVED, changed, report_of

FILES = [".lock", "records.jsonl", "report.html", "report.json", "report.md", "run.json", "seconds.json"]


@pytest.fixture
def config(tiny_run, tmp_path):
    return tiny_evaluation(tiny_run, tmp_path / "evaluation", num_prompts=3)


@pytest.fixture
def requests():
    return [Request(prompt_id=f"q{number}", category="c", tokens=(7, 12, 3 + number)) for number in range(3)]


def records_of(folder):
    """Return the generations and the timings on disk."""
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [[line[kind] for line in lines if kind in line] for kind in ("generation", "timing")]


def damaged_target(run, folder, where):
    """Copy the target with weights that are no numbers; return its folder."""
    copy = Path(shutil.copytree(run / "target", folder / "target"))
    model = LlamaForCausalLM.from_pretrained(copy, dtype=torch.float32)
    with torch.no_grad():
        where(model).fill_(float("nan"))
    model.save_pretrained(copy)
    return copy


def test_every_file_is_written_and_the_report_says_what_the_records_say(tiny_run, tmp_path, capsys):
    lossless = LosslessConfig()
    config = tiny_evaluation(tiny_run, tmp_path / "evaluation", num_prompts=5, repeats=2, lossless=lossless)
    assert evaluate(config) == 0

    folder = Path(config.output)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    report = report_in(config)
    generations, timings = records_of(folder)
    committed = [count for each in generations if each["mode"] == SPECULATIVE for count in each["rounds"]["committed"]]
    assert report.acceptance.tokens_per_target_step == pytest.approx(sum(committed) / len(committed))
    assert 1.0 < report.acceptance.tokens_per_target_step < 3.0
    assert report.acceptance.overlap_alpha is not None
    assert report.lossless.verdict == "lossless"
    assert report.prompts.ids == ["q0", "q1", "q2", "q3", "q4"]
    assert report.baselines.keys() == {"autoregressive", "prompt_lookup"}
    assert (report.baselines["prompt_lookup"].learns_from_prompts, report.with_lookup.learns_from_prompts) == (False, True)
    spent = sum(each["decode_seconds"] for each in timings if each["mode"] == SPECULATIVE)
    assert report.speed.decode_seconds_speculative == pytest.approx(spent)
    assert (folder / "report.md").read_text() in capsys.readouterr().out
    assert json.loads((folder / "run.json").read_text())["config"]["decode"]["batch_size"] == 2
    # Modes take turns on each batch and each repeat, in the reverse order every other time.
    modes, batches = [AUTOREGRESSIVE, SPECULATIVE, "prompt_lookup", WITH_LOOKUP], [["q0", "q1"], ["q2", "q3"], ["q4"]]
    assert [(each["prompt_ids"], each["repeat"], each["mode"]) for each in timings] == [
        (batch, repeat, mode)
        for place, batch in enumerate(batches)
        for repeat in range(2)
        for mode in (reversed(modes) if (place + repeat) % 2 else modes)
    ]


def test_what_was_measured_is_there_when_a_check_ends_the_run(config, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("eval.evaluation.judge_lossless", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            evaluate(config)
    partial = load_report(Path(config.output) / "report.partial.json")
    assert judge(partial, GateConfig()).outcome == "inconclusive"
    evaluate(config)
    assert report_in(config).acceptance == partial.acceptance
    assert not (Path(config.output) / "report.partial.json").exists()


def test_above_temperature_0_the_report_has_both_ways_of_choosing_drafts(config, tmp_path):
    sampled = config.model_copy(update={"decode": config.decode.model_copy(update={"temperature": 1.0}), "baselines": []})
    drawn = {"decode": sampled.decode.model_copy(update={"verification": "token"}), "output": str(tmp_path / "drawn")}
    evaluate(sampled)
    evaluate(sampled.model_copy(update=drawn | {"other_verification": False}))
    report, alone = report_in(sampled), load_report(tmp_path / "drawn" / "report.json")
    assert (report.decode.verification, alone.decode.verification, alone.other_verification) == ("one_hot", "token", None)
    other, own = report.other_verification, report.acceptance
    for name in ("tokens_per_target_step", "overlap_alpha"):
        assert other.interval_of(name) == alone.acceptance.interval_of(name)
        assert own.interval_of(name) != other.interval_of(name)
    assert other.tokens_per_target_step_ratio == pytest.approx(own.tokens_per_target_step / other.tokens_per_target_step)
    assert other.decode_speedup > 0
    assert report.lossless.checks.keys() == {"first_tokens", "first_tokens_other_verification"}
    rule = GateRule(metric="other_verification.overlap_alpha", min=0.01, bound="point")
    assert judge(report, GateConfig(rules=[rule])).findings[-1].outcome == "pass"
    assert "this draft, drawn" in (Path(sampled.output) / "report.md").read_text()


def test_the_targets_own_sampling_is_decoded_by_where_asked_for_and_else_named(config, tiny_run, tmp_path, caplog):
    target = Path(shutil.copytree(tiny_run / "target", tmp_path / "target"))
    own = {"do_sample": False, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}
    (target / "generation_config.json").write_text(json.dumps(own | {"presence_penalty": 0.4, "eos_token_id": 1}))
    config = config.model_copy(
        update={"target": config.target.model_copy(update={"name": str(target)}), "allow_target_mismatch": True}
    )
    evaluate(config)
    assert any("sampling_from" in message for message in caplog.messages)
    assert report_in(config).decode.temperature == 0.0
    caplog.clear()
    evaluate(config.model_copy(update={"sampling_from": "generation_config", "overwrite": True}))
    decode = report_in(config).decode.model_dump()
    expected = {"temperature": 0.7, "top_k": None, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}
    assert {key: decode[key] for key in (*expected, "presence_penalty")} == expected | {"presence_penalty": None}
    assert not any("sampling_from" in message for message in caplog.messages)
    tree = config.decode.model_copy(update={"tree": DynamicTree(kind="dynamic")})
    with pytest.raises(InputError, match="sampling_from"):
        evaluate(config.model_copy(update={"sampling_from": "generation_config", "decode": tree}))


@pytest.mark.parametrize("lossy", [TypicalAcceptance(kind="typical"), ParticleSampling(kind="smc", num_particles=3)])
def test_a_lossy_report_says_so_and_its_baselines_do_not_take_part(config, lossy):
    sampled = config.decode.model_copy(update={"temperature": 1.0, "lossy": lossy})
    evaluate(config.model_copy(update={"decode": sampled}))
    report = report_in(config)
    assert report.decode.lossy == lossy.model_dump()
    assert (report.decode.verification, report.lossless.verdict) == (lossy.kind, "lossy_by_design")
    assert report.lossless.checks == {}
    assert "; the rule changes the target's distribution by design" in (Path(config.output) / "report.md").read_text()
    no_acceptance = [report.acceptance.tokens_per_target_step, report.acceptance.accepted_per_round]
    assert (no_acceptance == [None, None]) == (lossy.kind == "smc")
    assert judge(report, GateConfig()).outcome == "fail"


def accept_everything(target_tokens_BK, tokens_BG, num_drafted_B):
    return ChainVerification(num_drafted_B, target_tokens_BK.gather(1, num_drafted_B.unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("planted", [False, True])
def test_a_sound_draft_passes_the_gate_and_a_rule_that_accepts_everything_does_not(config, planted, monkeypatch):
    if planted:
        monkeypatch.setattr("eval.decoder.verifier.verify_greedy", accept_everything)
    evaluate(config.model_copy(update={"baselines": []}))
    gate = GateConfig(rules=[GateRule(metric="acceptance.tokens_per_target_step", min=0.1)], allow_unknown_training=True)
    verdict = judge(report_in(config), gate, artifact=read_artifact([config.draft]))
    assert [each.check for each in verdict.findings if each.outcome != "pass"] == ["lossless"] * planted


def test_a_second_evaluation_into_the_same_folder_is_refused(config):
    with folder_lock(Path(config.output)), pytest.raises(InputError, match="output: another process"):
        evaluate(config)


def test_a_draft_that_was_trained_on_a_prompt_of_the_suite_is_warned_of_and_fails_the_gate(config, tiny_run, tmp_path):
    draft = Path(shutil.copytree(tiny_run / "artifact", tmp_path / "trained"))
    save_file({"user_texts": torch.tensor([text_hash(" W3\nw1 w2  w7"), 5])}, draft / PROMPTS_FILE)
    suite = write_suite(tmp_path / "turns.jsonl", [{"question_id": f"q{n}", "turns": ["w3", f"w{n} w2 w7"]} for n in range(3)])
    evaluate(config.model_copy(update={"draft": str(draft), "suite": suite}))
    report = report_in(config)
    assert "the draft was trained on 1 of the suite's 3 prompts, q1 among them" in report.warnings[0]
    (finding,) = (each for each in judge(report, GateConfig()).findings if each.check == "prompts")
    assert (finding.outcome, finding.reason[:34]) == ("fail", "the draft was trained on 1 of them")


def test_the_report_of_another_target_draft_or_suite_is_not_written_over_unless_asked(config, tiny_run, tmp_path):
    evaluate(config)
    before = (Path(config.output) / "report.json").read_bytes()
    copied = tiny_evaluation(shutil.copytree(tiny_run, tmp_path / "copy"), Path(config.output), num_prompts=3)
    for name, key in (("draft", "draft"), ("suite", "suite.path"), ("target", "target.name")):
        other = config.model_copy(update={name: getattr(copied, name)})
        with pytest.raises(InputError, match=f"holds the report of a run with {key} .*{tiny_run}.*set overwrite to true"):
            evaluate(other)
    assert evaluate(other.model_copy(update={"overwrite": True})) == 0
    assert (Path(config.output) / "report.json").read_bytes() != before
    assert evaluate(other.model_copy(update={"repeats": 2})) == 0  # the same, measured otherwise


def test_prompts_that_fill_the_context_are_left_out_where_asked_and_the_report_says_so(config, tmp_path):
    def evaluate_on(*texts):
        rows = [{"question_id": f"q{number}", "turns": [text]} for number, text in enumerate(texts)]
        suite = write_suite(tmp_path / "suite.jsonl", rows).model_copy(update={"on_too_long": "skip"})
        return evaluate(config.model_copy(update={"suite": suite, "overwrite": True}))

    evaluate_on("w1 " * 300, "w2")
    report = report_in(config)
    assert report.prompts.ids == ["q1"]
    assert "1 of the suite's prompts were left out" in report.warnings[0]
    with pytest.raises(InputError, match="each of the 1 prompts fills the target's context of 256 tokens"):
        evaluate_on("w1 " * 300)


@pytest.mark.parametrize(("warmup_prompts", "sizes"), [(0, []), (3, [2, 1])])
def test_warm_up_decodes_whole_batches_in_every_mode(
    config, requests, tiny_llama, as_target, warmup_prompts, sizes, monkeypatch
):
    target, decoded = as_target(tiny_llama(seed=1)), []

    def watch(target, batch, settings, proposer, **labels):
        if "mode" not in labels:
            decoded.append((len(batch), proposer))
        return decode(target, batch, settings, proposer, **labels)

    monkeypatch.setattr("eval.measure.interleaved.decode", watch)
    lookup = PromptLookup(target.device)
    measure(target, requests, config.model_copy(update={"warmup_prompts": warmup_prompts}), {"prompt_lookup": lookup})
    assert decoded == [(size, proposer) for size in sizes for proposer in (None, lookup)]


# --- run as a person runs it --------------------------------------------------------------------------------------


@pytest.fixture
def command(config, tmp_path, monkeypatch):
    """Return a function that runs the command in an empty folder, with changed settings."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    target = {"target.name": config.target.name, "target.dtype": "float32", "target.device": "cpu"}
    suite = {"suite.path": config.suite.path, "suite.num_prompts": 2, "decode.max_new_tokens": 4}

    def run(**changed):
        settings = {"draft": config.draft, "output": "evaluation", **target, **suite, **changed}
        argv = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return run_command(EvalConfig, main, description="", argv=argv)

    return run


@pytest.fixture
def refusal(command, capsys):
    """Return a function that gives the one sentence with which the command is refused, having written nothing."""

    def run(**changed):
        capsys.readouterr()
        assert (command(**changed), list(Path().iterdir())) == (BAD_INPUT, [])
        # Before it come, at most, transformers' own bars.
        complaints = [line for line in capsys.readouterr().err.splitlines() if "Loading weights" not in line and line]
        assert len(complaints) == 1
        return complaints[0]

    return run


def test_a_prompt_longer_than_the_context_and_damaged_weights_are_refused_in_one_sentence(refusal, tiny_run, tmp_path):
    suite = write_suite(tmp_path / "long.jsonl", [{"question_id": "q0", "turns": ["w1 " * 300]}])
    assert "prompt q0 " in refusal(**{"suite.path": suite.path, "suite.num_prompts": 1})
    damaged = damaged_target(tiny_run, tmp_path, lambda model: model.model.norm.weight)
    assert "logits that are not finite" in refusal(**{"target.name": damaged})


@pytest.mark.parametrize(
    ("changed", "beginning"),
    [
        ({"suite.path": "nosuch.jsonl"}, "error: suite not found: nosuch.jsonl"),
        ({"target.name": "./nosuch"}, "error: target.name: ./nosuch is neither"),
        ({"draft": "nosuch"}, "error: nosuch is no artifact"),
        ({"decode.num_speculative_tokens": 256}, "error: decode.num_speculative_tokens is 256, and the target's context"),
        ({"output": "/dev/null/evaluation"}, "error: output: /dev/null/evaluation"),
    ],
)
def test_what_cannot_be_found_or_written_is_refused_in_one_sentence(refusal, changed, beginning):
    assert refusal(**changed).startswith(beginning)


def test_categories_and_prompts_pool_back_to_the_whole_and_plain_decoding_is_a_baseline_of_one(report):
    parts = list(report.by_category.values())
    assert sum(part.acceptance.num_tokens for part in parts) == report.acceptance.num_tokens
    assert sum(part.acceptance.num_rounds for part in parts) == report.acceptance.num_rounds
    assert sum(part.num_prompts for part in parts) == report.prompts.num_prompts == 32
    speedups = [part.speed.decode_speedup for part in parts]
    assert min(speedups) < report.speed.decode_speedup < max(speedups)
    committed, rounds = map(sum, zip(*report.acceptance.per_prompt.values(), strict=True))
    assert committed / rounds == report.acceptance.tokens_per_target_step
    plain = report.baselines["autoregressive"]
    assert plain.tokens_per_target_step == plain.decode_speedup == 1.0


def test_without_timings_there_is_no_speed_and_a_prompt_without_an_answer_is_asked_but_not_measured(report, report_inputs):
    untimed = report_of({**report_inputs, "timings": []})
    assert (untimed.speed, untimed.baselines["prompt_lookup"].decode_speedup) == (None, None)
    assert untimed.acceptance == report.acceptance
    lost = report_inputs["generations"][0].prompt_id
    kept = [generation for generation in report_inputs["generations"] if generation.prompt_id != lost]
    prompts = report_of({**report_inputs, "generations": kept, "timings": []}).prompts
    assert (prompts.num_prompts, prompts.num_asked) == (31, 32)


def test_a_failed_request_is_counted_listed_and_kept_in_the_numbers(report, report_inputs):
    broken = next(generation for generation in report_inputs["generations"] if generation.mode == SPECULATIVE)
    others = [generation for generation in report_inputs["generations"] if generation is not broken]
    failed = dataclasses.replace(broken, stop_reason="non_finite")
    with_failure = report_of({**report_inputs, "generations": [*others, failed]})
    assert [each.model_dump() for each in with_failure.prompts.failed] == [
        {"prompt_id": broken.prompt_id, "turn": 0, "mode": SPECULATIVE, "stop_reason": "non_finite"}
    ]
    assert (with_failure.prompts.num_prompts, with_failure.prompts.num_asked) == (31, 32)
    assert with_failure.acceptance.num_rounds == report.acceptance.num_rounds


def test_two_answers_to_one_prompt_and_answers_to_no_prompt_are_mistakes_of_the_caller(report_inputs):
    first, *others = report_inputs["generations"]
    with pytest.raises(ValueError, match="writing-0 was decoded twice in mode autoregressive"):
        report_of({**report_inputs, "generations": [first, *others, first]})
    strange = dataclasses.replace(first, prompt_id="unknown")
    with pytest.raises(ValueError, match="prompt unknown, turn 0 was decoded but is not among the prompts"):
        report_of({**report_inputs, "generations": [strange, *others]})


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("schema_version", 2, "schema_version 1"),
        ("draft", REMOVED, "draft: Field required"),
        ("acceptance.tokens_per_target_step", "1.5", "acceptance.tokens_per_target_step: Input should be a valid number"),
        ("acceptance.tokens_per_target_step_ci", [2.0, 1.0], r"must be \[low, high\]"),
    ],
)
def test_a_malformed_report_is_refused_by_name(report, path, value, sentence):
    with pytest.raises(InputError, match=sentence):
        changed(report, {path: value})
