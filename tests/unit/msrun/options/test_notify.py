"""The options for events and metrics: what is refused, and what is never shown."""

import pytest

from agent.spec.job_spec import NotifySpec, UsageError
from msrun.job.request import parse


def notify(*argv, **environ):
    return parse([*argv, "--master_port=0", __file__], environ).job.notify


def test_they_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert notify() == NotifySpec() and not NotifySpec().is_on
    (tmp_path / "tell").touch(mode=0o755)
    found = notify("--on-event", "./tell 'a b' $X", "--metrics_file=m.prom", "--metrics-port=9200")
    assert found.on_event == (str(tmp_path / "tell"), "a b", "$X")
    assert (found.metrics_file, found.metrics_port) == (tmp_path / "m.prom", 9200)
    assert notify(PET_WEBHOOK="https://a:b@c/d").webhook == "https://a:b@c/d"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("--on_event='a", "is no command: No closing quotation"),
        ("--on_event=/no/such x", "/no/such is no program that can be run"),
        ("--webhook=ftp://a/b", "--webhook must be an address that begins with http:// or https://"),
        ("--webhook=file:///etc/passwd", "must be an address"),
        ("--webhook=http://", "must be an address"),
        ("--webhook=http://a:99999/", "must be an address"),
        ("--webhook=https://a:secret@b", "others can read in the list of processes: set the variable PET_WEBHOOK"),
        ("--metrics-file=/no/such/file", "must name a file in a folder that exists"),
        ("--metrics-port=70000", "--metrics-port=70000"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(word, sentence):
    with pytest.raises(UsageError) as refused:
        notify(word)
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("word", ["--metrics-file=m.prom", "--metrics-port=9200"])
def test_metrics_without_their_library_are_refused_with_what_to_type(word, monkeypatch):
    monkeypatch.setattr("msrun.options.notify.find_spec", lambda _: None)
    with pytest.raises(UsageError) as refused:
        notify(word)
    said = "needs the package prometheus_client: pip install 'msrun[metrics]'"
    assert str(refused.value) == f"{word.partition('=')[0]} {said}"
