"""The model card of a published draft, made from its report: no number in it that is not in `report.json` beside it.

The text is `templates/model_card.md.j2`; tables and wording of the figures are those of the report's own summary
(`eval.report.markdown`), the YAML on top is `scripts.publish.card_metadata`'s.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from configs.schema.commands.release import HUB_ID, PushConfig
from configs.schema.data import SELF_SEEDED
from eval.release.verdict import Finding, findings_table
from eval.report.markdown import as_markdown_table, code, code_block, escape, render_markdown, table
from eval.report.text import short
from heads.formats.exporting.table import engines_of
from scripts.publish.card_metadata import agreed_licence, card_data
from scripts.publish.publication import NAMELESS, Cleaned

TEMPLATE = Path(__file__).with_name("templates") / "model_card.md.j2"


def make_card(
    repo_id: str,
    cleaned: Cleaned,
    config: PushConfig,
    origins: Mapping[str, ModelCardData],
    exports: Mapping[str, str],
    endpoint: str,
) -> str:
    """Return `README.md`.

    Args:
        repo_id, endpoint: of the repository, `owner/name`, and of the Hub, for links.
        cleaned: what is published.
        config: may say licence and base model.
        origins: what the models that it was made from say in their own cards, by public name; the target first.
        exports: by engine, the `serve.txt` of its folder in the repository.
    """
    metadata, report, hardware = cleaned.metadata, cleaned.report, cleaned.report.hardware
    gpus = ", ".join(str(gpu.get("name")) for gpu in hardware.get("gpus") or ())
    serve = list(_serve(repo_id, metadata, exports))
    card = ModelCard.from_template(
        card_data(repo_id, cleaned, config, origins, endpoint),
        template_path=str(TEMPLATE),
        name=repo_id.split("/")[-1],
        report=report,
        metadata=metadata,
        escape=escape,
        code=code,
        code_block=code_block,
        short=short,
        outcome=cleaned.gate["outcome"],
        findings=as_markdown_table(findings_table(Finding(**each) for each in cleaned.gate["findings"]), numbers=False),
        summary=render_markdown(report),
        serve=serve,
        nameless=NAMELESS if any(NAMELESS in lines for *_, lines in serve) else None,
        recipe=_recipe(metadata),
        training=yaml.safe_dump(metadata["training"], sort_keys=False, allow_unicode=True).rstrip(),
        provenance=_provenance(cleaned),
        stated_licence=config.license,
        agreed_licence=agreed_licence(origins.values()),
        origins=origins,
        machine=gpus or f"{hardware.get('cpu')}, {hardware.get('cores')} cores",
        self_seeded=report.prompts.categories.get(SELF_SEEDED),
    )
    return str(card).rstrip() + "\n"


def _serve(repo_id: str, metadata: Mapping[str, Any], exports: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield a program, what to do before, and the command or code by which it serves the draft."""
    name, target = repo_id.split("/")[-1], str(metadata["target"]["name"])
    for engine, text in exports.items():
        intro = f"`hf download {repo_id} --include '{engine}/*' --local-dir {name}` fetches the folder, then"
        yield engine, intro, text.partition("\n")[2].strip()
    others = [engine for engine in engines_of(metadata["kind"]) if engine not in exports]
    if others:
        lines = "\n".join(f"python scripts/export.py {repo_id} --to {engine} --out {name}-{engine}" for engine in others)
        yield "other engines" if exports else "engines", "a checkout of draftsmith writes their forms.", lines
    named = shlex.quote(target) if HUB_ID.fullmatch(target) or target.startswith("embedded:") else NAMELESS
    line = f"python eval/run.py --set draft={repo_id} --set target.name={named}"
    yield "draftsmith", "measures it against plain decoding on your prompts.", line


def _recipe(metadata: Mapping[str, Any]) -> str:
    rows = [
        ("kind", escape(metadata["kind"])),
        ("tokens it can say", f"{metadata['draft_vocab_size']} ({escape(metadata['draft_vocabulary'])} vocabulary)"),
        ("drafts a round by default", str(metadata["num_speculative_tokens"])),
    ]
    return table(("", "value"), rows, numbers=False)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _provenance(cleaned: Cleaned) -> str:
    known, target = cleaned.metadata["provenance"], cleaned.metadata["target"]
    versions, git, command = _section(known, "versions"), _section(known, "git"), known.get("command")
    rows = [
        ("target weights", escape(str(target["weights_sha256"]))),
        ("target revision", escape(str(target.get("revision") or "not pinned"))),
        ("artifact (weights and metadata)", f"`{cleaned.sha256}`"),
        ("trained by", escape(" ".join(map(str, command)) if isinstance(command, list) else "not recorded")),
        ("imported from", escape(str(known.get("imported_from") or ""))),
        ("draftsmith commit", escape(f"{git.get('commit') or 'not recorded'}{', with changes' if git.get('dirty') else ''}")),
        ("versions", escape(", ".join(f"{name} {version}" for name, version in versions.items()) or "not recorded")),
    ]
    return table(("", ""), [row for row in rows if row[1]], numbers=False)
