"""The distillation loss and training beside plain ways and TRL's.

Start with `benchmark`.
"""
