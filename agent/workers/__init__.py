"""Processes of the job: start, wait, signal; clients of forkserver and store; replacements."""
