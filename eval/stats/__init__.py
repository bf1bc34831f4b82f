"""Statistics over prompts: intervals, tests, power, paired changes. Imports no torch."""
