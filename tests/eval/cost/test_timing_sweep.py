"""The sweep runs the rounds it says it runs, and keeps the seconds of the right ones."""

import pytest

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import CostConfig
from eval.cost import timing_sweep
from eval.cost.timing_sweep import sweep_rounds
from eval.decoder.records import Clock
from heads.proposers.draft_lm import DraftLM

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
    seen, run_round = [], timing_sweep.run_round

    def watch(run, drafts):
        before = [len(row.tokens) for row in run.rows]
        run_round(run, drafts)
        seen.append((drafts, run.verifier.keeps_all, before, [len(row.tokens) for row in run.rows]))

    monkeypatch.setattr(timing_sweep, "run_round", watch)
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
