"""The trials on disk: each is trained by the usual entry in a process of its own, and measured here; both are done once."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import read_object, write_json
from configs.schema.commands.advising import AdviceConfig
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import Conversation, open_conversations
from eval.report.sections import TimedRound
from heads.artifact import load_draft
from heads.frozen.loading import Target
from scripts.advice.candidates import Candidate
from scripts.advice.halving import TimeBudget
from scripts.advice.measuring import TrialMeasurement, TrialSpeed, measure_draft, pool_forwards
from scripts.advice.trained_runs import TrainingRun, train_run

log = logging.getLogger("draftsmith")


class Trials:
    """Runs trials on `train.jsonl` of `data` and the held-out `rows`, and remembers what came of them."""

    def __init__(self, config: AdviceConfig, budget: TimeBudget, target: Target, rows: list[Conversation], data: Path) -> None:
        self.config, self.budget, self.target, self.rows = config, budget, target, rows
        self._measured: dict[tuple[str, int], TrialMeasurement] = {}
        self._sweeps: dict[str, list[TimedRound]] = {}  # as they were timed, by candidate
        self._seconds: dict[tuple[str, int], float] = {}
        self._train = open_conversations(data / "train.jsonl")
        self.num_conversations, self.num_answer_tokens = len(self._train), self._count_tokens(len(self._train))

    def may_begin(self, candidate: Candidate, size: int) -> bool:
        """Say whether a trial is done, or expected to end in time: by its own time at another size, else by others'."""
        if self._read(candidate, size) is not None:
            return True
        own = {at: seconds for (name, at), seconds in self._seconds.items() if name == candidate.name}
        others = {at: seconds for (_, at), seconds in self._seconds.items()}
        expected = max((seconds * max(1.0, size / at) for at, seconds in (own or others).items()), default=0.0)
        return self.budget.allows(expected)

    def run(self, candidate: Candidate, size: int) -> bool:
        """Train and measure a trial; return False where it cannot be trained or drafts nothing, which a warning says."""
        kept = self._read(candidate, size)
        if kept is None:
            run = self.training_of(candidate, size)
            started = time.monotonic()
            kept = {"asked": self._asked(), **self._measure(candidate, run, size), "seconds": time.monotonic() - started}
            write_json(run.folder / "measured.json", kept)
            self.budget.note()
        self._seconds[candidate.name, size] = kept["seconds"]
        if "failed" in kept:
            log.warning("%s on %d conversations failed: %s", candidate.name, size, kept["failed"])
            return False
        measured = self._measured[candidate.name, size] = TrialMeasurement.model_validate(kept["measured"])
        self._sweeps.setdefault(candidate.name, measured.sweep)
        log.info("%s on %d conversations: tau %.2f", candidate.name, size, measured.tau(self.config.bootstrap_samples).point)
        return True

    def score(self, candidate: Candidate, size: int) -> float:
        """Return the predicted speedup of a trial that was run."""
        return TrialSpeed(self.measured[candidate.name, size], self.config).best(self.config.batch_size)[1]

    @property
    def measured(self) -> dict[tuple[str, int], TrialMeasurement]:
        """All measurements by candidate and size, the target's forwards timed alike in all (`pool_forwards`)."""
        sweeps = pool_forwards(self._sweeps)
        return {at: each.model_copy(update={"sweep": sweeps[at[0]]}) for at, each in self._measured.items()}

    def training_of(self, candidate: Candidate, size: int) -> TrainingRun:
        return candidate.run(size, Path(self.config.output) / "trials")

    def _measure(self, candidate: Candidate, run: TrainingRun, size: int) -> dict[str, Any]:
        """Train and measure; return what to keep."""
        log.info("== trial: %s on %d conversations, %.0f s spent", candidate.name, size, self.budget.spent)
        try:
            if not run.is_trained:
                train_run(run, "trial")
            draft = load_draft(str(run.artifact), self.target.identity, self.target.model)
            found = measure_draft(self.target, draft, self.rows, self.config, self._sweeps.get(candidate.name))
        except (InputError, RuntimeError) as error:  # of this candidate; what all need was checked before the first
            return {"failed": str(error)}
        if found is None:
            return {"failed": "it drafted nothing"}
        measured = TrialMeasurement(conversations=size, answer_tokens=self._count_tokens(size), **found)
        return {"measured": measured.model_dump(mode="json")}

    def _count_tokens(self, size: int) -> int:
        return ConversationDataset(self._train, self.config.max_length, size).num_labels

    def _read(self, candidate: Candidate, size: int) -> dict[str, Any] | None:
        path = self.training_of(candidate, size).folder / "measured.json"
        kept = read_object(path, "measurement of a trial") if path.is_file() else {}
        return kept if kept.get("asked") == self._asked() else None

    def _asked(self) -> dict[str, Any]:
        """Return what decides a measurement, besides the trial."""
        settings = self.config.model_dump(mode="json", include={"target", "cost"})
        prompts = [row.prompt_id for row in self.rows]
        return settings | {"prompts": prompts, "max_new_tokens": self.config.answers.max_new_tokens}
