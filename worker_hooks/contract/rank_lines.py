"""Lines that many ranks print at the same moment, and that the console shows once or not at all."""

TRIGGERED = "Graceful exit is triggered, stop training."
"""Once, with the ranks that print it: MindSpore's text."""

LOST_A_PEER = "lost its connection to a peer, and repeats its step"
"""Not at all: msrun itself says who died, and that the others keep running."""

STACK = "stack: "
"""Not at all: in front of each line of a thread's stack, which the rank's log keeps."""
