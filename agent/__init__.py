"""The supervisor of one node: starts workers, watches, decides, reports. Never imports torch."""
