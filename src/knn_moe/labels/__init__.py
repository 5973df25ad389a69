"""Label prompts that have no completions, by the model's own answers or by a judge."""
