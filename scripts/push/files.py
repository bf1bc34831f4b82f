"""The folder that is published: artifact, exports, report, page, `README.md` and `publication.json`, which lists their hashes.

Only files that loading needs are taken; descriptions are freed of machine paths and secrets (`configs.runtime.redaction`). The
artifact's hash covers its `draftsmith.json`, so cleaning that changes the hash: the published report names the new one and
keeps the measured one as `measured_sha256`; the pair passes `draftsmith gate report.json --artifact OWNER/NAME`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import REPOCARD_NAME

from configs.runtime.errors import InputError
from configs.runtime.files import read_json, read_text, sha256_of, write_json, write_text
from configs.runtime.redaction import holds_token, redact, scrub, scrub_value
from configs.schema.commands.release import HUB_ID, PushConfig
from eval.release import as_values
from eval.report.page import render_html
from eval.report.schema import Report, parse_report
from heads.formats.exporting.exporter import SERVE_FILE
from heads.metadata import METADATA_FILE, VOCABULARY_FILE, WEIGHTS_FILE, hash_artifact
from scripts.push.checks import Release

NAMELESS = "TARGET"  # stands in commands for a target that has no name on the Hub
MANIFEST = "publication.json"
DESCRIPTIONS = ("config.json", "generation_config.json", "tokenizer_config.json")  # freed of paths under the keys below
PATH_KEYS = ("name_or_path", "path", "_file")
# What transformers writes of a tokenizer; freed of nothing, but refused if a secret stands in it.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """A release without machine paths and secrets; `sha256` is the artifact's hash as it is published."""

    metadata: Mapping[str, Any]
    report: Report
    gate: Mapping[str, Any]
    sha256: str

    @property
    def target(self) -> str:
        """What the target is called in public."""
        return str(self.metadata["target"]["name"])


def put_artifact(folder: Path, release: Release, config: PushConfig) -> tuple[Cleaned, list[str]]:
    """Put what loading needs of an artifact into a folder, without machine paths and secrets; return the names left out too."""
    needed = [WEIGHTS_FILE, *([VOCABULARY_FILE] if release.metadata.draft_vocabulary == "reduced" else [])]
    if release.metadata.kind == "draft_lm":
        needed += [*DESCRIPTIONS, *TOKENIZER_FILES]
    left_out = put_model(folder, release.folder, needed)
    metadata = scrub_value(read_json(release.folder / METADATA_FILE, "artifact metadata"))
    own_name = str(release.metadata.target["name"])
    name = public_name(own_name)
    if name != own_name:  # a folder's
        name = config.base_model or name
    metadata["target"]["name"] = name
    write_json(folder / METADATA_FILE, metadata)
    sha256 = hash_artifact(folder)
    report = scrub_value(release.report.to_dict())
    report["target"]["name"] = name
    report["draft"]["sha256"] = sha256
    if sha256 != release.sha256:
        report["draft"]["measured_sha256"] = release.sha256
    gate = scrub_value({**as_values(release.verdict), "config": release.gate})
    return Cleaned(
        metadata=metadata, report=parse_report(report, "the report to be published"), gate=gate, sha256=sha256
    ), left_out


def put_model(folder: Path, source: Path, needed: Sequence[str] | None = None) -> list[str]:
    """Put the files of a model folder that may be published, descriptions cleaned, into another; return the others' names."""
    left_out = []
    for path in sorted(source.iterdir()):
        name, out = path.name, folder / path.name
        if needed is not None and name not in needed:
            left_out.append(name)
        elif name in DESCRIPTIONS:
            write_json(out, _without_paths(read_json(path, "description")))
        elif name == SERVE_FILE:
            write_text(out, redact(read_text(path, "instructions")))
        elif name in TOKENIZER_FILES or name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(path, out)
        else:
            left_out.append(name)
    return [name for name in left_out if name != METADATA_FILE]


def public_name(name: str) -> str:
    """Return what a model is called in public: its Hub id or embedded name, else its folder's own name."""
    if not Path(name).exists() and (HUB_ID.fullmatch(name) or name.startswith("embedded:")):
        return name
    return Path(scrub(name)).name


def complete(folder: Path, release: Release, cleaned: Cleaned, card: str) -> None:
    """Write report, page, card and manifest beside artifact and exports; an InputError where a secret stands in a file."""
    write_json(folder / "report.json", cleaned.report.to_dict())
    write_text(folder / "report.html", render_html(cleaned.report))
    write_text(folder / REPOCARD_NAME, card)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = {
        "artifact_sha256": cleaned.sha256,
        "measured_artifact_sha256": release.sha256,
        "gate": cleaned.gate,
        "files": {name: sha256_of(path) for name, path in files.items()},
    }
    write_json(folder / MANIFEST, manifest)
    for name, path in {**files, MANIFEST: folder / MANIFEST}.items():
        if holds_token(path):
            raise InputError(f"{name} holds what looks like an access token or a private key; nothing was published: remove it")


def _without_paths(value: Any) -> Any:
    """Free a model's config of paths: only under keys that hold some, since token texts and templates may look like one."""
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: scrub(inner) if isinstance(inner, str) and key.endswith(PATH_KEYS) else _without_paths(inner)
        for key, inner in value.items()
    }
