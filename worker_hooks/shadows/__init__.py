"""Sleeping copies of a rank that knows nothing of msrun, and what wakes them."""
