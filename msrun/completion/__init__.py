"""``msrun completion``: what may follow on a command line, for bash, zsh and fish."""
