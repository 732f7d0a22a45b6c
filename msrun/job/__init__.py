"""A command line becomes a job: request, resume, dry run, detach."""
