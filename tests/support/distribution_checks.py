"""Samples of the whole decoder on a tiny model against the target's exact distribution, by the shape of drafts and the rule.

The first tokens of answers to one prompt: one comes from the prefill, the next ones from rounds. Shared by the quick test of
the suite and by `make slow`, which has fifty times the samples.
"""

from __future__ import annotations

from collections import Counter

import torch
from transformers import PreTrainedModel

from configs.schema.decoding import ConfidenceStopping, DecodeConfig, StaticTree
from eval.decoder.decode import Request, decode
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import LookupFirst, PromptLookup

VOCAB, PROMPT, DEPTH = 4, (1, 2), 3
AT_ONCE = 5_000
SAMPLED = DecodeConfig(num_speculative_tokens=3, max_new_tokens=DEPTH + 2, temperature=1.2, verification="block")
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 0, 0]]


def with_tree(candidates):
    tree = StaticTree(kind="static", paths=TREE, candidates=candidates)
    return SAMPLED.model_copy(update={"tree": tree, "verification": "token"})


CASES = {
    "chain, token": SAMPLED.model_copy(update={"verification": "token"}),
    "chain, block": SAMPLED,
    "chain, block, top_p": SAMPLED.model_copy(update={"top_p": 0.9}),
    "chain, token, stopping": SAMPLED.model_copy(
        update={"verification": "token", "stopping": ConfidenceStopping(rule="confidence", threshold=0.37)}
    ),
    "chain, block, penalties": SAMPLED.model_copy(update={"min_p": 0.1, "repetition_penalty": 1.8, "frequency_penalty": -1.0}),
    "chain, one_hot": SAMPLED.model_copy(update={"verification": "one_hot"}),
    "tree, without_replacement": with_tree("without_replacement"),
    "tree, with_replacement": with_tree("with_replacement"),
    "tree, k_seq": with_tree("k_seq"),
    "tree, without_replacement, top_p": with_tree("without_replacement").model_copy(update={"top_p": 0.6}),
    "tree, one_hot": with_tree("without_replacement").model_copy(update={"verification": "one_hot"}),
    "lookup or chain, token": SAMPLED.model_copy(update={"verification": "token"}),
    "lookup or chain, block": SAMPLED,
}
BY_ESTIMATE = SAMPLED.model_copy(update={"stopping": ConfidenceStopping(rule="confidence", threshold=0.5, by="estimate")})


def models(tiny_llama):
    """Give a target and a draft of quite another distribution: only rejections and what comes after them make the samples
    right."""
    return tuple(
        tiny_llama(seed=seed, vocab_size=VOCAB, dtype=torch.float32, spread=spread) for seed, spread in ((4, 4.0), (5, 7.0))
    )


def lookup_of(case):
    """The lookup of a case: one that finds a match in some rows of a batch and not in others."""
    return PromptLookup(torch.device("cpu")) if case.startswith("lookup") else None


def sample(target, draft, config, number, prompt_ids="s", *, lookup=None):
    """Count the first `DEPTH` tokens of so many answers; also return the rounds they took. The draft is a model or a proposer;
    it comes second to the lookup.
    """
    counts, rounds = Counter(), 0
    proposer = DraftLM(draft, VOCAB) if isinstance(draft, PreTrainedModel) else draft
    if lookup is not None:
        proposer = LookupFirst(lookup, proposer, VOCAB)
    for start in range(0, number, AT_ONCE):
        size = min(AT_ONCE, number - start)
        requests = [Request(prompt_id=f"{prompt_ids}{start + n}", category="", tokens=PROMPT) for n in range(size)]
        generations, timing = decode(target, requests, config, proposer)
        counts.update(generation.tokens[:DEPTH] for generation in generations)
        rounds += timing.num_rounds
    return counts, rounds


def naive_penalised(logits, prompt, answer, settings):
    """One row of logits less their tokens' penalties, in plain Python."""
    scale, once, each_time = settings.repetition_penalty or 1.0, settings.presence_penalty or 0, settings.frequency_penalty or 0
    found = list(logits)
    for token in {*prompt, *answer}:
        found[token] = found[token] / scale if found[token] > 0 else found[token] * scale
        found[token] -= each_time * answer.count(token) + once * (token in answer)
    return found


def naive_distribution(logits, temperature, top_k=None, top_p=None, min_p=None):
    """The distribution of one row of logits, in plain Python and float64."""
    values = [value / temperature for value in logits]
    order = sorted(range(len(values)), key=lambda index: -values[index])
    kept = order if top_k is None else [index for index in order if values[index] >= values[order[:top_k][-1]]]
    weights = {index: torch.tensor(values[index], dtype=torch.float64).exp().item() for index in kept}
    total = sum(weights.values())
    if top_p is not None:
        chosen, mass = {}, 0.0
        for index in kept:
            if mass >= top_p:
                break
            chosen[index] = weights[index]
            mass += weights[index] / total
        weights = chosen
    weights = {index: weight for index, weight in weights.items() if weight >= (min_p or 0.0) * max(weights.values())}
    total = sum(weights.values())
    return [weights.get(index, 0.0) / total for index in range(len(values))]
