"""What every head family has to show, whatever it is made of. A family's own tests call these with a module of its own.

Targets are tiny random models of the four families of transformers that heads must work on, in float64, so that equality is a
fair demand. B batch, T positions, G drafted tokens, W draft vocabulary, V target vocabulary.
"""

from functools import cache, partial

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, Qwen3Config

from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.heads import (
    DFlash2Settings,
    DFlashSettings,
    DominoSettings,
    DSparkSettings,
    Eagle3Settings,
    EarlyExitSettings,
    HydraSettings,
    LayerSettings,
    MedusaSettings,
    MtpSettings,
    PEagleSettings,
    XPressSettings,
)
from configs.schema.training import LossConfig
from distill.loss.objectives import HeadObjective
from eval.decoder.decode import generate
from heads.artifact import load_draft
from heads.device import row_ints
from heads.families.registry import FAMILIES, serve
from heads.frozen.hidden_states import forward_states, read_states
from heads.inference.causal_lm import new_cache
from heads.modules.interface import NO_DOCUMENT, Batch
from heads.proposers.protocol import RoundInputs, TargetReader
from heads.sampling.draws import CounterRNG
from heads.vocabulary import DraftVocabulary
from tests.support.tiny_heads import save_artifact

VOCAB_SIZE = 64
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "gemma3": Gemma3TextConfig(
        **GROUPED,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=30.0,
        pad_token_id=None,
    ),
    "gpt_neox": GPTNeoXConfig(**SMALL),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OWN_HEADS = {"own_output_heads": True, "train_head": True}
TAPS = {"taps": [1, 2, 4], "num_depths": 3}
NO_NORMS = {"norm_taps": False, "norm_feedback": False}
OPTIONS = {"norm_taps": True, "norm_before_residual": True}
BLOCK = {"taps": [1, 3], "num_layers": 2, "block_size": 5, "mask_token_id": 2}
OWN_LAYER = LayerSettings(
    mlp_width=20,
    num_heads=8,
    num_key_value_heads=2,
    head_width=6,
    norm_epsilon=1e-3,
    rope_theta=500.0,
    rope_scaling={"rope_type": "linear", "factor": 2.0},
)
# By family, the plainest one without a comma: what its tests build.
SETTINGS = {
    "medusa": MedusaSettings(kind="medusa", num_depths=3, num_layers=2),
    "medusa, own output heads": MedusaSettings(kind="medusa", num_depths=3, **OWN_HEADS),
    "hydra": HydraSettings(kind="hydra", num_depths=3, num_layers=2),
    "hydra, prefix": HydraSettings(kind="hydra", num_depths=3, prefix_attention=True),
    "hydra, window": HydraSettings(kind="hydra", num_depths=3, prefix_attention=True, norm_embeddings=False, window=3),
    "eagle3": Eagle3Settings(kind="eagle3", **TAPS),
    "eagle3, window": Eagle3Settings(kind="eagle3", **TAPS, num_layers=2, window=4, qk_norm=True),
    "eagle3, all options": Eagle3Settings(kind="eagle3", taps=[0, 3], num_depths=3, num_layers=2, **OPTIONS),
    "eagle3, own parts": Eagle3Settings(
        kind="eagle3", **TAPS, **NO_NORMS, norm_joined_taps=True, own_embedding=True, layer=OWN_LAYER
    ),
    "peagle": PEagleSettings(kind="peagle", **TAPS, num_layers=2, mask_token_id=2),
    "peagle, all options": PEagleSettings(kind="peagle", **TAPS | {"num_depths": 4}, num_layers=3, mask_token_id=2, **OPTIONS),
    "dflash": DFlashSettings(kind="dflash", **BLOCK),
    "dspark": DSparkSettings(kind="dspark", **BLOCK, markov_rank=6),
    "dspark, from the anchor": DSparkSettings(kind="dspark", **BLOCK, markov_rank=6, sample_from_anchor=True),
    "dflash2": DFlash2Settings(kind="dflash2", **BLOCK, conv_group_size=8, selector_rank=6, selector_top_k=5),
    "xpress": XPressSettings(kind="xpress", **BLOCK, xpress_rank=6),
    "xpress, from the anchor": XPressSettings(kind="xpress", **BLOCK, xpress_rank=6, sample_from_anchor=True),
    "domino": DominoSettings(kind="domino", **BLOCK, gru_hidden_dim=10, emb_dim=6),
    "mtp": MtpSettings(kind="mtp", num_depths=3),
    "early_exit": EarlyExitSettings(kind="early_exit", taps=[2], num_depths=3),
}
SOME_TOKENS = DraftVocabulary(token_ids_W=torch.arange(1, VOCAB_SIZE, 2), target_vocab_size=VOCAB_SIZE)
PROMPTS = [[7, 12, 3, 44, 9], [20, 9, 9, 31, 5, 6, 2, 50, 17], [40, 11, 12]]
# By round: how many drafts each row keeps, and which rows then stay in the batch.
ROUNDS = [([0, 2, 3], [0, 1, 2]), ([3, 0, 1], [0, 1, 2]), ([1, 1, 0], [2, 0]), ([2, 0], [0, 1]), ([0, 3], [1]), ([1], [0])]


