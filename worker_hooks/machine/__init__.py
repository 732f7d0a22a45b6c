"""What the kernel says of this host, and the interpreter of the threads of its processes."""
