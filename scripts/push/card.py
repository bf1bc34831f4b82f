"""The model card of a published draft, made from its report: no number in it that is not in `report.json` beside it.

The text is `templates/model_card.md.j2`; tables and wording of the figures are those of the report's own summary
(`eval.report.tables`). A draft is bound by the licences of what it was made from: the target and, where it began as another
model (`student.init: model`), that one. Their own cards are read;
nothing is guessed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from httpx2 import HTTPError
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from configs.runtime.terminal import one_line
from configs.schema.commands.release import HUB_ID, PushConfig
from configs.schema.data import SELF_SEEDED
from eval.release import Finding, findings_table
from eval.report.tables import as_markdown_table, code, code_block, escape, render_markdown
from eval.report.text import short
from heads.formats.exporting.exporter import engines_of
from scripts.push.files import NAMELESS, Cleaned

LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
TEMPLATE = Path(__file__).with_name("templates") / "model_card.md.j2"


def make_card(repo_id: str, cleaned: Cleaned, config: PushConfig, origin: ModelCardData, exports: Mapping[str, str]) -> str:
    """Return `README.md`; `origin` is the metadata of the target's own card, `exports` are serve lines."""
    metadata, report, hardware = cleaned.metadata, cleaned.report, cleaned.report.hardware
    gpus = ", ".join(str(gpu.get("name")) for gpu in hardware.get("gpus") or ())
    serve = list(_serve(repo_id, metadata, exports))
    known: dict[str, Any] = {**vars(cleaned), "escape": escape, "code": code, "code_block": code_block, "short": short}
    card = ModelCard.from_template(
        _card_data(repo_id, cleaned, config, origin),
        template_path=str(TEMPLATE),
        **known,
        name=repo_id.split("/")[-1],
        findings=as_markdown_table(findings_table(Finding(**each) for each in cleaned.gate["findings"]), numbers=False),
        summary=render_markdown(report),
        serve=serve,
        nameless=NAMELESS if any(NAMELESS in lines for *_, lines in serve) else None,
        training=yaml.safe_dump(metadata["training"], sort_keys=False, allow_unicode=True).rstrip(),
        stated_licence=config.license,
        origin=origin,
        machine=gpus or f"{hardware.get('cpu')}, {hardware.get('cores')} cores",
        self_seeded=report.prompts.categories.get(SELF_SEEDED),
    )
    return str(card).rstrip() + "\n"


def read_card(name: str, revision: str | None, *, online: bool) -> ModelCardData:
    """Return the metadata of the own card of a folder, file or Hub id; empty where there is none that can be read."""
    data, folder = ModelCardData(), Path(name)
    try:
        if folder.exists():
            path = (folder if folder.is_dir() else folder.parent) / REPOCARD_NAME
        else:
            path = Path(hf_hub_download(name, REPOCARD_NAME, revision=revision, local_files_only=not online))
        if path.is_file():
            data = ModelCard.load(path, ignore_metadata_errors=True).data
    # Not a Hub id (embedded:...), no card, none in the cache, no access; or a file of somebody else's that is no card.
    except (HFValidationError, HfHubHTTPError, HTTPError, OSError, ValueError, TypeError, yaml.YAMLError):
        pass
    for key in ("license", "license_name", "license_link"):
        value = getattr(data, key, None)
        setattr(data, key, one_line(value) if isinstance(value, str) else None)
    data.language = _languages(data.language)
    return data


def _languages(stated: Any) -> str | list[str] | None:
    """Return what names a language of what a card states; YAML reads Norwegian's `no` as false."""
    if isinstance(stated, list):
        return [each for each in stated if _languages(each)] or None
    return stated if isinstance(stated, str) and LANGUAGE.fullmatch(stated) else None


def _serve(repo_id: str, metadata: Mapping[str, Any], exports: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield a program, what to do before, and the command or code by which it serves the draft."""
    name, target = repo_id.split("/")[-1], str(metadata["target"]["name"])
    for engine, text in exports.items():
        intro = f"`hf download {repo_id} --include '{engine}/*' --local-dir {name}` fetches the folder, then"
        yield engine, intro, text.partition("\n")[2].strip()
    others = [engine for engine in engines_of(metadata["kind"]) if engine not in exports]
    if others:
        lines = "\n".join(f"draftsmith export {repo_id} --to {engine} --out {name}-{engine}" for engine in others)
        yield "other engines" if exports else "engines", "a checkout of draftsmith writes their forms.", lines
    named = shlex.quote(target) if HUB_ID.fullmatch(target) or target.startswith("embedded:") else NAMELESS
    line = f"draftsmith eval --set draft={repo_id} --set target.name={named}"
    yield "draftsmith", "measures it against plain decoding on your prompts.", line


def _card_data(repo_id: str, cleaned: Cleaned, config: PushConfig, origin: ModelCardData) -> ModelCardData:
    """Return the metadata on top of the card."""
    kind = cleaned.metadata["kind"]
    target = config.base_model or cleaned.target
    licence = ModelCardData(license=config.license) if config.license else origin
    data = ModelCardData(
        base_model=target if HUB_ID.fullmatch(target) else None,
        library_name="transformers" if kind == "draft_lm" else None,
        license=licence.license or "other",
        license_name=licence.license_name,
        license_link=licence.license_link,
        language=origin.language,
        pipeline_tag="text-generation",
        tags=["draftsmith", "speculative-decoding", "draft-model", one_line(kind)],
        model_name=repo_id.split("/")[-1],
    )
    if data.base_model:
        # Of the Hub's four relations, a head that reads its target's states is an adapter, a model of its own a finetune.
        data["base_model_relation"] = "finetune" if kind == "draft_lm" else "adapter"
    return data
