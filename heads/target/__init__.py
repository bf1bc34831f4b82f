"""The frozen target: loading it, its hidden states, its identity, where its parts lie.

Start with `loading.load_target`.
"""
