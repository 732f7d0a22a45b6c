"""The layers of options: defaults < YAML < environment < flags, each value with its source.

Values stay text until they are read, so one set of rules checks every layer, and an error can say
where a wrong value came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agent.spec.job_spec import UsageError
from msrun.options.table import BY_DEST, OPTIONS, Kind, Option

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_SHOWN_LENGTH = 60


class Setting(NamedTuple):
    """A value as text, the name under which it was given, and the file if it came from one."""

    text: str
    name: str
    file: str = ""
    flag: bool = False  # typed without a value

    @property
    def shown(self) -> str:
        """How an error shows it: ``--role=x``, ``PET_ROLE=x``, ``role=x in job.yaml``."""
        text = self.text
        if len(text) > _SHOWN_LENGTH:
            text = text[:_SHOWN_LENGTH] + "..."
        where = f" in {self.file}" if self.file else ""
        return f"{self.name}{where}" if self.flag else f"{self.name}={text}{where}"


class Settings(NamedTuple):
    """The values given in any layer, by dest; all others are defaults."""

    given: Mapping[str, Setting]

    def of(self, dest: str) -> Setting:
        """The setting, or the option's default."""
        option = BY_DEST[dest]
        return self.given.get(dest) or Setting(option.default, option.long)

    def text(self, dest: str) -> str:
        """A text; one of the choices if the table lists some. Empty: there is none."""
        option, setting = BY_DEST[dest], self.of(dest)
        if setting.text and option.choices and setting.text not in option.choices:
            raise UsageError(f"{setting.shown}: choose from {', '.join(option.choices)}")
        return setting.text

    def integer(self, dest: str) -> int | None:
        """A whole number within the table's bounds; ``None``: neither given nor a default."""
        setting = self.of(dest)
        if not setting.text:
            return None
        return bounded(setting, BY_DEST[dest])

    def number(self, dest: str) -> float:
        """A number of any sign; there must be a default."""
        setting = self.of(dest)
        try:
            return float(setting.text)
        except ValueError:
            raise UsageError(f"{setting.shown} is not a number") from None

    def seconds(self, dest: str) -> float | None:
        """A time above 0; ``None``: none is given."""
        setting = self.of(dest)
        if not setting.text:
            return None
        value = self.number(dest)
        if not 0 < value < float("inf"):
            raise UsageError(f"{setting.shown} must be above 0")
        return value

    def boolean(self, dest: str) -> bool:
        """A flag or a True/False option, in any case; also 1/0, yes/no, on/off."""
        return truth(self.of(dest))


def bounded(setting: Setting, option: Option) -> int:
    """A setting's whole number, checked against the option's bounds."""
    try:
        value = int(setting.text)
    except ValueError:
        raise UsageError(f"{setting.shown} is not a whole number") from None
    if option.low is not None and value < option.low:
        raise UsageError(f"{setting.shown} must be at least {option.low}")
    if option.high is not None and value > option.high:
        raise UsageError(f"{setting.shown} must be at most {option.high}")
    return value


def truth(setting: Setting) -> bool:
    """A setting's boolean."""
    word = setting.text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise UsageError(f"{setting.shown} must be True or False")
    return word in _TRUE


def is_truth(setting: Setting) -> bool:
    """Whether a setting is a boolean; an empty text counts as one."""
    return setting.text.strip().lower() in _TRUE | _FALSE | {""}


def from_environ(environ: Mapping[str, str]) -> dict[str, Setting]:
    """The ``PET_*`` variables. An empty one switches a flag off; for other options it is unset."""
    given = {}
    for option in OPTIONS:
        name = option.env
        text = environ.get(name) if name is not None else None
        if name is not None and text is not None and (text or option.kind is Kind.FLAG):
            given[option.dest] = Setting(text or "0", name)
    return given
