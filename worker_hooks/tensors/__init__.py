"""Tensors as bytes without a copy: shards, digests, nested state as JSON."""
