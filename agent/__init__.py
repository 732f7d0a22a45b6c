"""The supervisor of one node: starts workers, watches them, decides, reports. Never imports torch."""
