"""Actions of the controller in short, as the rows of histories spell them. Not a test itself."""

from signal import Signals

from agent.controller import actions as do
from worker_hooks.contract import protocol

PLACES = {do.MEMORY: " memory", 0: "", 1: " place 1"}


def shorts(actions):
    """All actions but `WarmUp`, which changes nothing for the ranks and has its own test."""
    return "; ".join(short(each) for each in actions if not isinstance(each, do.WarmUp))


def short(action):
    """An action without its reason."""
    match action:
        case do.StartAttempt(attempt=attempt, resume=resume):
            return f"start {attempt}" + (f" from {resume}" if resume else "")
        case do.CancelStarts():
            return "cancel now" if action.now else "cancel"
        case do.SignalRanks(ranks=ranks, signum=signum):
            return f"{Signals(signum).name[3:]} {named(ranks)}"
        case do.SetDeadline(state=state, after_s=after_s):
            return f"deadline {state.value} {'-' if after_s is None else format(after_s, 'g')}"
        case do.Sweep():
            return "sweep"
        case do.Tell(ranks=ranks, message=message):
            return short_of_message(ranks, message)
        case do.Finish(state=state, exit_code=exit_code):
            return f"finish {state.value} {exit_code}"
        case _:
            return short_of_dump(action)


def short_of_message(ranks, message):
    match message:
        case protocol.Proceed(step=step):
            return f"proceed to {step}: {named(ranks)}"
        case protocol.Leave(step=step):
            return f"leave at {step}: {named(ranks)}"
        case protocol.EndNotes():
            return f"end notes {named(ranks)}"
        case protocol.Dismiss():
            return f"dismiss {named(ranks)}"
        case protocol.Release():
            return f"release {named(ranks)}"
        case protocol.GoOn(attempt=attempt):
            return f"go on {attempt}: {named(ranks)}"


def short_of_dump(action):
    match action:
        case do.HoldRanks(ranks=ranks, dump_id=dump_id):
            return f"hold {dump_id}: {named(ranks)}"
        case do.FreezeRanks(ranks=ranks, dump_id=dump_id, step=step):
            return f"freeze {dump_id}: {named(ranks)}" + (f" to {step}" if step else "")
        case do.SaveRanks(step=step, writers=writers, digesters=digesters, place=place):
            asked = f" digest {named(digesters)}" if digesters else ""
            by = "/".join(map(named, action.groups or (writers,)))
            return f"save {step} by {by}{asked}{PLACES[place]}"
        case do.CommitDump(step=step, variants=variants, odd=odd, place=place):
            by = "/".join(map(named, variants)) + (f" odd {named(odd)}" if odd else "")
            memory = " from memory" if action.from_memory else ""
            memory = " from a copy" if action.is_copy else memory
            memory = " kept" if action.is_kept else memory
            memory += " early" if action.is_early else ""
            return f"commit {step} by {by}{PLACES[place]}{memory}"
        case do.AbandonDump():
            return "abandon"
        case do.RefuseRanks(ranks=ranks):
            return f"refuse {named(ranks)}"
        case _:
            return short_of_replacement(action)


def short_of_replacement(action):
    match action:
        case do.ReplaceRanks(attempt=attempt, survivors=survivors, newcomers=newcomers):
            to = f"{action.path} at {action.step}"
            return f"replace {attempt}: {named(newcomers)} beside {named(survivors)} from {to}"
        case do.PrepareRanks(attempt=attempt, ranks=ranks):
            return f"prepare {attempt}: {named(ranks)}"
        case do.GiveUpDevices(devices=devices):
            return f"give up {named(devices)}"
        case do.ForgetMemory():
            return "forget"
        case do.RemindReplaced(after_s=after_s):
            return f"remind {after_s:g}"


def named(ranks):
    return ",".join(map(str, ranks))
