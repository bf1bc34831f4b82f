"""Decoding beside transformers' own generation, and every rule, shape and proposer in turns: `python -m scripts.bench.decode`.

Needs the draft of `make bench`, and two cores that nothing else uses; ten minutes. Ends with 1 where answers differ by
more than a tie. T positions.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation, Timing
from eval.lossless import NOT_LOSSLESS, judge_lossless
from eval.speed import compare_speed
from eval.stats import Interval, paired_ratio_interval, ratio_interval
from eval.teacher_forcing import check_tokens
from heads.artifact import load_draft
from heads.frozen.loading import Target, load_target, move
from heads.inference.lean_forward import make_lean
from heads.proposers.lookup import PromptLookup, SuffixLookup
from heads.proposers.protocol import Proposer
from scripts.bench.harness import SideTurns, last_prompts, speed_ratio, take_turns, write_results

log = logging.getLogger("draftsmith")

GENERATE, ASSISTED, DRAFT_LM = "transformers", "transformers_assisted", "draft_lm"
PLAIN_SPEED = "plain_speed_vs_transformers_generate"
RULES: tuple[dict[str, Any], ...] = tuple({"verification": rule} for rule in ("token", "block", "match"))
CANDIDATES = ("without_replacement", "with_replacement", "k_seq")
LOSSY: tuple[dict[str, Any], ...] = ({"lossy": {"kind": "typical"}}, {"lossy": {"kind": "smc"}})
COMPARED = {  # ratios of tokens per target step between ways by the draft LM
    "block_vs_token_verification": ("block, chain", "token, chain"),
    "static_tree_vs_chain_at_equal_rows": ("greedy, static tree", "greedy, long chain"),
    "dynamic_tree_vs_chain_at_equal_rows": ("greedy, dynamic tree", "greedy, long chain"),
}


class DecodeBenchConfig(Settings):
    """`python -m scripts.bench.decode`: which drafts are decoded with, on which prompts."""

    target: TargetConfig = TargetConfig()
    draft: str = "runs/heads/draft_lm/artifact"  # the artifact of a draft LM
    held_out: str = "runs/heads/data/held_out.jsonl"  # conversations on which nothing was trained
    num_prompts: PositiveInt = 24  # the last of the file: the first chose the checkpoints
    past_answers: str = "runs/heads/data/train.jsonl"  # conversations whose answers suffix lookup has seen
    num_speculative_tokens: PositiveInt = 3
    branching: list[PositiveInt] = [3, 2, 1]  # of the trees
    max_new_tokens: PositiveInt = 48
    repeats: PositiveInt = 2  # timed runs of every side on every prompt; sampled runs take another seed each time
    output: str = "docs/results/decode.json"


class Answer(NamedTuple):
    generation: Generation
    timing: Timing | None  # by phase, which transformers keeps none of


Turns = dict[str, SideTurns[Answer]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A verification rule, the shape of a round's drafts, who drafts, and by which forward of the target."""

    rule: str
    shape: str
    proposer: str
    forward: str
    target: Target
    settings: DecodeConfig
    draft: Proposer | None

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.shape}, {self.proposer}, {self.forward}"

    @property
    def plain(self) -> Way:
        """Plain decoding at the same temperature by the same forward."""
        return replace(self, rule=AUTOREGRESSIVE, shape=f"t{self.settings.temperature:g}", proposer="", draft=None)

    def decode(self, request: Request, repeat: int) -> Answer:
        """Decode a prompt; the repeat is also the seed, which greedy decoding does not read."""
        mode = AUTOREGRESSIVE if self.draft is None else self.name
        settings = self.settings.model_copy(update={"seed": repeat, "lossy": self.draft and self.settings.lossy})
        (generation,), timing = decode(self.target, [request], settings, self.draft, mode=mode, repeat=repeat)
        return Answer(generation, timing)


