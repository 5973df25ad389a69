"""Show which cases a memory recalled for each token, and what that changed."""
