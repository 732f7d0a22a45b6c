"""Nodes that show each other certificates: who gets in, who does not, and with which words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import struct
import sys
from datetime import datetime, timedelta

import pytest
from support.certificates import PASSWORD, PASSWORDS, Authority, authority
from support.meeting_nodes import LONG_S, node

from agent.launch import certificates
from agent.launch.certificates import TlsConfig, lacking_password, tls_context
from agent.nodes.join import RefusedError
from agent.nodes.link import NodeLink
from agent.nodes.run_messages import ShownStatus
from agent.nodes.tls import Tls
from agent.nodes.transfer import MemoryInbox, MemoryServer, Span, fetch, give
from agent.spec.job_spec import UsageError

CIPHERS_OF_MINDSPORE = (
    "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384:"
    "DHE-DSS-AES128-GCM-SHA256:DHE-PSK-CHACHA20-POLY1305:ECDHE-ECDSA-AES256-GCM-SHA384:"
    "TLS_AES_256_GCM_SHA384"
)


@pytest.fixture
def job_authority(tmp_path):
    return authority(tmp_path)


def sides(made, said=None, environ=None, **more):
    """What the controller's node and another one have of one configuration."""
    config = TlsConfig.read(made.config(**more))
    say = (said if said is not None else []).append
    environ = PASSWORDS if environ is None else environ
    return [Tls(tls_context(config, environ, say, is_server=each)) for each in (True, False)]


def meet(job, server, client, **more):
    controller = job.gather(nnodes=2, security=server, **more)
    return controller, job.join(node("mn1"), security=client)


@pytest.mark.parametrize(
    "more",
    [{}, {"cipher_list": CIPHERS_OF_MINDSPORE}, {"crl_path": "crl.pem"}],
    ids=["plain", "seed's ciphers", "revocations"],
)
def test_nodes_with_certificates_of_one_authority_meet_and_speak(job, job_authority, more):
    job_authority.issue("other")
    job_authority.revoke("other")
    said = []
    controller, other = meet(job, *sides(job_authority, said, **more))
    line, back = controller.result(LONG_S).lines[1], other.result(LONG_S).line
    assert line.connection.version() in {"TLSv1.2", "TLSv1.3"}
    assert bool(said) == ("crl_path" in more)  # it has 30 days
    large = ShownStatus({"text": "x" * (3 << 20)})
    heard = []
    loop = asyncio.new_event_loop()
    one, two = NodeLink(line), NodeLink(back)
    one.attach(loop, heard.append, heard.append)
    two.attach(loop, heard.append, heard.append)
    two.send(large)
    two.send(ShownStatus({"n": 1}))
    one.send(ShownStatus({"n": 2}))
    deadline = loop.time() + LONG_S
    while len(heard) < 3 and loop.time() < deadline:
        loop.call_later(0.01, loop.stop)
        loop.run_forever()
    assert sorted(heard, key=str) == sorted(
        [large, ShownStatus({"n": 1}), ShownStatus({"n": 2})], key=str
    )
    one.close()
    while len(heard) < 4 and loop.time() < deadline:
        loop.call_later(0.01, loop.stop)
        loop.run_forever()
    assert heard[3].why == "closed the line"  # which proves that its process has gone
    two.close()
    loop.close()


def connected(job, job_authority):
    controller, other = meet(job, *sides(job_authority))
    one, two = controller.result(LONG_S).lines[1].connection, other.result(LONG_S).line.connection
    for each in (one, two):
        each.settimeout(LONG_S)
    return one, two


def test_a_line_that_is_reset_tells_it_as_a_plain_one_does(job, job_authority):
    one, two = connected(job, job_authority)
    two.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    two.close()
    select.select([one], [], [], LONG_S)
    with pytest.raises(ConnectionResetError):
        one.send(b"x")


def test_that_it_was_reset_is_heard_by_who_only_listens(job, job_authority):
    one, two = connected(job, job_authority)
    two.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    two.close()
    with pytest.raises(ConnectionResetError):
        one.recv()


def test_last_words_are_heard_though_sending_fails(job, job_authority):
    one, two = connected(job, job_authority)
    two.sendall(b"last words")
    two.close()
    select.select([one], [], [], LONG_S)
    for _ in range(2):
        with contextlib.suppress(OSError):
            one.send(b"x")
    assert one.recv() == b"last words"


