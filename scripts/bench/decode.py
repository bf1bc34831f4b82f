"""Decoding beside transformers' own generation, and every rule, shape and proposer in turns: `python -m scripts.bench.decode`.

Needs the draft of `make bench`, and two cores that nothing else uses; ten minutes. Ends with 1 where answers differ by
more than a tie. T positions.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from configs.runtime.command import DONE, GATE_FAILED, run_command
from configs.runtime.errors import InputError
from configs.schema.base import PositiveInt, Settings
from configs.schema.decoding import DecodeConfig, StaticTree
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import Request, check_decodable, decode
from eval.decoder.records import AUTOREGRESSIVE, Generation, Timing
from eval.lossless.teacher_forcing import check_tokens
from eval.lossless.verdict import NOT_LOSSLESS, judge_lossless
from eval.metrics.speed import compare_speed
from eval.stats import Interval, paired_ratio_interval, ratio_interval
from heads.artifact import load_draft
from heads.frozen.loading import Target, load_target, move
from heads.inference.lean_forward import make_lean
from heads.proposers.lookup import PromptLookup, SuffixLookup
from heads.proposers.protocol import Proposer, TreeProposer
from scripts.bench.harness import SEED, SideTurns, count_per_prompt, speed_ratio, take_turns, write_results

log = logging.getLogger("draftsmith")

GENERATE, ASSISTED, DRAFT_LM = "transformers", "transformers_assisted", "draft_lm"
OURS, PLAIN, LEAN, LEAN_PLAIN = "ours", "ours, plain", "lean", "lean, plain"
RULES: tuple[dict[str, Any], ...] = tuple({"verification": rule} for rule in ("token", "block", "match"))
CANDIDATES = ("without_replacement", "with_replacement", "k_seq")
LOSSY: tuple[dict[str, Any], ...] = ({"lossy": {"kind": "typical"}}, {"lossy": {"kind": "smc"}})
COMPARED = {  # ratios of tokens per target step between ways
    "block_vs_token_verification": (f"block, chain, {DRAFT_LM}", f"token, chain, {DRAFT_LM}"),
    "static_tree_vs_chain_at_equal_rows": (f"greedy, static tree, {DRAFT_LM}", f"greedy, long chain, {DRAFT_LM}"),
    "dynamic_tree_vs_chain_at_equal_rows": (f"greedy, dynamic tree, {DRAFT_LM}", f"greedy, long chain, {DRAFT_LM}"),
}


class DecodeBenchConfig(Settings):
    """`python -m scripts.bench.decode`: which drafts are decoded with, on which prompts."""

    target: TargetConfig = TargetConfig()
    draft: str = "runs/heads/draft_lm/artifact"  # the artifact of a draft LM
    heads: list[str] = []  # further artifacts
    held_out: str = "runs/heads/data/held_out.jsonl"  # conversations on which nothing was trained
    num_prompts: PositiveInt = 24  # the last of the file: the first chose the checkpoints
    past_answers: str | None = "runs/heads/data/train.jsonl"  # conversations whose answers suffix lookup has seen; None: none
    num_speculative_tokens: PositiveInt = 3
    branching: list[PositiveInt] = [3, 2, 1]  # of the trees
    max_new_tokens: PositiveInt = 48
    repeats: PositiveInt = 2  # timed runs of every side on every prompt; sampled runs take another seed each time
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/decode.json"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a side made of some prompts; transformers keeps no timings by phase."""

    generations: Sequence[Generation]
    timings: Sequence[Timing] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(generation.tokens) for generation in self.generations)


