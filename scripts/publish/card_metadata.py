"""The YAML on top of a model card: base model, licence, and the report's figures, by which the Hub lists and plots a draft.

A draft is bound by the licences of what it was made from: the target and, where it began as another model (`student.init:
model`), that one. Their own cards are read, from the folder, the Hub's cache or the Hub; nothing is guessed. `model-index`
holds the report's headline figures, unrounded; the Hub's `.eval_results/` are for its own benchmark data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download, try_to_load_from_cache
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from yaml import YAMLError

from configs.runtime.terminal import one_line
from configs.schema.commands.release import HUB_ID, PushConfig
from eval.report.schema import CategorySection, Report, SuiteSection
from scripts.publish.publication import Cleaned

TASK = "text-generation"
# The report's numbers in the metadata: section, key, name.
METRICS = (
    ("acceptance", "tokens_per_target_step", "Tokens per target step"),
    ("acceptance", "overlap_alpha", "Acceptance rate"),
    ("acceptance", "draft_token_yield", "Draft token yield"),
    ("speed", "decode_speedup", "Decode speedup"),
    ("speed", "end_to_end_speedup", "End-to-end speedup"),
)


def card_data(
    repo_id: str, cleaned: Cleaned, config: PushConfig, origins: Mapping[str, ModelCardData], endpoint: str
) -> ModelCardData:
    """Return the metadata of a card; see `scripts.publish.model_card.make_card` for the arguments."""
    kind = cleaned.metadata["kind"]
    target, *others = origins
    base_models = [name for name in (config.base_model or target, *others) if HUB_ID.fullmatch(name)]
    licence = ModelCardData(license=config.license) if config.license else agreed_licence(origins.values()) or ModelCardData()
    data = ModelCardData(
        base_model=base_models[0] if len(base_models) == 1 else base_models or None,
        library_name="transformers" if kind == "draft_lm" else None,
        license=licence.license or "other",
        license_name=licence.license_name,
        license_link=licence.license_link,
        language=origins[target].language,
        pipeline_tag=TASK,
        tags=["draftsmith", "speculative-decoding", "draft-model", one_line(kind)],
        model_name=repo_id.split("/")[-1],
        eval_results=list(_eval_results(cleaned.report, f"{endpoint}/{repo_id}/blob/main/report.json")),
    )
    if base_models:
        # Of the Hub's four relations, a head that reads its target's states is an adapter, a model of its own a finetune.
        data["base_model_relation"] = config.base_model_relation or ("finetune" if kind == "draft_lm" else "adapter")
    return data


def read_card(name: str, revision: str | None, *, online: bool) -> ModelCardData:
    """Return the metadata of the own card of a folder, file or Hub id; empty where there is none that can be read."""
    try:
        path = _find_card(name, revision, online)
        data = ModelCardData() if path is None else ModelCard.load(path, ignore_metadata_errors=True).data
    # Not a Hub id (embedded:...), no card, no access; or a file of somebody else's that is no card.
    except (HFValidationError, HfHubHTTPError, HTTPError, OSError, ValueError, TypeError, YAMLError):
        data = ModelCardData()
    for key in ("license", "license_name", "license_link"):
        value = getattr(data, key, None)
        setattr(data, key, one_line(value) if isinstance(value, str) else None)
    return data


def agreed_licence(cards: Iterable[ModelCardData]) -> ModelCardData | None:
    """Return the first card if all name the same licence; None where one names none, or they differ."""
    first, *others = cards
    known = (first.license, first.license_name)
    return first if first.license and all((each.license, each.license_name) == known for each in others) else None


def _find_card(name: str, revision: str | None, online: bool) -> Path | None:
    folder = Path(name)
    if folder.exists():
        card = (folder if folder.is_dir() else folder.parent) / REPOCARD_NAME
        return card if card.is_file() else None
    cached = try_to_load_from_cache(name, REPOCARD_NAME, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    return Path(hf_hub_download(name, REPOCARD_NAME, revision=revision)) if online else None


def _eval_results(report: Report, source_url: str) -> Iterator[EvalResult]:
    """Yield the numbers of every suite."""
    suites: list[Report | SuiteSection] = [report, *report.suites.values()]
    for suite in suites:
        yield from _suite_results(suite, report.statistics.level, source_url)


def _suite_results(suite: Report | SuiteSection, level: float, source_url: str) -> Iterator[EvalResult]:
    """Yield the numbers of all prompts, and of each category, if there are several, as a configuration of the data set."""
    prompts, categories = suite.prompts, suite.by_category
    sections: dict[str | None, Report | SuiteSection | CategorySection] = {None: suite}
    if len(categories) > 1:
        sections.update(categories)
    for category, section in sections.items():
        for part, key, name in METRICS:
            numbers = getattr(section, part)
            value, bounds = (None, None) if numbers is None else numbers.interval_of(key)
            if value is None:
                continue
            yield EvalResult(
                task_type=TASK,
                task_name="Speculative decoding",
                dataset_type=one_line(Path(prompts.source).stem),
                dataset_name=one_line(prompts.source),
                dataset_config=None if category is None else one_line(category),
                dataset_args={"sha256": prompts.sha256},
                metric_type=key,
                metric_name=name,
                metric_value=value,
                metric_args=None if bounds is None else {"low": bounds[0], "high": bounds[1], "level": level},
                source_name="report.json",
                source_url=source_url,
            )
