"""The data loader's position: skip, replay from memory, the randomness of its workers."""
