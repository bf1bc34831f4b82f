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
from heads.device import CPU, choose_device
from scripts.advice.candidates import full_recipe
from scripts.advice.findings import Findings, bounded
from scripts.advice.measuring import TrialSpeed
from scripts.own_demo.steps import CPU_LAUNCH, GPU_LAUNCH

RECIPE = "recipe.yaml"


def write_advice(findings: Findings, spent_seconds: float, num_conversations: int) -> None:
    """Write the three files, and say the page."""
    output = Path(findings.config.output)
    write_text(output / RECIPE, _recipe(findings, output))
    write_json(output / "advice.json", to_json(findings, spent_seconds, num_conversations))
    page = render(findings, spent_seconds, num_conversations)
    write_text(output / "advice.md", page)
    say(page)


def to_json(findings: Findings, spent_seconds: float, num_conversations: int) -> dict[str, Any]:
    """Return every number of the advice; intervals are {point, low, high}, bounds null where there are none."""
    config, comparison, batch = findings.config, findings.comparison, findings.config.batch_size
    machine = None if config.hardware is None else config.hardware.machine.model_dump(mode="json")
    return {
        "format_version": 1,
        "target": config.target.name,
        "prompts": config.data or config.prompts.path,
        "hardware": describe_hardware(),
        "predicted_for": machine,  # None: the hardware above
        "versions": describe_versions(),
        "budget_seconds": 60 * config.budget_minutes,
        "spent_seconds": spent_seconds,
        "num_conversations": num_conversations,
        "num_held_out_prompts": len(findings.trial.prompts),
        "advice": {
            "family": findings.best.family,
            "settings": dict(findings.best.settings),
            "batch_size": batch,
            "num_speculative_tokens": findings.drafts(batch),
            "predicted_speedup": asdict(findings.speedups[batch]),  # of the trial's draft
            "predicted_speedup_of_whole_training": None if findings.whole_training is None else asdict(findings.whole_training),
            "break_even_batch_size": findings.speed.break_even_batch(),  # 0: no batch; None: all that were looked at
            "way": None if comparison is None else comparison.chosen.name,
            "sentences": findings.sentences(),
        },
        "by_batch": {
            str(size): {"num_speculative_tokens": findings.drafts(size), "predicted_speedup": asdict(speedup)}
            for size, speedup in findings.speedups.items()
        },
        "trials": [row for row, _ in _trials(findings)],
        "choices": [asdict(each) for each in findings.choices],
        "comparison": None if comparison is None else asdict(comparison),
        "data_curve": None if findings.curve is None else asdict(findings.curve),
    }


def render(findings: Findings, spent_seconds: float, num_conversations: int) -> str:
    """Return the page as Markdown."""
    config, trial = findings.config, findings.trial
    machine = "this machine" if config.hardware is None else config.hardware.preset
    parts = [
        f"# Advice for {config.target.name}",
        f"From {num_conversations} conversations of {config.data or config.prompts.path}, {len(trial.prompts)} held-out "
        f"prompts, greedy, in {spent_seconds / 60:.1f} of {config.budget_minutes:g} minutes. Speeds are predicted for "
        f"{machine} by the cost model; "
        "95 % intervals are over prompts.",
        "\n".join(f"- **{question}**: {answer}" for question, answer in findings.sentences().items()),
        f"The recipe of the whole training is `{Path(config.output) / RECIPE}`.",
        "## Trials",
        table(
            ("trial", "conversations", "parameters", "tau", "given all before it, by position", "drafting", "speedup"),
            [cells for _, cells in _trials(findings)],
        ),
        f"Drafting is the seconds of a round's drafts over those of a plain round, and speedup the predicted one, at batch "
        f"{config.batch_size} with the number of drafts in brackets.",
    ]
    if findings.choices:
        rows = [
            (
                f"{each.differs_in}: {each.other} for {each.best}",
                f"{each.answer_tokens:,}",
                bounded(each.tau_ratio),
                number(each.draft_seconds_ratio),
                number(each.speedup_ratio),
            )
            for each in findings.choices
        ]
        parts += ["## What each choice is worth", table(("choice", "answer tokens", "tau", "drafting", "speedup"), rows)]
        parts.append("Ratios of the other choice to the advised one, trained and measured alike.")
    if findings.comparison is not None:
        ways = [
            (each.name, bounded(each.tau), bounded(each.speedup), bounded(each.to_chain)) for each in findings.comparison.ways
        ]
        parts += ["## Ways of decoding", table(("way", "tau", "speed to plain", "speed to the chain"), ways)]
        parts.append(f"Measured on this machine in turns, one request at a time, {findings.comparison.num_prompts} prompts.")
    if (missed := _missed(findings)) is not None:
        parts.append(missed)
    return "\n\n".join(parts) + "\n"


def _trials(findings: Findings) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Return every trial as JSON and as cells."""
    found: list[tuple[dict[str, Any], tuple[str, ...]]] = []
    batch, samples = findings.config.batch_size, findings.config.bootstrap_samples
    for rung in findings.rungs:
        for candidate, _ in rung.ranked:
            measured = findings.measured[candidate.name, rung.size]
            speed, tau = TrialSpeed(measured, findings.config), measured.tau(samples)
            drafts, speedup = speed.best(batch)
            share, conditional = speed.draft_share(drafts, batch), speed.conditional
            row = {
                "name": candidate.name,
                "family": candidate.family,
                "settings": dict(candidate.settings),
                "conversations": rung.size,
                "answer_tokens": measured.answer_tokens,
                "num_parameters": measured.num_parameters,
                "tokens_per_target_step": asdict(tau),
                "position_conditional": conditional,
                "draft_share": share,
                "num_speculative_tokens": drafts,
                "predicted_speedup": speedup,
            }
            cells = (
                candidate.name,
                str(rung.size),
                f"{measured.num_parameters / 1e6:.1f} M",
                bounded(tau),
                " ".join(number(each) for each in conditional),
                number(share),
                f"{times(speedup)} ({drafts})",
            )
            found.append((row, cells))
    return found


def _missed(findings: Findings) -> str | None:
    """Say which trials failed, or were not begun for want of time."""
    said = []
    for rung in findings.rungs:
        for what, those in (("failed", rung.failed), ("not begun, for want of time", rung.not_begun)):
            if those:
                said.append(f"on {rung.size} conversations {what}: {'; '.join(each.name for each in those)}")
    return None if not said else f"Trials {', and '.join(said)}."


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
        f"# For more of them see scripts/make_data.py, and name them in data.train.\n{render_config(recipe)}\n"
    )
