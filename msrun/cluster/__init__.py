"""Nodes of a cluster on one machine, made of namespaces, which a drill can lose."""
