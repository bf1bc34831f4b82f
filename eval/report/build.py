"""From a run's records to its report: every number is computed here, by one pure function.

Numbers only, never formatted strings; units in names; `None` where a number is not available. `eval.report.schema` fixes the
form, `eval.report.markdown` and `eval.report.page` render it, `eval.release.checks` judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypedDict

from eval.decoder.records import SPECULATIVE, WITH_LOOKUP, Generation
from eval.lossless.teacher_forcing import Divergence
from eval.metrics.speed import compare_speed, summarise_advantage, summarise_speed, timings_within
from eval.metrics.tally import SAMPLES_A_SIDE, Tally
from eval.report.schema import SCHEMA_VERSION, Report, parse_report
from eval.stats.bootstrap import LEVEL
from eval.stats.significance import detectable_percent

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens included
# Of acceptance, what is kept of other ways than the draft's.
KEPT = ("tokens_per_target_step", "tokens_per_target_step_ci", "accepted_per_round", "draft_token_yield")
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of an unfinished character


class Bootstrap(TypedDict):
    """The resampling behind every interval of a report."""

    samples: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of a run."""

    source: str
    sha256: str
    texts: Mapping[str, str]  # prompt id -> text of the first turn, for all prompts of the run
    suite: str | None = None  # its name
    later_turns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # prompt id -> texts of the turns after the first
    format: str | None = None  # of the suite's rows (`eval.measure.suite`)
    trained_on: Sequence[str] | None = None  # ids of those that the draft was trained on; None: unknown

    @property
    def places(self) -> list[tuple[str, int]]:
        """Every (prompt id, turn) of the run, in order."""
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
    records: Tally,
    lossless: Mapping[str, Any],
    decode_tokens: Decode,
    hardware: Mapping[str, Any],
    versions: Mapping[str, Any],
    git: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
    warnings: Sequence[str] = (),
    bootstrap_samples: int = 2000,
    seed: int = 0,
    suites: Mapping[str, tuple[PromptSet, Tally]] | None = None,
) -> Report:
    """Compute the report, without the sections that `complete_report` adds.

    Args:
        target, draft, decode, hardware, versions, git, command: descriptions, kept as they are.
        prompts: the prompts of the run; answers may be missing, and the report says so.
        records: what was decoded, with at most one generation a mode, prompt and turn, and what was timed.
        lossless: `verdict`, `checked_prompts`, `divergences` (`Divergence` or dict), and whatever else the check found.
        decode_tokens: turns token ids into text, special tokens included.
        warnings: sentences the reader must see, such as an allowed mismatch of the target.
        bootstrap_samples, seed: of all intervals.
        suites: prompts and records of further suites, by name.

    Raises:
        ValueError: something was decoded that is not among the prompts.
        InputError: a description lacks a field that `eval.report.schema` requires.
    """
    bootstrap: Bootstrap = {"samples": bootstrap_samples, "seed": seed}
    values = {
        "schema_version": SCHEMA_VERSION,
        "simulated": False,
        "warnings": list(warnings),
        "command": None if command is None else list(command),
        "target": dict(target),
        "draft": dict(draft),
        "decode": dict(decode),
        "hardware": dict(hardware),
        "versions": dict(versions),
        "git": None if git is None else dict(git),
        "statistics": {"bootstrap_samples": bootstrap_samples, "seed": seed, "level": LEVEL},
        **_suite(prompts, records, bootstrap),
        "suites": {name: _suite(*of_suite, bootstrap) for name, of_suite in (suites or {}).items()},
        "lossless": _lossless(lossless),
        "quality": None,
        "energy": None,
        "samples": _samples(records, prompts, decode_tokens),
    }
    return parse_report(values, "the report just built")


def complete_report(report: Report, *, speed: Mapping[str, Any] | None = None, **sections: Any) -> Report:
    """Return a report with other sections in place of its own, and with more fields of the speed section."""
    values = report.to_dict() | sections
    values["lossless"] = _lossless(values["lossless"])
    if speed:
        values["speed"] |= speed
    return parse_report(values, "the report just completed")


def _lossless(section: Mapping[str, Any]) -> dict[str, Any]:
    divergences = [asdict(each) if isinstance(each, Divergence) else each for each in section["divergences"]]
    return {**section, "divergences": divergences}


def _suite(prompts: PromptSet, records: Tally, bootstrap: Bootstrap) -> dict[str, Any]:
    """Describe one suite and what was measured on it."""
    if unknown := records.places - set(prompts.places):
        raise ValueError("prompt {}, turn {} was decoded but is not among the prompts asked for".format(*min(unknown)))
    return {"prompts": _prompts(prompts, records), **_measurements(records, bootstrap)}


def _prompts(prompts: PromptSet, records: Tally) -> dict[str, Any]:
    """Describe the prompts and which were answered; a prompt counts when all its turns were answered in every mode."""
    return {
        "suite": prompts.suite,
        "source": prompts.source,
        "format": prompts.format,
        "sha256": prompts.sha256,
        "ids": list(prompts.texts),
        "num_asked": len(prompts.texts),
        "num_turns": len(prompts.places),
        "num_prompts": len(records.answered(prompts.places)),
        "num_trained_on": None if prompts.trained_on is None else len(prompts.trained_on),
        "categories": records.categories,
        "failed": [
            {name: getattr(each, name) for name in ("prompt_id", "turn", "mode", "stop_reason")} for each in records.failed
        ],
    }


