"""What decoding and training move besides their work, and what the host waits for, counted without a GPU on tiny models.

B batch, T positions, S cache length, N heads, H head width, C rows and W columns of a chunk of the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from distill.loss import fused
from distill.loss.divergences import forward_kl
from distill.loss.fused import normalise
from heads.frozen.loading import Target
from heads.inference import compiled_forward
from heads.inference.causal_lm import forward_rows, new_cache
from heads.inference.compiled_forward import make_compiled
from heads.inference.lean_forward import make_lean
from heads.inference.runner import runner_of
from heads.proposers.protocol import Proposer
from scripts.lab.counts.launches import VOCABULARY, as_on_a_gpu, is_launch, new_run, run_under_way

CHUNK, COLUMNS = 128, 32_768  # rows and columns of the loss whose bytes are counted
LONG = 160  # tokens of a prompt whose masks are looked for
WAITING = (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__int__, Tensor.__float__, Tensor.nonzero, torch.nonzero)


class _Seen(TorchDispatchMode):
    """Hands each launch, with its inputs and outputs, to `note`."""

    def __init__(self, note: Callable[[list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if is_launch(func, args, made):
            self.note(*([each for each in tree_leaves(part) if isinstance(each, Tensor)] for part in ((args, kwargs), made)))
        return made


@as_on_a_gpu
def count_loss_bytes() -> dict[str, float]:
    """Return the bytes that comparing a chunk reads and writes in tensors over the vocabulary, by logit of the draft.

    As it runs in operations of its own, bfloat16 logits of a reduced vocabulary, forward KL; and as `torch.compile` joins them,
    by its own count.
    """
    generator = torch.Generator().manual_seed(0)
    target_CW, draft_CW = (torch.randn(CHUNK, COLUMNS, generator=generator).bfloat16() for _ in range(2))
    sums_C = torch.full((CHUNK,), math.log(COLUMNS) + 1)
    known = sums_C, target_CW.argmax(-1)
    ids_W, weights_C = torch.arange(COLUMNS), torch.full((CHUNK,), 1 / CHUNK)
    with mock.patch.object(fused, "keeps_small_tensors_near", return_value=False), _moved() as moved:
        fused.compare(forward_kl, target_CW, draft_CW, weights_C, known=known, token_ids_W=ids_W, compiled=False)
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)  # or the compiler does not count
    with inductor_config.patch(force_disable_caches=True):
        fused.compare(forward_kl, target_CW, draft_CW, weights_C, known=known, token_ids_W=ids_W, compiled=True)
    torch._logging.set_logs()
    logits = CHUNK * COLUMNS
    return {"loss_bytes_a_logit": moved["bytes"] / logits, "loss_bytes_a_logit_compiled": metrics.num_bytes_accessed / logits}


@as_on_a_gpu
def count_sum_bytes(target: Target) -> float:
    """Return the bytes that the sum over the target's vocabulary moves at a position, by logit."""
    hidden_1TE = torch.zeros(1, CHUNK, target.model.config.hidden_size)
    with mock.patch("distill.loss.fused.keeps_small_tensors_near", return_value=False), _moved(VOCABULARY) as moved:
        normalise(target.model, hidden_1TE[0], chunk_size=CHUNK)
    return moved["bytes"] / (CHUNK * VOCABULARY)


@contextmanager
def _moved(width: int = 0) -> Iterator[Counter[str]]:
    """Count the bytes that launches read and write, of tensors no less wide than `width`."""
    counts: Counter[str] = Counter()

    def note(read: list[Tensor], written: list[Tensor]) -> None:
        counts["bytes"] += sum(each.nbytes for each in (*read, *written) if each.ndim and each.shape[-1] >= width)

    with _Seen(note):
        yield counts


def count_copied_weights(target: Target) -> int:
    """Return how many tensors but ids, positions and masks the graphs of a compiled round would copy before each run."""
    copied = []

    def see(graph: Any, inputs: Any, **options: Any) -> Any:
        given = [node for node in graph.graph.nodes if node.op == "placeholder" and "tensor_dict" in node.meta]
        moved = [node for node in given if not node.meta["tensor_dict"].get("_dynamo_static_input_type")]
        copied.append([node for node in moved if node.meta["example_value"].dtype not in (torch.int64, torch.bool)])
        return graph.forward

    with _own_forward(target.model), mock.patch.object(compiled_forward, "has_graphs", return_value=True):
        make_compiled(target.model, backend=see)
        _verify(target.model, nullcontext())
    torch._dynamo.reset()
    assert copied, "nothing was compiled"
    return sum(map(len, copied))


def count_expanded_bytes(target: Target) -> int:
    """Return the bytes that the lean forward, verifying a chain, writes of keys and values for each query's own head."""
    config, counts = target.model.config, Counter[str]()
    expanded = 2 * config.num_attention_heads * LONG * config.head_dim  # numbers, of both rows

    def note(read: list[Tensor], written: list[Tensor]) -> None:
        for each in written:
            if each.ndim > 3 and each.shape[-2] >= LONG - 1 and each.numel() >= expanded:
                counts["bytes"] += each.nbytes

    with _own_forward(target.model):
        make_lean(target.model)
        _verify(target.model, _Seen(note))
    return counts["bytes"]


@contextmanager
def _own_forward(model: PreTrainedModel) -> Iterator[None]:
    """Give the model back the forward that it had."""
    runner = runner_of(model)
    before = runner.forward
    try:
        yield
    finally:
        runner.forward = before


def _verify(model: PreTrainedModel, seen: AbstractContextManager[object]) -> None:
    """Verify two chains of five drafts at different places of a text that is longer than they are."""
    with torch.inference_mode():
        ids_BT = (torch.arange(2 * (LONG + 6)) % VOCABULARY).view(2, -1)
        cache = new_cache(model, LONG + 40)
        forward_rows(model, cache, ids_BT[:, :LONG], [0, 0])
        with seen:
            forward_rows(model, cache, ids_BT[:, LONG:], [LONG, LONG - 1])


def count_prefill_masks(kind: str, target: Target) -> int:
    """Return the bytes of tensors of all pairs of a prompt's tokens that a head makes when it reads one."""
    counts: Counter[str] = Counter()

    def note(read: list[Tensor], written: list[Tensor]) -> None:
        for each in written:
            if sum(size >= LONG - 2 for size in each.shape) > 1:
                counts["bytes"] += each.nbytes

    run = new_run(kind, target, prompt=tuple(place % VOCABULARY for place in range(LONG)))
    proposer = cast(Proposer, run.proposer)
    original = proposer.propose

    def propose(*args: Any, **kwargs: Any) -> Any:
        with _Seen(note):
            return original(*args, **kwargs)

    with torch.inference_mode(), mock.patch.object(proposer, "propose", propose):
        run.prefill()
        run.round()
    return counts["bytes"]


def count_waits(target: Target) -> int:
    """Return how often the host waits for a tensor's values in a round of EAGLE-3."""
    run, waits = run_under_way("eagle3", target, 0.0), _Waits()
    with torch.inference_mode(), waits:
        run.round()
    return waits.count


class _Waits(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in WAITING
        return func(*args, **(kwargs or {}))
