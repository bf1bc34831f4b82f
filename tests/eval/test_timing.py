"""The sweep runs the rounds it says it runs, speedups are interpolated, transformers' `generate` is timed on the same work."""

from itertools import count
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import CostConfig
from eval import timing
from eval.decoder.decode import Request, generate
from eval.decoder.records import Clock
from eval.report.schema import TimedRound
from eval.timing import Prediction, predict_speed, sweep_rounds
from heads.frozen.loading import load_target
from heads.proposers.draft_lm import DraftLM
from tests.support.evaluations import tiny_evaluation

SWEEP = CostConfig(num_speculative_tokens=3, batch_sizes=[1, 3], context_tokens=64, repeats=2)
TEXT = list(range(5, 60))


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1), eos=range(64))  # any token would end a text


@pytest.fixture
def proposer(tiny_llama):
    return DraftLM(tiny_llama(seed=2, layers=1), 64)


@pytest.fixture
def rounds(monkeypatch):
    """The rounds that a sweep runs: (drafts, all kept, each row's length before and after)."""
    seen, run_round = [], timing.run_round

    def watch(run, drafts):
        before = [len(row.tokens) for row in run.rows]
        run_round(run, drafts)
        seen.append((drafts, run.verifier.keeps_all, before, [len(row.tokens) for row in run.rows]))

    monkeypatch.setattr(timing, "run_round", watch)
    return seen


def test_every_number_of_drafts_is_timed_at_each_batch(target, proposer):
    sweep = sweep_rounds(target, proposer, TEXT, DecodeConfig(), SWEEP)
    sizes = [(each.num_speculative_tokens, each.batch_size) for each in sweep]
    assert sizes == [(drafts, batch) for batch in (1, 3) for drafts in range(4)]
    assert all(each.verify_seconds > 0 and each.other_seconds > 0 for each in sweep)
    assert [each.draft_seconds > 0 and each.draft_seconds_after_full > 0 for each in sweep] == [False, True, True, True] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_keep_what_they_were_told_to_and_numbers_of_drafts_fall(target, proposer, rounds, temperature):
    sweep_rounds(target, proposer, TEXT, DecodeConfig(temperature=temperature), SWEEP)
    assert {len(before) for _, _, before, _ in rounds} == {1, 3}
    for drafts, keeps_all, before, after in rounds:
        assert [end - start for start, end in zip(before, after, strict=True)] == [drafts * keeps_all + 1] * len(before)
        assert len(before) == 1 or max(before) - min(before) == 1
    last_pass = [(drafts, before[0]) for drafts, _, before, _ in rounds[-24:] if drafts]
    lengths = [length for _, length in last_pass]
    assert min(lengths) < 64 < max(lengths)
    assert sum(lengths) / len(lengths) == pytest.approx(64, abs=6)
    assert [drafts for drafts, _ in last_pass] == [3] * 4 + [2] * 4 + [1] * 4


def test_the_second_of_two_rounds_that_keep_the_same_is_the_one_whose_drafting_counts(target, proposer, rounds, monkeypatch):
    """With a clock that shows how many rounds were run, what is kept tells which round it was."""

    class Ticks(Clock):
        def _now(self):
            return 0.0

        def phase(self, name):
            if name == "draft":
                last_keeps_all = rounds[-1][1] if rounds else False
                self.seconds["draft"] += 100.0 if last_keeps_all else 1.0
            return super().phase(name)

    monkeypatch.setattr("eval.decoder.batch.Clock", Ticks)
    sweep = sweep_rounds(target, proposer, TEXT, DecodeConfig(), SWEEP)
    # Two phases a round are drafting: proposing and learning what was kept.
    assert {each.draft_seconds for each in sweep if each.num_speculative_tokens} == {2.0}
    assert {each.draft_seconds_after_full for each in sweep if each.num_speculative_tokens} == {200.0}


def test_a_context_that_does_not_fit_is_refused_by_name(target, proposer):
    settings = SWEEP.model_copy(update={"context_tokens": 250})
    with pytest.raises(InputError, match=r"cost.context_tokens"):
        sweep_rounds(target, proposer, TEXT, DecodeConfig(), settings)


# --- prediction -----------------------------------------------------------------------------------------------------


CONDITIONAL = [0.8, 0.5, None]  # the last position was not reached


