"""What the kernel says of this host: its memory and its control groups."""