def compare_decoding(config: DecodeBenchConfig) -> int:
    requests = last_prompts(config.held_out, config.num_prompts)
    target = load_target(config.target.model_copy(update={"forward": "transformers"}))
    check_decodable(target, requests)
    forwards = {"transformers": target, **({"lean": lean} if (lean := lean_twin(target)) else {})}
    beside = [greedy_chain(config, name, forward) for name, forward in forwards.items()]
    ways = [*beside, *other_ways(config, beside[-1])]
    sides: dict[str, Any] = {
        name: partial(generate, target, assistant, config.max_new_tokens)
        for name, assistant in ((GENERATE, None), (ASSISTED, load_assistant(config, target)))
    }
    sides |= {each.name: each.decode for way in ways for each in (way.plain, way)}
    table: Turns = take_turns(sides, requests, config.repeats, description="ways of decoding")
    rows = [summarise(way, table) for way in ways]
    pairs = [pair for way in beside for pair in ((way.name, ASSISTED), (way.plain.name, GENERATE))]
    agreement = {f"{ours} and {theirs}": agree(target, table[theirs], table[ours]) for ours, theirs in pairs}
    ratios = beside_transformers(beside, table) | between_ways(beside[-1].forward, table)
    more = {"agreement": agreement, "device": str(target.device), "threads": torch.get_num_threads()}
    write_results(config.output, "decode", rows=rows, ratios=ratios, config=config, **more)
    wrong = [row for row in rows if row["lossless"] == NOT_LOSSLESS]
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


# --- ways of decoding -------------------------------------------------------------------------------------------------


def greedy_chain(config: DecodeBenchConfig, forward: str, target: Target) -> Way:
    """Return the draft LM's chain, judged greedily."""
    usual = {"num_speculative_tokens": config.num_speculative_tokens, "max_new_tokens": config.max_new_tokens}
    named = {"rule": "greedy", "shape": "chain", "proposer": DRAFT_LM, "forward": forward}
    draft = load_draft(config.draft, target.identity, target.model).proposer
    return Way(**named, target=target, settings=DecodeConfig.model_validate(usual), draft=draft)


def other_ways(config: DecodeBenchConfig, first: Way) -> Iterator[Way]:
    """Yield the draft LM by every other shape and rule, and the lookups, by the forward of `first`."""

    def way(shape: str, **changes: Any) -> Way:
        settings = DecodeConfig.model_validate(first.settings.model_dump() | changes)
        return replace(first, rule=settings.rule, shape=shape, settings=settings)

    static: dict[str, Any] = {"kind": "static", "branching": config.branching}
    num_nodes = len(StaticTree.model_validate(static).all_paths())
    dynamic = {"kind": "dynamic", "num_nodes": num_nodes, "width": min(4, num_nodes)}
    deep = {"num_speculative_tokens": len(config.branching)}
    yield from (way(f"{tree['kind']} tree", tree=tree, **deep) for tree in (static, dynamic))
    yield way("long chain", num_speculative_tokens=num_nodes)
    yield from (way("chain", temperature=1.0, **rule) for rule in (*RULES, *LOSSY))
    for candidates in CANDIDATES:
        yield way("static tree", temperature=1.0, tree=static | {"candidates": candidates}, **deep)
    past = [list(row.answer_ids) for row in read_conversations(Path(config.past_answers))]
    yield replace(first, proposer="prompt_lookup", draft=PromptLookup(first.target.device))
    yield replace(first, proposer="suffix_lookup", draft=SuffixLookup(first.target.device, past))


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


def generate(target: Target, assistant: PreTrainedModel | None, max_new_tokens: int, request: Request, repeat: int) -> Answer:
    """Let transformers answer a prompt greedily."""
    eos = list(target.eos_token_ids) or None
    model: Any = target.model  # the type of a pretrained model does not know `generate`
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, eos_token_id=eos, pad_token_id=eos[0] if eos else None
    )
    ids_1T = torch.tensor([request.tokens], device=target.device)
    with torch.inference_mode():  # as our decoder does
        text_1T = model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=settings, assistant_model=assistant
        )
    tokens = tuple(text_1T[0, ids_1T.shape[1] :].tolist())
    end = "eos" if tokens[-1] in target.eos_token_ids else "length"
    labels: dict[str, Any] = {"prompt_id": request.prompt_id, "category": request.category, "stop_reason": end}
    return Answer(Generation(mode=GENERATE, prompt_tokens=request.tokens, tokens=tokens, rounds=(), **labels), None)


