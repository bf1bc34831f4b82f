"""Several artifacts evaluated as one draft: their trees merged, all named in the report, all known to the gate."""

import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.evaluation import EvalConfig, GateConfig, LosslessConfig, SuiteConfig
from configs.schema.target import TargetConfig
from eval.evaluation import evaluate
from eval.measure.proposers import load_evaluated
from eval.release.artifact_hash import read_shipped
from eval.release.checks import judge
from eval.report.schema import load_report
from heads.artifact import read_metadata, save_draft_lm
from heads.proposers.cross_device import CrossDeviceProposer
from heads.proposers.merged import MergedDrafts
from heads.target.loading import load_target

CHAINS = StaticTree(kind="static", branching=[1, 1])


@pytest.fixture(scope="module")
def folders(tiny_run, tiny_llama, tiny_tokenizer, tmp_path_factory):
    """Two artifacts for one target: the run's, and a draft that knows little."""
    other = tmp_path_factory.mktemp("other") / "artifact"
    save_draft_lm(other, tiny_llama(seed=2, dtype=torch.float32), tiny_tokenizer, read_metadata(tiny_run / "artifact"))
    return [str(tiny_run / "artifact"), str(other)]


@pytest.fixture
def config(tiny_run, folders, tmp_path):
    return EvalConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        draft=folders,
        suite=SuiteConfig(path=str(tiny_run / "suite.jsonl"), num_prompts=3),
        decode=DecodeConfig(num_speculative_tokens=2, max_new_tokens=10, batch_size=2, tree=CHAINS),
        lossless=LosslessConfig(check_float32_prompts=1),
        bootstrap_samples=20,
        output=str(tmp_path / "evaluation"),
    )


def test_the_report_names_all_drafts_and_the_gate_knows_them_by_their_hashes(config, folders):
    assert evaluate(config) == 0
    report = load_report(Path(config.output) / "report.json")
    draft, (one, other) = report.draft, report.draft.parts
    assert draft.kind == "merged"
    assert [one["path"], other["path"]] == folders
    assert all(folder in (Path(config.output) / "report.html").read_text() for folder in folders)
    assert draft.num_parameters == one["num_parameters"] + other["num_parameters"]
    assert report.lossless.verdict == "lossless"
    assert len({draft.sha256, one["sha256"], other["sha256"]}) == 3

    def provenance(*paths):
        artifact = read_shipped([Path(path) for path in paths]) if paths else None
        findings = judge(report, GateConfig(), artifact=artifact).findings
        return next(each.outcome for each in findings if each.check == "provenance")

    assert provenance() == provenance(*folders) == "pass"
    assert provenance(folders[0]) == provenance(*reversed(folders)) == "fail"


def test_merged_drafts_are_accepted_as_often_as_the_better_of_them(config, folders):
    taus = []
    for number, draft in enumerate((folders, *folders)):
        output = f"{config.output}{number}"
        evaluate(config.model_copy(update={"draft": draft, "output": output, "repeats": 1}))
        taus.append(load_report(Path(output) / "report.json").acceptance.tokens_per_target_step)
    assert taus[0] >= max(taus[1:]) > min(taus[1:])


def test_a_list_of_one_is_that_artifact(config, folders):
    target = load_target(config.target)
    alone = [load_evaluated(config.model_copy(update={"draft": draft}), target) for draft in (folders[0], folders[:1])]
    assert alone[0].section == alone[1].section
    assert "parts" not in alone[0].section
    assert not isinstance(alone[1].proposer, MergedDrafts)


def test_a_part_made_for_another_target_shows_in_the_section_and_fails_the_gate(config, folders, tmp_path):
    stranger = Path(shutil.copytree(folders[1], tmp_path / "stranger"))
    metadata = (stranger / "draftsmith.json").read_text()
    known = read_metadata(stranger).target["weights_sha256"]
    (stranger / "draftsmith.json").write_text(metadata.replace(known, "f" * 64))
    mixed = config.model_copy(update={"draft": [folders[0], str(stranger)], "allow_target_mismatch": True})
    evaluate(mixed)
    report = load_report(Path(config.output) / "report.json")
    assert report.draft.target_sha256 == f"{known}, {'f' * 64}"
    assert "trained for" in report.warnings[0]
    findings = {each.check: each.outcome for each in judge(report, GateConfig()).findings}
    assert findings["provenance"] == "fail"


def test_drafts_may_be_merged_on_a_device_of_their_own(config):
    away = load_evaluated(config.model_copy(update={"draft_device": "cpu"}), load_target(config.target))
    assert [type(draft) for draft in away.proposer.drafts] == [CrossDeviceProposer, CrossDeviceProposer]
    assert evaluate(config.model_copy(update={"draft_device": "cpu"})) == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"draft": []}, "draft names no artifact folder"),
        ({"draft": ["a", "b", "a"]}, "names the same folder twice"),
        ({"draft": ["a", "b"]}, "merged into a tree: set decode.tree"),
        ({"draft": ["a", "b"], "decode": {"tree": CHAINS, "num_speculative_tokens": 0}}, "num_speculative_tokens to at least"),
        (
            {"draft": ["a", "b"], "decode": {"tree": CHAINS, "temperature": 1.0}},
            "set decode.verification to match, or decode.temperature to 0",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_reason(changed, reason):
    with pytest.raises(ValidationError, match=reason):
        EvalConfig.model_validate(changed)


def test_sampled_answers_of_merged_drafts_are_matched():
    decode = DecodeConfig(tree=CHAINS, temperature=1.0, verification="match")
    assert EvalConfig(draft=["a", "b"], decode=decode).drafts == ["a", "b"]
