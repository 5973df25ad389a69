"""An OpenAI-compatible server of a model and its memories."""
