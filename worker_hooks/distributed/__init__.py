"""Process groups: leave, abort and re-make them; DDP's order of reduction; stacks."""
