"""The one table of options: spellings, defaults, environment names and help of every flag.

The command line (`argv`), the YAML keys (`config_file`), the environment (`settings`),
``--help-all`` (`help`) and ``docs/reference/command-line.md`` are all read from it. Pure data.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Section(Enum):
    """The headings of ``--help-all``, in their order."""

    JOB = "Job"
    PROGRAM = "Workers"
    RENDEZVOUS = "Rendezvous"
    RECOVERY = "Recovery"
    LOGS = "Logs"
    EVENTS = "Events and metrics"
    BINDING = "Binding"
    LOOKING = "Dry run"
    COMPATIBILITY = "Accepted for compatibility with torchrun"
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
    """The program an option comes from. Of an abbreviation's matches torchrun's options win."""

    TORCHRUN = "torchrun"
    MINDSPORE = "MindSpore"
    MSRUN = "msrun"


class Option(NamedTuple):
    """One option. ``default`` is text as a user types it; empty: there is no default."""

    name: str  # words joined by dashes
    section: Section
    help: str
    default: str = ""
    unset: str = ""  # what the default means, where its text does not say it
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
        """The YAML key, and torch's name for the parsed value."""
        return self.name.replace("-", "_")

    @property
    def env(self) -> str | None:
        """The variable that sets the option, by torchrun's rule."""
        return f"PET_{self.dest.upper()}" if self.has_env else None

    @property
    def long(self) -> str:
        """The spelling to show, one for all: with dashes."""
        return f"--{self.name}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every full spelling that is accepted."""
        both = dict.fromkeys((self.long, f"--{self.dest}"))
        return (self.short, *both) if self.short else tuple(both)

    @property
    def shown_default(self) -> str:
        """The default as text."""
        return self.unset or self.default or "none"


PORT_MAX = 65535
SIM_LEVEL_MAX = 3
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")

_S, _K = Section, Kind
_MS, _OUR = OptionOrigin.MINDSPORE, OptionOrigin.MSRUN


def _flag(name: str, section: Section, sentence: str, **more: object) -> Option:
    """An option that takes no value."""
    return Option(name, section, sentence, "0", "off", Kind.FLAG, "", **more)  # type: ignore[arg-type]


