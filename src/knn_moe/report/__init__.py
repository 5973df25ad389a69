"""Web pages of evaluated runs and of explanations, each one file that needs no network."""