@cache
def tiny_target(name):
    """Return a random target of a family of transformers; only for reading."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float64).eval().requires_grad_(False)
    for parameter in model.parameters():  # the default initialisation is so flat that every argmax would be a near tie
        parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    model.get_output_embeddings().weight.mul_(4.0)
    return model


def build(settings, model, vocabulary=None, *, stir=0.2):
    """Return a head in the target's dtype, still trainable, with noise on every parameter so that none is 0 or 1 by design."""
    torch.manual_seed(5)
    head = FAMILIES[settings.kind].build(settings, model, vocabulary).eval()
    with torch.no_grad():
        for parameter in head.parameters():  # before the cast: what was trained is float32, and is loaded as that
            parameter.add_(torch.randn_like(parameter) * stir)
    return head.to(model.dtype)


def inputs_of(model, rows, taps, answer_start=1):
    """Return rows of token ids as a right-padded batch, labels from `answer_start` on, and the target's states over it."""
    T = max(map(len, rows))
    ids_BT = torch.tensor([row + [0] * (T - len(row)) for row in rows])
    places_BT = torch.arange(T).expand(len(rows), T)
    valid_BT = places_BT < torch.tensor([[len(row)] for row in rows])
    batch = Batch(
        input_ids_BT=ids_BT,
        loss_mask_BT=valid_BT & (places_BT >= answer_start),
        position_ids_BT=places_BT,
        document_ids_BT=torch.where(valid_BT, 0, NO_DOCUMENT),
        conversations_BC=torch.arange(len(rows)).unsqueeze(1),
    )
    return batch, read_states(model, ids_BT, taps)


def packed(batch, states, lengths, padding=2):
    """Return the rows of a batch as documents of one row, with some padding after them."""

    def joined(values_BT):
        parts = [values_BT[row, :length] for row, length in enumerate(lengths)]
        return torch.cat([*parts, values_BT[0, :1].expand(padding, *values_BT.shape[2:])]).unsqueeze(0)

    counts = torch.tensor([*lengths, padding])
    documents_BT = torch.arange(len(counts)).repeat_interleave(counts).unsqueeze(0)
    is_padding_BT = documents_BT == len(lengths)
    packed_batch = Batch(
        input_ids_BT=joined(batch.input_ids_BT),
        loss_mask_BT=joined(batch.loss_mask_BT) & ~is_padding_BT,
        position_ids_BT=joined(batch.position_ids_BT),
        document_ids_BT=documents_BT.masked_fill(is_padding_BT, NO_DOCUMENT),
        conversations_BC=torch.arange(len(lengths)).unsqueeze(0),
    )
    return packed_batch, states.map(joined)


def hidden_at(depths, depth, place):
    """Return the state `[1, D]` that a head's logits at a depth and a flat place b * T + j are made of."""
    (row,) = (depths[depth].origins_N == place).nonzero().squeeze(1).tolist()
    return depths[depth].hidden_ND[row : row + 1]


def trained_logits(head, model, tokens, drafts):
    """Return the training forward's logits `[B, G, W]` at each row's last read position, its drafts being the text."""
    rows = [[*row, *drafted] for row, drafted in zip(tokens, drafts, strict=True)]
    batch, states = inputs_of(model, rows, head.taps)
    depths = head(batch, states)
    T = batch.input_ids_BT.shape[1]
    places = [number * T + len(row) - 2 for number, row in enumerate(tokens)]
    by_depth = [
        torch.cat([depths[depth].logits_of(hidden_at(depths, depth, place)) for place in places])
        for depth in range(len(drafts[0]))
    ]
    return torch.stack(by_depth, 1)


