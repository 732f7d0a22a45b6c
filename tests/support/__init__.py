"""What several tests share: jobs to start, stand-ins, histories, a simulated node."""
