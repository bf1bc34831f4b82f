"""A prediction in the report: made where it is asked for, printed beside what was measured, asked again for other machines."""

from pathlib import Path

import pytest

from configs.runtime.command import BAD_INPUT, DONE, run_command
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import CostConfig, PredictConfig
from eval.cost.predict import BY_TEXT_ALONE, prediction_of
from eval.decoder.decode import decode
from eval.evaluation import evaluate
from eval.predict import add_arguments, main
from eval.report.markdown import render_markdown
from eval.report.schema import load_report, write_report
from heads.families.registry import FAMILIES
from heads.proposers.draft_lm import DraftLM
from tests.support.decoding import HEADS, PROMPTS, requests_for
from tests.support.evaluations import tiny_evaluation
from tests.support.family_checks import NO_NORMS, build, tiny_target
from tests.support.reports import changed

SWEEP = CostConfig(num_speculative_tokens=3, batch_sizes=[1, 2], context_tokens=[16, 48], repeats=1)


@pytest.fixture(scope="module")
def evaluated(tiny_run, tmp_path_factory):
    """The folder of an evaluation with a timing sweep."""
    folder, decode = tmp_path_factory.mktemp("evaluation"), {"max_new_tokens": 10, "batch_size": 1}
    config = tiny_evaluation(tiny_run, folder, num_prompts=4, decode=decode, baselines=[], cost=SWEEP)
    assert evaluate(config) == DONE
    return Path(config.output)


@pytest.fixture
def found(evaluated):
    return load_report(evaluated / "report.json")


def guesses(target, draft, num_drafts):
    """Return what a draft guesses at each place of the target's answers that it has come to, by prompt and place."""
    config, seen = DecodeConfig(num_speculative_tokens=num_drafts, max_new_tokens=24), {}
    for generation in decode(target, requests_for(PROMPTS), config, draft)[0]:
        place = 1
        for round_ in generation.rounds:
            for number, token in enumerate(round_.drafted[: round_.num_accepted + 1]):
                seen[generation.prompt_id, place + number] = token
            place += len(round_.committed)
    return seen


@pytest.mark.parametrize("kind", ["draft_lm", "early_exit", "eagle3"])
def test_drafts_that_are_told_by_the_text_alone_guess_the_same_wherever_a_round_begins(kind, tiny_llama, as_target):
    target = as_target(tiny_target("llama"))
    if kind == "draft_lm":
        draft = DraftLM(tiny_llama(seed=2), 64)
    else:  # with norms an untrained EAGLE-3 head guesses the same anywhere
        settings = HEADS[kind].model_copy(update=NO_NORMS if kind == "eagle3" else {})
        draft = FAMILIES[kind].propose(build(settings, target.model), target.device)
    short, long = guesses(target, draft, 1), guesses(target, draft, 4)
    both = short.keys() & long.keys()
    assert len(both) > 10
    assert all(short[place] == long[place] for place in both) == (kind in BY_TEXT_ALONE)


def ask(*arguments):
    return run_command(PredictConfig, main, description="", argv=[str(each) for each in arguments], add_arguments=add_arguments)


def test_the_report_holds_the_prediction_and_the_summary_sets_it_beside_the_measured_speed(evaluated, found):
    predicted = found.speed.predicted
    speed = predicted.decode_speedup
    own = [
        each.decode_speedup
        for each in predicted.settings
        if (each.num_speculative_tokens, each.batch_size, each.context_tokens) == (2, 1, predicted.context_tokens)
    ]

    assert own == [speed]
    assert 0.1 < speed < 3.0
    tokens = sum(each.num_tokens * each.num_answers for each in predicted.answers)
    assert tokens == found.speed.decode_tokens_autoregressive > 0
    assert 10 <= predicted.context_tokens <= 20
    assert f"The cost model predicts {speed:.2f}× for this run." in (evaluated / "report.md").read_text()
    assert "Predicted decode speedup" in (evaluated / "report.html").read_text()


def test_the_model_made_of_the_report_alone_is_the_one_that_made_it(found):
    model = prediction_of(found, "report")
    for each in found.speed.predicted.settings:
        sizes = each.num_speculative_tokens, each.batch_size, each.context_tokens
        assert model.speedup(*sizes) == pytest.approx(each.decode_speedup)


@pytest.mark.parametrize(
    ("best", "largest", "sentence"),
    [
        (3, 12, "At this batch size 3 drafts per round would be fastest. Drafting pays up to a batch of 12. Batches"),
        (3, None, "At this batch size 3 drafts per round would be fastest. Drafting pays up to every timed batch. Batches"),
        (None, 0, "No number of drafts pays at this batch size. Batches"),
    ],
)
def test_the_summary_says_what_to_choose(found, best, largest, sentence):
    chosen = {"best_num_speculative_tokens": best, "break_even_batch_size": largest}
    report = changed(found, {"speed.predicted": chosen})
    assert sentence in render_markdown(report)


def test_the_command_prints_a_row_for_each_batch_and_another_machine_is_another_table(evaluated, capsys):
    assert ask(evaluated / "report.json", "--set", "batch_sizes=[1, 4]") == DONE
    here = capsys.readouterr().out
    assert ask(evaluated / "report.json", "--set", "batch_sizes=[1, 4]", "--bandwidth", "2000", "--flops", "400") == DONE
    there = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in here.splitlines()[2:4]] == ["1", "4"]
    assert "3 drafts" in here
    assert here != there


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--bandwidth", "100"], "described by --bandwidth and --flops together"),
        (["--bandwidth", "1", "--flops", "nan"], "--flops must be above 0, got nan"),
    ],
)
def test_half_a_machine_and_a_report_without_a_sweep_are_refused(evaluated, report, tmp_path, arguments, complaint, capsys):
    assert ask(evaluated / "report.json", *arguments) == BAD_INPUT
    assert complaint in capsys.readouterr().err
    write_report(tmp_path / "report.json", report)
    assert ask(tmp_path / "report.json") == BAD_INPUT
    assert "holds no timing sweep; run eval/run.py with `cost` set" in capsys.readouterr().err
