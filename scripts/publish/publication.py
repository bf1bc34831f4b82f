"""The files of a publication: artifact, exports, report, page, `README.md` and `publication.json`, which lists their hashes.

Only files that loading needs are taken; descriptions are freed of machine paths and secrets (`configs.runtime.redaction`). The
artifact's hash covers its `draftsmith.json`, so cleaning that changes the hash: the published report names the new one and
keeps the measured one as `measured_sha256`; the pair passes `eval/gate.py report.json --artifact OWNER/NAME`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import REPOCARD_NAME

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, read_json, read_text, sha256_of
from configs.runtime.redaction import Scrubber
from configs.runtime.run_record import describe_git, describe_versions
from configs.schema.commands.release import HUB_ID, PushConfig
from eval.release.verdict import as_values
from eval.report.page import render_html
from eval.report.schema import Report, parse_report
from heads.formats.exporting.exporter import SERVE_FILE
from heads.metadata import METADATA_FILE, VOCABULARY_FILE, WEIGHTS_FILE
from scripts.publish.release_checks import Release

Content = Path | bytes
NAMELESS = "TARGET"  # stands in commands for a target that has no name on the Hub
MANIFEST = "publication.json"
REPORT, PAGE = "report.json", "report.html"
WEIGHTS = ".safetensors"
DESCRIPTIONS = ("config.json", "generation_config.json", "tokenizer_config.json")  # freed of paths under the keys below
PATH_KEYS = ("name_or_path", "path", "_file")
# What transformers writes of a tokenizer; freed of nothing, but refused if a secret stands in it.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What is to be pushed: content by path in the repository; `left_out` are files of artifact and exports that are not."""

    files: Mapping[str, Content]
    left_out: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write the files into a new folder."""
        if folder.exists():
            raise InputError(f"{folder} exists already; give a new folder")
        with new_folder(folder) as scratch:
            for name, content in self.files.items():
                path = scratch / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    path.write_bytes(content)
                else:
                    shutil.copyfile(content, path)


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """A release without machine paths and secrets.

    metadata, metadata_file: of the artifact, and its bytes: those of the file itself where nothing had to be changed.
    report: with `sha256`, the hash of the artifact as it is published.
    gate: the verdict's values and the rules.
    """

    metadata: Mapping[str, Any]
    metadata_file: bytes
    report: Report
    gate: Mapping[str, Any]
    sha256: str


def clean(release: Release, config: PushConfig, scrubber: Scrubber) -> Cleaned:
    """Remove machine paths and secrets from a release's descriptions; `base_model`, if given, names a target from a folder."""
    path = release.folder / METADATA_FILE
    known = read_json(path, "artifact metadata")
    metadata = scrubber.value(known)
    own_name = str(release.metadata.target["name"])
    name = public_name(own_name, scrubber)
    if name != own_name:  # a folder's
        name = config.base_model or name
    metadata["target"]["name"] = name
    metadata_file = path.read_bytes() if metadata == known else as_json(metadata)
    sha256 = _artifact_hash(release, metadata_file)
    report = release.report.to_dict()
    samples = report.pop("samples")
    report = scrubber.value(report)
    report["samples"] = scrubber.only_secrets(samples) if config.samples else {"worst": [], "best": []}
    report["target"]["name"] = name
    report["draft"]["sha256"] = sha256
    if sha256 != release.sha256:
        report["draft"]["measured_sha256"] = release.sha256
    gate = scrubber.value({**as_values(release.verdict), "config": release.gate})
    return Cleaned(
        metadata=metadata,
        metadata_file=metadata_file,
        report=parse_report(report, "the report to be published"),
        gate=gate,
        sha256=sha256,
    )


def public_name(name: str, scrubber: Scrubber) -> str:
    """Return what a model is called in public: its Hub id or embedded name, else its folder's own name."""
    if not Path(name).exists() and (HUB_ID.fullmatch(name) or name.startswith("embedded:")):
        return name
    return Path(scrubber.text(name)).name


def name_for_engines(cleaned: Cleaned, config: PushConfig) -> str:
    """Return how a command that serves the draft names its target: by a Hub id, or a word to be replaced."""
    name = str(cleaned.metadata["target"]["name"])
    return config.base_model or (name if HUB_ID.fullmatch(name) else NAMELESS)