# fmt: off
# One row, one sentence: the table is easier to keep true when it reads like one.
OPTIONS: tuple[Option, ...] = (
    Option("worker-num", _S.JOB,
           "Number of workers of the whole job; given alone, all of them run on this node.",
           unset="nnodes x nproc-per-node", kind=_K.INT, metavar="N", low=1, origin=_MS),
    Option("local-worker-num", _S.JOB, "Number of workers on this node, as --nproc-per-node.",
           unset="the value of --nproc-per-node", kind=_K.INT, metavar="N", low=1, origin=_MS),
    Option("nproc-per-node", _S.JOB,
           "Number of workers on this node, or one per device: cpu, gpu, xpu, or auto (GPUs if "
           "any, else cores).",
           default="1", metavar="N|auto|cpu|gpu|xpu"),
    Option("nnodes", _S.JOB,
           "Number of nodes; the same command is started on each of them. MIN:MAX begins with MIN "
           "nodes if no more have come 30 s later (--rdzv-conf last_call_timeout=30).",
           default="1:1", unset="1", metavar="N|MIN:MAX"),
    Option("node-rank", _S.JOB,
           "Index of this node; node 0 has the address at which the nodes meet. Left out, the "
           "owner of that address is node 0, and the others are numbered by their addresses.",
           default="0", unset="by addresses", kind=_K.INT, metavar="N", low=-1),
    Option("role", _S.JOB, "ROLE_NAME of the workers, also in the prefix of their output lines.",
           default="default", metavar="NAME"),
    Option("join", _S.JOB,
           "True waits for the workers; False detaches: use msrun status and msrun stop then.",
           default="True", kind=_K.BOOL, metavar="True|False", origin=_MS),

    _flag("module", _S.PROGRAM,
          "Run the script as a module, as python -m does.", short="-m"),
    _flag("no-python", _S.PROGRAM, "Run the script directly, without python in front."),
    _flag("run-path", _S.PROGRAM, "Run the script with runpy.run_path; overrides --no-python."),
    Option("start-method", _S.PROGRAM,
           "auto, fork and forkserver fork workers from a warm interpreter where that is safe; "
           "spawn always starts a fresh interpreter.",
           default="auto", metavar="METHOD", choices=("auto", "spawn", "fork", "forkserver")),
    Option("preload", _S.PROGRAM,
           "Modules that the warm interpreter imports in addition to those that the script needs.",
           metavar="MODULE,...", origin=_OUR),
    _flag("virtual-local-rank", _S.PROGRAM, "Show each worker only one device, with LOCAL_RANK 0."),
    Option("spare-devices", _S.PROGRAM,
           "Devices in CUDA_VISIBLE_DEVICES, behind the workers' own, that wait for successors of "
           "ranks whose device failed.",
           default="0", kind=_K.INT, metavar="N", low=0, high=1024, origin=_OUR),
    Option("rank-table-file", _S.PROGRAM,
           "An existing file; workers get its path as RANK_TABLE_FILE.",
           metavar="FILE", origin=_MS),

    Option("master-addr", _S.RENDEZVOUS, "Address of the store at which the workers meet.",
           default="127.0.0.1", metavar="HOST"),
    Option("master-port", _S.RENDEZVOUS,
           "Port of the store, or at which several nodes meet; 0 chooses a free port.",
           unset="a free port; with several nodes 29500", kind=_K.INT, metavar="PORT", low=0,
           high=PORT_MAX),
    Option("node-wait", _S.RENDEZVOUS,
           "Seconds to wait for another node in the place of a lost one, while the others hold "
           "their state; 0: end at once, with the step saved.",
           default="600", kind=_K.FLOAT, metavar="SECONDS", low=0, origin=_OUR),
    Option("node-timeout", _S.RENDEZVOUS,
           "Seconds without a word after which a node counts as lost; node 0's counts. A shorter "
           "cut of the network disturbs nobody; a node whose msrun has ended is noticed at once.",
           default="10", kind=_K.FLOAT, metavar="SECONDS", low=3, high=120, origin=_OUR),
    _flag("spare-node", _S.RENDEZVOUS,
          "This node joins a job that runs on --nnodes other ones: it waits, with its imports "
          "done, and takes the place of the first one that is lost.", origin=_OUR),
    Option("on-leave", _S.RENDEZVOUS,
           "What SIGTERM to the msrun of one node means: stop stops the whole job; with shrink "
           "that node leaves, and the job goes on if MIN nodes are left, see --nnodes. msrun stop "
           "stops the whole job.",
           default="stop", metavar="RULE", choices=("stop", "shrink"), origin=_OUR),
    Option("token-file", _S.RENDEZVOUS,
           "A file with the job's token, the same on all nodes: only who has it may join; "
           "also MSRUN_TOKEN.",
           metavar="FILE", origin=_OUR),
    Option("tls-config", _S.RENDEZVOUS,
           "MindSpore's config.json: certificates by which the nodes know each other; what they "
           "say is encrypted. Needs msrun[tls].",
           metavar="FILE", origin=_MS),
    Option("controller-store", _S.RENDEZVOUS,
           "An etcd that the nodes share, as etcd://HOST:2379: where half of the nodes is cut off, "
           "it says which half goes on, and other nodes find the job there if node 0 is lost.",
           metavar="URL", origin=_OUR),
    Option("cluster-time-out", _S.RENDEZVOUS,
           "Seconds within which all nodes must have come, and then all workers have started; a "
           "negative number sets no bound.",
           default="600", kind=_K.INT, metavar="SECONDS", origin=_MS),
    _flag("standalone", _S.RENDEZVOUS,
          "Use one node and a free port; ignore backend, endpoint, address and port options."),
    Option("rdzv-backend", _S.RENDEZVOUS,
           "static or c10d; they do the same, but with c10d several nodes meet at port 29400. "
           "msrun: as static; a torchrun that is given it hands its job over to msrun.",
           default="static", metavar="NAME"),
    Option("rdzv-endpoint", _S.RENDEZVOUS,
           "Address and port of the store, instead of --master-addr and --master-port.",
           metavar="HOST[:PORT]"),
    Option("rdzv-id", _S.RENDEZVOUS, "Id of the job; workers get it as TORCHELASTIC_RUN_ID.",
           default="none", unset="a new id", metavar="ID"),
    Option("local-addr", _S.RENDEZVOUS,
           "Address of this node; workers get it as MASTER_ADDR unless --master-addr is given.",
           metavar="HOST"),

    Option("max-restarts", _S.RECOVERY, "How often all workers are restarted before the job fails.",
           default="0", kind=_K.INT, metavar="N", low=0),
    Option("on-failure", _S.RECOVERY,
           "What msrun does when a rank fails; each one only if the one before it is impossible: "
           "replace that rank alone (scripts that train in run()), dump the state, restart all "
           "ranks.",
           default="replace,dump,restart", metavar="RUNG,...", origin=_OUR),
    Option("max-replacements", _S.RECOVERY,
           "How many ranks msrun replaces at most within --replacement-period; a node that is lost "
           "counts as one, with all of its ranks.",
           default="20", kind=_K.INT, metavar="N", low=0, origin=_OUR),
    Option("replacement-period", _S.RECOVERY,
           "Seconds after which a replacement no longer counts towards --max-replacements.",
           default="3600", kind=_K.FLOAT, metavar="SECONDS", origin=_OUR),
    Option("shutdown-timeout", _S.RECOVERY,
           "Seconds from the request to stop until workers get SIGKILL.",
           unset="$TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30", kind=_K.INT, metavar="SECONDS", low=0),
    Option("resume", _S.RECOVERY,
           "Resume from the newest complete checkpoint: of the newest run, of RUN, or in FOLDER; "
           "without a script the run's own command line is used again.",
           unset="off", kind=_K.MAYBE, metavar="[RUN|FOLDER]", origin=_OUR),
    Option("is-recover", _S.RECOVERY, "1 means --resume, if it is given before the script.",
           default="0", kind=_K.BOOL, metavar="0|1", origin=_MS),
    Option("recover-arg", _S.RECOVERY,
           "Argument added to the script's when it resumes from a checkpoint; empty adds nothing.",
           unset="--is_recover=1 if the script's sources name is_recover, else nothing",
           origin=_OUR),
    _flag("strict", _S.RECOVERY,
          "Refuse to train if a variable of the training loop cannot be restored after a failure; "
          "what shows behind the first commit is said only.",
          origin=_OUR),
    Option("dump-fallback", _S.RECOVERY,
           "Folder for a dump when the script's own checkpoint folder cannot be written.",
           unset="the folder dumps in the log folder", metavar="DIR", origin=_OUR),
    _flag("dump-split", _S.RECOVERY,
          "Every survivor writes a part of a dump, instead of one survivor all of it.",
          origin=_OUR),
    Option("keep-dumps", _S.RECOVERY,
           "How many dumps of a run and of those that it resumed stay in a folder, the newest; 0: "
           "all.",
           default="3", kind=_K.INT, metavar="N", low=0, origin=_OUR),
    Option("freeze-timeout", _S.RECOVERY,
           "Seconds within which survivors must stand still for a dump.",
           unset="5, less with a short --shutdown-timeout", kind=_K.FLOAT, metavar="SECONDS",
           origin=_OUR),
    Option("update-grace", _S.RECOVERY,
           "Seconds that a running optimizer update gets to finish before a dump.",
           unset="10, less with a short --shutdown-timeout", kind=_K.FLOAT, metavar="SECONDS",
           origin=_OUR),
    Option("audit", _S.RECOVERY,
           "Share of the training's time in which ranks look whether their state changes in ways "
           "that torch does not count; 0 never looks.",
           default="0.5%", metavar="PERCENT", origin=_OUR),
    Option("protect-memory", _S.RECOVERY,
           "copy: each rank copies its state, or its part of what replicas share, to msrun's "
           "memory again and again; if no rank can save it any more, the newest copy is saved. "
           "live: copy, and what killed ranks leave in their memory is read, on one node: no step "
           "is lost if all are killed at once. auto: copies where no other rank holds what one "
           "has, and what killed ranks leave if that takes less than 0.5 % of a step.",
           default="auto", metavar="auto|copy|live|off", choices=("auto", "copy", "live", "off"),
           origin=_OUR),
    Option("protect", _S.RECOVERY,
           "hooks: what a script registers (TrainState) is kept when a rank dies. shadow: scripts "
           "stay as they are; each rank is a process that is copied now and then (fork), and the "
           "copies of all ranks go on when one dies. On one node, on CPUs, with gloo. auto: hooks "
           "for a script with a TrainState, shadow for any other. off: nothing is kept.",
           default="hooks", metavar="hooks|shadow|auto|off",
           choices=("hooks", "shadow", "auto", "off"), origin=_OUR),
    Option("protect-every", _S.RECOVERY,
           "Steps from one such copy to the next; 0: as often as takes 1 % of the time, "
           "and at most every 2 s. From one shadow to the next; 0: as few as take about 2 % of the "
           "time, at most a minute.",
           default="0", kind=_K.INT, metavar="N", low=0, origin=_OUR),
    Option("dump-timeout", _S.RECOVERY,
           "Seconds without a byte of progress after which msrun gives up a rank's part of a dump.",
           unset="20, less with a short --shutdown-timeout", kind=_K.FLOAT, metavar="SECONDS",
           origin=_OUR),
    Option("scheduler-grace", _S.RECOVERY,
           "Seconds between the cluster's SIGTERM and SIGKILL; msrun fits its own times into them.",
           unset="unknown", kind=_K.FLOAT, metavar="SECONDS", origin=_OUR),
    Option("hang-timeout", _S.RECOVERY,
           "Seconds without progress after which msrun kills a rank that its peers wait for; 0: "
           "never; auto, the longer of two: 1.5 s or 5 median steps if a signal stopped the rank, "
           "15 s or 30 times the slowest recent step if it uses no processor, else 300 s or 30 "
           "times that step.",
           default="auto", metavar="SECONDS|auto|0", origin=_OUR),
    Option("signals-to-handle", _S.RECOVERY,
           "Signals that stop the job: gracefully if every rank has hooks, else by forwarding.",
           default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metavar="SIG,..."),
    Option("grace", _S.RECOVERY,
           "Seconds from a request to stop until all ranks have reached one step and saved it; "
           "then msrun saves what is complete.",
           unset="30 after a signal, 600 after msrun stop --graceful, a file or --graceful-signals",
           kind=_K.FLOAT, metavar="SECONDS", origin=_OUR),
    Option("graceful-signals", _S.RECOVERY,
           "More signals, by name or number, that request a graceful exit; workers never get them.",
           metavar="SIG,...", origin=_OUR),
    Option("graceful-exit-file", _S.RECOVERY,
           'JSON file that requests a graceful exit once {"GracefulExit": 1} is written to it.',
           metavar="FILE", origin=_OUR),

    Option("log-dir", _S.LOGS, "Folder of the logs; with /dev/null no files are written.",
           unset="in the run's record folder", metavar="DIR"),
    Option("redirects", _S.LOGS,
           "Streams to write to files in torchrun's folders: 1 stdout, 2 stderr, 3 both, or a map "
           "by local rank.",
           default="0", metavar="0..3|RANK:0..3,...", short="-r"),
    Option("tee", _S.LOGS, "As --redirects, and the console shows them, too.",
           default="0", metavar="0..3|RANK:0..3,...", short="-t"),
    Option("local-ranks-filter", _S.LOGS, "Local ranks whose output the console shows.",
           unset="all", metavar="RANK,..."),
    Option("tail-worker-log", _S.LOGS, "Ranks whose output the console shows; -1 means all.",
           default="-1", metavar="RANK,...", origin=_MS),
    Option("worker-log-name", _S.LOGS,
           "Stem of the names of the workers' log files; {ip} and {hostname} are filled in.",
           default="worker", metavar="NAME", origin=_MS),
    Option("report", _S.LOGS,
           "Write a report of the run at its end, one HTML file, as msrun report does; its name "
           "only after an equals sign.",
           unset="off; msrun-report-ID.html without a name", kind=_K.MAYBE, metavar="[=FILE]",
           origin=_OUR),
    Option("duplicate-stdout-filters", _S.LOGS,
           "Texts; a line of a stdout shown by -t that contains one is also written to "
           "filtered_stdout.log; ,, is a comma.",
           metavar="TEXT,..."),
    Option("duplicate-stderr-filters", _S.LOGS, "The same for stderr and filtered_stderr.log.",
           metavar="TEXT,..."),

    Option("on-event", _S.EVENTS,
           "Run a command when a rank died, hung or is replaced, all ranks are restarted, a step "
           "was saved, the job ended. It finds EVENT, RANK, STEP, RUN_ID and REASON in its "
           "environment.",
           metavar="CMD", origin=_OUR),
    Option("webhook", _S.EVENTS, "Post the same to an address, as JSON.", metavar="URL",
           origin=_OUR),
    Option("metrics-file", _S.EVENTS,
           "Keep the job's figures in this file, for Prometheus' textfile collector.",
           metavar="FILE", origin=_OUR),
    Option("metrics-port", _S.EVENTS, "Serve the same at this port, under /metrics.",
           kind=_K.INT, metavar="PORT", low=1, high=PORT_MAX, origin=_OUR),

    Option("bind-core", _S.BINDING,
           'True shares the cores evenly along NUMA nodes; JSON lists them: {"device0": ["0-3"]}.',
           default="False", metavar="True|False|JSON", origin=_MS),
    Option("bind-numa", _S.BINDING, "True means node; other values as for --numa-binding.",
           default="False", metavar="True|False|MODE", origin=_MS),
    Option("numa-binding", _S.BINDING, "Bind workers near their GPUs.",
           metavar="|".join(NUMA_MODES), choices=NUMA_MODES, has_env=False),

    _flag("dry-run", _S.LOOKING, "Print what msrun would start, and start nothing.", origin=_OUR),
    Option("sim-level", _S.LOOKING, "0 to 3 mean --dry-run.",
           default="-1", unset="off", kind=_K.INT, metavar="LEVEL", low=-1, high=SIM_LEVEL_MAX,
           origin=_MS),
    Option("sim-rank-id", _S.LOOKING, "Print only this rank.",
           default="-1", unset="all ranks", kind=_K.INT, metavar="RANK", low=-1, origin=_MS),

    Option("monitor-interval", _S.COMPATIBILITY,
           "Has no effect: msrun notices the end of a worker as an event.",
           default="0.1", kind=_K.FLOAT, metavar="SECONDS"),
    Option("event-log-handler", _S.COMPATIBILITY,
           "console writes events to stderr as JSON lines; null does not.",
           default="null", metavar="NAME", choices=("null", "console")),
    Option("rdzv-conf", _S.COMPATIBILITY,
           "Of its keys last_call_timeout has an effect, see --nnodes; the others are checked for "
           "their form.",
           metavar="KEY=VALUE,..."),
    Option("logs-specs", _S.COMPATIBILITY, "default is the only accepted value.",
           metavar="NAME", choices=("default",), has_env=False),

    Option("config", _S.GENERAL,
           "YAML file that may contain every option by its name, and script and args.",
           metavar="FILE", origin=_OUR),
    _flag("verbose", _S.GENERAL, "Print the derived timeouts before the start.", short="-v",
          origin=_OUR),
    _flag("version", _S.GENERAL, "Print the version and exit.", origin=_OUR, has_env=False),
    _flag("help", _S.GENERAL, "Print examples, commands and the usual options, and exit.",
          short="-h", has_env=False),
    _flag("help-all", _S.GENERAL, "Print this text and exit.", origin=_OUR, has_env=False),
)
# fmt: on

SPELLINGS = {spelling: option for option in OPTIONS for spelling in option.spellings}
BY_DEST = {option.dest: option for option in OPTIONS}
