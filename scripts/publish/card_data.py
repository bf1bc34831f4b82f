"""The YAML on top of a model card: what the Hub lists, links and plots a draft by.

`model-index` holds the headline figures of the report and those by category, unrounded; it is what the Hub reads evaluations
from in a card. Its newer `.eval_results/` files are left out: they name a benchmark's data set on the Hub, which a suite of
one's own is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from configs.schema.release import HUB_ID, PushConfig
from scripts.publish.licences import OriginCard, agreed_licence
from scripts.publish.publication import Cleaned

TASK = "text-generation"
# Of a report's numbers, those that the card's metadata holds: path of the section, key, name.
METRICS = (
    ("acceptance", "tokens_per_target_step", "Tokens per target step"),
    ("acceptance", "overlap_alpha", "Acceptance rate"),
    ("acceptance", "draft_token_yield", "Draft token yield"),
    ("speed", "decode_speedup", "Decode speedup"),
    ("speed", "end_to_end_speedup", "End-to-end speedup"),
)


def card_data(
    repo_id: str, cleaned: Cleaned, config: PushConfig, origins: Mapping[str, OriginCard], endpoint: str
) -> ModelCardData:
    """Return the metadata of a card; see `scripts.publish.model_card.make_card` for the arguments."""
    kind = cleaned.metadata["kind"]
    target, *others = origins
    base_models = [name for name in (config.base_model or target, *others) if HUB_ID.fullmatch(name)]
    licence = OriginCard(license=config.license) if config.license else agreed_licence(origins.values()) or OriginCard()
    data = ModelCardData(
        base_model=base_models[0] if len(base_models) == 1 else base_models or None,
        library_name="transformers" if kind == "draft_lm" else None,
        license=licence.license or "other",
        license_name=licence.license_name,
        license_link=licence.license_link,
        language=origins[target].language,
        pipeline_tag=TASK,
        tags=["draftsmith", "speculative-decoding", "draft-model", kind],
        model_name=repo_id.split("/")[-1],
        eval_results=list(_eval_results(cleaned.report, f"{endpoint}/{repo_id}/blob/main/report.json")),
    )
    if base_models:
        data["base_model_relation"] = config.base_model_relation or _relation(kind)
    return data


def _relation(kind: str) -> str:
    """Of the Hub's four relations, a head that reads its target's states is an adapter, a model of its own a finetune."""
    return "finetune" if kind == "draft_lm" else "adapter"


def _eval_results(report: Mapping[str, Any], source_url: str) -> Iterator[EvalResult]:
    """Yield the numbers of all prompts, and of each category, if there are several, as a configuration of the data set."""
    yield from _results_of(report, report, None, source_url)
    if len(report["by_category"]) < 2:
        return
    for category, section in report["by_category"].items():
        yield from _results_of(section, report, category, source_url)


def _results_of(
    section: Mapping[str, Any], report: Mapping[str, Any], category: str | None, source_url: str
) -> Iterator[EvalResult]:
    prompts = report["prompts"]
    for part, key, name in METRICS:
        numbers = section[part]
        if numbers is None or numbers[key] is None:
            continue
        bounds = numbers.get(f"{key}_ci")  # None, or not there in a report of an earlier draftsmith
        yield EvalResult(
            task_type=TASK,
            task_name="Speculative decoding",
            dataset_type=Path(prompts["source"]).stem,
            dataset_name=prompts["source"],
            dataset_config=category,
            dataset_args={"sha256": prompts["sha256"]},
            metric_type=key,
            metric_name=name,
            metric_value=numbers[key],
            metric_args=None
            if bounds is None
            else {"low": bounds[0], "high": bounds[1], "level": report["statistics"]["level"]},
            source_name="report.json",
            source_url=source_url,
        )
