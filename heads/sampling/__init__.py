"""Probabilities of tokens, counter-based random numbers, sampling without replacement, and token trees; no model is run here.

Enter at `token_probabilities`, the one function from logits to the distribution that a token is drawn from.
"""

from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, token_probabilities
from heads.sampling.token_tree import Tree

__all__ = ["CounterRNG", "Role", "Tree", "draw", "token_probabilities"]
