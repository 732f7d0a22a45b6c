"""What the script keeps for itself beside the registered state: found, saved, put back, named."""
