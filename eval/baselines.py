"""The ways of drafting that need no training and are measured beside a draft: made by name, for a target.

They draft chains to their full length, whatever shape and stopping rule the draft under evaluation is asked for
(`eval.measuring`). Adding one is a line here and its name in `configs.evaluating.FreeDraft`.

What suffix lookup may know: the texts under way, and the answers to the prompts that this process measured before, in the
order of the suite. A prompt's answer is learnt once, after its last repeat; warming up teaches nothing. So no repeat copies
the answer of an earlier one, and every repeat of a prompt is drafted for with the same memory. With several processes each
has a memory of its own, of its own share of the prompts. Left out: lean forwards for self-speculation, whose two parts of the
target run by transformers' modules even where the target has a lean forward.
"""

from __future__ import annotations

from collections.abc import Callable

from configs.evaluating import EvalConfig, FreeDraft
from distill.target import Target
from heads.prompt_lookup import PromptLookup
from heads.proposer import Proposer
from heads.self_speculation import SelfSpeculation
from heads.suffix_lookup import SuffixLookup
from heads.target_states import num_blocks


def make_baselines(config: EvalConfig, target: Target) -> dict[str, Proposer]:
    """Return the proposers that `baselines` names, in its order.

    Raises:
        InputError: the target cannot draft for itself with `self_speculation_layers` of its blocks.
    """
    return {name: MAKERS[name](config, target) for name in config.baselines}


def _self_speculation(config: EvalConfig, target: Target) -> Proposer:
    num_layers = config.self_speculation_layers or max(1, num_blocks(target.model) // 4)
    return SelfSpeculation(target.model, num_layers, target.vocab_size)


MAKERS: dict[FreeDraft, Callable[[EvalConfig, Target], Proposer]] = {
    "prompt_lookup": lambda _, target: PromptLookup(target.device),
    "suffix_lookup": lambda _, target: SuffixLookup(target.device, learns_own_answers=False),
    "self_speculation": _self_speculation,
}
