"""The sweep decodes in the ways it says, and speedups are interpolated."""

from dataclasses import replace

import pytest

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import CostConfig
from eval import timing
from eval.decoder.decode import Request
from eval.report.schema import TimedRound
from eval.timing import predict_speed, sweep_rounds
from heads.proposers.draft_lm import DraftLM

SWEEP = CostConfig(num_speculative_tokens=5, batch_sizes=[1, 3], repeats=2)
REQUESTS = [Request(prompt_id=f"q{number}", category="c", tokens=(5, 6 + number, 7)) for number in range(3)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_number_that_the_draft_can_do_is_timed_by_the_round_at_each_batch(
    tiny_llama, as_target, temperature, monkeypatch
):
    target = as_target(tiny_llama(seed=1), eos=range(64))  # any token would end a text
    draft, asked, decode = DraftLM(tiny_llama(seed=1), 64), [], timing.decode_batch

    def seconds_by_drafts(target, batch, settings, proposer):
        generations, found = decode(target, batch, settings, proposer)
        asked.append((len(batch), settings.num_speculative_tokens))
        rounds = max(len(each.rounds) for each in generations)
        return generations, replace(found, decode_seconds=(1.0 + settings.num_speculative_tokens) * rounds)

    monkeypatch.setattr(timing, "decode_batch", seconds_by_drafts)
    monkeypatch.setattr(draft, "propose", limited(draft.propose, most=3))
    sweep = sweep_rounds(target, draft, REQUESTS, DecodeConfig(temperature=temperature), SWEEP)
    assert [tuple(dict(each).values()) for each in sweep] == [(n, batch, 1.0 + n) for batch in (1, 3) for n in range(4)]
    assert asked[1:9] == [(1, drafts) for drafts in (0, 1, 2, 3, 3, 2, 1, 0)]  # the first pass warms up


def limited(propose, most):
    return lambda inputs, num_tokens, *args, **others: propose(inputs, min(most, num_tokens), *args, **others)


# --- prediction -----------------------------------------------------------------------------------------------------


CONDITIONAL = [0.8, 0.5, None]  # the last position was not reached


def seconds(drafts, batch):
    """A round's forward takes 10 ms and 1 ms a row of the batch, and a draft 1 ms."""
    return 0.010 + 0.001 * batch * (drafts + 1) + 0.001 * drafts


TIMED = [
    TimedRound(num_speculative_tokens=drafts, batch_size=batch, seconds=seconds(drafts, batch))
    for drafts in range(4)
    for batch in (1, 16)
]


def test_a_speedup_is_tokens_a_round_by_what_a_round_takes_at_batches_within_those_timed():
    """Between 1 and 16 rows on a straight line over the logarithm, of which 4 is the middle."""
    found = predict_speed(TIMED, CONDITIONAL, batch=5).settings
    of = {(each.num_speculative_tokens, each.batch_size): each.decode_speedup for each in found}
    assert list(of) == [(drafts, batch) for batch in (1, 2, 4, 5, 8, 16) for drafts in (1, 2, 3)]
    for batch, rows in ((1, 1), (4, 8.5), (16, 16)):
        for drafts, tokens in ((1, 1.8), (2, 2.2), (3, 2.4)):  # the third position takes the second's share
            assert of[drafts, batch] == pytest.approx(tokens * seconds(0, rows) / seconds(drafts, rows))
    assert max(each.batch_size for each in predict_speed(TIMED, [0.01], batch=32).settings) == 16