Requests = Sequence[Request]
Side = Callable[[Requests, int], Answers]
Turns = dict[str, SideTurns[Answers]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A row of the table: a verification rule, the shape of a round's drafts, who drafts, and on which target."""

    rule: str
    shape: str
    proposer: str
    target: Target
    settings: DecodeConfig
    draft: Proposer | None

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.shape}, {self.proposer}"

    @property
    def plain(self) -> Way:
        """Plain decoding at the same temperature on the same target."""
        return replace(self, rule=AUTOREGRESSIVE, shape=f"t{self.settings.temperature:g}", proposer="", draft=None)

    def decode(self, batch: Requests, repeat: int) -> Answers:
        """Decode a batch; the repeat is also the seed, which greedy decoding does not read."""
        mode = AUTOREGRESSIVE if self.draft is None else self.name
        settings = self.settings.model_copy(update={"seed": repeat, "lossy": self.draft and self.settings.lossy})
        generations, timing = decode(self.target, batch, settings, self.draft, mode=mode, repeat=repeat)
        return Answers(generations=generations, timings=[timing])


def compare_decoding(config: DecodeBenchConfig) -> int:
    rows = {row.prompt_id: row for row in reversed(read_conversations(Path(config.held_out)))}  # of each the first turn
    requests = [
        Request(prompt_id=name, category=row.category, tokens=row.prompt_ids)
        for name, row in [*reversed(rows.items())][-config.num_prompts :]
    ]
    target = load_target(config.target.model_copy(update={"forward": "transformers"}))
    check_decodable(target, requests)
    lean = lean_twin(target)
    greedy = measure_greedy(config, target, lean, requests)
    ways = list_ways(config, lean or target)
    every = {way.name: way for each in ways for way in (each.plain, each)}
    cases: list[Requests] = [[request] for request in requests]
    table = take_turns({name: way.decode for name, way in every.items()}, cases, config.repeats, description="ways of decoding")
    found = [summarise(config, way, table[way.plain.name], table[way.name]) for way in ways]
    pairs = [(OURS, ASSISTED), (PLAIN, GENERATE), *([(LEAN, ASSISTED), (LEAN_PLAIN, GENERATE)] if lean else [])]
    agreement = {f"{ours} and {theirs}": agree(target, greedy[theirs], greedy[ours]) for ours, theirs in pairs}
    write_results(
        config.output,
        "decode",
        rows=found,
        ratios=ratios_of(config, greedy) | ratios_of_ways(config, table),
        config=config,
        agreement=agreement,
        device=str(target.device),
        threads=torch.get_num_threads(),
    )
    wrong = [row for row in found if row["lossless"] == NOT_LOSSLESS]
    for row in wrong:
        log.error("%s, %s, %s: the answers differ from plain decoding's", row["rule"], row["shape"], row["proposer"])
    return GATE_FAILED if wrong or any(each["not_ties"] for each in agreement.values()) else DONE


def lean_twin(target: Target) -> Target | None:
    """Return the target with the same weights and a lean forward; None where its family has none."""
    twin = copy.copy(target.model)
    try:
        make_lean(twin)
    except InputError as error:
        log.warning("lean forwards are not measured: %s", error)
        return None
    return replace(target, model=twin)


# --- beside transformers --------------------------------------------------------------------------------------------


def measure_greedy(config: DecodeBenchConfig, target: Target, lean: Target | None, requests: Requests) -> Turns:
    """Decode greedily, a prompt at a time: ours by either forward, and theirs, taking turns."""
    sides: dict[str, Side] = {
        name: partial(generate, target, assistant, config.max_new_tokens)
        for name, assistant in ((GENERATE, None), (ASSISTED, load_assistant(config, target)))
    }
    for own, name in ((target, OURS), *([(lean, LEAN)] if lean else [])):
        draft = load_draft(config.draft, own.identity, own.model).proposer
        way = Way(rule="greedy", shape="chain", proposer=name, target=own, settings=settings_of(config), draft=draft)
        sides |= {name: way.decode, f"{name}, plain": way.plain.decode}
    cases: list[Requests] = [[request] for request in requests]
    return take_turns(sides, cases, config.repeats, description="greedy, beside transformers")


