"""What a run does with its budget, from made-up rates: it is used, not exceeded, and spent on what is scarce."""

from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace

import pytest

from configs.runtime.errors import InputError
from configs.runtime.loading import as_overrides, load_config
from configs.schema.commands.running import RunConfig
from configs.schema.data import PromptsConfig
from configs.schema.evaluation import EvalConfig
from configs.schema.target import TargetConfig
from distill.generation.prompts import choose_prompts, split_prompts
from scripts.run import dry_run, plan
from scripts.run.draft_file import apply
from scripts.run.dry_run import Rates
from scripts.run.plan import MOST_EPOCHS, Budget, choose
from scripts.run.request import Facts, examine, prompts_of

FIXED = {"dry_run": 70.0, "data": 8.0, "cache": 8.0, "train": 20.0, "eval": 15.0, "gate": 4.0, "export": 6.0}


def rates(**changed):
    found = {
        "fixed_seconds": FIXED,
        "prompt_seconds": 0.35,
        "prompt_tokens": 40.0,
        "answer_lengths": tuple(range(30, 129)),
        "cache_token_seconds": 0.0008,
        "train_token_seconds": 0.0006,
        "held_out_seconds": 4.0,
        "decoded_token_seconds": 0.12,
        "plain_token_seconds": 0.05,
    }
    return Rates(**(found | changed))


def fit(minutes, num_prompts=None, cache_row_bytes=5768, engine="vllm", output="runs/draft", **changed):
    asked = {key: changed.pop(key) for key in ("data", "cache", "train") if key in changed}
    run = RunConfig(budget_minutes=minutes, engine=engine, output=str(output), **asked)
    facts = SimpleNamespace(num_prompts=num_prompts, decoded_tokens=64, on_cpu=True)
    budget = Budget(run=run, facts=facts, rates=rates(**changed), checks=False, cache_row_bytes=cache_row_bytes, step_size=8)
    return budget.spend()


@pytest.mark.parametrize("minutes", [10, 15, 30, 120, 600])
def test_the_stages_take_the_budget_and_no_more(minutes):
    found = fit(minutes)
    total = sum(found.seconds.values()) / 60
    assert 0.9 * minutes < total <= minutes


def test_more_time_means_more_prompts_then_longer_answers_and_fewer_passes():
    found = [fit(minutes) for minutes in (10, 30, 240, 2400)]
    for one, other in pairwise(found):
        assert one.num_prompts < other.num_prompts
        assert one.max_new_tokens <= other.max_new_tokens
        assert one.epochs >= other.epochs
    assert (found[0].max_new_tokens, found[-1].max_new_tokens) == (64, 128)  # the dry run saw no longer ones
    assert (found[0].epochs, found[-1].epochs) == (5, 2)


def test_answers_that_were_cut_off_are_as_long_as_the_few_that_went_on_and_thinking_gets_its_room():
    rows = [{"answer_ids": [1] * length, "ended": length < 64} for length in (10, 20, 64, 64, 64)]
    longer = [{"answer_ids": [1] * length, "ended": True} for length in (30, 900, 3000)]
    assert dry_run.answer_lengths(rows, []) == (10, 20, 64, 64, 64)
    assert dry_run.answer_lengths(rows, longer) == (10, 20, 900, 900, 3000)
    assert fit(6000, answer_lengths=dry_run.answer_lengths(rows, longer)).max_new_tokens == 2048


def test_few_prompts_are_all_used_and_trained_on_more_often():
    found = fit(30, num_prompts=200)
    assert found.num_prompts == 200
    assert found.epochs == MOST_EPOCHS
    assert sum(found.seconds.values()) < 60 * 30
    few = fit(30, num_prompts=20)
    assert few.held_out == 4
    decoded = 4 * 1.5 * fmean(min(length, 64) for length in range(30, 129)) * 0.12  # half as many are of the house suite
    assert few.seconds["eval"] == pytest.approx(FIXED["eval"] + decoded)
    assert few.seconds["data"] == pytest.approx(FIXED["data"] + 20 * 0.35)  # held-out ones are answered too


def test_a_cache_that_the_disk_does_not_hold_is_left_out_and_the_target_runs_in_training(monkeypatch):
    with_cache, without = fit(30), fit(30, cache_row_bytes=10**9)
    assert with_cache.cached
    assert "cache" in with_cache.seconds
    assert not without.cached
    assert "cache" not in without.seconds
    assert without.num_prompts < with_cache.num_prompts


