"""Several artifacts evaluated as one draft: their trees merged, all named in the report, all known to the gate."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from configs.schema.decoding import StaticTree
from configs.schema.evaluation import EvalConfig, GateConfig
from eval.evaluation import evaluate
from eval.release import judge, read_artifact
from heads.artifact import save_draft_lm
from heads.metadata import read_metadata
from tests.support.evaluations import report_in, tiny_evaluation

CHAINS = StaticTree(kind="static", branching=[1, 1])


@pytest.fixture(scope="module")
def folders(tiny_run, tiny_llama, tiny_tokenizer, tmp_path_factory):
    """Two artifacts for one target: the run's, and a draft that knows little."""
    other = tmp_path_factory.mktemp("other") / "artifact"
    save_draft_lm(other, tiny_llama(seed=2, dtype=torch.float32), tiny_tokenizer, read_metadata(tiny_run / "artifact"))
    return [str(tiny_run / "artifact"), str(other)]


@pytest.fixture
def config(tiny_run, folders, tmp_path):
    decode = {"max_new_tokens": 10, "tree": CHAINS}
    return tiny_evaluation(tiny_run, tmp_path / "evaluation", num_prompts=3, draft=folders, decode=decode, baselines=[])


def test_the_report_names_all_drafts_and_the_gate_knows_them_by_their_hashes(config, folders):
    assert evaluate(config) == 0
    report = report_in(config)
    draft, (one, other) = report.draft, report.draft.parts
    assert draft.kind == "merged"
    assert [one["path"], other["path"]] == folders
    assert all(folder in (Path(config.output) / "report.html").read_text() for folder in folders)
    assert draft.num_parameters == one["num_parameters"] + other["num_parameters"]
    assert report.lossless.verdict == "lossless"
    assert len({draft.sha256, one["sha256"], other["sha256"]}) == 3

    def provenance(*paths):
        artifact = read_artifact([Path(path) for path in paths]) if paths else None
        findings = judge(report, GateConfig(), artifact=artifact).findings
        return next(each.outcome for each in findings if each.check == "provenance")

    assert provenance() == provenance(*folders) == "pass"
    assert provenance(folders[0]) == provenance(*reversed(folders)) == "fail"


def test_what_suffix_lookup_adds_to_a_draft_is_measured_beside_it(config, folders):
    decode = config.decode.model_copy(update={"max_new_tokens": 24, "tree": None})
    evaluate(config.model_copy(update={"draft": folders[1], "decode": decode, "baselines": ["prompt_lookup"]}))
    report = report_in(config)
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
            "set decode.verification to match, or decode.temperature to 0",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_reason(changed, reason):
    with pytest.raises(ValidationError, match=reason):
        EvalConfig.model_validate(changed)
