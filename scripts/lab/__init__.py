"""The laboratory: benchmarks, checks of engines and models, and their settings and recipes. The product imports none of it."""
