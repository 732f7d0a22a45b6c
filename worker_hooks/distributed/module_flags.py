"""Which parts of a module train: the flags ``training`` and ``requires_grad``.

A script may set them once and leave them so: it unfreezes a backbone in its third epoch, or has a
BatchNorm no longer learn. No ``state_dict`` has them. DDP reduces the gradients of those parameters
that wanted one when it was made, so before the script makes its DDP anew the flags have to be as
they were at that time, and behind it as they were at the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, getitem
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

TRAINING, TRAINED = "training", "requires_grad"
_IS_TRAINING, _IS_TRAINED = attrgetter(TRAINING), attrgetter(TRAINED)

NOT_REDUCED = (
    "{} parameters are trained that the present DDP does not reduce, as they were frozen when it "
    "was made: make it in the training function that run() enters"
)


class ReducedParameters:
    """Knows each parameter's newest DDP, and whether a gradient was wanted as it was made."""

    def __init__(self) -> None:
        """Nothing is known before :meth:`watch`."""
        self.count = 0
        """Of the DDPs that were made, and of the times that they were forgotten."""
        self._made: list[tuple[int, ref[DistributedDataParallel]]] = []  # with the count then
        self._wanted: Any = WeakTensorKeyDictionary()
        self._is_watching = False

    def watch(self) -> None:
        """Take note of the DDPs that are made from now on in this process."""
        if not self._is_watching:
            self._is_watching = True
            register_module_module_registration_hook(self._note)

    def _note(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if name == "module" and child is not None and isinstance(parent, DistributedDataParallel):
            self.count += 1
            living = (each for each in self._made if each[1]() is not None)
            self._made = [*living, (self.count, ref(parent))]
            for each in child.parameters():
                self._wanted[each] = each.requires_grad, ref(parent)

    def made_since(self, count: int) -> list[DistributedDataParallel]:
        """The DDPs that were made since :attr:`count` was this, and still exist."""
        made = (one() for at, one in self._made if at > count)
        return [*dict.fromkeys(one for one in made if one is not None)]  # one may get two modules

    def forget(self) -> None:
        """All DDPs are gone."""
        self.count += 1
        self._wanted = WeakTensorKeyDictionary()

    def wanted(self, parameter: nn.Parameter) -> bool | None:
        """``None``: there is no DDP around it, as far as is known."""
        found: tuple[bool, Any] | None = self._wanted.get(parameter)
        return None if found is None else found[0]

    def is_superseded(self, ddp: DistributedDataParallel) -> bool:
        """Whether a newer DDP reduces each of its parameters; it may still exist."""
        newest = [self._wanted.get(each) for each in ddp.parameters()]
        return all(each is not None and each[1]() is not ddp for each in newest)


REDUCED = ReducedParameters()
"""Of this process."""


class Flags:
    """The flags of a module and of all inside it as two values, in a mapping by their names.

    A value is a text of digits, one for each module, or for each parameter: 1 if the flag is set,
    and 2 more if a gradient was wanted when the parameter's DDP was made.
    """

    def __init__(self, module: nn.Module, is_in_loop: Callable[[], bool]) -> None:
        """``is_in_loop`` tells of an assignment whether the script has made its DDPs."""
        self._is_in_loop = is_in_loop
        self._modules = list(module.modules())
        held = [each._parameters for each in self._modules]  # noqa: SLF001  they may be replaced
        pairs = ((each, key) for each in held for key in [*each.keys()])  # some are no dict
        self._places = [(each, key) for each, key in pairs if each[key] is not None]
        self._held = [each for each, _ in self._places]
        self._keys = [key for _, key in self._places]
        self._seen: dict[str, tuple[Any, str]] = {}

    def get(self, key: str, default: Any) -> Any:
        """The text, the same object until it changes. ``default``: layers were removed."""
        try:
            now: tuple[Any, ...]
            if key == TRAINING:
                now = tuple(map(_IS_TRAINING, self._modules))
            else:
                now = REDUCED.count, *map(_IS_TRAINED, map(getitem, self._held, self._keys))
        except (KeyError, AttributeError):
            return default
        was, text = self._seen.get(key, (None, ""))
        if now != was:
            text = "".join(map(str, map(int, now) if key == TRAINING else map(_code, self._all())))
            self._seen[key] = now, text
        return text

    def _all(self) -> Iterator[nn.Parameter | None]:
        return (held[key] for held, key in self._places)

    def __setitem__(self, key: str, text: str) -> None:
        """Set the flags.

        Raises:
            ValueError: the module has other layers.
            RuntimeError: a DDP does not reduce what it has to.
        """
        try:
            things = self._modules if key == TRAINING else list(self._all())
        except KeyError as error:
            raise ValueError(f"the model has no parameter {error} any more") from None
        if len(text) != len(things):
            raise ValueError(f"the model had {len(text)} flags, and has {len(things)}")
        if key == TRAINING:
            for module, digit in zip(self._modules, text, strict=True):
                module.training = digit == "1"
            return
        pairs = [
            (one, int(code)) for one, code in zip(self._all(), text, strict=True) if one is not None
        ]
        lost = [one for one, code in pairs if code == _BOTH and REDUCED.wanted(one) is False]
        if self._is_in_loop() and lost:
            raise RuntimeError(NOT_REDUCED.format(len(lost)))
        for one, code in pairs:
            is_trained = bool(code & 1 if self._is_in_loop() else code & 2)
            if one.requires_grad != is_trained:
                one.requires_grad_(is_trained)

    def pop(self, key: str, default: Any) -> Any:
        """A flag stays."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        return iter((TRAINING, TRAINED))

    def __contains__(self, key: object) -> bool:
        return key in {TRAINING, TRAINED}


_BOTH = 3


def _code(parameter: nn.Parameter | None) -> int:
    if parameter is None:
        return 0
    wanted = REDUCED.wanted(parameter)
    now = parameter.requires_grad
    return int(now) + 2 * int(now if wanted is None else wanted)


class RecordedFlags:
    """The flags ``training`` and ``requires_grad`` of some modules as they were once.

    Also of changes that no commit has seen; what is saved of flags is :class:`Flags`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Record the flags of these modules and of all inside them."""
        inside = [each for module in modules for each in module.modules()]
        self._training = [(each, each.training) for each in inside]
        self._trained = [
            (one, one.requires_grad) for each in inside for one in each.parameters(recurse=False)
        ]

    def restore(self) -> None:
        """Restore the recorded flags, for example after an interrupted validation."""
        for module, is_training in self._training:
            module.training = is_training
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
