"""Probabilities of tokens, counter-based random numbers, sampling without replacement, and token trees; no model is run here.

Enter at `token_probabilities`, the one function from logits to the distribution that a token is drawn from.
"""
