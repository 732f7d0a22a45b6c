"""What is prepared before a run: checks, processors, ranks, imports, forkserver."""
