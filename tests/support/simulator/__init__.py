"""One node in a virtual clock, with everything that can go wrong, and the promises it checks."""
