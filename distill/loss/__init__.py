"""Divergences between target and draft, and the objectives of training.

Read `divergences`, `target_logits`, `gradients`, `chunked` in this order: together they are the loss.
"""
