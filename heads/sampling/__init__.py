"""Distributions over tokens, random numbers by counter, and trees of tokens; no model is run here.

Start with `probabilities`, the one function from logits to the distribution that a token is drawn from.
"""
