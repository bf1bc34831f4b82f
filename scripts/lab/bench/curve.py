"""The data curve: tokens per target step of heads by the answer tokens they were trained on, and the law through them.

Nothing is timed: tokens per target step are counts. The law is that of `scripts.lab.curve_fit`, fitted by suite and family.
Suffix lookup knows the answers that the heads beside it were trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from configs.runtime.command import DONE
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import open_conversations, text_hash
from distill.generation.prompts import Prompt
from eval.decoder.decode import Request
from eval.measure.proposers import Answers, add_lookup
from eval.stats.bootstrap import ratio_interval
from heads.artifact import load_draft
from heads.frozen.loading import Target
from heads.proposers.lookup import SuffixLookup
from heads.proposers.protocol import Proposer
from scripts.lab.bench.harness import flat, write_results
from scripts.lab.bench.head_recipes import check_comparable, make_cache, make_data, with_cache
from scripts.lab.bench.provenance import check_trained_here, read_git, read_outcome, train_all
from scripts.lab.bench.suites import open_suites
from scripts.lab.bench.turns import count_rounds
from scripts.lab.curve_fit import fit_curve
from scripts.lab.head_settings import BenchCurveConfig
from scripts.lab.measuring import SEED, Counts, columns
from scripts.lab.trained_runs import TrainingRun, in_own_folder, load_changed

log = logging.getLogger("draftsmith")

SUFFIX_LOOKUP = "suffix_lookup"
NAMED = ("family", "recipe", "suite", "answer_tokens", "epochs", "training_seconds")
DOUBLINGS = (2, 4)  # of the most answer tokens that were trained on: what so many would bring is predicted


@dataclass(frozen=True, kw_only=True)
class CurveTraining:
    """A head trained at one point of the curve."""

    run: TrainingRun
    recipe: str
    dataset: ConversationDataset


class Measured(TypedDict):
    """What was counted of one way of drafting on one suite."""

    family: str
    recipe: str | None
    suite: str
    answer_tokens: int
    epochs: int | None
    training_seconds: float | None
    most: int  # tokens that a round commits
    counts: list[list[int]]  # by prompt: committed tokens and rounds


def measure_curve(config: BenchCurveConfig) -> int:
    make_data(config)
    make_cache(config)
    trainings = list_trainings(config)
    recipes = [each.run.recipe for each in trainings]
    check_comparable(recipes)
    runs = [each.run for each in trainings]
    check_trained_here([run.artifact for run in runs if run.is_trained], config.output)
    train_all(runs, "training")
    target, requests, prompts, _, journal = open_suites(config, runs)
    done: dict[str, list[Measured]] = journal.read()
    for each in trainings:
        if each.run.name not in done:
            done[each.run.name] = list(measure_training(config, target, each, requests, prompts))
            journal.append(each.run.name, done[each.run.name])
    measured = [row for each in trainings for row in done[each.run.name]]
    rows = summarise(measured, config.bootstrap_samples)
    if config.plot is not None:
        plot_curve(rows, Path(config.plot))
    write_results(
        config.output,
        "curve",
        config,
        rows=rows,
        ratios={},
        runs=[{"training": run.name, "git": read_git(run)} for run in runs],
    )
    journal.path.unlink(missing_ok=True)
    return DONE


def list_trainings(config: BenchCurveConfig) -> list[CurveTraining]:
    """Return the trainings of all recipes at all points, the smallest first.

    With all conversations and its own epochs a recipe is the one that `scripts.lab.bench.heads` trains, in the same folder.
    """
    of_data: dict[str, str] = {}  # in place of the data that a recipe names
    if config.data is not None:
        folder = Path(load_config(DataConfig, config.data).output)
        of_data = {f"data.{name}": str(folder / f"{name}.jsonl") for name in ("train", "held_out")}
    trainings = []
    for point in sorted(config.points, key=lambda point: point.share):
        for path in sorted(config.recipes):
            epochs = {} if point.epochs is None else {"schedule.epochs": point.epochs}
            recipe = load_changed(HeadsConfig, path, {**of_data, **epochs}, "points")
            rows = open_conversations(Path(recipe.data.train))
            number = None if point.share == 1 else max(1, round(point.share * len(rows)))
            data = recipe.data.model_copy(update={"num_conversations": number})
            recipe = with_cache(recipe.model_copy(update={"data": data}), config.cache)
            name = Path(path).stem if number is None else f"{Path(path).stem}-{number}"
            trainings.append(
                CurveTraining(
                    run=TrainingRun(name=name, recipe=in_own_folder(recipe, Path(config.runs), name)),
                    recipe=Path(path).stem,
                    dataset=ConversationDataset(rows, recipe.data.max_length, number),
                )
            )
    return trainings


def measure_training(
    config: BenchCurveConfig,
    target: Target,
    training: CurveTraining,
    requests: Mapping[str, Sequence[Request]],
    prompts: Sequence[Prompt],
) -> Iterator[Measured]:
    """Decode all suites with a head; of the first recipe also by suffix lookup, alone and before the head."""
    draft = load_draft(training.run.artifact, target.identity, target.model)
    settings = DecodeConfig(
        num_speculative_tokens=draft.metadata.num_speculative_tokens,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
    )
    drafts: dict[str, Callable[[], Proposer]] = {draft.metadata.kind: lambda: draft.proposer}
    joined = EvalConfig(decode=settings)
    if training.recipe == Path(config.recipes[0]).stem:
        answers = known_answers(training.dataset, prompts)
        drafts[SUFFIX_LOOKUP] = lambda: SuffixLookup(target.device, answers)
        drafts[f"{SUFFIX_LOOKUP} + {draft.metadata.kind}"] = lambda: add_lookup(draft.proposer, joined, target, answers)
    outcome = read_outcome(training.run)
    for family, make in drafts.items():
        trained = family != SUFFIX_LOOKUP
        longest = joined.suffix_length if family.startswith(SUFFIX_LOOKUP) else settings.num_speculative_tokens
        by = settings.model_copy(update={"num_speculative_tokens": longest})
        for suite, of_suite in requests.items():
            counts = count_rounds(target, of_suite, by, make(), what=training.run.name)
            row = Measured(
                family=family,
                recipe=training.recipe if trained else None,
                suite=suite,
                answer_tokens=training.dataset.num_labels,
                epochs=training.run.recipe.schedule.epochs if trained else None,
                training_seconds=outcome["training_seconds"] if trained else None,
                most=longest + 1,
                counts=[counts[request.prompt_id] for request in of_suite],
            )
            found = ratio_interval(*columns(_pairs(row)), samples=config.bootstrap_samples, seed=SEED).point
            log.info("%s, %s on %s: %.3f tokens per target step", training.run.name, family, suite, found)
            yield row


def known_answers(dataset: ConversationDataset, prompts: Sequence[Prompt]) -> Answers:
    """Return the answers that are trained on, without those to any of `prompts`."""
    asked = {text_hash(text) for prompt in prompts for text in prompt.user_texts}
    rows = [dataset.conversations[number] for number in dataset.numbers.tolist()]
    return [row.answer_ids for row in rows if text_hash(row.user_text) not in asked]


def summarise(measured: Sequence[Measured], samples: int) -> list[dict[str, Any]]:
    """Return a row for each measurement, with what the law through its curve leaves over, and one for each law."""
    curves: dict[tuple[str, str, int], dict[int, Counts]] = {}
    for row in measured:
        curves.setdefault((row["family"], row["suite"], row["most"]), {})[row["answer_tokens"]] = _pairs(row)
    laws, fitted = [], dict[tuple[str, str, int], Any]()
    for (family, suite, most), counts in curves.items():
        if len(counts) < 2:
            continue
        last = max(counts)
        curve = fit_curve(counts, most, sizes=[*counts, *(times * last for times in DOUBLINGS)], samples=samples)
        fitted |= {(family, suite, size): each.point for size, each in curve.predicted.items()}
        law = {"row": "law", "family": family, "suite": suite, "exponent": curve.exponent}
        law |= {f"tau_at_{times}_times": curve.predicted[times * last] for times in DOUBLINGS}
        if curve.check is not None:  # the law through the other sizes, and the largest
            law |= {"last_predicted": curve.check.predicted, "last_less_predicted": curve.check.difference}
        laws.append(flat(law))
    rows = []
    for row in measured:
        values: dict[str, Any] = dict(row)
        tau = ratio_interval(*columns(_pairs(row)), samples=samples, seed=SEED)
        own = flat({"row": "measured", **{name: values[name] for name in NAMED}, "tau": tau, "less_law": None})
        if fitted:
            own["less_law"] = own["tau"] - fitted[row["family"], row["suite"], row["answer_tokens"]]
        rows.append(own)
    return rows + laws


def plot_curve(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw tokens per target step over answer tokens, a panel for each suite, the laws on to the largest size predicted."""
    suites, families = (list(dict.fromkeys(row[name] for row in rows)) for name in ("suite", "family"))
    with matplotlib.rc_context({"svg.hashsalt": "curve", "font.size": 8}):
        figure = Figure(figsize=(3.0 * len(suites), 3.2), layout="constrained")
        panels = figure.subplots(1, len(suites), sharey=True, squeeze=False)[0]
        for panel, suite in zip(panels, suites, strict=True):
            for number, family in enumerate(families):
                of_both = [row for row in rows if (row["suite"], row["family"]) == (suite, family)]
                own = sorted((row for row in of_both if row["row"] == "measured"), key=lambda row: row["answer_tokens"])
                (law,) = (row for row in of_both if row["row"] == "law")
                sizes, taus = [row["answer_tokens"] for row in own], [row["tau"] for row in own]
                bounds = [[abs(row[bound] - row["tau"]) for row in own] for bound in ("tau_low", "tau_high")]
                panel.errorbar(sizes, taus, bounds, color=f"C{number}", label=family, marker="o", markersize=3, linewidth=1)
                further = [law[f"tau_at_{times}_times"] for times in DOUBLINGS]
                lengths = [sizes[-1], *(times * sizes[-1] for times in DOUBLINGS)]
                panel.plot(lengths, [taus[-1], *further], "--", color=f"C{number}", linewidth=0.8)
            panel.set(title=suite, xscale="log", xlabel="answer tokens", xticks=lengths + sizes[:-1])
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:,.0f} k"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.tick_params(axis="x", rotation=60)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("tokens per target step")
        panels[0].legend(fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def _pairs(row: Measured) -> Counts:
    return [(committed, rounds) for committed, rounds in row["counts"]]
