"""transformers' own generation on a job of `engine_check.engines`: rounds are counted where it updates its candidates.

An assisting draft model drafts before the prompt's forward, so it is given the answer's first token with the prompt; then its
rounds are those of a decoder that reads the prompt first. T positions, G tokens drafted in a round.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

WARM_UP_TOKENS = 8


def main(job_file: str, answers_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    model, arguments = load(job)
    rounds = watch_rounds(model)
    reads_first = job["kind"] == "draft_lm" and job["draft"] is not None
    room = 2 * ((job["num_speculative_tokens"] or 0) + 1) if job["draft"] is not None else 0

    def answer(prompt: dict[str, Any]) -> dict[str, Any]:
        rounds.clear()
        given = prompt["first"] if reads_first else []
        ids_1T = torch.tensor([[*prompt["tokens"], *given]])
        started = time.perf_counter()
        with torch.inference_mode():
            output_1T = model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=prompt["length"] + room - len(given),
                **arguments,
            )
        seconds = time.perf_counter() - started
        tokens = output_1T[0, len(prompt["tokens"]) :].tolist()
        # A forward without drafts before all others is the prompt's.
        drafted = rounds[1:] if rounds and rounds[0][0] == 0 else rounds
        return {"tokens": tokens, "accepted_by_round": [accepted for _, accepted in drafted], "seconds": seconds}

    answer({**job["prompts"][0], "length": WARM_UP_TOKENS})
    answers = [answer(prompt) for prompt in job["prompts"]]
    value = {"version": metadata.version("transformers"), "answers": answers}
    Path(answers_file).write_text(json.dumps(value), encoding="utf-8")


def load(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the target, and what `generate` is called with so that it drafts as the export's serve.txt says."""
    dtype, kind, draft_folder = getattr(torch, job["dtype"]), job["kind"], job["draft"]
    with_modules = kind == "mtp" and draft_folder is not None
    model: Any = AutoModelForCausalLM.from_pretrained(draft_folder if with_modules else job["target"], dtype=dtype)
    # From scratch, so that nothing of the model's own changes what is generated, or ends it.
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True)
    if draft_folder is None:
        return model, {}
    if kind == "mtp":
        model._keys_to_ignore_on_load_unexpected = [r"^mtp\."]
        return model, {"use_mtp": True}
    if kind == "dflash":
        draft = AutoModel.from_pretrained(draft_folder, dtype=dtype)
        return model, {"assistant_model": draft, "speculation_type": "dflash"}
    draft = AutoModelForCausalLM.from_pretrained(draft_folder, dtype=dtype)
    draft.generation_config.update(eos_token_id=None, pad_token_id=None)
    return model, {"assistant_model": draft}


def watch_rounds(model: Any) -> list[tuple[int, int]]:
    """Return a list to which every forward of `generate` adds how many drafts it judged, and how many stayed."""
    rounds: list[tuple[int, int]] = []
    make = model._get_candidate_generator

    def watched(*arguments: Any, **more: Any) -> Any:
        generator = make(*arguments, **more)
        update = generator.update_candidate_strategy

        def noting(ids_1T: Any, scores_1GV: Any, num_matches: Any) -> Any:
            rounds.append((scores_1GV.shape[1] - 1, int(num_matches)))
            return update(ids_1T, scores_1GV, num_matches)

        generator.update_candidate_strategy = noting
        return generator

    model._get_candidate_generator = watched
    return rounds


if __name__ == "__main__":
    main(*sys.argv[1:])
