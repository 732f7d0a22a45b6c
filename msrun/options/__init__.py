"""The table of options; command line, YAML and environment become settings."""
