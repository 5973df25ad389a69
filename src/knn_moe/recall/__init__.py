"""One layer at work (§4.2): look up the nearest cases, weigh them, mix their logits in."""
