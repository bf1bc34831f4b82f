"""The proposers of an evaluation: several artifacts as one draft, known to the gate, and free baselines measured beside it."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.decoding import ConfidenceStopping, DecodeConfig, StaticTree, TypicalAcceptance
from configs.schema.evaluation import EvalConfig, GateConfig
from distill.dataset.conversations import Conversation
from distill.generation.prompts import Prompt
from eval.decoder.decode import Request
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, WITH_LOOKUP
from eval.evaluation import evaluate
from eval.measure import interleaved
from eval.measure.interleaved import Measurement, add_lookup, known_answers, make_baselines
from eval.release import judge, read_artifact
from heads.artifact import save_draft_lm
from heads.metadata import read_metadata
from heads.proposers.draft_lm import DraftLM
from tests.support.caches import write_rows
from tests.support.evaluations import measure, report_in, tiny_evaluation

CHAINS = StaticTree(kind="static", branching=[1, 1])


@pytest.fixture(scope="module")
def folders(tiny_run, tiny_llama, tiny_tokenizer, tmp_path_factory):
    """Two artifacts for one target: the run's, and a draft that knows little."""
    other = tmp_path_factory.mktemp("other") / "artifact"
    save_draft_lm(other, tiny_llama(seed=2, dtype=torch.float32), tiny_tokenizer, read_metadata(tiny_run / "artifact"))
    return [str(tiny_run / "artifact"), str(other)]


@pytest.fixture
def evaluation(tiny_run, folders, tmp_path):
    decode = {"max_new_tokens": 10, "tree": CHAINS}
    return tiny_evaluation(tiny_run, tmp_path / "evaluation", num_prompts=3, draft=folders, decode=decode, baselines=[])


def test_the_report_names_all_drafts_and_the_gate_knows_them_by_their_hashes(evaluation, folders):
    assert evaluate(evaluation) == 0
    report = report_in(evaluation)
    draft, (one, other) = report.draft, report.draft.parts
    assert draft.kind == "merged"
    assert [one["path"], other["path"]] == folders
    assert all(folder in (Path(evaluation.output) / "report.html").read_text() for folder in folders)
    assert draft.num_parameters == one["num_parameters"] + other["num_parameters"]
    assert report.lossless.verdict == "lossless"
    assert len({draft.sha256, one["sha256"], other["sha256"]}) == 3

    def provenance(*paths):
        artifact = read_artifact([Path(path) for path in paths]) if paths else None
        findings = judge(report, GateConfig(), artifact=artifact).findings
        return next(each.outcome for each in findings if each.check == "provenance")

    assert provenance() == provenance(*folders) == "pass"
    assert provenance(folders[0]) == provenance(*reversed(folders)) == "fail"


def test_what_suffix_lookup_adds_to_a_draft_is_measured_beside_it(evaluation, folders):
    decode = evaluation.decode.model_copy(update={"max_new_tokens": 24, "tree": None})
    evaluate(evaluation.model_copy(update={"draft": folders[1], "decode": decode, "baselines": ["prompt_lookup"]}))
    report = report_in(evaluation)
    assert report.baselines.keys() == {"autoregressive", "prompt_lookup"}
    found, alone = report.with_lookup, report.acceptance.tokens_per_target_step
    assert found.tokens_per_target_step_ratio == pytest.approx(found.tokens_per_target_step / alone)
    assert found.tokens_per_target_step != alone  # the lookup took some rounds


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"draft": []}, "draft names no artifact folder"),
        ({"draft": ["a", "b", "a"]}, "names the same folder twice"),
        ({"draft": ["a", "b"]}, "merged into a tree: set decode.tree"),
        ({"draft": ["a", "prompt_lookup"]}, "a lookup is one of the baselines"),
        ({"draft": ["a", "b"], "decode": {"tree": CHAINS, "num_speculative_tokens": 0}}, "num_speculative_tokens to at least"),
        (
            {"draft": ["a", "b"], "decode": {"tree": CHAINS, "temperature": 1.0}},
            "decode.verification",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_reason(changed, reason):
    with pytest.raises(ValidationError, match=reason):
        EvalConfig.model_validate(changed)


# --- the free baselines ----------------------------------------------------------------------------------------------

NAMES = ["prompt_lookup", "suffix_lookup"]
PROMPTS = [(7, 12, 3), (20, 9, 9), (40, 7, 12)]


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, layers=5))


@pytest.fixture
def requests():
    return [Request(prompt_id=f"q{number}", category="c", tokens=prompt) for number, prompt in enumerate(PROMPTS)]


@pytest.fixture
def config():
    return EvalConfig(
        decode=DecodeConfig(num_speculative_tokens=3, max_new_tokens=16), repeats=2, warmup_prompts=0, baselines=NAMES
    )


