"""The sentences that people read about a complete dump. Pure."""

from __future__ import annotations

from agent.controller import actions as do
from agent.dump.target import SavedDump
from agent.text.wording import listed, sized


def dump_summary(
    action: do.CommitDump, saved: SavedDump, seconds: float, trouble: str = ""
) -> list[str]:
    """The sentences about a complete dump; what is wrong with it comes first.

    Args:
        action: the order that completed it.
        saved: the result.
        seconds: from the order to freeze.
        trouble: why it is not in the script's folder.
    """
    sentences = []
    size, place = sized(saved.nbytes), saved.path + (f" ({trouble})" if trouble else "")
    if action.from_memory:  # the rest was said when the dump in memory was complete
        return [f"step {action.step} saved from memory in {seconds:.2f} s ({size}): {place}"]
    if len(action.variants) > 1:
        kept = " and ".join(listed(ranks) for ranks in action.variants)
        sentences.append(
            f"the replicas disagree at step {action.step} and there is no majority: the states of "
            f"{kept} are all kept, and training resumes from that of {listed(action.variants[0])}; "
            "either the script does not train the same state on all ranks, or memory or a "
            "processor corrupts data silently"
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
            f"the random numbers and data position of {listed(saved.without_private)} are lost"
        )
    if saved.stale_private:
        sentences.append(
            f"the random numbers and data position of {listed(saved.stale_private)} are of a step "
            f"before {action.step}"
        )
    if action.place == do.MEMORY:
        return sentences  # the job resumes from it at once; it is not a place to look at
    sentences.append(
        f"step {action.step} saved by {listed(action.variants[0])} in {seconds:.2f} s "
        f"({size}): {place}"
    )
    return sentences
