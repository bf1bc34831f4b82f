"""Conversations on disk: `conversations` for a row, `batches` for what a training step gets."""