def gather(
    release: Release, cleaned: Cleaned, exports: Mapping[str, Path], card: str, config: PushConfig, scrubber: Scrubber
) -> Publication:
    """List everything that is to be published; an InputError where a secret stands in a file that is not to be changed."""
    files, left_out = _artifact_files(release, scrubber)
    files[METADATA_FILE] = cleaned.metadata_file
    for engine, folder in exports.items():
        exported, others = _model_files(folder, scrubber)
        files |= {f"{engine}/{name}": content for name, content in exported.items()}
        left_out += [f"{engine}/{name}" for name in others]
    files |= {
        REPORT: as_json(cleaned.report.to_dict()),
        PAGE: render_html(cleaned.report).encode(),
        REPOCARD_NAME: card.encode(),
    }
    manifest = {
        "format_version": 1,
        "artifact_sha256": cleaned.sha256,
        "measured_artifact_sha256": release.sha256,
        "measured_report_sha256": sha256_of(release.report_path),
        "gate": cleaned.gate,
        "config": scrubber.value(config.model_dump(mode="json")),
        "versions": describe_versions(),
        "git": describe_git(),
        "files": {
            name: hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else sha256_of(content)
            for name, content in sorted(files.items())
        },
    }
    files[MANIFEST] = as_json(manifest)
    for name, content in files.items():
        found = scrubber.finds_token_in(content) if isinstance(content, Path) else scrubber.finds_token(content.decode())
        if found:
            raise InputError(f"{name} holds what looks like an access token or a private key; nothing was published: remove it")
    return Publication(files=dict(sorted(files.items())), left_out=tuple(sorted(left_out)))


def as_json(value: Any) -> bytes:
    """Return a value as the files here are written."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _artifact_hash(release: Release, metadata_file: bytes) -> str:
    """Return the hash that `heads.artifact.hash_artifact` will find of the artifact with this metadata."""
    digests = {METADATA_FILE: hashlib.sha256(metadata_file).digest()}
    names = [WEIGHTS_FILE] if release.metadata.draft_vocabulary == "target" else [WEIGHTS_FILE, VOCABULARY_FILE]
    digests |= {name: bytes.fromhex(sha256_of(release.folder / name)) for name in names}
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def _artifact_files(release: Release, scrubber: Scrubber) -> tuple[dict[str, Content], list[str]]:
    files, left_out = _model_files(release.folder, scrubber)
    reduced = release.metadata.draft_vocabulary == "reduced"
    needed = [WEIGHTS_FILE, *([VOCABULARY_FILE] if reduced else [])]
    if release.metadata.kind == "draft_lm":
        needed += [*DESCRIPTIONS, *TOKENIZER_FILES]
    kept = {name: content for name, content in files.items() if name in needed}
    return kept, [*left_out, *(files.keys() - kept.keys() - {METADATA_FILE})]


def _model_files(folder: Path, scrubber: Scrubber) -> tuple[dict[str, Content], list[str]]:
    """Return the files of a model folder that may be published, descriptions cleaned, and the names of the others."""
    contents = {path.name: _content(path, scrubber) for path in sorted(folder.iterdir()) if path.name != METADATA_FILE}
    files = {name: content for name, content in contents.items() if content is not None}
    return files, sorted(contents.keys() - files.keys())


def _content(path: Path, scrubber: Scrubber) -> Content | None:
    """Return what is published of a file of a model folder; None: nothing."""
    if path.name in DESCRIPTIONS:
        return as_json(_without_paths(read_json(path, "description"), scrubber))
    if path.name == SERVE_FILE:
        return scrubber.secrets(read_text(path, "instructions")).encode()
    if path.name in TOKENIZER_FILES or path.name.endswith((WEIGHTS, f"{WEIGHTS}.index.json")):
        return path.resolve()
    return None


def _without_paths(value: Any, scrubber: Scrubber) -> Any:
    """Free a model's config of paths: only under keys that hold some, since token texts and templates may look like one."""
    if isinstance(value, list):
        return [_without_paths(each, scrubber) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: scrubber.text(inner) if isinstance(inner, str) and key.endswith(PATH_KEYS) else _without_paths(inner, scrubber)
        for key, inner in value.items()
    }
