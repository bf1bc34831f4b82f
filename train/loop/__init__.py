"""The one training loop, its checkpoints and engines; enter at `loop.train`."""
