"""A model's MoE routers: find them, intercept their logits, differentiate through all experts."""
