"""A sweep from the first cell to the verdict: train what is not trained, decode what is not decoded, write the results.

All cells are trained before the target is loaded here, so that the training has the machine's memory to itself. What a cell
decoded is kept in its folder beside the settings it was decoded with.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed

from configs.runtime.command import DONE
from configs.runtime.files import read_json, write_json
from configs.schema.decoding import DecodeConfig
from configs.schema.training import DistillConfig
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import check_decodable
from heads.artifact import load_draft
from heads.frozen.loading import Target, load_target
from scripts.lab.bench.harness import Counts, count_rounds, measured_rows, to_request, write_results
from scripts.lab.bench.tables import fill_tables
from scripts.lab.bench.trained_runs import train_all
from scripts.lab.recipe_sweep.cells import Cell, load_recipe, make_cells
from scripts.lab.recipe_sweep.results import CellResult, SweepChoice, choose, make_rows, mean_tau_ratio
from scripts.lab.recipe_sweep.settings import SweepConfig
from train.launch import make_accelerator
from train.loop.checkpoints import Progress
from train.tasks.draft import DraftTask

log = logging.getLogger("draftsmith")

NAME = "sweep"
COUNTS = "counts.json"
TABLE = f"<!-- table: {NAME} -->\n", "<!-- end -->"


def run_sweep(config: SweepConfig) -> int:
    """Run the sweep and write its file; see `scripts/lab/sweep.py`."""
    undistilled, cells = make_cells(config)
    measuring = Measuring(config, load_recipe(config))
    train_all(cells, "cell")
    results = [measuring.result(cell) for cell in cells]
    before = measuring.result(undistilled)
    verdict = choose(results, config.bootstrap_samples)
    write_sweep(config, cells, results, before, verdict)
    start, end = TABLE
    print(fill_tables(start + end, Path(config.output)).removeprefix(start).removesuffix(end).strip())
    print(f"\n{verdict.sentence}")
    return DONE


class Measuring:
    """Decodes held-out prompts with the cells' drafts, all in the same way; `shared` is the recipe that they share."""

    def __init__(self, config: SweepConfig, shared: DistillConfig) -> None:
        self.config, self.shared = config, shared
        self.rows = measured_rows(Path(shared.data.held_out), config.num_prompts, shared.held_out.num_prompts)
        num_speculative_tokens = config.num_speculative_tokens or shared.num_speculative_tokens
        self.settings = {
            temperature: DecodeConfig(
                num_speculative_tokens=num_speculative_tokens,
                max_new_tokens=config.max_new_tokens,
                batch_size=config.batch_size,
                temperature=temperature,
                verification="token",
            )
            for temperature in config.temperatures
        }

    @cached_property
    def accelerator(self) -> Accelerator:
        """The one that the training would have: it says on which device this is."""
        return make_accelerator(self.shared.schedule.model_copy(update={"trackers": []}), Path(self.config.output))

    @cached_property
    def target(self) -> Target:
        """The target, loaded when a cell is to be decoded."""
        return load_target(self.shared.target.model_copy(update={"device": str(self.accelerator.device)}))

    def result(self, cell: Cell) -> CellResult:
        """Return what came of a cell; it is decoded where this was not done before with the same settings."""
        outcome = {"seconds": 0.0, "labels": 0} if cell.data_policy is None else cell.read_outcome()
        return CellResult(
            divergence=cell.divergence,
            data_policy=cell.data_policy,
            counts=dict(zip(self.settings, self._kept_or_new_counts(cell), strict=True)),
            training_seconds=outcome["seconds"],
            labels=int(outcome["labels"]),
        )

    def _kept_or_new_counts(self, cell: Cell) -> list[Counts]:
        """Return the counts of each temperature, from the cell's folder where it has those asked for."""
        path = cell.folder / COUNTS
        asked = {
            "decoding": [settings.model_dump(mode="json") for settings in self.settings.values()],
            "prompts": [row.prompt_id for row in self.rows],
        }
        kept = read_json(path, "counts of a cell") if path.is_file() else {}
        if {name: kept.get(name) for name in asked} != asked:
            kept = asked | {"counts": self._decode(cell)}
            write_json(path, kept)
        return [[(committed, rounds) for committed, rounds in each.values()] for each in kept["counts"]]

    def _decode(self, cell: Cell) -> list[dict[str, list[int]]]:
        """Decode with a cell's draft; return `{prompt id: [committed tokens, rounds]}` for each temperature."""
        if cell.data_policy is None:
            self._save_undistilled(cell)
        draft = load_draft(cell.artifact, self.target.identity, self.target.model)
        requests = [to_request(row) for row in self.rows]
        check_decodable(self.target, requests)
        counts = []
        for temperature, settings in self.settings.items():
            by_turn = count_rounds(self.target, requests, settings, draft.proposer, what=f"cell {cell.name}")
            counts.append(self._by_prompt(by_turn))
            committed, rounds = map(sum, zip(*counts[-1].values(), strict=True))
            log.info("cell %s at temperature %g: %.3f tokens per target step", cell.name, temperature, committed / rounds)
        return counts

    def _by_prompt(self, by_turn: dict[str, list[int]]) -> dict[str, list[int]]:
        """Add up the turns of each prompt: they are no independent evidence."""
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for row in self.rows:
            turn = by_turn[f"{row.prompt_id}/{row.turn}"]
            counts[row.prompt_id] = [sum(pair) for pair in zip(counts[row.prompt_id], turn, strict=True)]
        return dict(counts)

    def _save_undistilled(self, cell: Cell) -> None:
        """Write the draft that all cells begin with."""
        train, held_out = (read_conversations(Path(path)) for path in (cell.recipe.data.train, cell.recipe.data.held_out))
        set_seed(cell.recipe.schedule.seed)
        task = DraftTask(cell.recipe, self.target, train, held_out, self.accelerator)
        task.save(task.module, Progress(), {})


def write_sweep(
    config: SweepConfig, cells: Sequence[Cell], results: Sequence[CellResult], undistilled: CellResult, verdict: SweepChoice
) -> None:
    """Write `sweep.json`: the rows, the verdict, and where each cell lies."""
    samples = config.bootstrap_samples
    write_results(
        Path(config.output) / f"{NAME}.json",
        NAME,
        config,
        rows=make_rows(results, undistilled, samples),
        ratios={"mean_tau_winner_vs_undistilled": mean_tau_ratio(verdict.winner, undistilled, samples)},
        script=f"scripts/{NAME}.py",
        verdict=asdict(verdict) | {"winner": verdict.winner.name},
        cells=[{"cell": cell.name, "artifact": str(cell.artifact), "git": cell.read_git()} for cell in cells],
    )
