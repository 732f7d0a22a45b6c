"""What a script has set on its modules beside their values: training or not, trained or not."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Modes:
    """As of one moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Note them, of these modules and all that are in them."""
        inside = [each for module in modules for each in module.modules()]
        self._training = [(each, each.training) for each in inside]
        self._trained = [
            (one, one.requires_grad) for each in inside for one in each.parameters(recurse=False)
        ]

    def restore(self) -> None:
        """Be as then: a validation, say, was interrupted."""
        for module, is_training in self._training:
            module.training = is_training
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
