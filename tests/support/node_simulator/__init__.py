"""Several nodes in a virtual clock, with all that can go wrong between them."""
