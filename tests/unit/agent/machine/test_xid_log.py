"""What NVIDIA's driver reported, from a file or a pipe in the place of the kernel's log."""

import os
import time

import pytest

from agent.machine import xid_log
from agent.machine.xid_log import XidLog, parse, read_present

TEXT = "GPU has fallen off the bus"


def line(text, at_s=100.0, record=7, level=3):
    return f"{level},{record},{int(at_s * 1e6)},-;{text}\n"


def xid(number=79, pid="1234", pci="PCI:0000:17:00"):
    return f"NVRM: Xid ({pci}): {number}, pid={pid}, name=python, {TEXT}."


FORMS = {  # as drivers of many years write them
    xid(): (79, "0000:17:00", 1234, TEXT),
    f"NVRM: Xid (PCI:0000:17:00): 79, pid=1234, {TEXT}.": (79, "0000:17:00", 1234, TEXT),
    f"NVRM: Xid (PCI:0000:17:00.0): 79, {TEXT}.": (79, "0000:17:00.0", None, TEXT),
    f"NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, {TEXT}.": (
        79,
        "0000:05:00",
        None,
        TEXT,
    ),
    "NVRM: Xid (0000:03:00): 14, Channel 00000001": (14, "0000:03:00", None, "Channel 00000001"),
    "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.": (
        63,
        "0000:10:1c",
        1896,
        "Row Remapper: New row marked for remapping, reset gpu to activate",
    ),
    "NVRM: Xid (PCI:0000:9b:00 GPU-I:05): 94, pid=7, name=a b, Contained: SM (0x1). RST: No": (
        94,
        "0000:9b:00",
        7,
        "Contained: SM (0x1). RST: No",
    ),
    "NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault: x": (
        31,
        "0000:00:06",
        79749,
        "Ch 0000000a, intr 00000000. MMU Fault: x",
    ),
    "NVRM: Xid (PCI:0000:83:00): 48": (48, "0000:83:00", None, ""),
    "nvidia 0000:17:00.0: NVRM: Xid (PCI:0000:17:00): 119, pid=3, name=x, Timeout after 45s of waiting for RPC response from GPU0 GSP!": (
        119,
        "0000:17:00",
        3,
        "Timeout after 45s of waiting for RPC response from GPU0 GSP!",
    ),
}


@pytest.mark.parametrize(("text", "found"), FORMS.items(), ids=[text[:70] for text in FORMS])
def test_every_form_of_the_line_is_read(text, found):
    report = parse(line(text))
    assert (report.number, report.pci, report.pid, report.text) == found
    assert (report.at_s, report.record) == (100.0, 7)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.",
        "usb 1-1: new device",
        "NVRM: Xid (invalid): some error",
        "",
    ],
)
def test_other_lines_are_no_reports(text):
    assert parse(line(text)) is None


def test_what_a_program_wrote_into_the_log_is_no_report():
    assert parse(line(xid(), level=12)) is None
    assert parse(xid()) is None  # not of the kernel's log
    assert parse(" SUBSYSTEM=pci\n") is None


def test_a_report_as_text():
    assert str(parse(line(xid()))) == f'Xid 79 on PCI 0000:17:00: "{TEXT}"'
    assert str(parse(line("NVRM: Xid (PCI:0000:83:00): 48"))) == "Xid 48 on PCI 0000:83:00"


def test_a_pipe_that_nobody_closes_is_not_waited_for(tmp_path):
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    keeper = os.open(path, os.O_RDWR)  # a writer that never closes it
    try:
        found = XidLog(50.0, path, knows_pids=True)
        assert found.of_process(1234) == ()
        whole = (line("usb") + line(xid())).encode()
        os.write(keeper, whole[:-20])
        assert found.of_process(1234) == ()  # half a line
        os.write(keeper, whole[-20:])
        assert [one.text for one in found.of_process(1234)] == [TEXT]
        assert [one.text for one in found.of_process(1234)] == [TEXT]
    finally:
        os.close(keeper)


def test_records_that_were_overwritten_are_left_out(monkeypatch):
    answers = [b"a\n", BrokenPipeError(), b"b\n", BlockingIOError(), b"c\n"]

    def read(_log, _most):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    with monkeypatch.context() as patch:  # all that reads or opens a file would notice
        patch.setattr(xid_log.os, "read", read)
        read_so_far = read_present(5)
    assert read_so_far == b"a\nb\n"


def test_a_log_without_end_is_not_read_for_ever(monkeypatch):
    monkeypatch.setattr(xid_log, "MOST_RECORDS", 10)
    with open("/dev/zero", "rb") as endless:
        assert len(read_present(endless.fileno())) == 10 * xid_log.RECORD_BYTES


def forbid(*_args):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("why", ["absent", "forbidden", "folder"])
def test_a_log_that_cannot_be_read_holds_nothing(tmp_path, monkeypatch, why):
    path = tmp_path / "kmsg"
    if why == "folder":
        path.mkdir()
    found = XidLog(0.0, path, knows_pids=True)
    with monkeypatch.context() as patch:
        if why == "forbidden":
            patch.setattr(xid_log.os, "open", forbid)
        about, news = found.of_process(1), found.news_of_host()
    assert about == news == ()


def test_nothing_is_opened_before_it_is_asked_for(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(xid_log.os, "open", forbid)
        assert XidLog(0.0, tmp_path / "kmsg", knows_pids=True)._log is None


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "kmsg"

    def write(*lines):
        with path.open("a") as file:
            file.writelines(lines)
        return path

    write()
    return write


def test_reports_about_a_process_are_those_with_its_pid(log):
    path = log(line(xid(31)), line(xid(79)), line(xid(48, pid="99")), line("usb"))
    assert [one.number for one in XidLog(50.0, path, knows_pids=True).of_process(1234)] == [31, 79]


def test_what_was_reported_before_the_run_is_not_its_business(log):
    found = XidLog(90.0, log(line(xid(31), 60.0), line(xid(79), 100.0)), knows_pids=True)
    assert [one.number for one in found.of_process(1234)] == [79]


def test_in_a_container_no_pid_is_believed_and_all_is_news_of_the_host(log):
    found = XidLog(50.0, log(line(xid())), knows_pids=False)
    assert found.of_process(1234) == ()
    assert [one.number for one in found.news_of_host()] == [79]


def test_news_are_told_once(log):
    found = XidLog(50.0, log(line(xid(79, "'<unknown>'"), record=7)), knows_pids=True)
    assert [one.number for one in found.news_of_host()] == [79]
    assert found.news_of_host() == ()
    log(line(xid(48, "'<unknown>'"), record=8))
    assert [one.number for one in found.news_of_host()] == [48]


def test_what_is_about_another_process_is_no_news_where_pids_are_known(log):
    assert XidLog(50.0, log(line(xid(pid="99"))), knows_pids=True).news_of_host() == ()


def test_the_machines_own_log_is_read_at_once():
    began = time.monotonic()
    XidLog(began).news_of_host()
    assert time.monotonic() - began < 5
