"""TLS between the nodes: each side proves with a certificate of the job's own authority who it is.

The configuration is MindSpore's ``config.json``, the certificates are PKCS#12 or PEM files. Whoever
has a certificate of that authority belongs to the job; the host's name is not looked at, as nodes
have names that nobody knows beforehand. No key is ever written to a disk.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from socket import MSG_PEEK, socket
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from agent.nodes.frames import PREAMBLE
from agent.nodes.line import bytes_of
from agent.nodes.messages import Refused
from agent.spec.job_spec import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.x509 import Certificate, CertificateRevocationList

WARNING_DAYS = 90  # as MindSpore's
_REQUIRED = ("server_cert_path", "client_cert_path", "ca_cert_path")
_OTHERS = (
    *("crl_path", "cipher_list", "cert_expire_warning_time_in_day"),
    "cert_check_interval_in_hour",  # MindSpore looks again at certificates that are in use
)
_NEEDED = "--tls-config needs a package for certificates: pip install 'msrun[tls]'"
NEEDS_TLS = "the nodes of this job know each other by certificates: give --tls-config here, too"
WRONG = 2  # the exit code of a node without
_BLOCK_BYTES = 1 << 20  # of a file at a time
_RECORD_BYTES = 16 << 10  # the longest that TLS has


class Security(Protocol):
    """What connections between nodes are made of."""

    def accepted(self, connection: socket) -> socket:
        """For a connection that this node has accepted; it shakes hands as it first reads."""

    def dialled(self, connection: socket) -> socket:
        """For a connection that this node has opened.

        Raises:
            OSError: it is gone.
            UntrustedError: the other side is not trusted, or does not speak TLS.
        """


class UntrustedError(Exception):
    """The two sides do not trust each other: a clause that says why."""


class PlainText:
    """No TLS."""

    def accepted(self, connection: socket) -> socket:
        """As it is."""
        return connection

    def dialled(self, connection: socket) -> socket:
        """As it is."""
        return connection


PLAIN = PlainText()


class TlsSocket(ssl.SSLSocket):
    """A connection that waits, or does not, as a plain one does."""

    def recv(self, buflen: int = _RECORD_BYTES, flags: int = 0) -> bytes:
        """Some bytes, at most ``buflen`` and what is left of one record; empty: it is closed.

        What was decrypted and is not read yet would wake nobody who waits for the descriptor.

        Raises:
            BlockingIOError: there is nothing yet.
        """
        if self.server_side and self.version() is None and self._is_plain():
            socket.send(self, bytes_of(Refused(NEEDS_TLS, WRONG)))
            return b""
        try:
            data = super().recv(buflen, flags)
            while more := self.pending():
                data += super().recv(more)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        return data

    def sendfile(self, file: Any, offset: int = 0, count: int | None = None) -> int:
        """As a plain socket's: the file's own position neither counts nor moves."""
        sent = 0
        while count is None or sent < count:
            wanted = _BLOCK_BYTES if count is None else min(_BLOCK_BYTES, count - sent)
            data = os.pread(file.fileno(), wanted, offset + sent)
            if not data:
                break
            self.sendall(data)
            sent += len(data)
        return sent

    def _is_plain(self) -> bool:
        """Whether the other side is a node without certificates, as its first bytes show."""
        try:
            return socket.recv(self, len(PREAMBLE), MSG_PEEK) == PREAMBLE
        except BlockingIOError:
            return False

    def send(self, data: Any, flags: int = 0) -> int:
        """As a plain socket's.

        Raises:
            BlockingIOError: the kernel takes nothing at present.
        """
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


class Tls:
    """Both sides show certificates."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    def accepted(self, connection: socket) -> socket:
        """Shakes hands as it first reads."""
        return self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def dialled(self, connection: socket) -> socket:
        """Shakes hands at once, within the connection's time-out."""
        wrapped = self._context.wrap_socket(connection, do_handshake_on_connect=False)
        try:
            wrapped.do_handshake()
        except ssl.SSLEOFError as error:
            wrapped.close()
            raise OSError("closed: perhaps it does not speak TLS") from error
        except ssl.SSLError as error:
            wrapped.close()
            raise UntrustedError(why_untrusted(error)) from error
        except OSError:
            wrapped.close()
            raise
        return wrapped


