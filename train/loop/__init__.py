"""The one training loop, its checkpoints, and how weights are shared over processes.

Start with `loop.train`.
"""
