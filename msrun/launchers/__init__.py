"""Launchers of others that hand their job over to msrun."""
