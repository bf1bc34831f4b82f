"""Successive halving: which trials go on, what the budget lets begin, what is kept of it."""

import pytest

from scripts.advice.halving import TimeBudget, sizes_up_to, successive_halving


def test_the_halving_keeps_the_better_at_every_size_whatever_order_they_come_in():
    ran = []

    def run(candidate, size):
        ran.append((candidate, size))
        return True

    def score(candidate, size):
        assert {at for _, at in ran} == {each for each in (10, 20, 40) if each <= size}  # no larger size has begun
        return candidate + size / 1000  # planted: a larger candidate is better at every size

    rungs = successive_halving([3, 1, 6, 2, 5, 4], [10, 20, 40], run, score, keep_share=0.5, may_begin=lambda *_: True)
    assert [[each for each, _ in rung.ranked] for rung in rungs] == [[6, 5, 4, 3, 2, 1], [6, 5, 4], [6, 5]]
    assert ran[6:] == [(6, 20), (5, 20), (4, 20), (6, 40), (5, 40)]


def test_what_fails_or_finds_no_time_is_named_and_does_not_go_on():
    rungs = successive_halving(
        "abcd",
        [1, 2, 4],
        lambda candidate, size: candidate != "b",
        lambda candidate, size: ord(candidate),
        keep_share=0.9,
        may_begin=lambda candidate, size: (candidate, size) != ("d", 1) and size < 4,
    )
    assert [rung.size for rung in rungs] == [1, 2]
    assert (rungs[0].failed, rungs[0].not_begun) == (["b"], ["d"])
    assert [each for each, _ in rungs[1].ranked] == ["c", "a"]


@pytest.mark.parametrize(
    ("first", "most", "sizes"),
    [(64, 512, [64, 128, 256, 512]), (64, 500, [64, 128, 256, 500]), (64, 300, [64, 128, 256]), (64, 40, [40])],
)
def test_sizes_grow_up_to_what_there_is(first, most, sizes):
    assert sizes_up_to(first, 2, most) == sizes


def test_the_budget_holds_over_sessions_and_its_reserve_is_kept(tmp_path):
    now = [100.0]
    budget = TimeBudget(60, tmp_path / "budget.json", "job", clock=lambda: now[0])
    now[0] += 20
    assert budget.allows(40)
    assert not budget.allows(41)
    budget.note(num_prompts=7)
    now[0] = 5.0  # another process, whose clock begins elsewhere
    again = TimeBudget(60, tmp_path / "budget.json", "job", clock=lambda: now[0])
    now[0] += 10
    assert again.spent == pytest.approx(30)
    assert again.kept["num_prompts"] == 7
    other = TimeBudget(60, tmp_path / "budget.json", "other", clock=lambda: now[0])
    assert other.spent == 0
    assert "num_prompts" not in other.kept
