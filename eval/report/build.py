"""`report.json`: everything a run measured, computed from its records by one pure function.

Numbers only, never formatted strings; units in names; `None` where a number is not available. `eval.report.schema` fixes
the form, `eval.report.markdown` and `eval.report.html` make text of it, `eval.release.checks` judges it.


The few answers a report shows: the prompts with the most and the fewest tokens per target step, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from configs.runtime.files import write_json
from eval.decoder.records import SPECULATIVE, Divergence, Generation, Timing
from eval.metrics.acceptance import count_committed, was_cut
from eval.metrics.speed import compare_speed, summarise_advantage, summarise_speed, timings_within
from eval.metrics.tally import SAMPLES_A_SIDE, Tally
from eval.report.schema import SCHEMA_VERSION, check_report
from eval.stats.bootstrap import LEVEL
from eval.stats.power import detectable_percent

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of an unfinished character


def pick_samples(
    generations: Sequence[Generation], texts: Mapping[str, str], decode_tokens: Callable[[Sequence[int]], str], count: int = 3
) -> dict[str, list[dict[str, Any]]]:
    """Return `{"worst": [...], "best": [...]}`, at most `count` each and none in both; the outermost come first.

    Args:
        generations: speculative ones; those without a single round have nothing to show.
        texts: the prompt's text by prompt id.
        decode_tokens: turns token ids into text.
        count: how many of each.
    """
    ranked = sorted((generation for generation in generations if generation.rounds), key=_tau)
    count = min(count, len(ranked) // 2)
    chosen = {"worst": ranked[:count], "best": ranked[::-1][:count]}
    return {name: [_sample(generation, texts, decode_tokens) for generation in some] for name, some in chosen.items()}


def _tau(generation: Generation) -> float:
    return count_committed(generation) / len(generation.rounds)


def _sample(generation: Generation, texts: Mapping[str, str], decode_tokens: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {
        "prompt_id": generation.prompt_id,
        "category": generation.category,
        "prompt": texts[generation.prompt_id],
        "tokens_per_target_step": _tau(generation),
        "pieces": spell_pieces(generation, decode_tokens),
    }


def spell_pieces(generation: Generation, decode_tokens: Callable[[Sequence[int]], str]) -> list[dict[str, str]]:
    """Return the answer as `{"kind", "text"}` pieces: `prefill`, `accepted`, `rejected`, `target`.

    The pieces but the rejected ones join to the whole answer's text. Each is spelled as the difference the tokens make to
    the text before them, since a token alone may be half a character; a character is shown with the token that completes it.
    """
    pieces: list[dict[str, str]] = []
    committed: list[int] = []
    shown = ""
    for kind, tokens in _runs(generation):
        text = decode_tokens([*committed, *tokens])
        new = text[len(shown) :]
        if kind != "rejected":
            committed += tokens
            new = new.rstrip(INCOMPLETE)
            shown += new
        if new:
            pieces.append({"kind": kind, "text": new})
    rest = decode_tokens(committed)[len(shown) :] if committed else ""
    return [*pieces, {"kind": "target", "text": rest}] if rest else pieces


def _runs(generation: Generation) -> Iterator[tuple[str, list[int]]]:
    """Yield (kind, tokens) in reading order, the rejected drafts of a round between its accepted ones and the target's."""
    yield "prefill", list(generation.tokens[:1])
    for round_ in generation.rounds:
        yield "accepted", list(round_.committed[: round_.num_accepted])
        if not was_cut(round_):  # drafts behind the end of the text were not rejected, they were not looked at
            yield "rejected", list(round_.drafted[round_.num_accepted :])
            yield "target", list(round_.committed[round_.num_accepted :])


class Bootstrap(TypedDict):
    """The resampling behind every interval of a report."""

    samples: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts that were asked for."""

    source: str
    sha256: str
    texts: Mapping[str, str]  # prompt id -> what is shown of the prompt; the keys are all ids asked for
    later_turns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # prompt id -> what was asked after the first turn
    format: str | None = None  # of the suite's rows (`eval.measure.suite`)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Every (prompt id, turn) asked for, in order."""
        return [(prompt_id, turn) for prompt_id in self.texts for turn in range(1 + len(self.later_turns.get(prompt_id, ())))]

    def text_of(self, prompt_id: str, turn: int) -> str:
        """Return what the user said in a turn."""
        return self.later_turns[prompt_id][turn - 1] if turn else self.texts[prompt_id]


