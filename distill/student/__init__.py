"""The draft LM before and during training: its initialisation, its vocabulary, and the rows that it writes itself."""
