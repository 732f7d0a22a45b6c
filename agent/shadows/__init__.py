"""The shadows of ranks that know nothing of msrun: what belongs together and goes on."""
