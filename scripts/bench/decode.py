"""Decoding beside transformers' own generation, and every rule, shape and proposer: `python -m scripts.bench.decode`.

Ours and transformers' ways take turns in this process; every other way is an evaluation by `eval/run.py`, in turns with plain
decoding. Needs the draft of `make bench`, and two cores that nothing else uses; a quarter of an hour. Ends with 1 where
answers differ by more than a tie. T positions.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from configs.runtime.command import DONE, GATE_FAILED, run_command
from configs.schema.base import PositiveInt, Settings
from configs.schema.decoding import DecodeConfig, StaticTree
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import Request, check_decodable, decode
from eval.decoder.records import Generation
from eval.lossless import NOT_LOSSLESS
from eval.stats import Interval, paired_ratio_interval
from eval.teacher_forcing import check_tokens
from heads.artifact import load_draft
from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.identity import locate
from heads.frozen.loading import Target, load_target, move
from heads.metadata import locate_artifact
from heads.proposers.protocol import Proposer
from scripts.bench.harness import (
    SideTurns,
    evaluate,
    figures,
    free_ways,
    held_out_rows,
    requests_of,
    speed_ratio,
    take_turns,
    write_results,
)

log = logging.getLogger("draftsmith")

GENERATE, ASSISTED, DRAFT_LM = "transformers", "transformers_assisted", "draft_lm"
FORWARDS = {"transformers": "", "lean": "lean_"}  # of the target, and what their ratios' names begin with
FIRST = "greedy, chain"
RULES = ("one_hot", "token", "block")
LOSSY = ("typical", "smc")
CANDIDATES = ("without_replacement", "with_replacement", "k_seq")
COMPARED = {  # ratios of tokens per target step
    "block_vs_token_verification": ("block, chain", "token, chain"),
    "static_tree_vs_chain_at_equal_rows": ("greedy, static tree", "greedy, long chain"),
    "dynamic_tree_vs_chain_at_equal_rows": ("greedy, dynamic tree", "greedy, long chain"),
}

Side = Callable[[Request, int], Generation]  # a way to answer a prompt; the second is the repeat


class DecodeBenchConfig(Settings):
    """`python -m scripts.bench.decode`: which drafts are decoded with, on which prompts."""

    target: TargetConfig = TargetConfig()  # of a family with a lean forward
    draft: str = "runs/heads/draft_lm/artifact"  # the artifact of a draft LM
    held_out: str = "runs/heads/data/held_out.jsonl"  # conversations on which nothing was trained
    num_prompts: PositiveInt = 24  # the last of the file: the first chose the checkpoints
    past_answers: str = "runs/heads/data/train.jsonl"  # conversations whose answers suffix lookup has seen
    num_speculative_tokens: PositiveInt = 3
    branching: list[PositiveInt] = [3, 2, 1]  # of the trees
    max_new_tokens: PositiveInt = 48
    repeats: PositiveInt = 2  # timed runs of every side on every prompt
    output: str = "docs/results/decode.json"


def compare_decoding(config: DecodeBenchConfig) -> int:
    ratios, agreement = beside_transformers(config)
    with TemporaryDirectory(prefix="bench-decode-") as scratch:
        reports = evaluate_ways(config, Path(scratch))
    rows = []
    for way, report in reports.items():
        rule, shape = way.split(", ")
        shared = {"rule": rule, "shape": shape, "temperature": report["decode"]["temperature"]}
        shared |= {"lossless": report["lossless"]["verdict"]}
        perplexity = {"perplexity_vs_plain": report["quality"]["perplexity"]["ratio"]}
        rows.append(shared | {"proposer": DRAFT_LM} | figures(report["acceptance"], report["speed"]) | perplexity)
        for name, section in free_ways(report, DRAFT_LM).items():
            rows.append(shared | {"proposer": name} | figures(section, section) | dict.fromkeys(perplexity))
    for name, (ours, theirs) in COMPARED.items():
        ratios[name] = tau_ratio(reports[ours], reports[theirs])
    ratios["lean_overhead_share"] = reports[FIRST]["speed"]["phase_shares"]["overhead_seconds"]
    more = {"agreement": agreement, "threads": torch.get_num_threads()}
    write_results(config.output, "decode", rows=rows, ratios=ratios, config=config, **more)
    wrong = [way for way, report in reports.items() if report["lossless"]["verdict"] == NOT_LOSSLESS]
    for way in wrong:
        log.error("%s: the answers differ from plain decoding's", way)
    return GATE_FAILED if wrong or any(each["not_ties"] for each in agreement.values()) else DONE


# --- ways of decoding -------------------------------------------------------------------------------------------------


def ways_of(config: DecodeBenchConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of decoding by `rule, shape`; trees and the long chain have as many drafts a round."""
    static: dict[str, Any] = {"kind": "static", "branching": config.branching}
    num_nodes = len(StaticTree.model_validate(static).all_paths())
    dynamic = {"kind": "dynamic", "num_nodes": num_nodes, "width": min(4, num_nodes)}
    drawn, deep = {"temperature": 1.0}, {"num_speculative_tokens": len(config.branching)}
    ways: dict[str, dict[str, Any]] = {FIRST: {}, "greedy, long chain": {"num_speculative_tokens": num_nodes}}
    ways |= {f"greedy, {tree['kind']} tree": deep | {"tree": tree} for tree in (static, dynamic)}
    ways |= {f"{rule}, chain": drawn | {"verification": rule} for rule in RULES}
    ways |= {f"{kind}, chain": drawn | {"lossy": {"kind": kind}} for kind in LOSSY}
    return ways | {f"{each}, static tree": drawn | deep | {"tree": static | {"candidates": each}} for each in CANDIDATES}


