"""Many nodes: the control link between their msrun processes, who joins, and what travels."""