class Rounds:
    """A proposer's rounds by hand: what the decoder does between proposals, with the target's states as it reads them."""

    def __init__(self, proposer, model, capacity=64):
        self.proposer, self.cache, self.capacity = proposer, new_cache(model, capacity), capacity
        self.read = proposer.forward_states if isinstance(proposer, TargetReader) else partial(forward_states, model)

    def start(self, tokens):
        """Read the prompts, all but the last token of each row."""
        prompts = [row[:-1] for row in tokens]
        self.proposer.start(tokens, self.capacity, self.states(prompts, [0] * len(tokens)))

    def commit(self, tokens, drafts, num_accepted):
        """Read each row's last token and its drafts, and say how many of these stay."""
        rows = [[row[-1], *drafted] for row, drafted in zip(tokens, drafts, strict=True)]
        self.proposer.commit(num_accepted, self.states(rows, [len(row) - 1 for row in tokens]))

    def states(self, rows, starts):
        longest = max(map(len, rows))
        ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return self.read(self.cache, ids_BT, row_ints(starts, ids_BT.device), self.proposer.taps)


@torch.no_grad()
def assert_drafts_as_trained(head, model, num_tokens=3, tolerance=1e-6):
    """The logits drafted from are those of the training forward, in every round of ragged rows that also leave."""
    proposer = FAMILIES[head.settings.kind].propose(head, model.device)
    rounds, generator, tokens = Rounds(proposer, model), torch.Generator().manual_seed(2), [list(prompt) for prompt in PROMPTS]
    _extend(tokens, [[]] * len(tokens), generator)
    rounds.start(tokens)
    rng = CounterRNG(0, range(len(tokens)), model.device)
    for num_accepted, staying in ROUNDS:
        proposal = proposer.propose(RoundInputs.of(tokens, rng), num_tokens, SamplingConfig(), keep_logits=True)
        drafts = proposal.tokens_BG.tolist()
        assert proposal.num_drafted.host == [num_tokens] * len(tokens)
        drafted_BGW = proposal.logits_BGV if head.token_ids_W is None else proposal.logits_BGV[..., head.token_ids_W]
        expected_BGW = trained_logits(head, model, tokens, drafts)
        torch.testing.assert_close(drafted_BGW, expected_BGW, atol=tolerance, rtol=tolerance)
        rounds.commit(tokens, drafts, num_accepted)
        _extend(tokens, [row[:kept] for row, kept in zip(drafts, num_accepted, strict=True)], generator)
        tokens = [tokens[row] for row in staying]
        for each in (rounds.cache, rng, proposer):
            each.keep_rows(staying)


def _extend(tokens, accepted, generator):
    """Append each row's accepted drafts and one token of the target's own."""
    for row, drafts in zip(tokens, accepted, strict=True):
        row += [*drafts, int(torch.randint(1, VOCAB_SIZE, (1,), generator=generator))]


def assert_greedy_output_is_plain(head, target, num_tokens=3):
    """Decoding with the head gives what decoding without one gives, alone and in a batch; sampling gives answers."""
    proposer = FAMILIES[head.settings.kind].propose(serve(head, target.model), target.device)
    plain = generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=12, batch_size=3))
    for batch_size in (1, 3):
        config = DecodeConfig(num_speculative_tokens=num_tokens, max_new_tokens=12, batch_size=batch_size)
        assert generate(target, PROMPTS, config, proposer) == plain
    for verification in ("token", "block"):
        sampled = config.model_copy(update={"temperature": 1.0, "verification": verification})
        assert [len(answer) for answer in generate(target, PROMPTS, sampled, proposer)] == [12] * len(PROMPTS)


@torch.no_grad()
def assert_documents_are_apart(head, model, tolerance=1e-5):
    """Two conversations in one row give what they give in a row each, where the target's states are the same."""
    rows = [PROMPTS[1] + PROMPTS[0], PROMPTS[0] + PROMPTS[2]]
    apart = inputs_of(model, rows, head.taps)
    together = packed(*apart, [len(row) for row in rows])
    T = apart[0].input_ids_BT.shape[1]
    for depths, packed_depths in zip(head(*apart), head(*together), strict=True):
        in_row_N = depths.origins_N % T + (depths.origins_N >= T) * len(rows[0])
        torch.testing.assert_close(packed_depths.origins_N, in_row_N)
        torch.testing.assert_close(
            packed_depths.target_places_N - packed_depths.origins_N, depths.target_places_N - depths.origins_N
        )
        torch.testing.assert_close(packed_depths.hidden_ND, depths.hidden_ND, atol=tolerance, rtol=tolerance)


