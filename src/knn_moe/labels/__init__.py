"""Label prompts that have no completions with the model's own answers."""
