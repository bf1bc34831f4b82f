"""`draftsmith serve-states`: the command, and what vLLM for CPUs needs to write states."""
