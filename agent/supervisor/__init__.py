"""The one loop of a node: events in, actions out."""
