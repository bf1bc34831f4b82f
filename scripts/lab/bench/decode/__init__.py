"""The decode benchmark: ours beside transformers' generation. Start with `benchmark.compare_decoding`."""
