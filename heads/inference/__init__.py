"""Running any causal LM a few tokens at a time, on a cache whose rows have their own lengths and can be rolled back.

Enter at `forward_rows`, by which the decoder and the drafts run a model; `head_logits` turns its hidden states into logits.
"""

from heads.inference.causal_lm import forward_rows, head_logits, new_cache

__all__ = ["forward_rows", "head_logits", "new_cache"]