def load_assistant(config: DecodeBenchConfig, target: Target) -> PreTrainedModel:
    """Load a draft LM's artifact as a user of transformers does; its weights and the target's are thawed.

    transformers cuts the last positions out of [1, T, D] hidden states; such a cut times a frozen weight is a batched
    product in torch, for the head in bfloat16 on a CPU twenty times slower than the plain product that a trainable weight gets.
    """
    attention = target.model.config._attn_implementation
    draft = AutoModelForCausalLM.from_pretrained(config.draft, dtype=target.model.dtype, attn_implementation=attention)
    # By default the draft stops where its confidence falls below 0.4. These count on the draft's config only.
    draft.generation_config.num_assistant_tokens = config.num_speculative_tokens
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    target.model.requires_grad_(True)
    return move(draft, target.device).eval().requires_grad_(True)


def generate(target: Target, assistant: PreTrainedModel | None, max_new_tokens: int, batch: Requests, repeat: int) -> Answers:
    """Let transformers answer greedily, a prompt at a time."""
    eos = list(target.eos_token_ids) or None
    model: Any = target.model  # the type of a pretrained model does not know `generate`
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, eos_token_id=eos, pad_token_id=eos[0] if eos else None
    )
    found = []
    for request in batch:
        ids_1T = torch.tensor([request.tokens], device=target.device)
        with torch.inference_mode():  # as our decoder does
            text_1T = model.generate(
                ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=settings, assistant_model=assistant
            )
        tokens = tuple(text_1T[0, ids_1T.shape[1] :].tolist())
        end = "eos" if tokens[-1] in target.eos_token_ids else "length"
        labels: dict[str, Any] = {"prompt_id": request.prompt_id, "category": request.category, "stop_reason": end}
        found.append(Generation(mode=GENERATE, prompt_tokens=request.tokens, tokens=tokens, rounds=(), **labels))
    return Answers(generations=found)


def settings_of(config: DecodeBenchConfig, **changes: Any) -> DecodeConfig:
    usual = {"num_speculative_tokens": config.num_speculative_tokens, "max_new_tokens": config.max_new_tokens}
    return DecodeConfig.model_validate(usual | changes)


# --- every way of decoding --------------------------------------------------------------------------------------------


def list_ways(config: DecodeBenchConfig, target: Target) -> list[Way]:
    def way(shape: str, proposer: str, draft: Proposer, **changes: Any) -> Way:
        settings = settings_of(config, **changes)
        return Way(rule=settings.rule, shape=shape, proposer=proposer, target=target, settings=settings, draft=draft)

    static: dict[str, Any] = {"kind": "static", "branching": config.branching}
    num_nodes = len(StaticTree.model_validate(static).all_paths())
    dynamic = {"kind": "dynamic", "num_nodes": num_nodes, "width": min(4, num_nodes)}
    deep = {"num_speculative_tokens": len(config.branching)}
    ways = []
    for name, folder in {DRAFT_LM: config.draft, **{Path(each).parent.name: each for each in config.heads}}.items():
        loaded = load_draft(folder, target.identity, target.model)
        draft, longest = loaded.proposer, loaded.metadata.num_speculative_tokens
        ways.append(way("chain", name, draft, num_speculative_tokens=longest))
        if isinstance(draft, TreeProposer):
            ways += [way(f"{tree['kind']} tree", name, draft, tree=tree, **deep) for tree in (static, dynamic)]
        if name == DRAFT_LM:
            ways.append(way("long chain", name, draft, num_speculative_tokens=num_nodes))
            ways += [way("chain", name, draft, temperature=1.0, **rule) for rule in (*RULES, *LOSSY)]
            trees = [static | {"candidates": each} for each in CANDIDATES]
            ways += [way("static tree", name, draft, temperature=1.0, tree=tree, **deep) for tree in trees]
    past = [] if config.past_answers is None else read_conversations(Path(config.past_answers))
    free: dict[str, Proposer] = {
        "prompt_lookup": PromptLookup(target.device),
        "suffix_lookup": SuffixLookup(target.device, [list(row.answer_ids) for row in past]),
    }
    return [*ways, *(way("chain", name, draft) for name, draft in free.items())]


