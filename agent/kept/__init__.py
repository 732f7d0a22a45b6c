"""The memory of ranks that were killed: what of it is whole, and a dump made of it."""