def why_untrusted(error: ssl.SSLError) -> str:
    """What went wrong between two sides, as a clause about the other one."""
    reason = (error.reason or "").replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"shows a certificate that is not accepted here: {error.verify_message}"
    if "alert" in reason:
        return f"does not accept this node's certificate: {reason.partition('alert ')[2]}"
    if reason in {"wrong version number", "http request"}:
        return "does not speak TLS: all nodes need --tls-config, or none"
    return f"cannot agree with this node on TLS: {reason or error}"


# --- the configuration ----------------------------------------------------------------------------


class TlsConfig(NamedTuple):
    """MindSpore's ``config.json``."""

    server_cert: Path
    client_cert: Path
    ca_cert: Path
    crl: Path | None
    ciphers: str
    warning_days: int

    @staticmethod
    def read(path: Path) -> TlsConfig:
        """Read the file; other files are named relative to its folder.

        Raises:
            UsageError: it is no such file.
        """
        try:
            found = json.loads(path.read_bytes())
        except OSError as error:
            raise UsageError(f"--tls-config {path} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise UsageError(f"--tls-config {path} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(f"--tls-config {path} must be an object with {', '.join(_REQUIRED)}")
        unknown = sorted(found.keys() - {*_REQUIRED, *_OTHERS})
        if unknown:
            known = ", ".join((*_REQUIRED, *_OTHERS))
            raise UsageError(f"--tls-config {path}: {unknown[0]!r} is none of {known}")
        lacking = [key for key in _REQUIRED if not found.get(key)]
        if lacking:
            raise UsageError(f"--tls-config {path} lacks {lacking[0]!r}")
        texts = {key: found.get(key) or "" for key in (*_REQUIRED, "crl_path", "cipher_list")}
        for key, text in texts.items():
            if not isinstance(text, str):
                raise UsageError(f"--tls-config {path}: {key!r} must be a text")
        days = found.get("cert_expire_warning_time_in_day", WARNING_DAYS)
        if type(days) is not int or days < 0:
            key = "cert_expire_warning_time_in_day"
            raise UsageError(f"--tls-config {path}: {key!r} must be a number of days")
        folder = path.absolute().parent
        return TlsConfig(
            server_cert=folder / texts["server_cert_path"],
            client_cert=folder / texts["client_cert_path"],
            ca_cert=folder / texts["ca_cert_path"],
            crl=folder / texts["crl_path"] if texts["crl_path"] else None,
            ciphers=texts["cipher_list"],
            warning_days=days,
        )


def security(
    config: TlsConfig, environ: Mapping[str, str], say: Callable[[str], None], *, is_server: bool
) -> Security:
    """TLS by this configuration. Everything that would fail later fails here.

    Args:
        config: where the certificates are.
        environ: msrun's, with passwords.
        say: takes a sentence about what expires soon.
        is_server: this is the controller's node, which the others dial.

    Raises:
        UsageError: one of the files is of no use.
    """
    try:
        import cryptography.x509  # noqa: F401  loaded only where it is needed
    except ImportError as error:
        raise UsageError(_NEEDED) from error
    path = config.server_cert if is_server else config.client_cert
    own = _Identity.read(path, _password(environ, is_server=is_server))
    authorities = _certificates(config.ca_cert)
    crl = None if config.crl is None else _revocations(config.crl)
    _check(own.certificate, path, authorities, config, crl, say)
    kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(kind)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    own.load_into(context, path)
    context.load_verify_locations(cadata=_pem(authorities))
    if crl is not None:
        context.load_verify_locations(str(config.crl))
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    _set_ciphers(context, config)
    return Tls(context)


def _set_ciphers(context: ssl.SSLContext, config: TlsConfig) -> None:
    """Those of TLS 1.2; the three of TLS 1.3 are always there, Python cannot choose among them."""
    names = [name for name in config.ciphers.split(":") if name and not name.startswith("TLS_")]
    if not names:
        return
    try:
        context.set_ciphers(":".join(names))
    except ssl.SSLError as error:
        raise UsageError(
            f"none of the ciphers of cipher_list is known here: {config.ciphers[:100]!r}"
        ) from error


def _password(environ: Mapping[str, str], *, is_server: bool) -> bytes | None:
    name = f"MSRUN_{'SERVER' if is_server else 'CLIENT'}_PASSWORD"
    if file := environ.get(f"{name}_FILE"):
        try:
            return Path(file).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise UsageError(f"{name}_FILE={file} cannot be read ({error.strerror})") from error
    return environ[name].encode() if environ.get(name) else None


# --- certificates ---------------------------------------------------------------------------------


class _Identity(NamedTuple):
    """A certificate and its key."""

    certificate: Certificate
    key: Any
    chain: tuple[Certificate, ...]

    @staticmethod
    def read(path: Path, password: bytes | None) -> _Identity:
        """From a PKCS#12 or a PEM file.

        Raises:
            UsageError: it cannot be read, or the password is wrong.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, pkcs12

        data = _bytes(path)
        try:
            if b"-----BEGIN" in data:
                key: Any = load_pem_private_key(data, password)
                first, *chain = x509.load_pem_x509_certificates(data)
                return _Identity(first, key, tuple(chain))
            key, found, more = pkcs12.load_key_and_certificates(data, password)
        except (ValueError, TypeError) as error:
            names = "MSRUN_SERVER_PASSWORD or MSRUN_CLIENT_PASSWORD (or their _FILE)"
            raise UsageError(
                f"{path} cannot be opened ({error}): is the password in {names} right?"
            ) from error
        if key is None or found is None:
            raise UsageError(f"{path} has no key and certificate")
        return _Identity(found, key, tuple(more))

    def load_into(self, context: ssl.SSLContext, path: Path) -> None:
        """Python takes files only: one in memory, with the key encrypted by a random password."""
        from cryptography.hazmat.primitives import serialization as of

        password = os.urandom(16).hex()
        locked = of.BestAvailableEncryption(password.encode())
        text = self.key.private_bytes(of.Encoding.PEM, of.PrivateFormat.PKCS8, locked)
        text += _pem((self.certificate, *self.chain)).encode()
        file = os.memfd_create("msrun-certificate", os.MFD_CLOEXEC)
        try:
            os.write(file, text)
            context.load_cert_chain(f"/proc/self/fd/{file}", password=password)
        except ssl.SSLError as error:
            raise UsageError(f"{path} is of no use to TLS: {error.reason or error}") from error
        finally:
            os.close(file)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error


def _certificates(path: Path) -> tuple[Certificate, ...]:
    from cryptography import x509

    data = _bytes(path)
    try:
        if b"-----BEGIN" in data:
            return tuple(x509.load_pem_x509_certificates(data))
        return (x509.load_der_x509_certificate(data),)
    except ValueError as error:
        raise UsageError(f"{path} has no certificate: {error}") from error


def _revocations(path: Path) -> CertificateRevocationList:
    from cryptography import x509

    try:
        return x509.load_pem_x509_crl(_bytes(path))
    except ValueError as error:
        raise UsageError(f"{path} is no list of revoked certificates (PEM): {error}") from error


def _pem(certificates: Sequence[Certificate]) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return "".join(each.public_bytes(Encoding.PEM).decode() for each in certificates)


def _check(
    own: Certificate,
    path: Path,
    authorities: Sequence[Certificate],
    config: TlsConfig,
    crl: CertificateRevocationList | None,
    say: Callable[[str], None],
) -> None:
    """Raise UsageError for what the other side would refuse; say what expires soon."""
    named = [(f"the certificate {path}", own)]
    named += [(f"the authority's {config.ca_cert}", each) for each in authorities]
    ends = [(what, each.not_valid_before_utc, each.not_valid_after_utc) for what, each in named]
    if crl is not None and crl.next_update_utc is not None:
        ends.append((f"the list {config.crl}", crl.last_update_utc, crl.next_update_utc))
    now = datetime.now(UTC)
    for what, begin, end in ends:
        if now < begin:
            raise UsageError(f"{what} is not valid before {begin:%Y-%m-%d %H:%M} UTC")
        if end < now:
            raise UsageError(f"{what} expired on {end:%Y-%m-%d %H:%M} UTC: renew it")
        if (left := (end - now).days) < config.warning_days:
            say(f"{what} expires in {left} days, on {end:%Y-%m-%d}")
    if not any(own.issuer == each.subject for each in authorities):
        raise UsageError(f"the certificate {path} was not issued by {config.ca_cert}")
    if crl is not None and crl.get_revoked_certificate_by_serial_number(own.serial_number):
        raise UsageError(f"the certificate {path} is revoked by {config.crl}")