def evaluate_ways(config: DecodeBenchConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """Return a report for each way, by the fastest forward; the first is also of the lookups, alone and before the draft."""
    suite = folder / "suite.jsonl"
    rows = held_out_rows(config.held_out, config.num_prompts)
    suite.write_text("".join(row.to_line() for row in rows), encoding="utf-8")
    target = config.target.model_dump(mode="json") | {"forward": "lean"}
    shared: dict[str, Any] = {"target": target, "draft": config.draft}
    shared |= {"suite": {"name": "home", "path": str(suite)}, "repeats": config.repeats, "quality": {"perplexity": True}}
    # Sampling rules are enumerated in the tests, and their samples are not tested here.
    shared |= {"lookup_answers": config.past_answers, "lossless": {"first_token_samples": 0}, "other_verification": False}
    usual = {"num_speculative_tokens": config.num_speculative_tokens, "max_new_tokens": config.max_new_tokens}
    reports = {}
    for number, (way, settings) in enumerate(ways_of(config).items()):
        baselines = ["prompt_lookup", "suffix_lookup"] if way == FIRST else []
        reports[way] = evaluate(folder / f"{number}", shared | {"decode": usual | settings, "baselines": baselines})
    return reports


def tau_ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Interval:
    """Return the ratio of tokens per target step of two reports on the same prompts, paired by prompt."""
    sides = [report["acceptance"]["per_prompt"] for report in (ours, theirs)]
    return paired_ratio_interval(*([side[name][place] for name in sides[0]] for side in sides for place in (0, 1)))


# --- beside transformers ----------------------------------------------------------------------------------------------


def beside_transformers(config: DecodeBenchConfig) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Return our speeds over transformers', by each of our forwards, and how many greedy answers differ."""
    requests = requests_of(held_out_rows(config.held_out, config.num_prompts))
    targets = {name: load_target(config.target.model_copy(update={"forward": name})) for name in FORWARDS}
    target = targets["transformers"]
    check_decodable(target, requests)
    usual = {"num_speculative_tokens": config.num_speculative_tokens, "max_new_tokens": config.max_new_tokens}
    settings = DecodeConfig.model_validate(usual)
    sides: dict[str, Side] = {}
    for name, assistant in ((GENERATE, None), (ASSISTED, load_assistant(config, target))):
        sides[name] = partial(generate, target, assistant, config.max_new_tokens)
    pairs = {}
    for name, prefix in FORWARDS.items():
        proposer = load_draft(config.draft, target.identity, targets[name].model).proposer
        for kind, other, draft in (("plain_speed", GENERATE, None), ("speed", ASSISTED, proposer)):
            pairs[f"{prefix}{kind}_vs_{other}{'_generate' if draft is None else ''}"] = side = f"{name}, {kind}", other
            sides[side[0]] = partial(answer, targets[name], settings, draft)
    turns = take_turns(sides, requests, config.repeats, description="ours and transformers'")
    ratios = {
        name: speed_ratio(turns[ours], turns[theirs], lambda each: len(each.tokens)) for name, (ours, theirs) in pairs.items()
    }
    return ratios, {name: agree(target, turns[theirs], turns[ours]) for name, (ours, theirs) in pairs.items()}


def answer(target: Target, settings: DecodeConfig, draft: Proposer | None, request: Request, repeat: int) -> Generation:
    (generation,), _ = decode(target, [request], settings, draft)
    return generation


def load_assistant(config: DecodeBenchConfig, target: Target) -> PreTrainedModel:
    """Load a draft LM's export, which drafts the tokens that ours does and no others; its weights and the target's are thawed.

    transformers cuts the last positions out of [1, T, D] hidden states; such a cut times a frozen weight is a batched
    product in torch, for the head in bfloat16 on a CPU twenty times slower than the plain product that a trainable weight gets.
    """
    attention, folder = target.model.config._attn_implementation, locate(config.target).resolve()
    place = TargetFolder(folder, str(folder))
    source = read_source(locate_artifact(config.draft), place, num_speculative_tokens=config.num_speculative_tokens)
    with TemporaryDirectory(prefix="bench-decode-") as scratch:
        out = Path(scratch) / "draft"
        export(source, "transformers", out)
        draft = AutoModelForCausalLM.from_pretrained(out, dtype=target.model.dtype, attn_implementation=attention)
    target.model.requires_grad_(True)
    return move(draft, target.device).eval().requires_grad_(True)


def generate(
    target: Target, assistant: PreTrainedModel | None, max_new_tokens: int, request: Request, repeat: int
) -> Generation:
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
    return request.answered(GENERATE, "eos" if tokens[-1] in target.eos_token_ids else "length", tokens)


def agree(target: Target, theirs: SideTurns[Generation], ours: SideTurns[Generation]) -> dict[str, int]:
    """Count prompts whose answers differ, and those that rounding does not explain: in bf16 near ties may fall either way."""
    plain, own = ([turns[0].result for turns in side] for side in (theirs, ours))
    found = check_tokens(target, plain, own, LosslessConfig().tie_noise)
    return {"prompts": len(plain), "differing": len(found.divergences), "not_ties": len(found.wrong_answers)}


if __name__ == "__main__":
    sys.exit(run_command(DecodeBenchConfig, compare_decoding, description=__doc__))
