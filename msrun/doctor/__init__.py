"""``msrun doctor``: is this machine, and a folder, fit for a job? Every look has a deadline."""
