"""Tables, progress bars, and streams that never block."""
