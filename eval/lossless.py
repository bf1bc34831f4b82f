"""The losslessness verdict: whether speculation changed the output, and the check that this rests on.

Of greedy answers every token must be the target's choice up to rounding, by the measure of plain decoding's own answers
(`eval.teacher_forcing`), and every end the right one; this is checked of every mode. Answers may still differ from plain
decoding's: a forward over several rows rounds differently from one over a single row, so that a near tie falls the other way,
and the text goes on from there.

Of samples the first tokens of many continuations of one text are counted and tested against their exact probabilities. These
are a tree of the target's forwards; leaves too unlikely for a G-test are pooled. The first token comes from the prefill, so
speculation shows in the second and third; the text is therefore chosen, by plain answers alone, where the next token is nearly
certain and the one after it is not. That each rule keeps the target's distribution is proved by exact enumeration in the test
suite. A lossy mode is `lossy_by_design`. N samples, P prefixes, T positions, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from configs.runtime.terminal import progress
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder.batch import BatchRun
from eval.decoder.records import AUTOREGRESSIVE, FAILED, OTHER_RULE, SPECULATIVE, UNDECODED, BatchRow, Generation, Request
from eval.stats import detectable_variation, g_test
from eval.teacher_forcing import TokenCheck, answer_logits, check_modes, pair_answers, read_answers
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits, read_documents
from heads.proposers.protocol import Proposer
from heads.sampling.draws import TextCounts, penalised, token_probabilities

LOSSLESS, UP_TO_TIES, NOT_LOSSLESS, LOSSY = "lossless", "lossless_up_to_ties", "not_lossless", "lossy_by_design"
PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
SHOWN = 10  # wrong tokens that the report names
FALSE_ALARMS = 0.01  # the share of lossless decoders that may fail the test of samples
MUST_SHOW = 0.2  # the total variation that the test must be able to show in four of five runs

Check = dict[str, Any]


def judge_lossless(
    target: Target,
    plain: Sequence[Generation],
    by_mode: Mapping[str, Sequence[Generation]],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    proposer: Proposer | None,
) -> dict[str, Any]:
    """Return the report's `lossless` section, by the answers of each mode but plain decoding, the draft's by `SPECULATIVE`.

    A check that fails makes the verdict `not_lossless`; else one that is inconclusive, or the lack of any, makes it so. Without
    a proposer samples are not tested.
    """
    start, lossy, greedy = time.perf_counter(), decode_config.lossy is not None, dict[str, TokenCheck]()
    plain, by_mode = _decoded_in_all(plain, by_mode, config.num_answers)
    checks: dict[str, Check] = {}
    if decode_config.temperature == 0:
        every = [*plain, *(answer for answers in by_mode.values() for answer in answers)]
        readings = read_answers(target, every, decode_config)
        greedy = check_modes(readings, plain, by_mode, config.tie_noise)
        for mode, answers in ((AUTOREGRESSIVE, plain), *by_mode.items()):
            wrong_ends = sum(not _ends_rightly(target, answer, decode_config) for answer in answers)
            checks["greedy" if mode == SPECULATIVE else f"greedy_{mode}"] = _describe(greedy[mode], wrong_ends)
    elif not lossy and proposer is not None and config.first_token_samples:
        ways = {"first_tokens": decode_config}
        if OTHER_RULE in by_mode:
            ways[f"first_tokens_{OTHER_RULE}"] = decode_config.otherwise
        checks |= {name: check_samples(target, proposer, plain, way, config) for name, way in ways.items()}
    failed, inconclusive = ([name for name in checks if checks[name]["outcome"] == outcome] for outcome in (FAIL, INCONCLUSIVE))
    own, control = greedy.get(SPECULATIVE), greedy.get(AUTOREGRESSIVE)
    divergences = [] if own is None else own.divergences
    if failed:
        verdict = NOT_LOSSLESS
    elif lossy:
        verdict = LOSSY
    elif inconclusive or not checks:
        verdict = INCONCLUSIVE
    else:
        verdict = UP_TO_TIES if divergences else LOSSLESS
    return {
        "verdict": verdict,
        "checked_prompts": len(plain) if own is not None else sum(check["checked_prompts"] for check in checks.values()),
        "checked_tokens": None if own is None else own.num_tokens,
        "largest_gap": None if own is None else own.largest_gap,
        "largest_gap_in_roundings": None if own is None else own.largest_gap_in_roundings,
        "tolerance": None if own is None else own.tolerance,
        "off_share": None if own is None else own.off_share,
        "plain_largest_gap_in_roundings": None if control is None else control.largest_gap_in_roundings,
        "plain_off_share": None if control is None else control.off_share,
        "divergences": [each._asdict() for each in divergences],
        "tie_noise": config.tie_noise,
        "failed_checks": failed,
        "inconclusive_checks": inconclusive,
        "checks": checks,
        "seconds": time.perf_counter() - start,
    }


def _decoded_in_all(
    plain: Sequence[Generation], by_mode: Mapping[str, Sequence[Generation]], most: int
) -> tuple[list[Generation], dict[str, list[Generation]]]:
    """Return the answers to requests that every mode decoded (the report lists the others), evenly chosen down to `most`."""
    undecoded = {
        (each.prompt_id, each.turn)
        for answers in (plain, *by_mode.values())
        for each in answers
        if each.stop_reason in UNDECODED
    }
    keys = [key for each in plain if (key := (each.prompt_id, each.turn)) not in undecoded]
    kept = set(keys[:: max(1, math.ceil(len(keys) / most))])
    chosen = {
        mode: [other for one, other in pair_answers(plain, answers) if (one.prompt_id, one.turn) in kept]
        for mode, answers in by_mode.items()
    }
    return [each for each in plain if (each.prompt_id, each.turn) in kept], chosen


def _ends_rightly(target: Target, answer: Generation, config: DecodeConfig) -> bool:
    """Return whether an answer's tokens, given to a row of the decoder one by one, end it where it ended and why."""
    if answer.stop_reason in FAILED:  # the report lists it as such
        return True
    request = Request(prompt_id=answer.prompt_id, category=answer.category, tokens=answer.prompt_tokens)
    row = BatchRow(request, target, config)
    return row.commit(answer.tokens) == answer.tokens and row.stop_reason == answer.stop_reason


