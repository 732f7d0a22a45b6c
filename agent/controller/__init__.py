"""All decisions, pure: events in, actions with a reason out."""
