"""Several reports side by side: compared with the first prompt by prompt, refused where they are about different things."""

import pytest

from configs.runtime.command import run_command
from configs.runtime.errors import InputError
from configs.schema.evaluation import CompareConfig
from eval.compare import add_arguments, main
from eval.report.comparison import compare, describe_change, differences, speed_change, tau_change
from eval.report.schema import write_report
from tests.support.reports import changed

SUITE = "eval/suites/house64.jsonl"


def with_tau_times(report, factor):
    counts = {
        prompt_id: [round(1000 * factor * committed), 1000 * rounds]
        for prompt_id, (committed, rounds) in report.acceptance.per_prompt.items()
    }
    return changed(report, {"acceptance.per_prompt": counts})


# --- what two reports differ in -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "aspect", "sentence"),
    [
        ("target.tokenizer_sha256", "f" * 64, "target", "tokenizer (embedded:smollm2-135m-instruct, dddddddddddd here, "),
        ("prompts.sha256", "f" * 64, "suite", f"prompts ({SUITE}, cccccccccccc here, {SUITE}, ffffffffffff there)"),
        ("prompts.ids", ["writing-0"], "suite", "prompts (32, 31 of them only here, 1, 0 of them only"),
        ("prompts.num_turns", 64, "suite", "turns (32 here, 64 there)"),
        ("prompts.format", "gsm8k", "suite", "format of the suite (turns here, gsm8k there)"),
        ("decode.num_speculative_tokens", 5, "decode", "decode.num_speculative_tokens (3 here, 5 there)"),
        ("decode.top_p", 0.9, "decode", "decode.top_p (None here, 0.9 there)"),
        ("hardware.cores", 64, "machine", "hardware cores (2 here, 64 there)"),
        ("versions.torch", "9.9", "machine", "version of torch (2.13.0 here, 9.9 there)"),
    ],
)
def test_each_difference_is_named_with_both_values(report, path, value, aspect, sentence):
    (found,) = differences(report, changed(report, {path: value}))
    assert found.aspect == aspect
    assert str(found).startswith(sentence)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decode.seed": 9},
        {"versions.python": "9.9"},
        {"draft.sha256": "f" * 64},
        {"decode.lookup_expects": 0.7},
        {"decode.verification": "block"},
    ],
)
def test_seeds_drafts_and_greedy_rules_are_no_reason_against_a_comparison(report, changes):
    assert differences(report, changed(report, changes)) == []
    if "decode.verification" in changes:  # the rule decides what samples are
        sampled = changed(report, {"decode.temperature": 1.0})
        assert [found.what for found in differences(sampled, changed(sampled, changes))] == ["decode.verification"]


# --- side by side -------------------------------------------------------------------------------------------------


def test_a_change_that_every_prompt_shares_is_found_whatever_the_spread_between_prompts(report):
    _, better, worse = compare([("a", report), ("b", with_tau_times(report, 1.04)), ("c", with_tau_times(report, 0.97))])
    assert describe_change(better.tau) == "×1.04 [1.04, 1.04] better"
    assert describe_change(worse.tau) == "×0.97 [0.97, 0.97] worse"
    assert describe_change(better.speed).startswith("×1.00 [1.00, 1.00] not significant")


def test_numbers_of_another_target_are_not_compared(report):
    entry = compare([("a", report), ("b", changed(report, {"target.weights_sha256": "f" * 64}))])[1]
    assert (entry.tau, entry.speed) == (None, None)
    assert [each.aspect for each in entry.differences] == ["target"]


@pytest.mark.parametrize("changes", [{"hardware.cores": 64}, {"versions.torch": "9.9"}, {"decode.dtype": "float32"}])
def test_another_machine_version_or_dtype_leaves_only_the_counts_comparable(report, changes):
    entry = compare([("a", report), ("b", changed(report, changes))])[1]
    assert (entry.tau is None, entry.speed) == (False, None)


# --- prompt by prompt ----------------------------------------------------------------------------------------------


def with_seconds(report, plain=1.0, speculative=1.0):
    """The report of a run whose seconds were so many times as long."""
    batches = [
        {
            "prompt_ids": each.prompt_ids,
            "autoregressive": [plain * each.autoregressive[0], each.autoregressive[1]],
            "speculative": [speculative * each.speculative[0], each.speculative[1]],
        }
        for each in report.speed.per_batch
    ]
    return changed(report, {"speed.per_batch": batches})


def test_speed_is_compared_by_each_runs_own_plain_decoding(report):
    slower_machine = with_seconds(report, plain=3.0, speculative=3.0)
    assert speed_change(slower_machine, report).ratio.bounds == pytest.approx((1.0, 1.0))
    found = speed_change(with_seconds(report, speculative=1.25), report)
    assert (found.ratio.point, found.outcome) == (pytest.approx(0.8), "worse")


def test_only_prompts_that_both_answered_count(report):
    kept = dict(list(report.acceptance.per_prompt.items())[5:])
    found = tau_change(report, changed(report, {"acceptance.per_prompt": lambda _: kept}))
    tau = sum(tokens for tokens, _ in kept.values()) / sum(rounds for _, rounds in kept.values())
    assert found.ours == pytest.approx(tau)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompts.sha256": "f" * 64}, "which differ"),
        ({"acceptance.per_prompt": lambda _: {"else": [4, 2]}}, "no answered prompt in common"),
    ],
)
def test_reports_without_a_common_prompt_are_refused(report, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        tau_change(report, changed(report, changes))


@pytest.mark.parametrize("changes", [{"speed": None}, {"speed.per_batch": lambda batches: batches[1:]}])
def test_speed_on_other_batches_is_not_compared(report, changes):
    assert speed_change(report, changed(report, changes)) is None


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_takes_files_and_folders_and_writes_a_table_but_never_over_a_report(report, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_report(tmp_path / "one/report.json", report)
    write_report(tmp_path / "two.json", changed(with_tau_times(report, 0.9), {"warnings": ["<script>alert(1)</script>"]}))

    def run(output):
        argv = ["one", "two.json", "--set", f"output={output}"]
        return run_command(CompareConfig, main, description="", argv=argv, add_arguments=add_arguments), *capsys.readouterr()

    code, out, _ = run("table.md")
    assert (code, "A  one/report.json" in out, "worse" in out) == (0, True, True)
    written = (tmp_path / "table.md").read_text()
    assert ("| A | one/report.json |" in written, "<script" in written) == (True, False)
    code, out, err = run("./two.json")
    assert (code, out, "would overwrite the report" in err) == (2, "", True)
