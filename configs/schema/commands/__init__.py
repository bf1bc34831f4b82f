"""The configs of the commands around data, training and evaluation: plans, sweeps, benchmarks, runs, releases."""
