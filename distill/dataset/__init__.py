"""Conversations on disk, and the batches made of them.

Start with `conversations` for a row and `batches` for what a training step gets.
"""
