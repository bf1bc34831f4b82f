"""The layers of heads written out for one element at a time, without masks, tensors of positions or transformers' modules."""

import math

import torch
from torch.nn import functional

from heads.modules.layers import layer_shape


class NaiveBody:
    """The layers of a head; remembers the keys and values of every element that was added."""

    def __init__(self, head, model, layers=None, *, norm_heads=False):
        self.head, self.model, self.shape = head, model, layer_shape(model, head.settings.layer)
        self.layers, self.norm_heads = head.layers if layers is None else layers, norm_heads
        self.seen = [[] for _ in self.layers]  # by layer and element

    def feature(self, taps):
        """Return the projection of one position's taps, a vector each."""
        if self.head.settings.norm_joined_taps:
            return self.head.fc.weight @ self.norm(self.head.input_norm.weight, torch.cat(list(taps)))
        if self.head.settings.norm_taps:
            taps = [self.norm(each.weight, tap) for each, tap in zip(self.head.fc_norm, taps, strict=True)]
        return self.head.fc.weight @ torch.cat(list(taps))

    def embedded(self, token):
        """Return the embedding of a token, the target's or the head's own."""
        if getattr(self.head.settings, "own_embedding", None):
            return self.head.embed_tokens.weight[token]
        return self.model.get_input_embeddings()(torch.tensor(token))

    def add(self, embedded, state, position, sees):
        """Run an element through all layers, which sees these earlier ones and itself; return its number and last state."""
        for layer, seen in zip(self.layers, self.seen, strict=True):
            residual, read = state, self.norm(layer.input_layernorm.weight, state)
            if getattr(layer, "first", False):
                normed = self.norm(layer.hidden_norm.weight, state)
                residual = normed if layer.norm_before_residual else state
                read = torch.cat([self.norm(layer.input_layernorm.weight, embedded), normed])
            seen.append(self.keys_values(layer.self_attn, read, position))
            state = self.after(layer, residual, read, position, [seen[n] for n in [*sees, -1]])
        return len(self.seen[0]) - 1, state

    def keys_values(self, attention, read, position):
        """Return the keys and the values of one element, a vector a head."""
        keys = self.heads(attention.k_proj.weight @ read, attention.k_norm)
        return [self.rotated(key, position) for key in keys], self.heads(attention.v_proj.weight @ read)

    def after(self, layer, residual, read, position, seen):
        """Return the state after a layer of an element that sees these keys and values."""
        state = self.attended(layer.self_attn, residual, read, position, seen)
        read = self.norm(layer.post_attention_layernorm.weight, state)
        gate, up, down = (each.weight for each in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))
        return state + down @ (functional.silu(gate @ read) * (up @ read))

    def attended(self, attention, residual, read, position, seen):
        """Return the state after the attention of a layer alone."""
        mixed = []
        for number, query in enumerate(self.heads(attention.q_proj.weight @ read, attention.q_norm)):
            group = number * self.shape.num_key_value_heads // self.shape.num_heads
            turned = self.rotated(query, position)
            scores = torch.stack([turned @ keys[group] for keys, _ in seen]) / math.sqrt(self.shape.head_width)
            mixed.append(sum(weight * values[group] for weight, (_, values) in zip(scores.softmax(0), seen, strict=True)))
        return residual + attention.o_proj.weight @ torch.cat(mixed)

    def heads(self, projected, norm=None):
        vectors = projected.split(self.shape.head_width)
        return [self.norm(norm.weight, x) for x in vectors] if norm is not None and self.norm_heads else list(vectors)

    def norm(self, weight, vector):
        return weight * vector / (vector.square().mean() + self.shape.norm_epsilon).sqrt()

    def rotated(self, vector, position):
        """Turn each pair (i, i + half) by its own angle."""
        half = len(vector) // 2
        position = position / (self.shape.rope_scaling or {"factor": 1})["factor"]
        angles = position * self.shape.rope_theta ** (-torch.arange(half, dtype=vector.dtype) / half)
        x, y = vector[:half], vector[half:]
        return torch.cat([x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()])