def _describe(greedy: TokenCheck, wrong_ends: int) -> Check:
    right = greedy.is_right and not wrong_ends
    return {
        "outcome": INCONCLUSIVE if greedy.num_answers == 0 else PASS if right else FAIL,
        "reason": "no_answers" if greedy.num_answers == 0 else None,
        "checked_prompts": greedy.num_answers,
        "wrong_answers": len(greedy.wrong_answers),
        "wrong_tokens": len(greedy.wrong_tokens),
        "first_wrong_tokens": [each._asdict() for each in greedy.wrong_tokens[:SHOWN]],
        "wrong_ends": wrong_ends,
        "differing_answers": len(greedy.divergences),
        "largest_gap": greedy.largest_gap,
        "largest_gap_in_roundings": greedy.largest_gap_in_roundings,
        "tolerance": greedy.tolerance,
        "off_share": greedy.off_share,
        "p_value": greedy.p_value,
    }


def check_samples(
    target: Target, proposer: Proposer, plain: Sequence[Generation], decode_config: DecodeConfig, config: LosslessConfig
) -> Check:
    """Return the test of the first tokens: it fails where its p-value is at most the rate of false alarms.

    Else it is inconclusive where it has no p-value, or where the least difference that it shows in four of five runs
    (`detectable_difference`) is above what it must show.
    """
    test = check_first_tokens(target, proposer, plain, decode_config, config.first_token_samples)
    test |= {"false_alarm_rate": FALSE_ALARMS, "must_show": MUST_SHOW, "checked_prompts": int(test["num_samples"] > 0)}
    if test["p_value"] is None:
        return test | {"outcome": INCONCLUSIVE}
    if test["p_value"] <= FALSE_ALARMS:
        return test | {"outcome": FAIL}
    if test["detectable_difference"] is None or test["detectable_difference"] > MUST_SHOW:
        return test | {"outcome": INCONCLUSIVE, "reason": "would_miss_what_it_must_show"}
    return test | {"outcome": PASS}


# --- the test of the first tokens -----------------------------------------------------------------------------------


Prefix = tuple[int, ...]

