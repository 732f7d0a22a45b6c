"""What begins anew in a loop of the script's own, one that asks whether to exit."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType

from worker_hooks.data.unfed_loaders import BEGINS_ANEW, NAME, UnfedLoaders
from worker_hooks.script.for_loops import begin_anew
from worker_hooks.training.script_frames import frames_of_script

MOST = 8  # places in which a script asks that are looked at
TRAINS_AGAIN = (
    "{} begin{} anew after a replacement or resume, and what was trained is trained again: begin "
    "at state.step, or loop over state.batches(...); if the script itself skips what was trained, "
    "say so by state.ignore({!r})"
)


class OwnLoop:
    """The steps that a script makes outside of ``state.batches``."""

    def __init__(self, is_ignored: Callable[[str], bool]) -> None:
        """The first step begins.

        ``is_ignored``: whether the script has said that a name does not matter.
        """
        self._is_ignored = is_ignored
        self._loaders: UnfedLoaders | None = UnfedLoaders()
        self._has_loader = False
        self._seen: set[tuple[tuple[CodeType, int], ...]] = set()
        self._told: set[tuple[str, int]] = set()

    def begins_anew(self, frame: FrameType) -> list[str]:
        """A step ends: what begins anew when training is entered again; each is told once."""
        loaders, self._loaders = self._loaders, None
        if loaders is not None and loaders.have_advanced():
            self._has_loader = True  # its loop is none to be named, too
            return [] if self._is_ignored(NAME) else [BEGINS_ANEW]
        frames = frames_of_script(frame)
        place = tuple((each.f_code, each.f_lasti) for each in frames)
        if self._has_loader or place in self._seen or len(self._seen) == MOST:
            return []
        self._seen.add(place)
        found = begin_anew(frames, self._is_ignored)
        new = [each for each in found if (each.file, each.line) not in self._told]
        self._told |= {(each.file, each.line) for each in new}
        if not new:
            return []
        loops, names = ", ".join(map(str, new)), new[-1].names
        return [TRAINS_AGAIN.format(loops, "s" * (len(new) == 1), *(names[:1] or ("_",)))]
