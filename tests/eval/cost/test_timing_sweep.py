"""The sweep runs the rounds it says it runs, keeps the seconds of the right ones, and counts the work that they are."""

import pytest

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import CostConfig
from eval.cost import timing_sweep
from eval.cost.timing_sweep import sweep_rounds
from eval.decoder.records import Clock
from heads.proposers.draft_lm import DraftLM

SWEEP = CostConfig(num_speculative_tokens=3, batch_sizes=[1, 3], context_tokens=[24, 64], repeats=2)
TEXT = list(range(5, 60))


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1), eos=range(64))  # any token would end a text


@pytest.fixture
def proposer(tiny_llama):
    return DraftLM(tiny_llama(seed=2, layers=1), 64)


@pytest.fixture
def rounds(monkeypatch):
    """The rounds that a sweep runs: (drafts, rows, all kept, mean length before and after)."""
    seen, run_round = [], timing_sweep.run_round

    def watch(run, drafts):
        before = [len(row.tokens) for row in run.rows]
        run_round(run, drafts)
        seen.append((drafts, run.verifier.keeps_all, before, [len(row.tokens) for row in run.rows]))

    monkeypatch.setattr(timing_sweep, "run_round", watch)
    return seen


def test_every_number_of_drafts_is_timed_at_each_batch_and_each_context(target, proposer):
    sweep = sweep_rounds(target, proposer, TEXT, DecodeConfig(), SWEEP)
    assert [(each.num_speculative_tokens, each.batch_size, each.context_tokens) for each in sweep] == [
        (drafts, *place) for place in ((1, 24), (3, 24), (1, 64)) for drafts in range(4)
    ]
    assert all(each.verify_seconds > 0 and each.other_seconds > 0 for each in sweep)
    assert [each.draft_seconds > 0 and each.draft_seconds_after_full > 0 for each in sweep] == [False, True, True, True] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_keep_what_they_were_told_to_and_contexts_lie_around_the_one_asked_for(target, proposer, rounds, temperature):
    sweep_rounds(target, proposer, TEXT, DecodeConfig(temperature=temperature), SWEEP)
    assert {len(before) for _, _, before, _ in rounds} == {1, 3}
    for drafts, keeps_all, before, after in rounds:
        assert [end - start for start, end in zip(before, after, strict=True)] == [drafts * keeps_all + 1] * len(before)
        assert len(before) == 1 or max(before) - min(before) == 1
    timed = [before[0] for drafts, _, before, _ in rounds[-24:] if drafts]  # the last pass, in the longer context
    assert min(timed) < 64 < max(timed)
    assert sum(timed) / len(timed) == pytest.approx(64, abs=6)


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
    settings = SWEEP.model_copy(update={"context_tokens": [24, 250]})
    with pytest.raises(
        InputError, match=r"cost.context_tokens: .* around 250 tokens need a context of \d+, the target's is 256"
    ):
        sweep_rounds(target, proposer, TEXT, DecodeConfig(), settings)


def test_the_work_is_that_of_the_weights_and_of_the_keys_and_values(target, proposer):
    of = {
        (each.num_speculative_tokens, each.batch_size, each.context_tokens): each
        for each in sweep_rounds(target, proposer, TEXT, DecodeConfig(), SWEEP)
    }
    model = target.model
    weights = sum(each.numel() for each in model.parameters() if each.ndim == 2) - model.get_input_embeddings().weight.numel()
    draft_weights = 32 * 64 + sum(each.numel() for each in proposer.model.model.layers.parameters() if each.ndim == 2)

    # Two operations a weight and row; of attention each row takes 4 operations a width and position, in two layers.
    plain, three = of[0, 1, 24], of[3, 1, 24]
    assert plain.verify_flops == pytest.approx(2 * weights + 2 * 4 * 32 * 24, rel=0.05)
    assert three.verify_flops == pytest.approx(4 * plain.verify_flops, rel=0.05)
    assert plain.verify_bytes == pytest.approx(8 * (weights + 2 * 2 * 16 * 24), rel=0.10)
    assert three.draft_flops == pytest.approx(3 * (2 * draft_weights + 4 * 32 * 24), rel=0.05)
    assert three.draft_bytes == pytest.approx(3 * of[1, 1, 24].draft_bytes, rel=0.1)
    grown = of[0, 1, 64].verify_flops - plain.verify_flops
    assert grown == pytest.approx(2 * 4 * 32 * 40, rel=0.5)


class Lessened(DraftLM):
    """Drafts no more, in a batch, than it once did."""

    def start(self, tokens, capacity, states=None):
        super().start(tokens, capacity, states)
        self.most = 99

    def propose(self, tokens, num_tokens, *others, **settings):
        self.most = min(self.most, num_tokens)
        return super().propose(tokens, self.most, *others, **settings)


def test_a_draft_that_never_drafts_more_than_it_once_did_is_timed_downwards(target, tiny_llama, monkeypatch):
    drafted, chain = [], timing_sweep.ScriptedVerifier.chain

    def watch(judge, logits_BKV, proposal, num_drafted, lengths):
        drafted.append(max(num_drafted))
        return chain(judge, logits_BKV, proposal, num_drafted, lengths)

    asked, run_round = [], timing_sweep.run_round
    monkeypatch.setattr(timing_sweep, "run_round", lambda run, drafts: (asked.append(drafts), run_round(run, drafts)))
    monkeypatch.setattr(timing_sweep.ScriptedVerifier, "chain", watch)
    sweep_rounds(target, Lessened(tiny_llama(seed=2, layers=1), 64), TEXT, DecodeConfig(), SWEEP)
    looked, timed = slice(0, 3), slice(3, None)  # whether it may rise is tried out first
    assert (asked[looked], drafted[looked]) == ([3, 1, 3], [3, 1, 1])
    assert drafted[timed] == asked[timed]
