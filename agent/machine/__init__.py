"""What this host is: processors, devices, cgroup, memory, processes."""