def test_every_repeat_of_suffix_lookup_takes_the_same_rounds_and_earlier_prompts_help(target, requests, config):
    asked = [*requests, Request(prompt_id="again", category="c", tokens=PROMPTS[0])]
    rounds = {}
    for warmup_prompts in (0, 4):
        settings = config.model_copy(update={"baselines": ["suffix_lookup"], "warmup_prompts": warmup_prompts})
        timings = measure(target, asked, settings, make_baselines(settings, target)).timings
        for each in timings:
            if each.mode == "suffix_lookup":
                rounds.setdefault(each.prompt_ids, set()).add(each.num_rounds)
    assert all(len(each) == 1 for each in rounds.values())
    assert rounds["again",] < rounds["q0",] or min(rounds["again",]) < min(rounds["q0",])


def test_suffix_lookup_before_a_draft_learns_from_earlier_prompts_as_it_does_alone(target, requests, config, tiny_llama):
    settings = config.model_copy(update={"baselines": [], "lookup_expects": 2.0})
    both = add_lookup(DraftLM(tiny_llama(seed=2), 64), settings, target)
    asked = [requests[0], Request(prompt_id="again", category="c", tokens=PROMPTS[0])]
    first, again = measure(target, asked, settings, {WITH_LOOKUP: both}).of(WITH_LOOKUP)
    assert again.tokens == first.tokens
    assert len(again.rounds) < len(first.rounds)


def test_answers_to_prompts_of_the_suites_are_not_known(target, tmp_path, monkeypatch):
    said = ["What is a tide?", "Say it again.", "Name a river."]
    rows = [
        Conversation(
            prompt_id=f"p{n}",
            category="c",
            turn=0,
            messages=({"role": "user", "content": text}, {"role": "assistant", "content": "a"}),
            prompt_ids=(1, 2),
            answer_ids=tuple(range(n, n + 10)),
            ended=True,
        )
        for n, text in enumerate(said)
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    written_by = target.identity.to_dict()
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": 1, "target": written_by}))
    config = EvalConfig(lookup_answers=str(tmp_path / "train.jsonl"))
    suite = [Prompt(prompt_id="q", category="c", turns=("say IT  again.", "Hello."))]
    assert list(known_answers(config, suite, target.identity)) == [rows[0].answer_ids, rows[2].answer_ids]
    assert list(known_answers(EvalConfig(), suite, target.identity)) == []
    monkeypatch.setattr(interleaved, "KNOWN_TOKENS", 19)
    assert list(known_answers(config, suite, target.identity)) == [rows[0].answer_ids]
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format_version": 1, "target": written_by | {"tokenizer_sha256": "another"}})
    )
    with pytest.raises(InputError, match="whose tokenizer is not that of target"):
        known_answers(config, suite, target.identity)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tree", StaticTree(kind="static", branching=[2, 1])),
        ("stopping", ConfidenceStopping(rule="confidence", threshold=1.0)),
        ("lossy", TypicalAcceptance(kind="typical")),
    ],
)
def test_baselines_draft_whole_chains_without_loss_whatever_is_asked_of_the_draft(target, config, name, value):
    asked = config.decode.model_copy(update={name: value})
    measurement = Measurement(target, config.model_copy(update={"decode": asked}), make_baselines(config, target))
    assert all(getattr(measurement.settings[each], name) is None for each in NAMES)


@pytest.mark.parametrize("tree", [None, StaticTree(kind="static", branching=[2, 1])])
def test_what_is_timed_is_not_looked_at_and_a_tree_nowhere_and_lookups_draft_their_own_number_of_tokens(
    target, requests, config, tiny_llama, monkeypatch, tree
):
    calls, plain = [], interleaved.decode

    def decode(*args, **how):
        calls.append((how["mode"], how["measure_overlap"]))
        return plain(*args, **how)

    monkeypatch.setattr(interleaved, "decode", decode)
    config = config.model_copy(update={"lookup_num_speculative_tokens": 5, "baselines": ["prompt_lookup"]})
    config = config.model_copy(update={"decode": config.decode.model_copy(update={"tree": tree})})
    proposers = {SPECULATIVE: DraftLM(tiny_llama(seed=2), 64), **make_baselines(config, target)}
    records = measure(target, requests[:1], config, proposers)
    modes = [AUTOREGRESSIVE, SPECULATIVE, "prompt_lookup"]
    in_turns = [(mode, False) for mode in (*modes, *reversed(modes))]
    assert calls == in_turns + ([] if tree else [(SPECULATIVE, True)])
    assert all(bool(round_.overlap) == (tree is None) for round_ in records.of(SPECULATIVE)[0].rounds if round_.drafted)
    assert len(records.timings) == 6
    assert max(len(round_.drafted) for round_ in records.of("prompt_lookup")[0].rounds) > 3
