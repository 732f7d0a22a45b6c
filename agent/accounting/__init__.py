"""What failures cost: incidents, and the share of the time that was training."""
