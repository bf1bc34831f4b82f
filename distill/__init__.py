"""What the target teaches: prompts, target-written answers, tokenised batches, hidden states, divergences."""
