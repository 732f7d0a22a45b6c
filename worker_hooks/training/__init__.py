"""``TrainState`` and ``run``: what a training script holds and enters."""
