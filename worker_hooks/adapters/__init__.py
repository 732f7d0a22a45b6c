"""Other frameworks' names on ``TrainState``."""
