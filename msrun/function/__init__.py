"""``msrun.launch``: a function in ranks of its own, for notebooks and tests."""
