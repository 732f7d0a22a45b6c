"""``msrun checkpoints``: list, show, verify, prune, merge."""
