"""YAML files as a layer of options."""

from __future__ import annotations

import pytest

from agent.spec.job_spec import UsageError
from msrun.job.request import parse
from msrun.options.config_file import read_config


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"

    def write(text):
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "dest", "value"),
    [
        ("worker_num: 8", "worker_num", "8"),
        ("worker-num: 8", "worker_num", "8"),
        ("nnodes: 1:2", "nnodes", "1:2"),
        ("redirects: {0: 3, 11: 1}", "redirects", "0:3,11:1"),
        ("tee: 3", "tee", "3"),
        ("local_ranks_filter: [0, 1]", "local_ranks_filter", "0,1"),
        ('duplicate_stdout_filters: ["a,b", c]', "duplicate_stdout_filters", "a,,b,c"),
        ("signals_to_handle: [SIGTERM, SIGUSR1]", "signals_to_handle", "SIGTERM,SIGUSR1"),
        ("rdzv_conf: {timeout: 5, x: y}", "rdzv_conf", "timeout=5,x=y"),
        ("bind_core: {device0: [0-3]}", "bind_core", '{"device0": ["0-3"]}'),
        ("join: no", "join", "no"),
        ("standalone: true", "standalone", "true"),
    ],
)
def test_values_mean_what_they_would_on_the_command_line(job, text, dest, value):
    given = read_config(job(text)).given
    assert {key: setting.text for key, setting in given.items()} == {dest: value}


@pytest.mark.parametrize("text", ["", "# nothing\n", "role:", "role: null", "role: ~"])
def test_nothing_said_is_nothing_given(job, text):
    assert read_config(job(text)).given == {}


@pytest.mark.parametrize(
    ("text", "script", "args"),
    [
        ("script: t.py", "t.py", ()),
        ("training_script: t.py\ntraining_script_args: [--lr, 0.10]", "t.py", ("--lr", "0.10")),
        ("script: t.py\nargs: --lr 0.1 --name 'a b'", "t.py", ("--lr", "0.1", "--name", "a b")),
        ("args: [a]", None, ("a",)),
    ],
)
def test_script_and_args_may_stand_in_the_file(job, text, script, args):
    config = read_config(job(text))
    assert (config.script, config.script_args) == (script, args)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker_nums: 8", "unknown key 'worker_nums', the closest known one is 'worker_num'"),
        ("a: [1\nb: 2", "malformed YAML at line 2, column 2"),
        ("\tx: 1", "malformed YAML at line 1, column 1"),
        ("a: \x01", "malformed YAML"),
        ("- a\n- b", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("role: [a]", "role cannot be a list"),
        ("role: {a: b}", "role cannot be a mapping"),
        ("tee: [[1]]", "tee cannot be a list"),
        ("worker_num: 1\nworker-num: 2", "says worker_num twice"),
        ("config: other.yaml", "belongs on the command line"),
        ("args: {a: 1}", "args must be a list of words or one line"),
        ('args: "\'a"', "args cannot be split"),
        ("script: [a]", "script must be one path"),
        ("? [a]\n: b", "malformed YAML"),
        ('role: "a\\0"', "role contains a NUL character"),
        ('tee: {"0\\0": 3}', "tee contains a NUL character"),
        ('signals_to_handle: ["a", "\\0"]', "signals_to_handle contains a NUL character"),
        ('script: "\\0"', "script contains a NUL character"),
        ('args: ["a", "\\0"]', "args contains a NUL character"),
        ('args: "a \\0"', "args contains a NUL character"),
        ('log-dir: "a\\ud800"', "log-dir contains U+D800"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_it(job, text, said):
    with pytest.raises(UsageError) as raised:
        read_config(job(text))
    assert said in str(raised.value)
    assert "job.yaml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none.yaml cannot be read: No such file"):
        read_config(str(tmp_path / "none.yaml"))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"role: \xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_config(str(path))


def test_layers_are_defaults_then_yaml_then_environment_then_flags(job, tmp_path):
    script = tmp_path / "t.py"
    script.touch()
    path = job(f"script: {script}\nargs: [y]\nmax_restarts: 1\nrole: yaml\nworker_num: 3\n")
    environ = {"PET_CONFIG": path, "PET_ROLE": "env", "PET_MAX_RESTARTS": "2"}
    request = parse(["--max-restarts=3"], environ)
    assert request.job.max_restarts == 3
    assert request.job.role == "env"
    assert request.job.nproc == 3
    assert request.job.timeouts.start_s == 600.0
    assert (request.job.program.name, request.job.program.args) == (str(script), ("y",))


def test_a_script_that_is_typed_brings_its_own_arguments(job, tmp_path):
    script = tmp_path / "t.py"
    script.touch()
    path = job("script: other.py\nargs: [y]\n")
    program = parse(["--config", path, str(script)], {}).job.program
    assert (program.name, program.args) == (str(script), ())


def test_a_bad_value_in_a_file_names_key_and_file(job):
    path = job("script: any.module\nmodule: true\nmax_restarts: -2\n")
    with pytest.raises(UsageError, match=r"max_restarts=-2 in .*job.yaml must be at least 0"):
        parse(["--config", path], {})
