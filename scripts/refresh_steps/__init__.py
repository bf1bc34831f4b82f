"""The steps of `scripts/refresh.py`: the log read and cleaned, the data mixed, the commands run, the results put together."""