# --- what they say ----------------------------------------------------------------------------------------------------


def summarise(way: Way, table: Turns) -> dict[str, Any]:
    plain, own = table[way.plain.name], table[way.name]
    # Greedy answers are checked token by token; sampling rules are enumerated in the tests, and their samples not tested here.
    pair = first_answers(plain), first_answers(own)
    judged = judge_lossless(way.target, pair[0], {SPECULATIVE: pair[1]}, way.settings, LosslessConfig(), None)
    timings = [turn.result.timing for side in (plain, own) for turns in side for turn in turns if turn.result.timing]
    speed = compare_speed(timings, way.name)
    drafted = [round_.num_drafted for generation in pair[1] for round_ in generation.rounds]
    return {
        "rule": way.rule,
        "shape": way.shape,
        "proposer": way.proposer,
        "forward": way.forward,
        "temperature": way.settings.temperature,
        "drafts_a_round": sum(drafted) / len(drafted) if drafted else None,  # particles have no rounds
        "lossless": judged["verdict"] if judged["checks"] or way.settings.lossy else "by its rule",
        "tau": ratio_interval(*counts_of(own)),
        "speedup": Interval(speed["decode_speedup"], *(speed["decode_speedup_ci"] or ())),
    }


def beside_transformers(ways: list[Way], table: Turns) -> dict[str, Interval]:
    """Return our speeds over transformers', and our share of time beside the models' forwards, by each of our forwards."""
    ratios = {}
    for way in ways:
        prefix = "" if way.forward == "transformers" else f"{way.forward}_"
        for ours, theirs, name in ((way, ASSISTED, "speed_vs_transformers_assisted"), (way.plain, GENERATE, PLAIN_SPEED)):
            ratios[prefix + name] = speed_ratio(table[ours.name], table[theirs], lambda each: len(each.generation.tokens))
        timings = [[turn.result.timing for turn in turns if turn.result.timing] for turns in table[way.name]]
        overhead = [sum(each.overhead_seconds for each in own) for own in timings]
        whole = [sum(each.decode_seconds for each in own) for own in timings]
        ratios[f"{prefix}overhead_share"] = ratio_interval(overhead, whole)
    return ratios


def between_ways(forward: str, table: Turns) -> dict[str, Interval]:
    """Return the ratios of tokens per target step, paired by prompt, between ways."""
    ratios = {}
    for name, pair in COMPARED.items():
        columns = [column for way in pair for column in counts_of(table[f"{way}, {DRAFT_LM}, {forward}"])]
        ratios[name] = paired_ratio_interval(*columns)
    return ratios


def agree(target: Target, theirs: SideTurns[Answer], ours: SideTurns[Answer]) -> dict[str, int]:
    """Count prompts whose answers differ, and those that rounding does not explain: in bf16 near ties may fall either way."""
    pair = first_answers(theirs), first_answers(ours)
    found = check_tokens(target, *pair, LosslessConfig().tie_noise)
    return {"prompts": len(pair[0]), "differing": len(found.divergences), "not_ties": len(found.wrong_answers)}


def first_answers(side: SideTurns[Answer]) -> list[Generation]:
    return [turns[0].result.generation for turns in side]


def counts_of(side: SideTurns[Answer]) -> tuple[list[float], list[float]]:
    """Return committed tokens and rounds by prompt."""
    answers = [[turn.result.generation for turn in turns] for turns in side]
    committed = [float(sum(each.num_committed for each in own)) for own in answers]
    return committed, [float(sum(len(each.rounds) for each in own)) for own in answers]


if __name__ == "__main__":
    sys.exit(run_command(DecodeBenchConfig, compare_decoding, description=__doc__))
