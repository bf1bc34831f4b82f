"""The tasks of the training loop: distilling a draft LM (`draft`), and training a head (`head`)."""
