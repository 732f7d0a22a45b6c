"""``TrainState`` and ``run``: what a training script makes and calls."""
