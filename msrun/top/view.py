"""What the user looks at: the selected rank, the visible rows, table or log. Pure."""

from __future__ import annotations

from typing import NamedTuple


class TopView(NamedTuple):
    """Rows are counted from 0, in the order of ranks."""

    selected: int = 0
    top: int = 0  # the first visible row
    is_log: bool = False  # of the selected rank, instead of the table

    def after(self, key: str, count: int, room: int) -> TopView:
        """The view after a key, with ``count`` rows of which ``room`` fit."""
        moves = {
            "up": self.selected - 1,
            "down": self.selected + 1,
            "page up": self.selected - room,
            "page down": self.selected + room,
            "first": 0,
            "last": count - 1,
        }
        match key:
            case "log":
                return self._replace(is_log=count > 0 and not self.is_log)
            case "back":
                return self._replace(is_log=False)
        return self._replace(selected=moves.get(key, self.selected)).settled(count, room)

    def settled(self, count: int, room: int) -> TopView:
        """The view in which the selected row exists and is visible, and no line is wasted."""
        selected = max(0, min(self.selected, count - 1))
        top = max(0, min(self.top, selected, count - room), selected - room + 1)
        return self._replace(selected=selected, top=top)
