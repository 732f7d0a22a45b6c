"""Lines of ranks that the agent knows: the console shows most of them once or not at all."""

TRIGGERED = "Graceful exit is triggered, stop training."
"""Once, with the ranks that print it: MindSpore's text."""

LOST_A_PEER = "lost its connection to a peer, and repeats its step"
"""Not at all: msrun itself says who died, and that the others keep running."""

ENDS_ITSELF = "this rank ends itself: "
"""The last line of a rank that kills itself because it cannot continue, in front of the reason."""

STACK = "stack: "
"""Not at all: in front of each line of a thread's stack, which the rank's log keeps."""
