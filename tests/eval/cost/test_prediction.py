"""Predicted speedups: tokens a round over seconds a round, interpolated between timed batches and silent outside of them."""

import pytest

from eval.cost.prediction import Prediction, predict_speed
from eval.report.schema import TimedRound

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


SWEEP = [timed(drafts, batch) for drafts in range(4) for batch in (1, 16)]


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
        assert Prediction(SWEEP, CONDITIONAL).speedup(drafts, batch) == pytest.approx(expected)


def test_what_pays_is_found_among_the_batches_that_were_timed_and_those_between():
    found = predict_speed(SWEEP, CONDITIONAL, drafts=2, batch=5, context=128)
    batches = [1, 2, 4, 5, 8, 16]
    of = {(each.num_speculative_tokens, each.batch_size): each.decode_speedup for each in found.settings}
    assert sorted(of) == [(drafts, batch) for drafts in (1, 2, 3) for batch in batches]
    assert found.decode_speedup == of[2, 5]
    assert found.best_num_speculative_tokens == max((1, 2, 3), key=lambda drafts: of[drafts, 5])
    paying = [batch for batch in batches if max(of[drafts, batch] for drafts in (1, 2, 3)) > 1]
    assert 1 <= found.break_even_batch_size == max(paying)
    beyond = predict_speed(SWEEP, [0.01], drafts=2, batch=32, context=128)
    assert (beyond.decode_speedup, beyond.best_num_speculative_tokens, beyond.break_even_batch_size) == (None, None, 0)