def summarise(config: DecodeBenchConfig, way: Way, plain: SideTurns[Answers], own: SideTurns[Answers]) -> dict[str, Any]:
    samples = config.bootstrap_samples
    # Greedy answers are checked token by token; sampling rules are enumerated in the tests, and their samples not tested here.
    pair = first_answers(plain), first_answers(own)
    judged = judge_lossless(way.target, *pair, way.settings, LosslessConfig(), None)
    timings = [timing for side in (plain, own) for turns in side for turn in turns for timing in turn.result.timings]
    speed = compare_speed(timings, way.name)
    drafted = [round_.num_drafted for generation in pair[1] for round_ in generation.rounds]
    return {
        "rule": way.rule,
        "shape": way.shape,
        "proposer": way.proposer,
        "temperature": way.settings.temperature,
        "drafts_a_round": sum(drafted) / len(drafted) if drafted else None,  # particles have no rounds
        "lossless": judged["verdict"] if judged["checks"] or way.settings.lossy else "by its rule",
        "tau": ratio_interval(*counts_of(own), samples=samples, seed=SEED),
        "speedup": Interval(speed["decode_speedup"], *(speed["decode_speedup_ci"] or ())),
    }


def ratios_of(config: DecodeBenchConfig, greedy: Turns) -> dict[str, Interval]:
    samples = config.bootstrap_samples
    ratios = {}
    for ours, prefix in ((OURS, ""), (LEAN, "lean_")):
        if ours not in greedy:
            continue
        for side, theirs, name in ((ours, ASSISTED, "assisted"), (f"{ours}, plain", GENERATE, "generate")):
            ratio = speed_ratio(greedy[side], greedy[theirs], lambda answers: answers.num_tokens, samples=samples)
            ratios[f"{prefix}{'plain_' if name == 'generate' else ''}speed_vs_transformers_{name}"] = ratio
        timings = [[timing for turn in turns for timing in turn.result.timings] for turns in greedy[ours]]
        overhead = [sum(each.overhead_seconds for each in own) for own in timings]
        whole = [sum(each.decode_seconds for each in own) for own in timings]
        ratios[f"{prefix}overhead_share"] = ratio_interval(overhead, whole, samples=samples, seed=SEED)
    return ratios


def ratios_of_ways(config: DecodeBenchConfig, table: Turns) -> dict[str, Interval]:
    """Return the ratios of tokens per target step, paired by prompt, between ways that were measured."""
    samples = config.bootstrap_samples
    return {
        name: paired_ratio_interval(*counts_of(table[one]), *counts_of(table[other]), samples=samples, seed=SEED)
        for name, (one, other) in COMPARED.items()
        if one in table and other in table
    }


def agree(target: Target, theirs: SideTurns[Answers], ours: SideTurns[Answers]) -> dict[str, int]:
    """Count prompts whose answers differ, and those that rounding does not explain: in bf16 near ties may fall either way."""
    pair = first_answers(theirs), first_answers(ours)
    found = check_tokens(target, *pair, LosslessConfig().tie_noise)
    return {"prompts": len(pair[0]), "differing": len(found.divergences), "not_ties": len(found.wrong_answers)}


def first_answers(turns: SideTurns[Answers]) -> list[Generation]:
    return [generation for repeats in turns for generation in repeats[0].result.generations]


def counts_of(turns: SideTurns[Answers]) -> tuple[list[float], list[float]]:
    """Return committed tokens and rounds by prompt."""
    generations = (each for repeats in turns for turn in repeats for each in turn.result.generations)
    counts = count_per_prompt(generations).values()
    return [float(committed) for committed, _ in counts], [float(rounds) for _, rounds in counts]


if __name__ == "__main__":
    sys.exit(run_command(DecodeBenchConfig, compare_decoding, description=__doc__))
