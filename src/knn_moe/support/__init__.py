"""Helpers that know nothing of models: files, statistics, progress, registries."""
