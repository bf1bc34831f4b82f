"""The target's outputs kept on disk, so that training need not run it: `writer.make_cache`, `reader.TargetCache`."""
