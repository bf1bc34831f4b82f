"""Where a results file comes from. Those in docs/results are of one command, one machine and one commit of a clean tree."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT, read_json
from configs.runtime.run_record import describe_git, describe_hardware, describe_versions, output_of
from scripts.lab.trained_runs import OUTCOME, TrainingRun, train_run

log = logging.getLogger("draftsmith")

RESULTS = CHECKOUT / "docs" / "results"
TRAINING_CODE = ("configs/runtime", "configs/schema", "heads", "distill", "eval", "train")
# Of these, what decides a draft's weights: decoding only chooses among checkpoints, by answers that no draft changes
DECODING_CODE = ("eval", "heads/proposers", "heads/sampling", "heads/formats", "configs/schema/evaluation.py")
WEIGHTS_CODE = (*TRAINING_CODE, *(f":(exclude){path}" for path in DECODING_CODE))


def is_published(path: str | Path) -> bool:
    return RESULTS in Path(path).resolve().parents


@cache
def describe_origin() -> dict[str, Any]:
    """Return machine, versions and commit of this process, as they were when it first asked."""
    return {"hardware": describe_hardware(), "versions": describe_versions(), "git": describe_git()}


def check_place(output: str | Path) -> None:
    """Refuse to write into docs/results from a tree that is no commit's, or no longer that of this process's beginning."""
    if not is_published(output):
        return
    commit = describe_origin()["git"]["commit"]
    changed = None if commit is None else changed_files(commit)
    if changed != []:
        why = "this is no git checkout" if changed is None else f"these differ from commit {commit[:12]}: {_listed(changed)}"
        raise InputError(f"output: {output} is for results of a commit, and {why}; commit first, or set output to another file")


def check_trained_here(artifacts: Iterable[str | Path], output: str | Path) -> None:
    """Refuse drafts, for results in docs/results, that were trained by other code than this commit's."""
    for artifact in artifacts if is_published(output) else ():
        metadata = read_json(Path(artifact) / "draftsmith.json", "artifact metadata")
        trained = metadata.get("provenance", {}).get("git", {})
        commit = trained.get("commit")
        changed = None if commit is None else changed_files(commit, WEIGHTS_CODE)
        if trained.get("dirty") is not False or changed != []:
            by = f"commit {str(commit)[:12]}" + (", with changes that are not committed" if trained.get("dirty") else "")
            since = f"; since then changed: {_listed(changed)}" if changed else ""
            raise InputError(
                f"output: {output} is for results of one commit, and {artifact} was trained by {by}{since}; remove it, or set "
                "output to another file"
            )


def check_same_origin(results: Mapping[str, Any], path: str | Path, code: tuple[str, ...] = (".",)) -> None:
    """Refuse to join results that another machine, other versions or other code made."""
    here, git = describe_origin(), results.get("git") or {}
    other = [name for name in ("hardware", "versions") if not here[name].items() <= (results.get(name) or {}).items()]
    if git.get("dirty") is not False or changed_files(git["commit"], code) != []:
        other.append("code")
    if other:
        raise InputError(f"{path} is of other {' and '.join(other)} than this run's; make it anew first")


def _listed(files: list[str]) -> str:
    return ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")


def read_outcome(run: TrainingRun) -> dict[str, Any]:
    outcome: dict[str, Any] = read_json(run.folder / OUTCOME, "outcome of a training")
    return outcome


def read_git(run: TrainingRun) -> dict[str, Any]:
    metadata = read_json(run.artifact / "draftsmith.json", "artifact metadata")
    git: dict[str, Any] = metadata["provenance"]["git"]
    return git


def train_all(runs: Sequence[TrainingRun], kind: str) -> None:
    commit = describe_git()["commit"]
    for number, run in enumerate(runs, 1):
        place = f"{kind} {number} of {len(runs)}, {run.name}"
        if not run.is_trained:
            log.info("%s: training", place)
            train_run(run, kind)
        elif (made_at := read_git(run)["commit"]) == commit:
            log.info("%s: kept from %s", place, run.folder)
        else:
            log.warning("%s: kept from %s, trained at commit %s; remove the folder to train anew", place, run.folder, made_at)


def changed_files(since: str, paths: Sequence[str] = (".",), *, root: Path = CHECKOUT) -> list[str] | None:
    """Return the files of a checkout, documents aside, that differ from a commit's or are untracked; None: git cannot tell."""
    where = ["--", *paths, ":(exclude)docs", ":(exclude)README.md"]
    commands = (["diff", "--name-only", since], ["ls-files", "--others", "--exclude-standard"])
    listed = [output_of(["git", "-C", str(root), *command, *where]) for command in commands]
    return None if None in listed else [path for each in listed for path in (each or "").splitlines()]
