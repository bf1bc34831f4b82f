"""Publishing a draft on the Hub: checks, files, model card, upload. Start with `steps.publish`."""
