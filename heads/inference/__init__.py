"""Any causal LM run incrementally: a key-value cache rolled back by position, and faster forwards.

Start with `kv_cache.forward_rows`, the one way the decoder and the drafts run a model.
"""
