"""What was registered, one adapter for each kind, and the committed state of a rank."""
