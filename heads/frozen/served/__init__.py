"""A target that servers run: what of it is loaded here (`ends`), and its forward over texts (`forward`)."""
