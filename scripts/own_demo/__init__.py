"""The demo on a model of one's own: its command lines and a plan of what they take, for `scripts/demo.py` to run."""
