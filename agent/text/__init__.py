"""Text for people: ranges, wording, output made safe for a terminal. No decision is made here."""
