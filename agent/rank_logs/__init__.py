"""Logs of ranks, for who asks for them on another node than theirs."""
