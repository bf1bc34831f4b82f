"""Launches counted without a GPU: how many kernels a decode round and a training step would start.

A launch is an operation of the real code, on a tiny model on the CPU, that is neither a view nor an allocation. What CUDA has a
kernel for counts once however the CPU computes it (`FUSED`). Numbers of launches do not depend on widths; they do on the
number of layers, which heads have as their settings' defaults say.
B batch, T positions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from configs.runtime.files import CHECKOUT
from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from configs.schema.training import LossConfig
from distill.loss.head_objective import HeadObjective
from eval.decoder.batch import BatchRun
from eval.decoder.request import Request
from heads.families.registry import FAMILIES, serve
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import Target, load_target
from heads.inference.runner import runner_of
from heads.modules.interface import Batch
from heads.modules.output_head import HeadModule
from heads.proposers.protocol import Proposer
from heads.vocabulary import DraftVocabulary
from scripts.lab.models_check.stages import word_tokenizer

FUSED: set[Any] = {functional.rms_norm, torch.rms_norm, functional.scaled_dot_product_attention, functional.linear}
NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "_local_scalar_dense",
    "_unsafe_view",
    "set_",
}
PROJECT = tuple(str(CHECKOUT / name) for name in ("configs", "heads", "distill", "eval", "train"))
NUM_DRAFTS = 5
BLOCKS, VOCABULARY = 8, 64
PROMPT = tuple(range(3, 15))


class Launches:
    """Counts launches while it is entered, by the function of the project that makes them."""

    def __init__(self) -> None:
        self.by_place: Counter[str] = Counter()
        self._pauses = 0

    @property
    def total(self) -> int:
        return self.by_place.total()

    @contextmanager
    def counting(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def without(self, owner: Any, name: str) -> Any:
        """Return a patch under which a function's launches do not count."""
        original = getattr(owner, name)

        def quiet(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return original(*args, **kwargs)

        return mock.patch.object(owner, name, quiet)

    def note(self) -> None:
        if not self._pauses:
            self.by_place[_place()] += 1


class _Operations(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if is_launch(func, args, made):
            self.launches.note()
        return made


class _Functions(TorchFunctionMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FUSED:
            return func(*args, **(kwargs or {}))
        self.launches.note()
        with self.launches.paused():
            return func(*args, **(kwargs or {}))


def is_launch(func: Any, args: Any, made: Any) -> bool:
    """Return whether an operation is neither an allocation nor a view; one that may be either (reshape) is by what it made."""
    returns = func._schema.returns
    may_be_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    if not may_be_view or not isinstance(made, torch.Tensor):
        return not may_be_view and func.overloadpacket.__name__ not in NO_LAUNCH
    return all(_storage(each) != _storage(made) for each in tree_leaves(args) if isinstance(each, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place() -> str:
    """Return the function of the project that is at work, as file and name."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PROJECT):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "backward"  # which autograd runs on a thread of its own, or from the caller
    return f"{Path(frame.f_code.co_filename).relative_to(CHECKOUT)} {frame.f_code.co_qualname}"


# --- what is counted ------------------------------------------------------------------------------------------------


def tiny_target(folder: Path, device: str = "cpu") -> Target:
    """Return a Llama with grouped heads, saved and loaded as a target in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return load_target(TargetConfig(name=str(folder), dtype="float32", device=device))


def head_of(kind: str, target: Target) -> nn.Module:
    """Return an untrained head of a family, with a draft vocabulary of half the target's where it may have one."""
    torch.manual_seed(0)
    settings = FAMILIES[kind].settings.model_validate({"kind": kind})
    vocabulary = DraftVocabulary(token_ids_W=torch.arange(0, target.vocab_size, 2), target_vocab_size=target.vocab_size)
    whole = kind in ("dflash2", "domino")
    return FAMILIES[kind].build(settings, target.model, None if whole else vocabulary).float().to(target.device)


def new_run(kind: str, target: Target, temperature: float = 0.0, prompt: tuple[int, ...] = PROMPT) -> BatchRun:
    """Return a batch of one prompt that a family drafts for."""
    proposer = FAMILIES[kind].propose(serve(head_of(kind, target), target.model), target.device)
    config = DecodeConfig(num_speculative_tokens=NUM_DRAFTS, max_new_tokens=60, temperature=temperature)
    return BatchRun(target, [Request(prompt_id="a", category="", tokens=prompt)], config, proposer)


def run_under_way(kind: str, target: Target, temperature: float) -> BatchRun:
    """Return the same after its first round."""
    run = new_run(kind, target, temperature)
    with torch.inference_mode():
        run.prefill()
        run.round()
    return run


def _no(device: torch.device) -> bool:
    return False


as_on_a_gpu = mock.patch("heads.sampling.probabilities.keeps_small_tensors_near", new=_no)  # decorates what counts


@as_on_a_gpu
def count_round(kind: str, target: Target, temperature: float) -> dict[str, Launches]:
    """Return the launches of a round in its course: of drafting, and of all else but the target's forward."""
    run, drafting, rest = run_under_way(kind, target, temperature), Launches(), Launches()
    proposer = cast(Proposer, run.proposer)
    original = proposer.propose

    def propose(*args: Any, **kwargs: Any) -> Any:
        with rest.paused(), drafting.counting():
            return original(*args, **kwargs)

    drafts = mock.patch.object(proposer, "propose", propose)
    with torch.inference_mode():
        forward = runner_of(target.model).current
        with drafts, rest.without(proposer, "commit"), rest.without(forward, "hidden"), rest.counting():
            run.round()
    return {"draft": drafting, "rest": rest}


def count_walks(target: Target) -> dict[str, int]:
    """Return how often a round of EAGLE-3 walks the whole tree of some module, and how many hooks it sets."""
    counts: Counter[str] = Counter()
    walk = nn.Module.named_modules

    def walked(module: nn.Module, memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from walk(module, memo, *args, **kwargs)
        counts["walks"] += memo is None  # to its end, and not as a part of another walk

    def hooked(name: str) -> Any:
        original = getattr(nn.Module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts["hooks"] += 1
            return original(*args, **kwargs)

        return mock.patch.object(nn.Module, name, call)

    run = run_under_way("eagle3", target, 0.0)
    hooks = [hooked(f"register_forward_{name}hook") for name in ("", "pre_")]
    with torch.inference_mode(), mock.patch.object(nn.Module, "named_modules", walked), hooks[0], hooks[1]:
        run.round()
    return {"walks": counts["walks"], "hooks": counts["hooks"]}


@as_on_a_gpu
def count_step(kind: str, target: Target) -> Launches:
    """Return the launches of forward, loss and backward of a training step, the target's forward left out."""
    head = head_of(kind, target)
    if (start := FAMILIES[kind].start) is not None:
        start(head, target.model)
    batch = tiny_batch()
    states = read_states(target.model, batch.input_ids_BT, tuple(head.taps) if isinstance(head, HeadModule) else ())
    objective, launches = HeadObjective(head, target, LossConfig()), Launches()
    for _ in range(2):  # what is made once is made in the first
        launches = Launches()
        with launches.counting():
            objective(batch, states, torch.tensor(float(batch.num_labels)), 1).loss.backward()
    return launches


def tiny_batch() -> Batch:
    """Return two rows of 24 tokens, of which the last 16 are an answer's."""
    ids_BT = torch.arange(2 * 24).view(2, 24) % VOCABULARY
    mask_BT = torch.arange(24).expand(2, 24) >= 8
    documents_BT = torch.zeros_like(ids_BT)
    conversations_BC = torch.tensor([[0], [1]])
    return Batch(ids_BT, mask_BT, torch.arange(24).repeat(2, 1), documents_BT, conversations_BC)


def count_launches(kind: str, target: Target) -> dict[str, Launches]:
    """Return all counts of a family, by what they are of."""
    found = {
        f"{kind} {name} {part}": launches
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
        for part, launches in count_round(kind, target, temperature).items()
    }
    return {**found, f"{kind} training step": count_step(kind, target)}
