"""What an advice leaves: advice.json for programs, advice.md for people, recipe.yaml for the whole training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.runtime.files import write_json, write_text
from configs.runtime.key_list import render_config
from configs.runtime.run_record import describe_hardware, describe_versions
from configs.runtime.terminal import say
from configs.schema.training import DistillConfig
from eval.report.markdown import table
from eval.report.text import number, times
from eval.stats.bootstrap import Interval
from heads.device import CPU, choose_device
from scripts.advice.candidates import full_recipe
from scripts.advice.findings import Findings, bounded
from scripts.advice.measuring import TrialSpeed
from scripts.steps import CPU_LAUNCH, GPU_LAUNCH

RECIPE = "recipe.yaml"


def write_advice(findings: Findings, spent_seconds: float, num_conversations: int) -> None:
    """Write the three files, and say the page."""
    output, trials = Path(findings.config.output), _trials(findings)
    write_text(output / RECIPE, _recipe(findings, output))
    said = {"spent_seconds": spent_seconds, "num_conversations": num_conversations, "trials": trials}
    write_json(output / "advice.json", _to_json(findings) | said)
    page = _render(findings, trials, spent_seconds, num_conversations)
    write_text(output / "advice.md", page)
    say(page)


def _to_json(findings: Findings) -> dict[str, Any]:
    """Return the numbers of the advice; intervals are {point, low, high}, bounds null where there are none."""
    config, batch = findings.config, findings.config.batch_size
    machine = None if config.hardware is None else config.hardware.machine.model_dump(mode="json")
    return {
        "format_version": 1,
        "target": config.target.name,
        "prompts": config.data or config.prompts.path,
        "hardware": describe_hardware(),
        "predicted_for": machine,  # None: the hardware above
        "versions": describe_versions(),
        "budget_seconds": 60 * config.budget_minutes,
        "num_held_out_prompts": len(findings.trial.prompts),
        "advice": {
            "family": findings.best.family,
            "settings": dict(findings.best.settings),
            "batch_size": batch,
            "num_speculative_tokens": findings.drafts(batch),
            "predicted_speedup": asdict(findings.speedups[batch]),  # of the trial's draft
            "predicted_speedup_of_whole_training": None if findings.whole_training is None else asdict(findings.whole_training),
            "break_even_batch_size": findings.speed.break_even_batch(),  # 0: no batch; None: all that were looked at
            "sentences": findings.sentences(),
        },
        "by_batch": {
            str(size): {"num_speculative_tokens": findings.drafts(size), "predicted_speedup": asdict(speedup)}
            for size, speedup in findings.speedups.items()
        },
        "data_curve": None if findings.curve is None else asdict(findings.curve),
    }


def _render(findings: Findings, trials: list[dict[str, Any]], spent_seconds: float, num_conversations: int) -> str:
    config = findings.config
    machine = "this machine" if config.hardware is None else config.hardware.preset
    parts = [
        f"# Advice for {config.target.name}",
        f"From {num_conversations} conversations of {config.data or config.prompts.path}, {len(findings.trial.prompts)} "
        f"held-out prompts, greedy, in {spent_seconds / 60:.1f} of {config.budget_minutes:g} minutes. Speeds are predicted for "
        f"{machine} by the cost model; 95 % intervals are over prompts.",
        "\n".join(f"- **{question}**: {answer}" for question, answer in findings.sentences().items()),
        f"The recipe of the whole training is `{Path(config.output) / RECIPE}`.",
        "## Trials",
        table(
            ("trial", "conversations", "parameters", "tau", "given all before it, by position", "drafting", "speedup"),
            [
                (
                    each["name"],
                    str(each["conversations"]),
                    f"{each['num_parameters'] / 1e6:.1f} M",
                    bounded(Interval(**each["tokens_per_target_step"])),
                    " ".join(number(share) for share in each["position_conditional"]),
                    number(each["draft_share"]),
                    f"{times(each['predicted_speedup'])} ({each['num_speculative_tokens']})",
                )
                for each in trials
            ],
        ),
        f"Drafting is the seconds of a round's drafts over those of a plain round, and speedup the predicted one, at batch "
        f"{config.batch_size} with the number of drafts in brackets.",
    ]
    missed = [
        f"on {rung.size} conversations {what}: {'; '.join(each.name for each in those)}"
        for rung in findings.rungs
        for what, those in (("failed", rung.failed), ("not begun, for want of time", rung.not_begun))
        if those
    ]
    if missed:
        parts.append(f"Trials {', and '.join(missed)}.")
    return "\n\n".join(parts) + "\n"


def _trials(findings: Findings) -> list[dict[str, Any]]:
    rows = []
    batch = findings.config.batch_size
    for rung in findings.rungs:
        for candidate, _ in rung.ranked:
            measured = findings.measured[candidate.name, rung.size]
            speed = TrialSpeed(measured, findings.config)
            drafts, speedup = speed.best(batch)
            rows.append(
                {
                    "name": candidate.name,
                    "family": candidate.family,
                    "settings": dict(candidate.settings),
                    "conversations": rung.size,
                    "answer_tokens": measured.answer_tokens,
                    "num_parameters": measured.num_parameters,
                    "tokens_per_target_step": asdict(measured.tau(findings.config.bootstrap_samples)),
                    "position_conditional": speed.conditional,
                    "draft_share": speed.draft_share(drafts, batch),
                    "num_speculative_tokens": drafts,
                    "predicted_speedup": speedup,
                }
            )
    return rows


def _recipe(findings: Findings, output: Path) -> str:
    recipe = full_recipe(
        findings.best, findings.config, findings.drafts(findings.config.batch_size), len(findings.trial.prompts)
    )
    entry = "train/distill.py" if isinstance(recipe, DistillConfig) else "train/heads.py"
    on_gpu = choose_device(findings.config.target.device) != CPU
    launch = f"accelerate launch --quiet --config_file {GPU_LAUNCH if on_gpu else CPU_LAUNCH}"
    return (
        f"# {launch} {entry} --config {output / RECIPE}\n#\n"
        f"# {findings.best.name}: advised for {findings.config.target.name}, on the trials' conversations.\n"
        f"# For more of them see scripts/data.py, and name them in data.train.\n{render_config(recipe)}\n"
    )
