"""Prompts, and the target's answers to them: the data that a draft is trained on. Start with `make_dataset`."""