def assert_gradients_reach_everything(head, target):
    """Every trainable parameter of the head gets a gradient that is not 0; the target gets none."""
    batch, states = inputs_of(target.model, PROMPTS, head.taps)
    objective = HeadObjective(head.train(), target, LossConfig())
    objective(batch, states).loss.backward()
    named = dict(objective.named_parameters())
    assert set(named.values()).isdisjoint(target.model.parameters())
    without = [name for name, value in named.items() if value.grad is None or not bool(value.grad.any())]
    assert without == []
    assert all(parameter.grad is None for parameter in target.model.parameters())


def assert_comes_back(folder, head, target, vocabulary=None, vocab_size=VOCAB_SIZE):
    """A head written as an artifact and loaded has the same weights and drafts the same tokens."""
    save_artifact(folder, head, target.identity.to_dict(), vocabulary, vocab_size=vocab_size)
    loaded = load_draft(folder, target.identity, target.model)
    assert loaded.num_parameters == sum(parameter.numel() for parameter in head.parameters())
    proposer = FAMILIES[head.settings.kind].propose(serve(head, target.model), target.device)
    for drafted, again in zip(first_drafts(target, proposer), first_drafts(target, loaded.proposer), strict=True):
        torch.testing.assert_close(drafted, again, rtol=0, atol=0)


@torch.no_grad()
def first_drafts(target, proposer):
    """Return the tokens and logits of the first proposal."""
    tokens, rounds = [[*prompt, 1] for prompt in PROMPTS], Rounds(proposer, target.model)
    rounds.start(tokens)
    rng = CounterRNG(0, range(len(tokens)), target.device)
    proposal = proposer.propose(RoundInputs.of(tokens, rng), 3, SamplingConfig(), keep_logits=True)
    return proposal.tokens_BG, proposal.logits_BGV


def depths_as_written_out(head, model, written_out):
    """Return a batch of the prompts and the head's depths on it, whose states are those of `written_out`.

    `written_out(head, model, taps, prompt)` gives, by depth, the states `[origins, D]` of one prompt, computed naively.
    """
    batch, states = inputs_of(model, PROMPTS, head.taps)
    T = batch.input_ids_BT.shape[1]
    depths = head(batch, states)
    for row, prompt in enumerate(PROMPTS):
        expected = written_out(head, model, [tap_BTE[row] for tap_BTE in states.taps_ABTE], prompt)
        for depth, of_depth in enumerate(expected):
            for origin in range(len(prompt) - 2 - depth):
                found_1D = hidden_at(depths, depth, row * T + origin)
                torch.testing.assert_close(found_1D[0], of_depth[origin], atol=1e-5, rtol=1e-5)
    return batch, depths


def blocks_as_written_out(head, model, naive_block):
    """Compare the final states of all slots that have labels with a block computed naively.

    `naive_block(head, model, taps_CF, pending, anchor)` gives the final state of each slot. Yields, for each, the depth, what
    its logits are made of `[1, D]`, the state, and the token before it.
    """
    batch, states = inputs_of(model, PROMPTS, head.taps)
    T, depths, seen = batch.input_ids_BT.shape[1], head(batch, states), 0
    assert all(torch.equal(depth.target_places_N, depth.origins_N + 1 + number) for number, depth in enumerate(depths))
    for row, prompt in enumerate(PROMPTS):
        for anchor in range(1, len(prompt) - 1):
            expected = naive_block(head, model, states.joined_BTF[row, :anchor], prompt[anchor], anchor)
            for number in range(min(head.settings.block_size, len(prompt) - anchor) - 1):
                found_1D = hidden_at(depths, number, row * T + anchor - 1)
                torch.testing.assert_close(found_1D[0, :32], expected[number + 1], atol=1e-5, rtol=1e-5)
                seen += 1
                yield depths[number], found_1D, expected[number + 1], prompt[anchor + number]
    assert seen == sum(len(depth.origins_N) for depth in depths)
