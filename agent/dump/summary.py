"""The sentences that people read about a complete dump. Pure."""

from __future__ import annotations

from agent.controller import actions as do
from agent.dump.target import SavedDump
from agent.text.wording import listed, sized


def dump_summary(
    action: do.CommitDump, saved: SavedDump, seconds: float, trouble: str = ""
) -> list[str]:
    """The sentences about a complete dump; what is wrong with it comes first.

    ``trouble``: why it is not in the script's folder.
    """
    sentences = []
    size, place = sized(saved.nbytes), saved.path + (f" ({trouble})" if trouble else "")
    if action.from_memory:  # the rest was said when the dump in memory was complete
        return [f"step {action.step} saved from memory in {seconds:.2f} s ({size}): {place}"]
    if action.is_disputed:
        sides = " against ".join(listed(ranks) for ranks in action.holders)
        sentences.append(
            f"the replicas disagree at step {action.step} and there is no majority ({sides}): what "
            f"{' and '.join(map(listed, action.variants))} wrote is kept, and nothing is resumed "
            "from it; either the script does not train the same state on all ranks, or memory or "
            "a processor corrupts data silently"
        )
    elif action.odd:
        differ = "differ" if len(action.odd) > 1 else "differs"
        sentences.append(
            f"{listed(action.odd)} {differ} from the other replicas at step {action.step}: memory "
            "or a processor corrupts data silently there, unless the script trains ranks "
            "differently; the majority's state is saved"
        )
    if saved.without_private:
        sentences.append(
            "the random numbers, buffers and data position of "
            f"{listed(saved.without_private)} are lost"
        )
    if saved.stale_private:
        sentences.append(
            "the random numbers, buffers and data position of "
            f"{listed(saved.stale_private)} are of a step before {action.step}"
        )
    if action.place == do.MEMORY:
        return sentences  # the job resumes from it at once; it is not a place to look at
    writers = sorted({rank for ranks in action.variants for rank in ranks})
    who = writers if action.holders else action.variants[0]
    sentences.append(
        f"step {action.step} saved by {listed(who)} in {seconds:.2f} s ({size}): {place}"
    )
    return sentences
