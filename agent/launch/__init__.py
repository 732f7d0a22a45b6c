"""What is prepared before a run: checks, CPUs, ranks, imports, forkserver."""
