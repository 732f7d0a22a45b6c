"""Who comes while a job of several nodes runs, and what becomes of the places of lost ones."""
