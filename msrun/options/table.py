"""The one table of options: spellings, defaults, environment names and help of every flag.

The command line (`scan`), the YAML keys (`config`), the environment (`settings`), ``--help``
(`usage`) and ``docs/reference/command-line.md`` are all read from it. Pure data; nothing is parsed
here.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Section(Enum):
    """The headings of ``--help``, in their order."""

    JOB = "Job"
    PROGRAM = "Workers"
    RENDEZVOUS = "Rendezvous"
    RECOVERY = "Recovery"
    LOGS = "Logs"
    BINDING = "Binding"
    LOOKING = "Looking first (dry run)"
    COMPATIBILITY = "Accepted for torchrun's sake"
    GENERAL = "General"


class Kind(Enum):
    """What an option's value is; `settings` checks it, whichever layer it came from."""

    FLAG = "flag"  # no value on the command line; a boolean in YAML and environment
    MAYBE = "maybe"  # a value or none
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"


class OptionOrigin(Enum):
    """Whose option it is. torchrun's win where an abbreviation could mean several."""

    TORCHRUN = "torchrun"
    MINDSPORE = "MindSpore"
    MSRUN = "msrun"


class Option(NamedTuple):
    """One option. ``default`` is text as it would be typed; empty when there is none."""

    name: str  # words joined by dashes
    section: Section
    help: str
    default: str = ""
    unset: str = ""  # what the default means, in words, where its text does not say it
    kind: Kind = Kind.TEXT
    metavar: str = "TEXT"
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    short: str = ""
    origin: OptionOrigin = OptionOrigin.TORCHRUN
    has_env: bool = True

    @property
    def dest(self) -> str:
        """The YAML key, and torch's name of the parsed value."""
        return self.name.replace("-", "_")

    @property
    def env(self) -> str | None:
        """The variable that sets the option, by torchrun's rule."""
        return f"PET_{self.dest.upper()}" if self.has_env else None

    @property
    def long(self) -> str:
        """The spelling that is shown: torchrun writes dashes, MindSpore underscores."""
        return f"--{self.name if self.origin is OptionOrigin.TORCHRUN else self.dest}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """Everything that may be typed in full."""
        both = dict.fromkeys((self.long, f"--{self.name}", f"--{self.dest}"))
        return (self.short, *both) if self.short else tuple(both)

    @property
    def shown_default(self) -> str:
        """The default in words."""
        return self.unset or self.default or "none"


PORT_MAX = 65535
SIM_LEVEL_MAX = 3
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")

_S, _K = Section, Kind
_MS, _OUR = OptionOrigin.MINDSPORE, OptionOrigin.MSRUN


def _flag(name: str, section: Section, sentence: str, **more: object) -> Option:
    """Build the row of an option without a value."""
    return Option(name, section, sentence, "0", "off", Kind.FLAG, "", **more)  # type: ignore[arg-type]


# fmt: off
# One row, one sentence: the table is easier to keep true when it reads like one.
OPTIONS: tuple[Option, ...] = (
    Option("worker-num", _S.JOB,
           "Workers of the whole job; alone it means all of them on this node.",
           unset="nnodes x nproc-per-node", kind=_K.INT, metavar="N", low=1, origin=_MS),
    Option("local-worker-num", _S.JOB, "Workers on this node, as --nproc-per-node.",
           unset="as --nproc-per-node", kind=_K.INT, metavar="N", low=1, origin=_MS),
    Option("nproc-per-node", _S.JOB,
           "Workers on this node: a number, cpu, gpu, xpu, or auto (GPUs if any, else cores).",
           default="1", metavar="N|auto|cpu|gpu|xpu"),
    Option("nnodes", _S.JOB, "Nodes, or a range; more than one is not supported yet.",
           default="1:1", unset="1", metavar="N|MIN:MAX"),
    Option("node-rank", _S.JOB, "Index of this node; of no effect on one node.",
           default="0", kind=_K.INT, metavar="N", low=-1),
    Option("role", _S.JOB, "ROLE_NAME of the workers, also in the prefix of their lines.",
           default="default", metavar="NAME"),
    Option("join", _S.JOB,
           "True waits for the workers; False detaches, see msrun status and msrun stop.",
           default="True", kind=_K.BOOL, metavar="True|False", origin=_MS),

    _flag("module", _S.PROGRAM,
          "The script is a module's name, run as with python -m.", short="-m"),
    _flag("no-python", _S.PROGRAM, "Run the script directly, without python in front."),
    _flag("run-path", _S.PROGRAM, "Run the script with runpy.run_path; wins over --no-python."),
    Option("start-method", _S.PROGRAM,
           "auto, fork and forkserver fork workers from a warm interpreter where that is safe; "
           "spawn always starts a fresh one.",
           default="auto", metavar="METHOD", choices=("auto", "spawn", "fork", "forkserver")),
    Option("preload", _S.PROGRAM,
           "Modules the warm interpreter imports besides those the script needs.",
           metavar="MODULE,...", origin=_OUR),
    _flag("virtual-local-rank", _S.PROGRAM, "Show each worker one device only, with LOCAL_RANK 0."),
    Option("rank-table-file", _S.PROGRAM,
           "Existing file, passed to the workers as RANK_TABLE_FILE.",
           metavar="FILE", origin=_MS),

    Option("master-addr", _S.RENDEZVOUS, "Address of the store the workers meet at.",
           default="127.0.0.1", metavar="HOST"),
    Option("master-port", _S.RENDEZVOUS, "Port of the store; 0 takes a free one.",
           unset="a free port", kind=_K.INT, metavar="PORT", low=0, high=PORT_MAX),
    Option("cluster-time-out", _S.RENDEZVOUS,
           "Seconds until all workers must have started; negative for no bound.",
           default="600", kind=_K.INT, metavar="SECONDS", origin=_MS),
    _flag("standalone", _S.RENDEZVOUS,
          "One node, a free port; backend, endpoint, address and port given are ignored."),
    Option("rdzv-backend", _S.RENDEZVOUS, "static or c10d; on one node they are the same.",
           default="static", metavar="NAME"),
    Option("rdzv-endpoint", _S.RENDEZVOUS,
           "Where the store listens, instead of --master-addr and --master-port.",
           metavar="HOST[:PORT]"),
    Option("rdzv-id", _S.RENDEZVOUS, "The job's id, TORCHELASTIC_RUN_ID.",
           default="none", unset="a new one", metavar="ID"),
    Option("local-addr", _S.RENDEZVOUS,
           "Address of this node, told to the workers as MASTER_ADDR unless that is given.",
           metavar="HOST"),

    Option("max-restarts", _S.RECOVERY, "How often the workers are restarted before the job fails.",
           default="0", kind=_K.INT, metavar="N", low=0),
    Option("on-failure", _S.RECOVERY,
           "What follows when a rank fails, each if what is before it cannot be done: only that "
           "rank is replaced (scripts that train in run()), the state is saved, all restart.",
           default="replace,dump,restart", metavar="RUNG,...", origin=_OUR),
    Option("max-replacements", _S.RECOVERY,
           "How many ranks are replaced within the period before that is given up.",
           default="20", kind=_K.INT, metavar="N", low=0, origin=_OUR),
    Option("replacement-period", _S.RECOVERY, "Seconds after which a replacement counts no more.",
           default="3600", kind=_K.FLOAT, metavar="SECONDS", origin=_OUR),
    Option("shutdown-timeout", _S.RECOVERY,
           "Seconds from asking workers to stop to SIGKILL, on every path.",
           unset="$TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30", kind=_K.INT, metavar="SECONDS", low=0),
    Option("resume", _S.RECOVERY,
           "Go on from the newest whole checkpoint: of the newest run, of RUN, or in FOLDER; "
           "without a script the run's own command is started again.",
           unset="off", kind=_K.MAYBE, metavar="[RUN|FOLDER]", origin=_OUR),
    Option("is-recover", _S.RECOVERY, "1 before the script means --resume.",
           default="0", kind=_K.BOOL, metavar="0|1", origin=_MS),
    Option("recover-arg", _S.RECOVERY,
           "Added to the script's arguments when it goes on from a checkpoint; empty for nothing.",
           default="--is_recover=1", origin=_OUR),
    Option("dump-fallback", _S.RECOVERY,
           "Where the power-off checkpoint goes when the script's own folder cannot be written.",
           unset="dumps in the log folder", metavar="DIR", origin=_OUR),
    _flag("dump-split", _S.RECOVERY,
          "All survivors write a part of the power-off checkpoint each, instead of one all of it.",
          origin=_OUR),
    Option("freeze-timeout", _S.RECOVERY,
           "Seconds until survivors must stand still for the power-off checkpoint.",
           unset="5, less with a short --shutdown-timeout", kind=_K.FLOAT, metavar="SECONDS",
           origin=_OUR),
    Option("update-grace", _S.RECOVERY,
           "Seconds for an optimizer update that is under way to end before it.",
           unset="10, less with a short --shutdown-timeout", kind=_K.FLOAT, metavar="SECONDS",
           origin=_OUR),
    Option("dump-timeout", _S.RECOVERY,
           "Seconds without a byte of progress after which a rank's part of it is given up.",
           unset="20, less with a short --shutdown-timeout", kind=_K.FLOAT, metavar="SECONDS",
           origin=_OUR),
    Option("scheduler-grace", _S.RECOVERY,
           "Seconds the cluster gives msrun between SIGTERM and SIGKILL; the others fit into it.",
           unset="unknown", kind=_K.FLOAT, metavar="SECONDS", origin=_OUR),
    Option("hang-timeout", _S.RECOVERY,
           "Seconds without progress after which a rank that its peers wait for is killed; auto: "
           "1.5 or 5x the median step if a signal stopped it, 15 or 30x the slowest of late if it "
           "uses no processor, 300 or 30x that else, whichever is more; 0 for never.",
           default="auto", metavar="SECONDS|auto|0", origin=_OUR),
    Option("signals-to-handle", _S.RECOVERY,
           "Signals that stop the job: gracefully where every rank has hooks, else forwarded.",
           default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metavar="SIG,..."),
    Option("grace", _S.RECOVERY,
           "Seconds from a request to stop until all ranks have come to one step and it is saved; "
           "what is whole is saved then.",
           unset="30 after a signal, 600 after msrun stop --graceful, a file or --graceful_signals",
           kind=_K.FLOAT, metavar="SECONDS", origin=_OUR),
    Option("graceful-signals", _S.RECOVERY,
           "More signals, by name or number, that ask for a graceful exit; workers never get them.",
           metavar="SIG,...", origin=_OUR),
    Option("graceful-exit-file", _S.RECOVERY,
           'JSON file in which {"GracefulExit": 1} asks for it, if it is written during the run.',
           metavar="FILE", origin=_OUR),

    Option("log-dir", _S.LOGS, "Folder of the logs; /dev/null writes no files.",
           unset="under the run's record", metavar="DIR"),
    Option("redirects", _S.LOGS,
           "Streams written to files in torchrun's tree: 1 stdout, 2 stderr, 3 both, or a map by"
           " local rank.",
           default="0", metavar="0..3|RANK:0..3,...", short="-r"),
    Option("tee", _S.LOGS, "As --redirects, and shown on the console too.",
           default="0", metavar="0..3|RANK:0..3,...", short="-t"),
    Option("local-ranks-filter", _S.LOGS, "Local ranks the console shows.",
           unset="all", metavar="RANK,..."),
    Option("tail-worker-log", _S.LOGS, "Ranks the console shows; -1 for all on this node.",
           default="-1", metavar="RANK,...", origin=_MS),
    Option("worker-log-name", _S.LOGS,
           "Stem of the workers' log files; {ip} and {hostname} are filled in.",
           default="worker", metavar="NAME", origin=_MS),
    Option("duplicate-stdout-filters", _S.LOGS,
           "Lines of stdout with one of these texts are also written to filtered_stdout.log; ,, "
           "is a comma.",
           metavar="TEXT,..."),
    Option("duplicate-stderr-filters", _S.LOGS, "The same for stderr.",
           metavar="TEXT,..."),

    Option("bind-core", _S.BINDING,
           'True shares the cores evenly along NUMA nodes; or JSON {"device0": ["0-3"]}.',
           default="False", metavar="True|False|JSON", origin=_MS),
    Option("bind-numa", _S.BINDING, "True is node; else as --numa-binding.",
           default="False", metavar="True|False|MODE", origin=_MS),
    Option("numa-binding", _S.BINDING, "Bind workers near their GPUs.",
           metavar="|".join(NUMA_MODES), choices=NUMA_MODES, has_env=False),

    _flag("dry-run", _S.LOOKING, "Print what would be started, and start nothing.", origin=_OUR),
    Option("sim-level", _S.LOOKING, "0 to 3: as --dry_run.",
           default="-1", unset="off", kind=_K.INT, metavar="LEVEL", low=-1, high=SIM_LEVEL_MAX,
           origin=_MS),
    Option("sim-rank-id", _S.LOOKING, "Print this rank only.",
           default="-1", unset="all ranks", kind=_K.INT, metavar="RANK", low=-1, origin=_MS),

    Option("monitor-interval", _S.COMPATIBILITY, "Not needed: a worker's end is an event.",
           default="0.1", kind=_K.FLOAT, metavar="SECONDS"),
    Option("event-log-handler", _S.COMPATIBILITY,
           "null, or console: events as JSON lines on stderr.",
           default="null", metavar="NAME", choices=("null", "console")),
    Option("rdzv-conf", _S.COMPATIBILITY,
           "Read and checked for its form; of no effect on one node.",
           metavar="KEY=VALUE,..."),
    Option("logs-specs", _S.COMPATIBILITY, "default is the only one.",
           metavar="NAME", choices=("default",), has_env=False),

    Option("config", _S.GENERAL,
           "YAML file with any of these options by name, and script and args.",
           metavar="FILE", origin=_OUR),
    _flag("verbose", _S.GENERAL, "Print the derived timeouts at the start.", short="-v",
          origin=_OUR),
    _flag("version", _S.GENERAL, "Print the version and leave.", origin=_OUR, has_env=False),
    _flag("help", _S.GENERAL, "Print this text and leave.", short="-h", has_env=False),
)
# fmt: on

SPELLINGS = {spelling: option for option in OPTIONS for spelling in option.spellings}
BY_DEST = {option.dest: option for option in OPTIONS}