def test_pem_files_and_passwords_in_files(job, job_authority, tmp_path):
    for name in ("server", "client"):
        job_authority.issue(name, is_pem=True)
    (tmp_path / "word").write_text(f"{PASSWORD}\n")
    environ = {
        f"MSRUN_{side}_PASSWORD_FILE": str(tmp_path / "word") for side in ("SERVER", "CLIENT")
    }
    more = {"server_cert_path": "server.pem", "client_cert_path": "client.pem"}
    controller, other = meet(job, *sides(job_authority, environ=environ, **more))
    controller.result(LONG_S), other.result(LONG_S)


def test_files_in_memory_travel_encrypted(job_authority):
    server, client = sides(job_authority)
    file = os.memfd_create("test")
    os.truncate(file, 5 << 20)
    os.pwrite(file, b"at the end", (5 << 20) - 10)
    os.lseek(file, 12345, os.SEEK_SET)  # others read it at the same time
    memory = MemoryServer(lambda _: None, server)
    key = memory.offer([Span(file)])
    copy = os.memfd_create("copy")
    fetch("127.0.0.1", memory.port, key, [Span(copy, 0, 5 << 20)], client)
    assert os.pread(copy, 100, (5 << 20) - 10) == b"at the end"
    assert os.lseek(file, 0, os.SEEK_CUR) == 12345
    with pytest.raises(OSError):
        fetch("127.0.0.1", memory.port, key, [Span(copy, 0, 5 << 20)])  # in plain text
    memory.close()
    taken = []
    inbox = MemoryInbox("test", taken.append, lambda _: None, server)
    with open(file, "rb") as readable:
        give("127.0.0.1", inbox.port, inbox.key, readable, lambda _: None, client)
    assert os.fstat(taken[0]).st_size == 5 << 20
    assert os.pread(taken[0], 100, (5 << 20) - 10) == b"at the end"
    inbox.close()
    for each in (copy, *taken):
        os.close(each)


# --- who is not trusted ---------------------------------------------------------------------------


def test_a_certificate_of_another_authority_is_refused(job, job_authority, tmp_path):
    (tmp_path / "other").mkdir()
    stranger = authority(tmp_path / "other")
    server, _ = sides(job_authority)
    _, client = sides(stranger)
    controller, other = meet(job, server, client, timeout_s=3.0)
    with pytest.raises(
        RefusedError, match="shows a certificate that is not accepted here: "
    ) as why:
        other.result(LONG_S)
    assert why.value.exit_code == 2
    controller.exception(LONG_S)


def test_who_is_not_accepted_there_is_told(job, job_authority, tmp_path_factory):
    job_authority.issue("client2")
    job_authority.revoke("client2")
    server, _ = sides(job_authority, crl_path="crl.pem")
    # what else is in that file is no authority
    other = Authority(tmp_path_factory.mktemp("other"), "another")
    with open(job_authority.folder / "crl.pem", "ab") as file:
        file.write((other.folder / "ca.crt").read_bytes())
    server, _ = sides(job_authority, crl_path="crl.pem")
    _, client = sides(job_authority, client_cert_path="client2.p12")
    controller, other = meet(job, server, client, timeout_s=3.0)
    with pytest.raises(
        RefusedError, match=r"does not accept this node's certificate, .*: certificate revoked"
    ):
        other.result(LONG_S)
    controller.exception(LONG_S)


def test_a_node_without_certificates_is_told_what_to_give(job, job_authority):
    server, _ = sides(job_authority)
    controller = job.gather(nnodes=2, security=server, timeout_s=3.0)
    with pytest.raises(RefusedError, match="by certificates: give --tls-config here, too"):
        job.join(node("mn1")).result(LONG_S)
    controller.exception(LONG_S)


def test_a_node_that_alone_has_certificates_is_told(job, job_authority):
    _, client = sides(job_authority)
    controller = job.gather(nnodes=2)
    with pytest.raises(RefusedError, match="of this job have no --tls-config") as why:
        job.join(node("mn1"), security=client).result(LONG_S)
    assert why.value.exit_code == 2
    other = job.join(node("mn2"))
    assert [each.host for each in controller.result(LONG_S).roster.nodes] == ["mn0", "mn2"]
    other.result(LONG_S)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n"], ids=["nothing", "web"])
