"""How engines sample the target where a request does not say: by its `generation_config.json`.

vLLM and SGLang take these values by default, whatever its `do_sample` says, and temperature 1 where it names none. So a draft
that was measured at temperature 0 may be served at another.
"""

from __future__ import annotations

from pathlib import Path

from configs.runtime.files import read_json

FILE = "generation_config.json"
OFF = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,), "repetition_penalty": (1,)}  # the values by which each is off
Sampling = dict[str, float | None]  # keys of `configs.schema.decoding.DecodeConfig`


def served_sampling(target: Path) -> Sampling:
    """Return the sampling of a target's folder, None for what is off; a single file has none of its own."""
    said = read_json(target / FILE, "generation config") if (target / FILE).is_file() else {}
    sampling = {key: None if (value := said.get(key)) in (None, *off) else value for key, off in OFF.items()}
    temperature = said.get("temperature")
    return {"temperature": 1.0 if temperature is None else temperature} | sampling


def in_words(sampling: Sampling) -> str:
    """Name what a sampling sets; nothing where that is temperature 1 alone."""
    named = {key: value for key, value in sampling.items() if value is not None}
    return "" if named == {"temperature": 1.0} else ", ".join(f"{key} {value:g}" for key, value in named.items())