def test_epochs_answers_and_a_cache_that_were_asked_for_are_reckoned_with():
    found = fit(
        30, train={"schedule": {"epochs": 1}}, data={"answers": {"max_new_tokens": 96}}, cache={}, cache_row_bytes=10**9
    )
    assert (found.epochs, found.max_new_tokens, found.cached) == (1, 96, True)
    assert fit(30).epochs > 1
    assert fit(30, num_prompts=200, train={"schedule": {"epochs": 3}}).epochs == 3
    assert not fit(30, cache=None).cached


def test_no_more_prompts_are_used_than_were_asked_for_and_own_settings_of_prompts_stay(model, tmp_path):
    run = RunConfig(target=TargetConfig(name=str(model)), budget_minutes=60, engine="vllm")
    given = PromptsConfig(num_prompts=100, temperature=1.3)
    for asked, most in ((given, 100), (PromptsConfig(), None)):
        examined, facts, _ = examine(run.model_copy(update={"prompts": prompts_of(None, asked)}))
        assert facts.num_prompts == most
        chosen = apply(examined, choose(examined, facts, rates(), checks=False)).prompts
        assert (chosen.num_prompts == 100) == (most == 100)
        assert chosen.temperature == (1.3 if most else 0.8)
    (tmp_path / "prompts.txt").write_text("".join(f"w{n % 50} w{n // 50}\n" for n in range(300)))
    own = prompts_of(str(tmp_path / "prompts.txt"), PromptsConfig(num_prompts=100, on_too_long="refuse"))
    assert (own.num_prompts, own.on_too_long, own.source) == (100, "refuse", "file")


def test_of_a_file_of_which_some_prompts_are_taken_as_many_are_held_out_as_are_decoded(model, tmp_path):
    (tmp_path / "prompts.txt").write_text("".join(f"w{n % 50} w{n // 50} w7\n" for n in range(2000)))
    prompts = prompts_of(str(tmp_path / "prompts.txt"), PromptsConfig())
    run = RunConfig(target=TargetConfig(name=str(model)), prompts=prompts, engine="vllm", budget_minutes=10)
    run, facts, _ = examine(run)
    chosen = apply(run, choose(run, facts, rates(prompt_seconds=2.0), checks=False))
    taken = choose_prompts(facts.prompts, chosen.prompts.num_prompts)
    assert len(taken) < 200
    held_out = split_prompts(taken, chosen.data["held_out_share"]).held_out
    assert len(held_out) == chosen.eval["suite.num_prompts"] >= 16


def test_a_budget_that_is_too_short_is_refused_with_one_that_is_not():
    with pytest.raises(InputError, match="too short") as refused:
        fit(3)
    enough = int(str(refused.value).split("give ")[1].split("m ")[0])
    assert fit(enough).num_prompts > plan.LEAST_PROMPTS


def test_a_dry_run_that_was_cut_off_begins_its_stage_anew_and_ends_once_half_the_budget_is_spent(tmp_path, monkeypatch):
    run, ran = RunConfig(budget_minutes=4, output=str(tmp_path)), []
    (tmp_path / "cache" / "shard").mkdir(parents=True)
    monkeypatch.setattr(dry_run, "_in_small", lambda run, facts: run)
    monkeypatch.setattr(dry_run, "decided_by", lambda run, stage: stage)
    monkeypatch.setattr(dry_run, "_longer", lambda *asked: None)
    monkeypatch.setattr(dry_run, "_timed", lambda run, stage: ran.append((stage, (tmp_path / stage).exists())) or 70.0)
    with pytest.raises(InputError, match="--budget"):
        dry_run.dry_run(run, SimpleNamespace())
    assert ran == [("data", False), ("cache", False)]


@pytest.mark.parametrize(("shards", "swept"), [(1, True), (8, False)])
def test_rounds_are_timed_where_the_target_is_whole_in_its_process(shards, swept):
    run = RunConfig(budget_minutes=60, target={"shards": shards})
    cost = Facts.cost(SimpleNamespace(context=2048), run)
    assert bool(cost) == swept
    target = {"target": run.target.model_dump(mode="json")}
    load_config(EvalConfig, None, as_overrides(target | cost))  # which refuses the sweep of a target that processes share


def test_an_engine_that_is_installed_takes_time_of_its_own_and_more_for_a_slow_target():
    run, facts = RunConfig(budget_minutes=20), SimpleNamespace(num_prompts=None, decoded_tokens=64, on_cpu=True)
    none, fast, slow = (
        Budget(
            run=run, facts=facts, rates=rates(plain_token_seconds=pace), checks=checks, cache_row_bytes=5768, step_size=8
        ).spend()
        for checks, pace in ((False, 0.1), (True, 0.004), (True, 0.1))
    )
    assert 80 < fast.seconds["check"] < 100
    assert slow.seconds["check"] > fast.seconds["check"] + 100
    assert slow.seconds["train"] < fast.seconds["train"] < none.seconds["train"]
