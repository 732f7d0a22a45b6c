"""The usual causes of a worker's death, and what to do about them. Pure: one literal table.

No hint is better than a wrong one: a row uses only the end of the worker's output (its exception,
else its last lines), how it ended, and the kernel's counters. The first row that fits wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGTERM, SIGXCPU, Signals

from agent.failure.evidence import Evidence
from agent.failure.own_end import own_end
from agent.failure.root_cause import first_words, last_words

SHELL_SIGNAL_BASE = 128
SHELL_SIGNALS = (SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGTERM)


@dataclass(frozen=True, slots=True)
class DeathCase:
    """The facts that the rows use."""

    evidence: Evidence
    words: str
    interpreter: str

    def ended_by(self, *signals: Signals) -> bool:
        """Whether one of these signals ended it, directly or reported by a shell as 128 + n."""
        end = self.evidence.end
        behind_shell = tuple(SHELL_SIGNAL_BASE + number for number in signals)
        return end.signal in signals or end.exit_code in behind_shell


Fit = Callable[[DeathCase], re.Match[str] | bool | None]


def _says(pattern: str) -> Fit:
    compiled = re.compile(pattern)
    return lambda case: compiled.search(case.words)


def _signal(*signals: Signals) -> Fit:
    return lambda case: case.evidence.end.signal in signals


def _refuses_argument(case: DeathCase) -> bool:
    """Whether a parser names the argument that msrun appended, in whatever words."""
    name = case.evidence.end.told.lstrip("-").partition("=")[0]
    return bool(name) and name in case.words and case.evidence.end.signal is None


def _is_ended_by_us(case: DeathCase) -> bool:
    return bool(case.evidence.end.ended_for)


def _anothers(signal: Signals) -> Fit:
    return lambda case: case.evidence.end.signal == signal and not _is_ended_by_us(case)


def _ends_itself(case: DeathCase) -> re.Match[str] | None:
    last = case.evidence.log_tail[-1:] if case.ended_by(SIGKILL) else ()
    return re.fullmatch("(?P<why>.+)", own_end("".join(last)))


def _oom(case: DeathCase) -> bool:
    return case.evidence.oom_kills > 0 and case.ended_by(SIGKILL) and not _is_ended_by_us(case)


def _oom_elsewhere(case: DeathCase) -> bool:
    return case.evidence.oom_elsewhere > 0 and case.ended_by(SIGKILL)


def _oom_child(case: DeathCase) -> bool:
    killed = r"DataLoader worker .*(?:is killed by signal: Killed|exited unexpectedly)"
    return case.evidence.oom_kills > 0 and re.search(killed, case.words) is not None


def _exits(code: int, pattern: str = "") -> Fit:
    compiled = re.compile(pattern)
    return lambda case: case.evidence.end.exit_code == code and compiled.search(case.words)


def _shell_signal(case: DeathCase) -> bool:
    # Only if nothing else fits: a script may well exit with 137 on its own.
    quiet = case.evidence.message is None and case.evidence.end.signal is None
    return quiet and case.ended_by(*SHELL_SIGNALS)


SENT = "msrun sent the signal: {ended_for}"
# Sentences may use {interpreter}, {local_rank}, {code}, {shell_signal}, {told}, {ended_for},
# {device_fault} and the groups.
HINTS: tuple[tuple[Fit, str], ...] = (
    (
        lambda case: bool(case.evidence.end.hung),
        (
            "each rank's stack at that time is in its log, below the words 'is inspected'; "
            "--hang-timeout sets how long it may last"
        ),
    ),
    (lambda case: _is_ended_by_us(case) and case.evidence.message is None, SENT),
    (
        _ends_itself,
        "it ended itself, as a new process can continue where it could not: {why}",
    ),
    (
        lambda case: bool(case.evidence.device_fault),
        (
            "its device failed ({device_fault}): have it reset, or give others in "
            "CUDA_VISIBLE_DEVICES; --spare-devices does that during a run"
        ),
    ),
    (
        _refuses_argument,
        (
            "msrun appended {told} to the script's arguments because the rank resumes "
            "(--recover-arg= leaves it out)"
        ),
    ),
    (
        _oom,
        (
            "killed by the kernel because memory ran out (its out-of-memory counter rose): use "
            "fewer workers or a smaller batch, or raise the memory limit"
        ),
    ),
    (
        _oom_elsewhere,
        (
            "killed perhaps by the kernel because memory ran out: its out-of-memory counter rose "
            "for a control group of this machine that is not msrun's; if the rank has a memory "
            "limit of its own, raise it"
        ),
    ),
    (
        _oom_child,
        (
            "the kernel killed a DataLoader worker because memory ran out (its out-of-memory "
            "counter rose): use fewer num_workers or raise the memory limit"
        ),
    ),
    (
        _anothers(SIGKILL),
        (
            "probably not out of memory (the kernel's counters show no such kill): something else "
            "sent SIGKILL, such as kill -9, or a time or memory limit of Slurm or Kubernetes"
        ),
    ),
    (
        _says(r"DataLoader worker .*is killed by signal: Bus error|out of shared memory"),
        (
            "shared memory (/dev/shm) is full: enlarge it (docker run --shm-size=8g) or use "
            "fewer DataLoader workers"
        ),
    ),
    (
        _signal(SIGBUS),
        (
            "a mapped file was shorter than its mapping; most often /dev/shm is full: look at "
            "df /dev/shm, enlarge it (docker run --shm-size=8g) or use fewer DataLoader workers"
        ),
    ),
    (
        _says(r"atchdog caught collective operation timeout"),
        (
            "a collective did not finish in time: a peer hangs, is slow, or took another path "
            "through the program; compare the last lines of all ranks"
        ),
    ),
    (
        _says(r"Timed out waiting \d+ ?ms for (?:recv|send) operation|failed to pass monitoredB"),
        (
            "another rank did not come to the same collective in time: it hangs, is slow, or "
            "took another path through the program; compare the last lines of all ranks"
        ),
    ),
    (
        _says(r"Address already in use|EADDRINUSE"),
        (
            "a port that this rank opens is taken: if it is the job's, give a free one with "
            "--master-port or leave the flag out; if the script's own, make it differ between "
            "ranks"
        ),
    ),
    (
        _says(r"(?:ModuleNotFoundError: |python\S*: )No module named '?(?P<module>[\w.]+)"),
        (
            "module {module} is not installed for {interpreter}: install it there, or add its "
            "folder to PYTHONPATH"
        ),
    ),
    (
        _says(r"Torch not compiled with CUDA enabled"),
        (
            "the torch of {interpreter} is a CPU build: install a CUDA build, or train on the "
            "CPU with the gloo backend"
        ),
    ),
    (
        _says(r"Found no NVIDIA driver|[Nn]o NVIDIA GPU|No CUDA GPUs are available"),
        (
            "this process sees no NVIDIA GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES (in a "
            "container: docker run --gpus all), or train on the CPU with the gloo backend"
        ),
    ),
    (
        _says(r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"),
        (
            "the NVIDIA driver is older than this torch needs: update it, or install a torch "
            "build for an older CUDA"
        ),
    ),
    (
        _says(r"invalid device ordinal"),
        (
            "local rank {local_rank} asked for a GPU that is not there: start no more workers "
            "than there are GPUs (--nproc-per-node), and look at CUDA_VISIBLE_DEVICES"
        ),
    ),
    (
        _says(r"Duplicate GPU detected"),
        (
            "two ranks use the same GPU: call "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the first collective"
        ),
    ),
    (
        _says(r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
        (
            "the GPU's memory is full: use a smaller batch, and look at nvidia-smi for "
            "processes left from an earlier run"
        ),
    ),
    (
        _says(r"Cannot re-initialize CUDA in forked subprocess"),
        (
            "CUDA was used before a fork: start child processes with the spawn method; if the "
            "script itself starts none, give msrun --start-method spawn"
        ),
    ),
    (
        _exits(2, r"can't open file '(?P<file>[^']*)'.*No such file"),
        "there is no script {file}: look at its name and at the folder msrun was started in",
    ),
    (
        _exits(2, r"arguments are required: .*--local[-_]rank"),
        "workers are not given --local-rank as an argument: read LOCAL_RANK from the environment",
    ),
    (
        _exits(127, r"(?:command )?not found|No such file"),
        "the program, or one that it starts, was not found: look at PATH and its first line",
    ),
    (
        _exits(126, r"[Pp]ermission denied|[Cc]annot execute|Exec format error"),
        "the program could not be executed: look at its permissions (chmod +x) and its first line",
    ),
    (
        _says(r"[Dd]efault process group has not been initialized|default_pg not initialized"),
        "torch.distributed was used before torch.distributed.init_process_group() was called",
    ),
    (
        _says(r"(?m)^(?:[\w.]*_Array)?MemoryError|can't allocate memory|Cannot allocate memory"),
        (
            "memory ran out, or a limit (ulimit -v, a batch system's) was reached: use fewer "
            "workers or a smaller batch"
        ),
    ),
    (
        _says(r"Too many open files|received 0 items of ancdata"),
        "the limit of open files is reached: raise it (ulimit -n), or use fewer DataLoader workers",
    ),
    (
        _says(r"can't start new thread|Resource temporarily unavailable"),
        (
            "the limit of processes and threads is reached: raise it (ulimit -u, a container's "
            "pids limit), or use fewer workers and threads (OMP_NUM_THREADS)"
        ),
    ),
    (
        _says(r"No space left on device|Disk quota exceeded"),
        "a disk is full: look at df for the folders of logs, checkpoints, TMPDIR and /dev/shm",
    ),
    (
        _says(r"unhandled (?:system|cuda) error"),
        "NCCL says more with NCCL_DEBUG=INFO; start again with that set",
    ),
    (
        _signal(SIGSEGV),
        (
            "a C or C++ library touched memory that is not its own; PYTHONFAULTHANDLER=1 prints "
            "where in Python it happened"
        ),
    ),
    (
        _signal(SIGABRT),
        "a C or C++ library gave up (abort); its reason is usually in the last lines of the log",
    ),
    (
        _signal(SIGILL),
        "a library uses instructions that this CPU does not have: install a build for this machine",
    ),
    (_signal(SIGFPE), "a C or C++ library divided an integer by zero"),
    (_signal(SIGXCPU), "its limit of CPU time is reached (ulimit -t, a batch system's)"),
    (_is_ended_by_us, SENT),  # it had failed before, for a reason that is not known
    (
        _anothers(SIGTERM),
        "msrun did not send it; someone or something else did: kill, a batch system's time limit",
    ),
    (
        _shell_signal,
        "{code} is how a shell reports that its command was ended by {shell_signal}",
    ),
)


def is_for_memory(evidence: Evidence) -> bool:
    """Whether the kernel killed the process for lack of memory, as far as that can be known."""
    case = DeathCase(evidence, "", "")
    return not evidence.end.hung and (_oom(case) or _oom_elsewhere(case))


def hint(evidence: Evidence, interpreter: str) -> str | None:
    """One sentence about the known cause of this end, or ``None``.

    ``interpreter``: the workers' interpreter, named if a module is missing.
    """
    words = "\n".join((last_words(evidence), first_words(evidence)))
    case = DeathCase(evidence, words, interpreter)
    for fits, sentence in HINTS:
        found = fits(case)
        if found:
            return sentence.format_map(_facts(case, found))
    return None


def _facts(case: DeathCase, found: re.Match[str] | bool) -> dict[str, str | None]:
    end = case.evidence.end
    facts: dict[str, str | None] = {
        "interpreter": case.interpreter,
        "local_rank": str(end.local_rank),
        "code": str(end.exit_code),
        "told": end.told,
        "ended_for": end.ended_for,
        "device_fault": case.evidence.device_fault,
        "shell_signal": _shell_signal_name(end.exit_code),
    }
    return facts if isinstance(found, bool) else facts | found.groupdict()


def _shell_signal_name(exit_code: int | None) -> str:
    known = {SHELL_SIGNAL_BASE + number: number.name for number in SHELL_SIGNALS}
    return known.get(exit_code or 0, "a signal")
