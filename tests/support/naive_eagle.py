"""EAGLE's layers written out for one element at a time, without masks, tensors of positions or transformers' modules."""

import math

import torch
from torch.nn import functional

from heads.modules.layers import layer_shape


class NaiveBody:
    """The layers of a head; remembers the keys and values of every element that was added."""

    def __init__(self, head, model):
        self.head, self.shape = head, layer_shape(model, head.settings.layer)
        self.model = model
        self.seen = [[] for _ in head.layers]  # by layer and element: keys and values, a vector a head

    def feature(self, taps):
        """Return the projection of one position's taps, a vector each."""
        if self.head.settings.norm_joined_taps:
            return self.head.fc.weight @ self.norm(self.head.input_norm.weight, torch.cat(list(taps)))
        if self.head.settings.norm_taps:
            taps = [self.norm(each.weight, tap) for each, tap in zip(self.head.fc_norm, taps, strict=True)]
        return self.head.fc.weight @ torch.cat(list(taps))

    def embedded(self, token):
        """Return the embedding of a token, the target's or the head's own."""
        if self.head.settings.own_embedding:
            return self.head.embed_tokens.weight[token]
        return self.model.get_input_embeddings()(torch.tensor(token))

    def add(self, embedded, state, position, sees):
        """Run an element through all layers, which sees these earlier ones and itself; return its number and last state."""
        for layer, seen in zip(self.head.layers, self.seen, strict=True):
            residual = read = state
            if layer.first:
                read = self.norm(layer.hidden_norm.weight, state)
                residual = read if layer.norm_before_residual else state
                read = torch.cat([self.norm(layer.input_layernorm.weight, embedded), read])
            else:
                read = self.norm(layer.input_layernorm.weight, state)
            attention = layer.self_attn
            keys = [self.rotated(key, position) for key in self.heads(attention.k_proj.weight @ read)]
            seen.append((keys, self.heads(attention.v_proj.weight @ read)))
            queries = [self.rotated(query, position) for query in self.heads(attention.q_proj.weight @ read)]
            mixed = [self.mixed(query, number, [seen[n] for n in [*sees, -1]]) for number, query in enumerate(queries)]
            state = residual + attention.o_proj.weight @ torch.cat(mixed)
            read = self.norm(layer.post_attention_layernorm.weight, state)
            gate, up, down = (each.weight for each in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))
            state = state + down @ (functional.silu(gate @ read) * (up @ read))
        return len(self.seen[0]) - 1, state

    def mixed(self, query, number, seen):
        """Return the values that one head mixes."""
        group = number * self.shape.num_key_value_heads // self.shape.num_heads
        scores = torch.stack([query @ keys[group] for keys, _ in seen]) / math.sqrt(self.shape.head_width)
        return sum(weight * values[group] for weight, (_, values) in zip(scores.softmax(0), seen, strict=True))

    def heads(self, projected):
        return list(projected.split(self.shape.head_width))

    def norm(self, weight, vector):
        return weight * vector / (vector.square().mean() + self.shape.norm_epsilon).sqrt()

    def rotated(self, vector, position):
        """Turn each pair (i, i + half) by its own angle."""
        half = len(vector) // 2
        position = position / (self.shape.rope_scaling or {"factor": 1}).get("factor")
        turned = vector.clone()
        for i in range(half):
            angle = position * self.shape.rope_theta ** (-i / half)
            turned[i] = vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle)
            turned[i + half] = vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle)
        return turned
