"""Servers that hand out a target's hidden states: their command line, and what vLLM for CPUs needs to write them."""
