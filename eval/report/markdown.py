"""A report as a short Markdown text, fit for a pull request or a model card. (Not `markdown`: that is an installed module.)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.report.text import VERDICTS, headline, interval, lossless_detail, number, percent, settings, short, times, warnings


def render_markdown(report: Mapping[str, Any]) -> str:
    """Return the summary of a checked report (`eval.report.schema.check_report`)."""
    acceptance, speed = report["acceptance"], report["speed"] or {}
    blocks = [
        f"## {headline(report)}",
        *(f"> **Warning:** {escape(warning)}" for warning in warnings(report)),
        table(
            ("", "value", "95 % interval"),
            [
                ("decode speedup", times(speed.get("decode_speedup")), interval(speed.get("decode_speedup_ci"))),
                ("decode speedup predicted by the cost model", times((speed.get("predicted") or {}).get("decode_speedup")), ""),
                ("end-to-end speedup", times(speed.get("end_to_end_speedup")), interval(speed.get("end_to_end_speedup_ci"))),
                (
                    "tokens per target step (τ)",
                    number(acceptance["tokens_per_target_step"]),
                    interval(acceptance["tokens_per_target_step_ci"]),
                ),
                ("acceptance rate (α)", number(acceptance["overlap_alpha"]), interval(acceptance["overlap_alpha_ci"])),
            ],
        ),
        *_expected(speed),
        f"**{VERDICTS[report['lossless']['verdict']]}**: {lossless_detail(report)}.",
        table(("category", "prompts", "τ", "95 % interval", "decode speedup"), _category_rows(report)),
        table(("draft position", "given all before", "survival", "overlap α"), _position_rows(acceptance)),
        table(("way of decoding", "τ", "decode speedup", "95 % interval"), _baseline_rows(report)),
        *worth_tables(report),
        f"Target `{escape(report['target']['name'])}`, draft `{escape(report['draft']['path'])}` "
        f"({short(report['draft']['sha256'])}), {settings(report)}.",
    ]
    return "\n\n".join(blocks) + "\n"


def worth_tables(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the answers are worth and what they burn, in runs that asked; reports of before hold neither."""
    quality, energy = report.get("quality"), report.get("energy")
    if quality is not None:
        header = ("quality", "plain", "speculative", "change", "95 % interval")
        yield table(header, [*_perplexity_rows(quality["perplexity"]), *map(_score_row, quality["scores"].items())])
    if energy is not None and energy["source"] is None:
        yield f"Energy: not available, {escape(energy['reason'])}."
    elif energy is not None:
        yield table(("energy", "plain", "speculative", "ratio", "95 % interval"), [_energy_row(energy)])


def _perplexity_rows(found: Mapping[str, Any] | None) -> list[tuple[str, ...]]:
    if found is None:
        return []
    values = (number(found["autoregressive"]), number(found["speculative"]), times(found["ratio"], 3))
    return [("perplexity", *values, interval(found["ratio_ci"], 3))]


def _score_row(named: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, found = named
    values = (number(found[key], 3) for key in ("autoregressive", "speculative", "difference"))
    return (escape(name), *values, interval(found["difference_ci"], 3))


def _energy_row(energy: Mapping[str, Any]) -> tuple[str, ...]:
    plain, speculative, ratio = (energy[f"joules_per_token_{side}"] for side in ("autoregressive", "speculative", "ratio"))
    bounds = interval(energy["joules_per_token_ratio_ci"])
    return (f"joules per token ({escape(energy['source'])})", number(plain), number(speculative), times(ratio), bounds)


def _expected(speed: Mapping[str, Any]) -> list[str]:
    """Say which settings the cost model would choose."""
    predicted = speed.get("predicted")
    if predicted is None:
        return []
    best, largest = predicted["best_num_speculative_tokens"], predicted["break_even_batch_size"]
    fastest = "no number of drafts is expected to pay" if best is None else f"the fastest is expected at {best} a round"
    up_to = "every batch that was looked at" if largest is None else f"a batch of {largest}"
    return [f"Drafts at this batch size: {fastest}" + (f"; drafting pays up to {up_to}." if largest != 0 else ".")]


def _category_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, section in report["by_category"].items():
        acceptance, speed = section["acceptance"], section["speed"] or {}
        rows.append(
            (
                escape(name),
                str(section["num_prompts"]),
                number(acceptance["tokens_per_target_step"]),
                interval(acceptance["tokens_per_target_step_ci"]),
                times(speed.get("decode_speedup")),
            )
        )
    return rows


def _position_rows(acceptance: Mapping[str, Any]) -> list[tuple[str, ...]]:
    columns = zip(
        acceptance["position_conditional"],
        acceptance["position_survival"],
        acceptance["overlap_alpha_by_position"],
        strict=True,
    )
    return [
        (str(position), percent(conditional), percent(survival), number(overlap))
        for position, (conditional, survival, overlap) in enumerate(columns, 1)
    ]


def _baseline_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    speculative = {**report["acceptance"], **(report["speed"] or {"decode_speedup": None, "decode_speedup_ci": None})}
    return [
        (
            escape(name),
            number(section["tokens_per_target_step"]),
            times(section["decode_speedup"]),
            interval(section["decode_speedup_ci"]),
        )
        for name, section in {"this draft": speculative, **report["baselines"]}.items()
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Return a Markdown table; the first column is to the left, and the others to the right where they are numbers."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def escape(text: str) -> str:
    """Return text from outside so that it can break neither a table nor the page around it."""
    flat = " ".join(text.split())
    for character, harmless in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("`", "'"), ("[", "\\[")):
        flat = flat.replace(character, harmless)
    return flat
