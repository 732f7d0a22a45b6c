"""``msrun bugreport``: what others need to understand a fault, in one archive."""
