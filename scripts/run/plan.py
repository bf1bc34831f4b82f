"""What a run does with its budget: how many prompts, how long answers, how many epochs, and how large an evaluation.

The dry run's rates say what a prompt, a token and a step cost here. A quarter of what the fixed parts leave goes to the
evaluation, and the rest to as many answers as can be made and trained on for `EPOCHS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean

from configs.runtime.errors import InputError
from configs.schema.commands.planning import PlanHeadsConfig
from configs.schema.commands.release import CheckConfig
from configs.schema.commands.running import RunConfig, Stage
from distill.generation.prompts import choose_prompts, share_for
from scripts.doctor import describe_disk
from scripts.run.draft_file import Choice
from scripts.run.dry_run import Rates
from scripts.run.mix import CHOOSING
from scripts.run.request import Facts
from scripts.run.stages import HOUSE

EVALUATION_SHARE = 0.25  # of the budget
EVALUATION_MINUTES = 30.0  # at most
HELD_OUT = (16, 128)  # prompts of an evaluation: what the gate asks for, and where intervals are narrow
HOUSE_SHARE = 0.5  # of so many prompts beside them ...
HOUSE_PROMPTS = (8, 64)  # ... of the house suite: one a category, and all
EPOCHS = ((2_000_000, 3), (200_000, 5))  # passes over so many answer tokens or fewer; over more, two
FEWEST_EPOCHS = 2
MOST_EPOCHS = 10  # where prompts are few
HASH_MARGIN = 2  # where a hash decides who is held out, so that they are not too few
EVALUATIONS = 6  # on held-out prompts, in training ...
FEWEST_STEPS = 20  # ... with so many steps between them
MANY_PROMPTS = 1000  # answers are cut off earlier rather than that fewer prompts are answered
# A check of the export starts the engine twice, and decodes plainly and with the draft.
START_SECONDS, START_SECONDS_ON_CPU = 90.0, 40.0  # on a GPU assumed
ENGINE_PACE = 1.6  # times a plain token here is one in vLLM, in float32 on a CPU
CHECK = CheckConfig()
DISK_SHARE = 0.5  # of the free disk that a cache may take
ANSWER_LIMITS = (64, 128, 256, 512, 1024, 2048, 4096)  # the last as long as a dry run lets answers go
LEAST_PROMPTS = 32  # to train on


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much of everything fits into a budget."""

    num_prompts: int  # that are answered, held-out ones included
    held_out: int
    max_new_tokens: int  # of an answer
    epochs: int
    cached: bool
    seconds: dict[Stage, float]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A run's minutes, and what they are spent at. A limit is the most tokens of an answer in the data."""

    run: RunConfig
    facts: Facts
    rates: Rates
    checks: bool  # the engine is installed, and checks the export
    cache_row_bytes: int
    step_size: int  # conversations a training step

    @property
    def mixed(self) -> float:
        """Conversations that are trained on, for each that is answered."""
        return 1.0 if self.run.refresh is None else 1 / (1 - self.run.refresh.replay_share)

    @cached_property
    def fixed(self) -> dict[Stage, float]:
        """Seconds of each stage that do not depend on how much there is to do."""
        fixed = dict(self.rates.fixed_seconds)
        fixed["train"] += EVALUATIONS * self.rates.held_out_seconds
        if self.run.refresh is not None:
            fixed["baseline"] = fixed["eval"]
        if self.run.engine is not None:
            start = START_SECONDS_ON_CPU if self.facts.on_cpu else START_SECONDS
            tokens = CHECK.num_prompts * CHECK.max_new_tokens
            check = 2 * (start + tokens * ENGINE_PACE * self.rates.plain_token_seconds)
            fixed["check"] = check if self.checks else fixed["gate"]
        return fixed

    @cached_property
    def left(self) -> float:
        """Seconds beside the fixed ones."""
        return 60 * self.run.budget_minutes - sum(self.fixed.values())

    # --- the evaluation -------------------------------------------------------------------------------------------

    @cached_property
    def held_out_limits(self) -> tuple[int, int]:
        """The fewest and the most held-out prompts that the evaluation decodes."""
        least, most = HELD_OUT
        if self.facts.num_prompts is not None:
            most = min(most, max(2, self.facts.num_prompts // 5))
        return min(least, most), most

    @cached_property
    def held_out(self) -> int:
        """Held-out prompts that the evaluation decodes."""
        room = min(EVALUATION_SHARE * self.left, 60 * EVALUATION_MINUTES)
        least, most = self.held_out_limits
        return max(least, min(int(room / self.seconds_to_decode(1)), most))

    @property
    def evaluation(self) -> float:
        """Seconds of decoding by all drafts that are measured, the house suite included."""
        return self.seconds_to_decode(self.held_out)

    def seconds_to_decode(self, held_out: int) -> float:
        drafts, tokens = 1 if self.run.refresh is None else 2, self.mean_answer(self.facts.decoded_tokens)
        return drafts * (1 + HOUSE_SHARE) * held_out * tokens * self.rates.decoded_token_seconds

    # --- data and training ----------------------------------------------------------------------------------------

    def mean_answer(self, limit: int) -> float:
        """Return the mean tokens of answers that are cut off at a limit, as far as the dry run knows."""
        return mean(min(length, limit) for length in self.rates.answer_lengths)

    def mean_trained(self, limit: int) -> float:
        """Return the tokens that are trained on for each prompt that is answered."""
        return self.mixed * (self.rates.prompt_tokens + self.mean_answer(limit))

    def seconds_to_answer(self, limit: int) -> float:
        """Return the seconds until a prompt is answered."""
        return self.rates.prompt_seconds * self.mean_answer(limit) / mean(self.rates.answer_lengths)

    def seconds_to_train(self, limit: int, epochs: int, cached: bool) -> float:
        """Return the seconds of the target's states and of the draft's steps for each prompt that is answered."""
        states = self.rates.cache_token_seconds * (1 if cached else epochs)
        return self.mean_trained(limit) * (states + epochs * self.rates.train_token_seconds)

    def num_conversations(self, limit: int, epochs: int, cached: bool) -> int:
        """Return how many conversations can be made and trained on."""
        room = self.left - self.evaluation - self.held_out * self.seconds_to_answer(limit)
        found = max(0, int(room / (self.seconds_to_answer(limit) + self.seconds_to_train(limit, epochs, cached))))
        return found if self.facts.num_prompts is None else min(found, self.facts.num_prompts - self.held_out)

    def is_cached(self, limit: int, epochs: int) -> bool:
        """Return whether a cache was asked for, else whether the disk holds one of the states that `epochs` would read."""
        if "cache" in self.run.model_fields_set:
            return self.run.cache is not None
        tokens = self.num_conversations(limit, epochs, True) * self.mean_trained(limit)
        return tokens * self.cache_row_bytes < DISK_SHARE * describe_disk(Path(self.run.output))["free_bytes"]

    def steps(self, num_conversations: int, epochs: int) -> int:
        """Return how many steps a training has."""
        return max(1, int(self.mixed * num_conversations * epochs) // self.step_size)

    # --- the whole ------------------------------------------------------------------------------------------------

    def fit(self, limit: int) -> Amounts:
        """Return what fits with answers of at most `limit` tokens."""
        asked = (self.run.train or {}).get("schedule.epochs")
        epochs = asked or FEWEST_EPOCHS
        for most, passes in EPOCHS:
            number = self.num_conversations(limit, passes, self.is_cached(limit, passes))
            if asked is None and number * self.mean_answer(limit) <= most:
                epochs = passes
        cached = self.is_cached(limit, epochs)
        number = self.num_conversations(limit, epochs, cached)
        if asked is None and self.facts.num_prompts is not None and number == self.facts.num_prompts - self.held_out:
            while epochs < MOST_EPOCHS and self.num_conversations(limit, epochs + 1, cached) == number:
                epochs += 1
        trained = number * self.seconds_to_train(limit, epochs, cached)
        states = number * self.mean_trained(limit) * self.rates.cache_token_seconds if cached else 0.0
        drafts: list[Stage] = ["eval"] if self.run.refresh is None else ["baseline", "eval"]
        seconds = self.fixed | {
            "data": self.fixed["data"] + (number + self.held_out) * self.seconds_to_answer(limit),
            "cache": self.fixed["cache"] + states,
            "train": self.fixed["train"] + trained - states,
            **{stage: self.fixed[stage] + self.evaluation / len(drafts) for stage in drafts},
        }
        if not cached:
            del seconds["cache"]
        return Amounts(
            num_prompts=number + self.held_out,
            held_out=self.held_out,
            max_new_tokens=limit,
            epochs=epochs,
            cached=cached,
            seconds=seconds,
        )

    def spend(self) -> Amounts:
        """Return the best use: many prompts first, then longer answers; an InputError where there is time for neither."""
        seen = max(self.rates.answer_lengths)
        limits = [limit for limit in ANSWER_LIMITS if limit <= max(ANSWER_LIMITS[0], seen)]
        if (asked := (self.run.data or {}).get("answers.max_new_tokens")) is not None:
            limits = [asked]
        wanted = min(MANY_PROMPTS, self.facts.num_prompts or MANY_PROMPTS)
        fits = [self.fit(limit) for limit in limits]
        best = [fits[0], *(each for each in fits[1:] if each.num_prompts >= wanted)][-1]
        if best.num_prompts - best.held_out < min(LEAST_PROMPTS, wanted - best.held_out):
            a_prompt = self.seconds_to_answer(limits[0]) + self.seconds_to_train(limits[0], 1, True)
            needed = sum(self.fixed.values()) + self.evaluation + (LEAST_PROMPTS + self.held_out) * FEWEST_EPOCHS * a_prompt
            raise InputError(
                f"--budget: {self.run.budget_minutes:g} minutes are too short: on this machine the stages alone take "
                f"{sum(self.fixed.values()) / 60:.1f}; give {math.ceil(needed / 60) + 1}m or more, or a smaller target"
            )
        return best


def choose(run: RunConfig, facts: Facts, rates: Rates, *, checks: bool) -> list[Choice]:
    """Return what a run does, each with its reason; what was asked for of epochs, answers and cache is reckoned with."""
    plan, schedule = facts.plan, facts.plan.config.schedule
    budget = Budget(
        run=run,
        facts=facts,
        rates=rates,
        checks=checks,
        cache_row_bytes=plan.cache_row_bytes,
        step_size=schedule.batch_size * schedule.gradient_accumulation_steps * run.num_processes,
    )
    found = budget.spend()
    minutes = {stage: round(seconds / 60, 1) for stage, seconds in found.seconds.items()}
    answer = budget.mean_answer(found.max_new_tokens)
    # Of a refresh some choose the checkpoint, and are not measured.
    held_out = found.held_out if run.refresh is None else math.ceil(found.held_out * CHOOSING / (CHOOSING - 1))
    share = HASH_MARGIN * held_out / found.num_prompts
    if facts.prompts:
        share = share_for(choose_prompts(facts.prompts, found.num_prompts), held_out)
    steps = budget.steps(found.num_prompts - found.held_out, found.epochs)
    every = max(FEWEST_STEPS, math.ceil(steps / EVALUATIONS))
    house = min(HOUSE_PROMPTS[1], max(HOUSE_PROMPTS[0], found.held_out // 2 // 8 * 8))
    why = f"{minutes['data']:g} minutes of answers at {60 / rates.prompt_seconds:.0f} a minute"
    if found.num_prompts == facts.num_prompts:
        why = f"all {found.num_prompts} that there are, or as many as asked"
    asked = run.prompts.model_copy(update={"num_prompts": found.num_prompts}).model_dump(mode="json", exclude_defaults=True)
    is_given = (run.data or {}).get("answers.written_by") == "dataset"
    longest = None if is_given else found.max_new_tokens  # what a data set brings is whole
    choices = [
        Choice("prompts", asked, why),
        Choice("data.answers.max_new_tokens", longest, f"answers of {answer:.0f} tokens on average"),
        Choice("data.answers.batch_size", facts.answer_batch_size, "generation batch size"),
        Choice("data.held_out_share", share, f"{held_out} prompts, or some more, are held out"),
        Choice("train.schedule.epochs", found.epochs, f"{steps} steps in {minutes['train']:g} minutes"),
        Choice("train.schedule.eval_every_steps", every, f"{EVALUATIONS} evaluations, fewer of a short training"),
        Choice("train.schedule.checkpoint_every_steps", every, "checkpoint interval"),
        Choice("train.schedule.log_every_steps", max(1, min(20, steps // 40)), "points of the loss curve"),
        Choice("eval.suite.num_prompts", found.held_out, "of those, as many as there is time to decode"),
        Choice("eval.suites", [HOUSE | {"num_prompts": house}], f"{house} prompts of other kinds than those trained on"),
        Choice("eval.decode.max_new_tokens", facts.decoded_tokens, "tokens of each answer, at most"),
        Choice("eval.repeats", 1, "one timed run of each prompt"),
    ]
    if isinstance(plan.config, PlanHeadsConfig):
        choices.append(Choice("train.sanity.enabled", False, "the dry run has checked that this head learns and is read back"))
    for key, value in facts.cost(run).items():
        choices.append(Choice(f"eval.{key}", value, "times rounds, to predict the speed at other batch sizes"))
    if found.cached:
        size = found.num_prompts * budget.mean_trained(found.max_new_tokens) * plan.cache_row_bytes / 2**30
        choices += [
            Choice("cache.taps", facts.cached["taps"], f"the target runs once over the data; {size:.1f} GiB"),
            Choice("cache.max_length", facts.cached["max_length"], "as in training"),
        ]
    return [*choices, Choice("minutes", minutes, f"{sum(minutes.values()):.0f} of {run.budget_minutes:g} minutes in all")]
