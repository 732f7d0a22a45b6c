"""The seat of a job's controller in a store: whose it is where half of the nodes is silent."""
