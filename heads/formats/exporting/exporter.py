"""Which engine takes which kind of draft in what form, and writing one: refuse, write, then put in place.

Suffix lookup that knows some answers has no weights: it is written as a package that vLLM imports.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, write_json, write_text
from configs.schema.heads import Eagle3Settings
from heads.formats.exporting import converted, draft_lm, flat, mtp, speculators
from heads.formats.exporting.source import Source, TargetFolder
from heads.formats.layout import ExportLayout
from heads.frozen.identity import hash_weights
from heads.frozen.loading import GENERATION_CONFIG, in_words, served_sampling
from heads.frozen.weights import SINGLE_FILE, link_or_copy, write_weights
from heads.metadata import hash_artifact
from heads.proposers import suffixes, vllm_suffix_lookup

SERVE_FILE = "serve.txt"
MADE_OF = re.compile(r"^- Made of the artifact (\w{64}), to draft (\d+) tokens a round\.$", re.MULTILINE)
Form = Callable[[Source], ExportLayout]

FORMS: dict[str, dict[str, Form]] = {
    "transformers": {"draft_lm": draft_lm.transformers, "dflash": flat.transformers_dflash},
    "vllm": {
        "draft_lm": draft_lm.vllm,
        "medusa": flat.vllm_medusa,
        "eagle3": speculators.eagle,
        "peagle": speculators.eagle,
        "dflash": speculators.vllm_dflash,
        "dspark": speculators.untried_in_vllm,
        "dflash2": speculators.untried_in_vllm,
        "mtp": mtp.vllm,
    },
    "speculators": {
        "eagle3": speculators.eagle_complete,
        "peagle": speculators.eagle_complete,
        "dflash": speculators.block_drafter,
        "dspark": speculators.block_drafter,
        "dflash2": speculators.block_drafter,
        "xpress": speculators.block_drafter,
    },
    "sglang": {
        "draft_lm": draft_lm.sglang,
        "eagle3": flat.sglang_eagle,
        "dflash": flat.sglang_dflash,
        "domino": flat.sglang_domino,
    },
    "gguf": {"draft_lm": converted.gguf_draft_lm, "eagle3": converted.gguf_eagle3, "dflash": converted.gguf_dflash},
    "openvino": {"draft_lm": converted.openvino_draft_lm, "eagle3": converted.openvino_eagle3},
}
PROGRAMS = {"gguf": "llama.cpp", "openvino": "OpenVINO GenAI"}  # where the form is not called like what serves it
WITHOUT_NORMS = ("gguf", "openvino")  # their EAGLE-3 norms neither its taps nor the state that it feeds back
# Words in the path of a draft's folder that vLLM 0.32 takes for the method, whatever the config says.
PATH_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
PACKAGE = "draftsmith_suffix_lookup"
LOOKUP_DRAFTS = 6  # a round at most, where nothing else is asked for; a chain ends by its probability
LOOKUP_NOTE = (
    "vLLM calls its interface for a user's own class experimental; this one is written for 0.32. A target of several kinds of "
    "attention, and pipeline parallelism, were not run."
)


def export(
    source: Source, engine: str, out: Path, *, allow_target_mismatch: bool = False, served_from: str | None = None
) -> ExportLayout:
    """Write an artifact as a new folder that an engine of `FORMS` loads, with the line that serves it from there.

    `served_from` is the path at which engines will find the folder; None: `out`. An InputError says why it cannot be written.
    """
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    if out.resolve().is_relative_to(source.target.folder.resolve()):
        raise InputError(f"{out} lies in the target's folder, which an export may copy; give a folder outside it")
    place = str(out.resolve()) if served_from is None else served_from
    check_path(engine, source.metadata.kind, place)
    known = source.metadata.target
    if not allow_target_mismatch and hash_weights(source.target.folder) != known.get("weights_sha256"):
        raise InputError(
            f"{source.folder} was trained for {known.get('name')}, and the weights in {source.target.folder} are others "
            "(--set allow_target_mismatch=true exports it anyway)"
        )
    form = form_of(engine, source.metadata.kind)
    try:
        source.check_complete()
        check_norms(engine, source.settings)
        layout = form(source)
    except InputError as error:
        raise InputError(f"{source.folder} cannot be written for {engine}: {error}") from error
    with new_folder(out) as folder:
        if layout.convert is None:
            _write(layout, folder)
        else:
            with TemporaryDirectory(dir=folder.parent) as scratch:
                _write(layout, Path(scratch))
                layout.convert(Path(scratch), folder, layout)
        sha256 = hash_artifact(source.folder)
        made = f"Made of the artifact {sha256}, to draft {source.num_speculative_tokens} tokens a round."
        notes = [f"- {note}" for note in (*layout.notes, *_sampling_note(source.target.folder), made)]
        lines = [f"Serve with {PROGRAMS.get(engine, engine)}:", "", layout.serve(place), "", *notes]
        write_text(folder / SERVE_FILE, "\n".join(lines).rstrip() + "\n")
    return layout


def made_of(serve: str) -> tuple[str, int] | tuple[None, None]:
    """Return the hash of the artifact that an export was made of, and its drafts a round; None for one of a lookup."""
    found = MADE_OF.search(serve)
    return (None, None) if found is None else (found[1], int(found[2]))


def _sampling_note(target: Path) -> list[str]:
    """Say by what engines sample where a request does not name it, if the target sets more than the usual."""
    served = in_words(served_sampling(target))
    measured = "the draft's report is of this sampling only if it was measured with sampling_from generation_config"
    if not served:
        return []
    return [f"The target's {GENERATION_CONFIG} sets {served}, which applies to requests that name none: {measured}."]


def engines_of(kind: str) -> list[str]:
    return [engine for engine, forms in FORMS.items() if kind in forms]


def form_of(engine: str, kind: str) -> Form:
    """Return how a kind of draft is written for an engine; an InputError says why it is not, and what takes it instead."""
    forms = FORMS[engine]
    if kind in forms:
        return forms[kind]
    engines = ", ".join(engines_of(kind)) or "no engine yet"
    raise InputError(f"{engine} has no form for {kind}; {kind} goes to {engines}, {engine} takes {', '.join(forms)}")


def check_norms(engine: str, settings: Any) -> None:
    """Refuse a head of these settings, of its family, for an engine that does not know its norms; None: a draft LM."""
    if engine in WITHOUT_NORMS and isinstance(settings, Eagle3Settings) and (settings.norm_taps or settings.norm_feedback):
        raise InputError(
            f"it norms each tap or the state that it feeds back, which {PROGRAMS[engine]} does not: train it with "
            "head.norm_taps=false head.norm_feedback=false"
        )


def check_path(engine: str, kind: str, path: str) -> None:
    """Refuse a folder whose path has a word in it that makes vLLM load the draft as something else."""
    if engine != "vllm" or kind in ("eagle3", "peagle", "dflash", "dspark", "dflash2"):
        return
    found = [word for word in PATH_WORDS if word in path.lower()]
    if found:
        raise InputError(
            f"vLLM takes a draft at a path with {found[0]!r} in it for one of that kind: choose another --out, got {path}"
        )


def _write(layout: ExportLayout, folder: Path) -> None:
    if layout.copy_target is not None:
        layout.copy_target(folder)
        return
    for name, path in layout.files.items():
        link_or_copy(path, folder / name)
    write_weights(folder / SINGLE_FILE, layout.weights)
    write_json(folder / "config.json", dict(layout.config))
    for name, value in layout.json_files.items():
        write_json(folder / name, value)


def export_suffix_lookup(
    answers: Sequence[Sequence[int]],
    target: TargetFolder,
    out: Path,
    *,
    engine: str = "vllm",
    num_speculative_tokens: int | None = None,
) -> None:
    """Write suffix lookup as a new folder, and in it the line that serves a target with it."""
    if engine != "vllm":
        raise InputError(f"suffix lookup is written for vllm only, not for {engine}: no other engine takes a proposer's code")
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    config = {
        "method": "custom_class",
        "model": f"{PACKAGE}.{vllm_suffix_lookup.VllmSuffixLookup.__name__}",
        "num_speculative_tokens": num_speculative_tokens or LOOKUP_DRAFTS,
    }
    line = shlex.join(["vllm", "serve", target.name, *target.options, "--speculative-config", json.dumps(config)])
    with new_folder(out) as scratch:
        package = scratch / PACKAGE
        package.mkdir()
        for module, name in ((vllm_suffix_lookup, "__init__.py"), (suffixes, "suffixes.py")):
            write_text(package / name, Path(str(module.__file__)).read_text(encoding="utf-8"))
        tokens = np.concatenate([np.asarray(answer, np.int32) for answer in answers])
        np.savez(package / vllm_suffix_lookup.ANSWERS, tokens=tokens, lengths=np.asarray([len(answer) for answer in answers]))
        served = f"PYTHONPATH={shlex.quote(str(out.resolve()))} {line}"
        write_text(scratch / SERVE_FILE, f"Serve with vllm:\n\n{served}\n\n- {LOOKUP_NOTE}\n")
