"""A study of the method on pretrained models: whole test sets, every method, in resumable runs."""