REST = -1  # in a prefix: any token but those that were followed
DEPTH = 3  # tokens tested: the prefill's and two from rounds
MIN_EXPECTED = 5.0  # samples a cell should expect; with fewer, G is not near chi-square
CANDIDATES, MAX_START = 8, 16  # answers, and tokens of each, among which the text to continue is chosen
AT_ONCE = 32  # samples decoded where the target takes batches, or prefixes read, together


@dataclass
class Cells:
    """A partition of all answers by their first tokens; `probabilities[i]` is the target's probability of cell i.

    `cell_of` has the cell of a prefix that is one by itself. Of a prefix that was followed further it has, behind the prefix
    and `REST`, the cell of the continuations without one of their own.
    """

    probabilities: list[float] = field(default_factory=list)
    cell_of: dict[Prefix, int] = field(default_factory=dict)

    def add(self, probability: float, *prefixes: Prefix) -> None:
        """Make a new cell."""
        self.cell_of |= dict.fromkeys(prefixes, len(self.probabilities))
        self.probabilities.append(probability)

    def find(self, tokens: Sequence[int]) -> int:
        """Return the cell of an answer's first tokens, which must be enough to tell."""
        before: Prefix = ()
        for token in tokens:
            prefix = (*before, token)
            if prefix in self.cell_of:
                return self.cell_of[prefix]
            if (*prefix, REST) not in self.cell_of:
                return self.cell_of[*before, REST]
            before = prefix
        raise ValueError(f"{len(tokens)} tokens do not reach a cell")


def check_first_tokens(
    target: Target,
    proposer: Proposer,
    plain: Sequence[Generation],
    config: DecodeConfig,
    num_samples: int,
) -> dict[str, Any]:
    """Sample a text's continuation many times by the decoding under test and return the G-test of its first tokens.

    The text is chosen from plain decoding's answers. Samples have numbers for their random draws that no other request has.
    """
    start, num_answered = choose_start(target, plain, config)
    if start is None:
        return {"p_value": None, "reason": "no_answer_to_start_from", "detectable_difference": None, "num_samples": 0}
    cells = find_cells(target, start, config, num_samples)
    answers = list(_sample(target, proposer, start, config, num_samples))
    complete = [tokens for tokens in answers if tokens is not None]
    counts = [0] * len(cells.probabilities)
    for tokens in complete:
        counts[cells.find(tokens[:DEPTH])] += 1
    found = g_test(counts, cells.probabilities)
    reason = "law_too_certain_for_so_few_samples" if found.p_value is None else None
    reason = "samples_failed" if len(complete) < len(answers) else reason
    return {
        "p_value": None if reason else found.p_value,
        "reason": reason,
        "statistic": found.statistic,
        "degrees_of_freedom": found.degrees_of_freedom,
        "detectable_difference": detectable_variation(len(complete), found.degrees_of_freedom, level=1 - FALSE_ALARMS),
        "num_samples": num_samples,
        "num_failed": len(answers) - len(complete),
        "num_tokens": DEPTH,
        "prompt_id": start.prompt_id,
        "turn": start.turn,
        "after_answer_tokens": num_answered,
    }


def choose_start(target: Target, plain: Sequence[Generation], config: DecodeConfig) -> tuple[Request | None, int]:
    """Return the text after which most samples reach the same next token and then differ, and how much of it is answered.

    That is where p(a) (1 - sum_v p(v | a)^2) is largest: a the plain answer's own next token, v the one after it. `None` where
    no answer leaves room for a round.
    """
    best, num_answered, largest = None, 0, -1.0
    for answer in [each for each in plain if len(each.tokens) > 1 and each.stop_reason not in FAILED][:CANDIDATES]:
        room = target.max_positions - len(answer.prompt_tokens) - _answer_length(config)
        size = min(len(answer.tokens) - 1, MAX_START, room)
        if size < 1:
            continue
        logits_TV = answer_logits(target, answer.prompt_tokens, answer.tokens[: size + 1], answer.media_prompt)
        probs_TV = token_probabilities(logits_TV, config)
        own_T1 = probs_TV[:-1].gather(1, torch.tensor(answer.tokens[:size], device=probs_TV.device).unsqueeze(1))
        open_T = own_T1.squeeze(1) * (1 - probs_TV[1:].square().sum(-1))
        if float(open_T.max()) > largest:
            num_answered, largest = int(open_T.argmax()), float(open_T.max())
            best = Request(
                prompt_id=answer.prompt_id,
                category=answer.category,
                tokens=(*answer.prompt_tokens, *answer.tokens[:num_answered]),
                turn=answer.turn,
                media_prompt=answer.media_prompt,
            )
    return best, num_answered


