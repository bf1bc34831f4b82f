"""speculators' own EAGLE-3 module, given our weights, hidden states and labels: what our training of it is measured against.

Written for speculators 0.9.0, which is no dependency of this project: `INSTALL` is enough, and leaves vLLM and torchvision out.
It runs at its best on the machine at hand: on a CPU with PyTorch's fused attention and its eager losses (its other attention
has no backward there, its other losses need Triton); noise on the taps, which its data loader adds, is in neither side.

B batch, T positions, S positions of all conversations in one row, A taps, E width of the target, V target vocabulary,
W draft vocabulary, K depths.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from configs.runtime.errors import first_line
from configs.schema.heads import Eagle3Settings
from heads.device import has_graphs
from heads.families.eagle3 import Eagle3
from heads.frozen.hidden_states import final_norm
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_rows
from heads.modules.interface import Batch
from heads.modules.layer_shape import shape_like
from heads.vocabulary import DraftVocabulary

INSTALL = "pip install --no-deps speculators==0.9.0 hs-connectors loguru pydantic-settings openai jiter sniffio"
BORROWED = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "d2t", "t2d"}


def why_not_installed() -> str | None:
    """Return why speculators' EAGLE-3 cannot be imported, in a sentence; None where it can."""
    try:
        importlib.import_module("speculators.models.eagle3")
    except ImportError as error:
        return first_line(error)
    return None


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """A batch as speculators trains on it: all conversations in one row, each without its first token.

    Its place i of a conversation holds token x_{i+1}, the target's states after x_i, and the target's last state after
    x_{i+1}, by which x_{i+2} is judged; the loss mask therefore marks x_{i+2}. (Its own loader marks x_{i+1}, so that it also
    learns a token behind the answer's last one. Which places are marked does not change its work.)
    """

    hidden_states_1SF: Tensor  # F = A * E
    input_ids_1S: Tensor
    document_ids_1S: Tensor
    loss_mask_1S: Tensor
    position_ids_1S: Tensor
    last_states_1SE: Tensor  # before the final norm

    @property
    def arguments(self) -> dict[str, Tensor]:
        """What the module's forward is called with."""
        return {
            "hidden_states": self.hidden_states_1SF,
            "input_ids": self.input_ids_1S,
            "document_ids": self.document_ids_1S,
            "loss_mask": self.loss_mask_1S,
            "position_ids": self.position_ids_1S,
            "verifier_last_hidden_states": self.last_states_1SE,
        }


def pack(batch: Batch, taps_BTF: Tensor, last_BTE: Tensor) -> PackedRow:
    """Return a batch of one conversation a row, padded, as a packed row.

    Args:
        batch: its labels begin at token K + 1 or later in each row; K depths reach from one conversation into the next here.
        taps_BTF: the tapped states side by side.
        last_BTE: the residual stream after the last block, before the final norm.
    """
    lengths = (batch.document_ids_BT >= 0).sum(1).tolist()
    parts: list[list[Tensor]] = []
    for row, length in enumerate(lengths):
        labels_T = batch.loss_mask_BT[row, 2:length]
        parts.append(
            [
                taps_BTF[row, : length - 1],
                batch.input_ids_BT[row, 1:length],
                torch.full((length - 1,), row, device=labels_T.device),
                torch.cat([labels_T, labels_T.new_zeros(1)]),
                batch.position_ids_BT[row, 1:length],
                last_BTE[row, 1:length],
            ]
        )
    taps, ids, documents, mask, positions, last = (torch.cat(column).unsqueeze(0) for column in zip(*parts, strict=True))
    return PackedRow(
        hidden_states_1SF=taps.float(),
        input_ids_1S=ids,
        document_ids_1S=documents,
        loss_mask_1S=mask,
        position_ids_1S=positions,
        last_states_1SE=last.float(),
    )


class Eagle3Peer(nn.Module):
    """speculators' `Eagle3DraftModel` with the weights of one of our heads, its loss the forward KL.

    Args:
        head: read once; its output head must be the target's rows, untrained, as theirs is.
        target: whose embedding, head and final norm it gets copies of.
    """

    def __init__(self, head: Eagle3, target: Target) -> None:
        super().__init__()
        self.settings: Eagle3Settings = head.settings
        package = importlib.import_module("speculators.models.eagle3")
        losses = importlib.import_module("speculators.losses")
        vocabulary = head.lm_head.vocabulary
        self.model: Any = package.Eagle3DraftModel(self._config(package, head, target, vocabulary)).to(target.device)
        self.model.load_vocab_mappings(*_mappings(vocabulary))
        missing, unexpected = self.model.load_state_dict(_weights(head, target), strict=False)
        if unexpected or set(missing) - BORROWED:
            raise RuntimeError(f"speculators' module has other weights than ours: {[*missing, *unexpected]}")
        self.loss_config = losses.resolve_loss_config("kl_div", "fused" if has_graphs(target.device) else "eager")

    def forward(self, row: PackedRow) -> Tensor:
        """Return the loss: over depths the sum, weighed by `depth_decay`, of the mean over labels of the KL, in nats."""
        _, loss, _ = self.model(
            **row.arguments,
            ttt_steps=self.settings.num_depths,
            ttt_step_loss_decay=self.settings.depth_decay,
            loss_config=self.loss_config,
        )
        return cast(Tensor, loss)

    def _config(self, package: Any, head: Eagle3, target: Target, vocabulary: DraftVocabulary | None) -> Any:
        """Return the config of their module that is built as ours."""
        configs = importlib.import_module("speculators.config")
        greedy = importlib.import_module("speculators.proposals.greedy").GreedyTokenProposalConfig
        settings = head.settings
        layer = shape_like(target.model).llama_config()
        layer.vocab_size, layer.num_hidden_layers = target.vocab_size, settings.num_layers
        layer._attn_implementation = "simple_flex_attention" if has_graphs(target.device) else "sdpa"
        return package.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=target.vocab_size if vocabulary is None else len(vocabulary),
            norm_before_residual=settings.norm_before_residual,
            fc_norm=settings.norm_taps,
            norm_output=settings.norm_feedback,
            eagle_aux_hidden_state_layer_ids=list(head.taps),
            speculators_config=configs.SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[greedy(speculative_tokens=settings.num_depths)],
                default_proposal_method="greedy",
                verifier=configs.VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )


def _mappings(vocabulary: DraftVocabulary | None) -> tuple[Tensor | None, Tensor | None]:
    """Return their `t2d` and `d2t`, which holds what to add to a draft id."""
    if vocabulary is None:
        return None, None
    return vocabulary.is_drafted_V, vocabulary.token_ids_W.cpu() - torch.arange(len(vocabulary))


def _weights(head: Eagle3, target: Target) -> dict[str, Tensor]:
    """Return our trained weights and the target's frozen ones under their names."""
    everything_V = torch.arange(target.vocab_size, device=target.device)
    ids_W = everything_V if head.token_ids_W is None else head.token_ids_W
    rows_WE = head_rows(target.model, ids_W)[0].detach().float()
    trained = {name: value for name, value in head.state_dict().items() if not name.startswith("lm_head.")}
    return trained | {
        "embed_tokens.weight": cast(Tensor, target.model.get_input_embeddings().weight).detach().float(),
        "lm_head.weight": rows_WE,
        "verifier_lm_head.weight": rows_WE,
        "verifier_norm.weight": cast(Tensor, final_norm(target.model).weight).detach().float(),
    }
