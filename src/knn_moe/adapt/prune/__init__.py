"""Make a memory smaller: keep the cases that other examples gain from most."""