def timed(drafts, batch):
    """A round whose forward takes 10 ms and 1 ms a row of the batch, and a draft 1 ms, or 2 ms after a full acceptance."""
    return TimedRound(
        num_speculative_tokens=drafts,
        batch_size=batch,
        draft_seconds=0.001 * drafts,
        draft_seconds_after_full=0.002 * drafts,
        verify_seconds=0.010 + 0.001 * batch * (drafts + 1),
        other_seconds=0.001,
    )


TIMED = [timed(drafts, batch) for drafts in range(4) for batch in (1, 16)]


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_speedup_is_tokens_a_round_by_what_a_round_takes(batch):
    def seconds(drafts, after_full):
        # Between 1 and 16 rows on a straight line over the logarithm, of which 4 is the middle.
        by_rows = 0.001 * (drafts + 1) * (8.5 if batch == 4 else batch)
        return 0.011 + by_rows + 0.001 * drafts * (1 + after_full)

    for drafts, tokens, all_kept in (
        (1, 1.8, 0.8),
        (2, 2.2, 0.4),
        (3, 2.4, 0.2),
    ):  # the third position takes the second's share
        expected = tokens * seconds(0, 0) / seconds(drafts, 1 - (1 - all_kept) ** batch)
        assert Prediction(TIMED, CONDITIONAL).speedup(drafts, batch) == pytest.approx(expected)


def test_what_pays_is_found_among_the_batches_that_were_timed_and_those_between():
    found = predict_speed(TIMED, CONDITIONAL, drafts=2, batch=5, context=128)
    batches = [1, 2, 4, 5, 8, 16]
    of = {(each.num_speculative_tokens, each.batch_size): each.decode_speedup for each in found.settings}
    assert sorted(of) == [(drafts, batch) for drafts in (1, 2, 3) for batch in batches]
    assert found.decode_speedup == of[2, 5]
    assert found.best_num_speculative_tokens == max((1, 2, 3), key=lambda drafts: of[drafts, 5])
    paying = [batch for batch in batches if max(of[drafts, batch] for drafts in (1, 2, 3)) > 1]
    assert 1 <= found.break_even_batch_size == max(paying)
    beyond = predict_speed(TIMED, [0.01], drafts=2, batch=32, context=128)
    assert (beyond.decode_speedup, beyond.best_num_speculative_tokens, beyond.break_even_batch_size) == (None, None, 0)


# --- generate -------------------------------------------------------------------------------------------------------


REQUESTS = [Request(prompt_id=f"q{number}", category="c", tokens=(5, 6 + number, 7)) for number in range(3)]


@pytest.fixture
def evaluation(tiny_run, tmp_path):
    return tiny_evaluation(tiny_run, tmp_path / "out", generate_prompts=2)


def test_both_sides_write_the_same_tokens_and_the_first_pair_is_not_counted(evaluation, monkeypatch):
    target, own, written = load_target(evaluation.target), timing._generate, []
    monkeypatch.setattr(timing, "_generate", lambda *args: written.append(own(*args)) or written[-1])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=count().__next__))  # each side takes a second
    found = timing.time_generate(target, REQUESTS, evaluation)
    plain = generate(target, [each.tokens for each in REQUESTS[:2]], DecodeConfig(num_speculative_tokens=0, max_new_tokens=8))
    assert written == [len(plain[0]), *map(len, plain)]
    pace = pytest.approx(1000 * 2 / sum(map(len, plain)))
    assert (found.num_prompts, found.milliseconds_per_token_autoregressive, found.milliseconds_per_token_generate) == (
        2,
        pace,
        pace,
    )
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_an_answer_ends_with_the_context_on_both_sides(evaluation, as_target, monkeypatch):
    settings = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    own, written = timing._generate, []
    monkeypatch.setattr(timing, "_generate", lambda *args: written.append(own(*args)) or written[-1])
    target = as_target(GPT2LMHeadModel(settings).eval())
    longer = evaluation.model_copy(update={"decode": DecodeConfig(num_speculative_tokens=0, max_new_tokens=40)})
    assert timing.time_generate(target, REQUESTS, longer).num_prompts == 2
    (plain,) = generate(target, [REQUESTS[0].tokens], longer.decode)
    assert (written, len(plain)) == ([29, 29, 29], 29)


@pytest.mark.parametrize("changes", [{"generate_prompts": 0}, {"decode": DecodeConfig(temperature=1.0)}])
def test_work_that_generate_does_not_do_is_not_timed(evaluation, changes):
    assert timing.time_generate(load_target(evaluation.target), REQUESTS, evaluation.model_copy(update=changes)) is None