def build_report(
    *,
    target: Mapping[str, Any],
    draft: Mapping[str, Any],
    decode: Mapping[str, Any],
    prompts: PromptSet,
    generations: Sequence[Generation] | Tally,
    timings: Sequence[Timing] = (),
    lossless: Mapping[str, Any],
    decode_tokens: Callable[[Sequence[int]], str],
    hardware: Mapping[str, Any],
    versions: Mapping[str, Any],
    git: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
    warnings: Sequence[str] = (),
    bootstrap_samples: int = 2000,
    seed: int = 0,
    simulated: bool = False,
) -> dict[str, Any]:
    """Compute the report.

    Args:
        target, draft, decode, hardware, versions, git, command: descriptions, kept as they are.
        prompts: what was asked for; answers may be missing, and that shows.
        generations: at most one a mode, prompt and turn, those of the first repeat where a run was repeated; or a tally of
            them, which then holds the timings as well.
        timings: of all repeats; empty where nothing was timed.
        lossless: `verdict`, `checked_prompts`, `divergences` (`Divergence` or dict), and whatever else the check found.
        decode_tokens: turns token ids into text, special tokens included.
        warnings: sentences the reader must see, such as an allowed mismatch of the target.
        bootstrap_samples, seed: of all intervals.
        simulated: acceptance was drawn instead of measured.

    Raises:
        ValueError: records contradict each other, or a description lacks a field that `eval.report.schema` requires.
    """
    tally = generations if isinstance(generations, Tally) else _tally(generations, timings, decode["num_speculative_tokens"])
    _check_places(tally, prompts)
    bootstrap: Bootstrap = {"samples": bootstrap_samples, "seed": seed}
    report = {
        "schema_version": SCHEMA_VERSION,
        "simulated": simulated,
        "warnings": list(warnings),
        "command": None if command is None else list(command),
        "target": dict(target),
        "draft": dict(draft),
        "decode": dict(decode),
        "hardware": dict(hardware),
        "versions": dict(versions),
        "git": None if git is None else dict(git),
        "statistics": {"bootstrap_samples": bootstrap_samples, "seed": seed, "level": LEVEL},
        "prompts": _prompts(prompts, tally),
        **_measurements(tally, bootstrap),
        "lossless": {**lossless, "divergences": [_as_dict(divergence) for divergence in lossless["divergences"]]},
        "quality": None,  # these two are of runs that ask for them (`eval.evaluation`)
        "energy": None,
        "samples": _samples(tally, prompts, decode_tokens),
    }
    return check_report(report, "the report just built")


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Check a report and write it.

    Raises:
        InputError: it is no report, or the file cannot be written.
    """
    write_json(path, check_report(dict(report), f"report for {path}"))


def _tally(generations: Sequence[Generation], timings: Sequence[Timing], num_positions: int) -> Tally:
    tally = Tally(num_positions)
    tally.add(generations, timings)
    return tally


def _check_places(tally: Tally, prompts: PromptSet) -> None:
    """Refuse answers to what was not asked.

    Raises:
        ValueError: there are some.
    """
    if unknown := tally.places - set(prompts.places):
        raise ValueError("prompt {}, turn {} was decoded but is not among the prompts asked for".format(*min(unknown)))


def _prompts(prompts: PromptSet, tally: Tally) -> dict[str, Any]:
    """Describe what was asked and what came of it; a prompt counts when all its turns were answered in every mode."""
    return {
        "source": prompts.source,
        "format": prompts.format,
        "sha256": prompts.sha256,
        "ids": list(prompts.texts),
        "num_asked": len(prompts.texts),
        "num_turns": len(prompts.places),
        "num_prompts": len(tally.answered(prompts.places)),
        "categories": tally.categories,
        "failed": [
            {"prompt_id": each.prompt_id, "turn": each.turn, "mode": each.mode, "stop_reason": each.stop_reason}
            for each in tally.failed
        ],
    }


def _measurements(tally: Tally, bootstrap: Bootstrap) -> dict[str, Any]:
    """Compute the sections that are numbers: over all prompts, by category, and of the baselines."""
    speculative = tally.of_mode(SPECULATIVE)
    return {
        "acceptance": {
            **speculative.summarise(**bootstrap),
            "detectable_change_percent": detectable_percent(*_columns(speculative.per_prompt)),
            "per_prompt": speculative.per_prompt,
        },
        "speed": summarise_speed(tally.timings, keep_batches=True, **bootstrap),
        "by_category": {category: _category(tally, category, bootstrap) for category in tally.categories},
        "baselines": {
            mode: _baseline(tally, mode, speculative.per_prompt, bootstrap) for mode in tally.modes if mode != SPECULATIVE
        },
    }


def _columns(per_prompt: Mapping[str, Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return what is above and below the line of tau, prompt by prompt."""
    return [[counts[0] for counts in per_prompt.values()]], [[counts[1] for counts in per_prompt.values()]]


def _category(tally: Tally, category: str, bootstrap: Bootstrap) -> dict[str, Any]:
    share = tally.of_category(category)
    return {
        "num_prompts": share.num_prompts,
        "acceptance": share.summarise(**bootstrap),
        "speed": summarise_speed(timings_within(tally.timings, set(share.per_prompt)), **bootstrap),
    }


def _baseline(tally: Tally, mode: str, speculative: Mapping[str, Sequence[int]], bootstrap: Bootstrap) -> dict[str, Any]:
    """Describe another way of decoding, and what the draft has over it; `speculative` are the draft's counts by prompt."""
    own = tally.of_mode(mode)
    acceptance = own.summarise(**bootstrap)
    timings = [timing for timing in tally.timings if timing.mode == mode]
    kept = ("tokens_per_target_step", "tokens_per_target_step_ci", "accepted_per_round", "draft_token_yield")
    return {
        **{name: acceptance[name] for name in kept},
        "decode_seconds": sum(timing.decode_seconds for timing in timings),
        "decode_tokens": sum(timing.num_tokens for timing in timings),
        **compare_speed(tally.timings if timings else [], mode, **bootstrap),
        **summarise_advantage(speculative, own.per_prompt, tally.timings, mode, **bootstrap),
    }


def _samples(tally: Tally, prompts: PromptSet, decode_tokens: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Show the answers at both ends; those to later turns go by the prompt's id and the turn, counted from 1."""
    texts, shown = {}, []
    for each in tally.samples:
        name = f"{each.prompt_id}, turn {each.turn + 1}" if each.turn else each.prompt_id
        texts[name] = prompts.text_of(each.prompt_id, each.turn)
        shown.append(replace(each, prompt_id=name))
    return pick_samples(shown, texts, decode_tokens, SAMPLES_A_SIDE)


def _as_dict(divergence: Divergence | Mapping[str, Any]) -> dict[str, Any]:
    return asdict(divergence) if isinstance(divergence, Divergence) else dict(divergence)
