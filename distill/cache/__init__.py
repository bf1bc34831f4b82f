"""The target's outputs kept on disk, so that training need not run it.

Start with `writer.make_cache` and `reader.TargetCache`.
"""
