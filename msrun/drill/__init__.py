"""``msrun drill``: faults in a real training, and the proof that nothing was lost."""
