"""Statistics over prompts: intervals, tests, power, paired comparison.

Nothing here imports torch.
"""