def find_cells(target: Target, start: Request, sampling: DecodeConfig, num_samples: int) -> Cells:
    """Partition the answers to `start` by their first `DEPTH` tokens into cells that expect at least `MIN_EXPECTED` samples.

    What is pooled over the whole tree becomes one cell, or joins the smallest.
    """
    cells, min_share = Cells(), MIN_EXPECTED / num_samples
    level: dict[Prefix, float] = {(): 1.0}
    small: list[Prefix] = []
    for depth in range(1, DEPTH + 1):
        deeper: dict[Prefix, float] = {}
        for prefix, probs_V in zip(level, _distributions_after(target, start, list(level), sampling), strict=True):
            reached_V = level[prefix] * probs_V
            kept = torch.nonzero(reached_V >= min_share).flatten().tolist()
            for token in kept:
                if depth == DEPTH or token in target.eos_token_ids:
                    cells.add(float(reached_V[token]), (*prefix, token))
                else:
                    deeper[(*prefix, token)] = float(reached_V[token])
            rest = level[prefix] - float(reached_V[kept].sum())
            if rest >= min_share:
                cells.add(rest, (*prefix, REST))
            else:
                small.append((*prefix, REST))
        level = deeper
    if small:
        missing = max(0.0, 1.0 - sum(cells.probabilities))
        if missing >= min_share or not cells.probabilities:
            cells.add(missing, *small)
        else:
            smallest = min(range(len(cells.probabilities)), key=cells.probabilities.__getitem__)
            cells.probabilities[smallest] += missing
            cells.cell_of |= dict.fromkeys(small, smallest)
    return cells


@torch.inference_mode()
def _distributions_after(
    target: Target, start: Request, prefixes: Sequence[Prefix], sampling: DecodeConfig
) -> Iterator[Tensor]:
    """Yield the next token's distribution `[V]` (float64) after the text and each prefix; the prefixes are equally long."""
    for first in range(0, len(prefixes), AT_ONCE):
        rows = [[*start.tokens, *prefix] for prefix in prefixes[first : first + AT_ONCE]]
        media = target.media_inputs([start.media_prompt] * len(rows), rows)
        hidden_PTD = read_documents(target.model, torch.tensor(rows, device=target.device), None, media)
        counts = TextCounts.of(sampling, rows, [len(start.tokens)] * len(rows), target.vocab_size, target.device)
        logits_PV = penalised(head_logits(target.model, hidden_PTD[:, -1]), counts)
        probs_PV = token_probabilities(logits_PV, sampling).cpu().double()
        yield from probs_PV / probs_PV.sum(-1, keepdim=True)


@torch.inference_mode()
def _sample(
    target: Target, proposer: Proposer, start: Request, config: DecodeConfig, num_samples: int
) -> Iterator[list[int] | None]:
    """Yield the first tokens of each sample, `DEPTH` or more unless the answer ended; `None` for one that failed."""
    settings = config.model_copy(update={"max_new_tokens": _answer_length(config)})
    requests = [replace(start, prompt_id=f"{start.prompt_id}/sample {n}", turn=0) for n in range(num_samples)]
    at_once = 1 if "batches" in target.runner.refused else AT_ONCE  # after a round the samples are of unequal lengths
    with progress("sampling first tokens", num_samples, "samples") as advance:
        for first in range(0, num_samples, at_once):
            run = BatchRun(target, requests[first : first + at_once], settings, proposer)
            run.prefill()
            while any(row.num_answered < DEPTH for row in run.active):
                run.round()
            yield from (None if row.stop_reason in FAILED else row.tokens[len(start.tokens) :] for row in run.rows)
            advance(len(run.rows))


def _answer_length(config: DecodeConfig) -> int:
    """Return how long a sample must be for its first round to draft as many tokens as are in use, and to reach `DEPTH`."""
    return max(config.num_speculative_tokens + 2, DEPTH)
