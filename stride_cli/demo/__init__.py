"""The embedded corpus, its prompts, and the model that was trained on it."""
