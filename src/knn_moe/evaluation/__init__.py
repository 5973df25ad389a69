"""Does it help on my benchmark: questions put to a model, answers written down and compared."""