def _measurements(records: Tally, bootstrap: Bootstrap) -> dict[str, Any]:
    """Compute the sections that are numbers: over all prompts, by category, and of the baselines."""
    speculative = records.of_mode(SPECULATIVE)
    per_prompt = speculative.per_prompt
    committed, rounds = ([counts[column] for counts in per_prompt.values()] for column in (0, 1))
    return {
        "acceptance": {
            **speculative.summarise(**bootstrap),
            **speculative.by_length(**bootstrap),
            "detectable_change_percent": detectable_percent([committed], [rounds]),
            "per_prompt": per_prompt,
        },
        "speed": summarise_speed(records.timings, keep_batches=True, **bootstrap),
        "by_category": {category: _category(records, category, bootstrap) for category in records.categories},
        "baselines": {
            mode: _baseline(records, mode, per_prompt, bootstrap)
            for mode in records.modes
            if mode not in (SPECULATIVE, WITH_LOOKUP)
        },
        "with_lookup": _with_lookup(records, per_prompt, bootstrap) if WITH_LOOKUP in records.modes else None,
    }


def _category(records: Tally, category: str, bootstrap: Bootstrap) -> dict[str, Any]:
    share = records.of_category(category)
    return {
        "num_prompts": len(share.sums),
        "acceptance": share.summarise(**bootstrap),
        "speed": summarise_speed(timings_within(records.timings, set(share.per_prompt)), **bootstrap),
    }


def _other_way(records: Tally, mode: str, bootstrap: Bootstrap) -> dict[str, Any]:
    """Describe another way of decoding than the draft's."""
    acceptance, timed = records.of_mode(mode).summarise(**bootstrap), any(each.mode == mode for each in records.timings)
    speed = compare_speed(records.timings if timed else [], mode, **bootstrap)
    return {name: acceptance[name] for name in KEPT} | speed


def _baseline(records: Tally, mode: str, draft: Mapping[str, Sequence[int]], bootstrap: Bootstrap) -> dict[str, Any]:
    """Describe a way without the draft, and the draft's ratios to it; `draft` are the draft's counts by prompt."""
    timings = [timing for timing in records.timings if timing.mode == mode]
    return {
        **_other_way(records, mode, bootstrap),
        "num_speculative_tokens": records.num_drafts(mode),
        "decode_seconds": sum(timing.decode_seconds for timing in timings),
        "decode_tokens": sum(timing.num_tokens for timing in timings),
        **summarise_advantage(draft, records.of_mode(mode).per_prompt, records.timings, mode, **bootstrap),
    }


def _with_lookup(records: Tally, draft: Mapping[str, Sequence[int]], bootstrap: Bootstrap) -> dict[str, Any]:
    """Describe the draft after prompt lookup, and its ratios to the draft alone."""
    own = records.of_mode(WITH_LOOKUP)
    return {
        **_other_way(records, WITH_LOOKUP, bootstrap),
        "lookup": "prompt_lookup",
        **summarise_advantage(own.per_prompt, draft, records.timings, SPECULATIVE, ours_mode=WITH_LOOKUP, **bootstrap),
        **own.lookup_shares(),
    }


# --- sample answers -----------------------------------------------------------------------------------------------


def _samples(records: Tally, prompts: PromptSet, decode_tokens: Decode) -> dict[str, Any]:
    """Show the answers at both ends; those to later turns are named by the prompt's id and the turn, counted from 1."""
    texts, shown = {}, []
    for each in records.samples:
        name = f"{each.prompt_id}, turn {each.turn + 1}" if each.turn else each.prompt_id
        texts[name] = prompts.text_of(each.prompt_id, each.turn)
        shown.append(replace(each, prompt_id=name))
    return pick_samples(shown, texts, decode_tokens, SAMPLES_A_SIDE)


def pick_samples(
    generations: Sequence[Generation], texts: Mapping[str, str], decode_tokens: Decode, count: int = 3
) -> dict[str, list[dict[str, Any]]]:
    """Return the answers with the fewest and the most tokens per target step, token by token.

    Args:
        generations: speculative ones; those without a single round have nothing to show.
        texts: the prompt's text by prompt id.
        decode_tokens: turns token ids into text.
        count: at most as many of each, and none in both; the outermost come first.
    """
    ranked = sorted((generation for generation in generations if generation.rounds), key=_tau)
    count = min(count, len(ranked) // 2)
    chosen = {"worst": ranked[:count], "best": ranked[::-1][:count]}
    return {
        name: [
            {
                "prompt_id": each.prompt_id,
                "category": each.category,
                "prompt": texts[each.prompt_id],
                "tokens_per_target_step": _tau(each),
                "pieces": spell_pieces(each, decode_tokens),
            }
            for each in generations
        ]
        for name, generations in chosen.items()
    }


def _tau(generation: Generation) -> float:
    return generation.num_committed / len(generation.rounds)


def spell_pieces(generation: Generation, decode_tokens: Decode) -> list[dict[str, str]]:
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
        if not round_.was_cut:  # drafts behind the end of the text were never judged, so they were not rejected
            yield "rejected", list(round_.drafted[round_.num_accepted :])
            yield "target", list(round_.committed[round_.num_accepted :])
