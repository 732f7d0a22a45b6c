"""Tells programs outside of a job what happens to it; nothing here can hold the job up."""