def test_who_is_no_msrun_may_be_gone_later(job, job_authority, says):
    """A node with certificates dials again, as one without does."""
    server, client = sides(job_authority)
    job.listener.listen(100)
    other = job.join(node("mn1"), security=client)
    for _ in range(2):  # with certificates, and to see whether an msrun has none
        with job.accept() as connection:
            assert connection.recv(1)
            connection.sendall(says)
    assert len(job.gather(nnodes=2, security=server).result(LONG_S).roster.nodes) == 2
    other.result(LONG_S)


def test_strangers_disturb_nobody(job, job_authority):
    server, client = sides(job_authority)
    controller = job.gather(nnodes=2, security=server)
    job.connect(b"GET / HTTP/1.0\r\n\r\n")
    job.connect(b"\x16\x03\x01\x00\x05hello")
    job.connect()
    other = job.join(node("mn1"), security=client)
    assert len(controller.result(LONG_S).roster.nodes) == 2
    other.result(LONG_S)


# --- what fails before anything starts ------------------------------------------------------------


def other_list(made):
    """Of an authority with another name."""
    path = made.folder / "ca.crt"
    kept = path.read_bytes()
    Authority(made.folder, "another").revoke()
    path.write_bytes(kept)


def nothing(_authority):
    """The files are as they were made."""


@pytest.mark.parametrize(
    ("make", "more", "why"),
    [
        (lambda each: each.issue("server", -1), {}, r"server\.p12 expired on 20.*: renew it"),
        (lambda each: each.issue("server", since=1), {}, r"server\.p12 is not valid before 20"),
        (
            lambda each: each.revoke(since=1),
            {"crl_path": "crl.pem"},
            r"crl\.pem is not valid before 20",
        ),
        (nothing, {"crl_path": "none.pem"}, r"none\.pem cannot be read \(No such file"),
        (
            lambda each: each.revoke("server"),
            {"crl_path": "crl.pem"},
            r"server\.p12 is revoked by ",
        ),
        (lambda each: each.revoke(days=-1), {"crl_path": "crl.pem"}, r"crl\.pem expired on 20"),
        (nothing, {"crl_path": "ca.crt"}, r"ca\.crt is no list of revoked certificates"),
        (nothing, {"ca_cert_path": "server.p12"}, r"server\.p12 has no certificate"),
        (lambda each: Authority(each.folder, "x"), {}, r"server\.p12 was not issued by .*ca\.crt"),
        (nothing, {"cipher_list": "TLS_AES_256_GCM_SHA384:NOPE"}, "none of the ciphers"),
        (nothing, {"cipher_list": "aNULL:@SECLEVEL=0"}, "none of the ciphers"),
        (nothing, {"ca_cert_path": "a\0b"}, "--tls-config: a certificate is of no use"),
        (other_list, {"crl_path": "crl.pem"}, "is not of the authority that has issued"),
        (nothing, {"server_cert_path": "ca.crt"}, r"ca\.crt cannot be opened"),
        (nothing, {"sever_cert_path": ""}, "'sever_cert_path' is none of server_cert_"),
        (nothing, {"ca_cert_path": ""}, "lacks 'ca_cert_path'"),
        (nothing, {"crl_path": 3}, "'crl_path' must be a text"),
        (nothing, {"cert_expire_warning_time_in_day": "x"}, "must be a number of days"),
    ],
)
def test_what_would_fail_later_is_one_sentence_at_once(job_authority, make, more, why):
    make(job_authority)
    with pytest.raises(UsageError, match=why):
        sides(job_authority, **more)


def test_an_authority_is_renewed(job, job_authority):
    """Both are in the file for a while; the old one may have expired."""
    old = (job_authority.folder / "ca.crt").read_bytes()
    new = Authority(job_authority.folder, "the new one")
    for name in ("server", "client"):
        new.issue(name)
    path = new.folder / "ca.crt"
    path.write_bytes(old + path.read_bytes())
    controller, other = meet(job, *sides(new))
    controller.result(LONG_S), other.result(LONG_S)


@pytest.mark.parametrize("since", [-1, 1], ids=["valid", "not yet"])
def test_an_authority_whose_certificate_is_renewed_has_two_for_a_while(job, job_authority, since):
    """Of one key; the new one may not be valid before tomorrow."""
    job_authority.renew(days=7300, since=since)
    controller, other = meet(job, *sides(job_authority))
    controller.result(LONG_S), other.result(LONG_S)


