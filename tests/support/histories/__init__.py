"""Histories as rows: what happened, and what the controller must decide."""
