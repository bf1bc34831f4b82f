"""Tiny models of every family that transformers knows, through every stage of the project. Start with `runner.check_models`."""