def test_an_authority_that_is_not_valid_yet_is_said(tmp_path):
    made = authority(tmp_path)
    (tmp_path / "ca.crt").unlink()
    made.renew(since=1)
    with pytest.raises(UsageError, match=r"its authority .*ca\.crt is not valid before 20"):
        sides(made)


class Ahead(datetime):
    """A clock that is two days ahead."""

    @classmethod
    def now(cls, zone=None):
        return super().now(zone) + timedelta(days=2)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "server",
            r"shows a certificate .*not accepted here: .*not yet valid .are the clocks of both right",
        ),
        ("client", r"does not accept this node's certificate.*: bad certificate .are the clocks"),
    ],
)
def test_a_clock_that_is_ahead_of_the_others_is_thought_of(
    job, job_authority, monkeypatch, name, why
):
    """There a certificate is valid already, of which the others say that it is not yet."""
    job_authority.issue(name, since=1)
    monkeypatch.setattr(certificates, "datetime", Ahead)
    controller, other = meet(job, *sides(job_authority), timeout_s=3.0)
    with pytest.raises(RefusedError, match=why) as told:
        other.result(LONG_S)
    assert told.value.exit_code == 2
    controller.exception(LONG_S)


@pytest.mark.parametrize("content", ["", "[]", "{", None])
def test_what_is_no_configuration_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="--tls-config "):
        TlsConfig.read(path)


@pytest.mark.parametrize("word", ["", "no-such-word"])
def test_a_wrong_password_is_said_and_not_shown(job_authority, word):
    with pytest.raises(UsageError, match=r"cannot be opened .*MSRUN_SERVER_PASSWORD") as raised:
        sides(job_authority, environ={"MSRUN_SERVER_PASSWORD": word})
    assert not word or word not in str(raised.value)


@pytest.mark.parametrize("is_server", [True, False])
def test_the_password_that_a_node_lacks_is_named(job_authority, tmp_path, is_server):
    name = "MSRUN_SERVER_PASSWORD" if is_server else "MSRUN_CLIENT_PASSWORD"
    config = job_authority.config()
    (variable, file) = lacking_password(config, {}, is_server=is_server)
    assert (variable, file.parent) == (name, tmp_path)
    given = {name: PASSWORDS[name]}
    assert lacking_password(config, given, is_server=is_server) is None
    file.unlink()  # which is said later
    assert lacking_password(config, {}, is_server=is_server) is None


def test_what_expires_soon_is_said(job_authority):
    job_authority.issue("client", 50)
    said = []
    sides(job_authority, said)
    (sentence,) = said
    assert "client.p12 expires in 49 days" in sentence
    said.clear()
    sides(job_authority, said, cert_expire_warning_time_in_day=10)
    assert said == []


def test_without_the_package_one_sentence_says_what_to_install(job_authority, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(UsageError, match=r"pip install 'msrun\[tls\]'"):
        sides(job_authority)


def test_no_key_is_left_in_a_file(job_authority, tmp_path):
    config = TlsConfig.read(job_authority.config())
    before = sorted(tmp_path.iterdir())
    descriptors = len(os.listdir("/proc/self/fd"))
    written, is_watching = [], [True]

    def look(event, args):
        if event == "open" and is_watching and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(args[0])

    sys.addaudithook(look)  # for ever
    try:
        for is_server in (True, False):
            tls_context(config, PASSWORDS, pytest.fail, is_server=is_server)
    finally:
        is_watching.clear()
    assert written == []  # wherever that is
    assert sorted(tmp_path.iterdir()) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_connection_that_is_not_ready_blocks_as_a_plain_one_does(job_authority):
    server, client = sides(job_authority)
    one, two = socket.socketpair()
    wrapped = server.accepted(one)
    wrapped.setblocking(False)
    with pytest.raises(BlockingIOError):
        wrapped.recv(10)
    with pytest.raises(BlockingIOError):
        wrapped.send(b"x")
    two.close()
    assert wrapped.recv(10) == b""
    wrapped.close()
    assert isinstance(client._context, ssl.SSLContext)


def test_a_token_counts_beside_certificates(job, job_authority):
    server, client = sides(job_authority)
    controller = job.gather(nnodes=2, token=b"a", security=server, timeout_s=3.0)
    with pytest.raises(RefusedError, match="token"):
        job.join(node("mn1"), b"b", security=client).result(LONG_S)
    controller.exception(LONG_S)
