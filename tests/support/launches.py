"""Launches counted without a GPU: how many kernels a decode round would start.

A launch is an operation of the real code, on a tiny model on the CPU, that is neither a view nor an allocation. What CUDA has a
kernel for counts once however the CPU computes it (`FUSED`). Numbers of launches do not depend on widths.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from configs.runtime.files import CHECKOUT
from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from eval.decoder.batch import BatchRun
from eval.decoder.records import Request
from heads.families.registry import FAMILIES, serve
from heads.frozen.loading import load_target
from heads.inference.runner import runner_of
from heads.modules.interface import Batch
from heads.vocabulary import DraftVocabulary
from tests.support.architectures import word_tokenizer

FUSED = {functional.rms_norm, torch.rms_norm, functional.scaled_dot_product_attention, functional.linear}
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
NO_LAUNCH |= {"_local_scalar_dense", "_unsafe_view", "set_"}
PROJECT = tuple(str(CHECKOUT / name) for name in ("configs", "heads", "distill", "eval", "train"))
NUM_DRAFTS, BLOCKS, VOCABULARY = 5, 8, 64
PROMPT = tuple(range(3, 15))


class Launches:
    """Counts launches while it is entered, by the function of the project that makes them."""

    def __init__(self):
        self.by_place, self._pauses = Counter(), 0

    @property
    def total(self):
        return self.by_place.total()

    @contextmanager
    def counting(self):
        with _Functions(self), _Operations(self):
            yield

    def apart(self, function, *args, **kwargs):
        """Call a function whose launches do not count."""
        self._pauses += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._pauses -= 1

    def without(self, owner, name):
        """Return a patch under which a function's launches do not count."""
        return mock.patch.object(owner, name, partial(self.apart, getattr(owner, name)))

    def note(self):
        if not self._pauses:
            self.by_place[_place()] += 1


class _Operations(TorchDispatchMode):
    def __init__(self, launches):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if is_launch(func, args, made):
            self.launches.note()
        return made


class _Functions(TorchFunctionMode):
    def __init__(self, launches):
        super().__init__()
        self.launches = launches

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in FUSED:
            return func(*args, **(kwargs or {}))
        self.launches.note()
        return self.launches.apart(func, *args, **(kwargs or {}))


def is_launch(func, args, made):
    """Return whether an operation is neither an allocation nor a view; one that may be either (reshape) is by what it made."""
    returns = func._schema.returns
    may_be_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    if not may_be_view or not isinstance(made, torch.Tensor):
        return not may_be_view and func.overloadpacket.__name__ not in NO_LAUNCH
    return all(_storage(each) != _storage(made) for each in tree_leaves(args) if isinstance(each, torch.Tensor))


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def _place():
    """Return the function of the project that is at work, as file and name."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PROJECT):
        frame = frame.f_back
    if frame is None:
        return "backward"  # which autograd runs on a thread of its own, or from the caller
    return f"{Path(frame.f_code.co_filename).relative_to(CHECKOUT)} {frame.f_code.co_qualname}"


def tiny_target(folder, device="cpu"):
    """Return a Llama with grouped heads, saved and loaded as a target in float32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=BLOCKS, max_position_embeddings=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return load_target(TargetConfig(name=str(folder), dtype="float32", device=device))


def head_of(kind, target):
    """Return an untrained head of a family, with a draft vocabulary of half the target's where it may have one."""
    torch.manual_seed(0)
    settings = FAMILIES[kind].settings.model_validate({"kind": kind})
    vocabulary = DraftVocabulary(token_ids_W=torch.arange(0, target.vocab_size, 2), target_vocab_size=target.vocab_size)
    whole = kind in ("dflash2", "domino")
    return FAMILIES[kind].build(settings, target.model, None if whole else vocabulary).float().to(target.device)


def run_under_way(kind, target, temperature):
    """Return a batch of one prompt that a family drafts for, after its first round."""
    proposer = FAMILIES[kind].propose(serve(head_of(kind, target), target.model), target.device)
    config = DecodeConfig(num_speculative_tokens=NUM_DRAFTS, max_new_tokens=60, temperature=temperature, verification="block")
    run = BatchRun(target, [Request(prompt_id="a", category="", tokens=PROMPT)], config, proposer)
    with torch.inference_mode():
        run.prefill()
        run.round()
    return run


def count_round(kind, target, temperature):
    """Return the launches of a round in its course, without those of the target's forward and of what is kept of it."""
    run, launches = run_under_way(kind, target, temperature), Launches()
    forward = runner_of(target.model).current
    uncounted = launches.without(run.proposer, "commit"), launches.without(forward, "hidden")
    as_on_a_gpu = mock.patch("heads.sampling.draws.keeps_small_tensors_near", return_value=False)
    with torch.inference_mode(), as_on_a_gpu, uncounted[0], uncounted[1], launches.counting():
        run.round()
    return launches


def tiny_batch():
    """Return two rows of 24 tokens, of which the last 16 are an answer's."""
    ids_BT = torch.arange(2 * 24).view(2, 24) % VOCABULARY
    mask_BT = torch.arange(24).expand(2, 24) >= 8
    conversations_BC = torch.tensor([[0], [1]])
    return Batch(ids_BT, mask_BT, torch.arange(24).repeat(2, 1), torch.zeros_like(ids_BT), conversations_BC)
