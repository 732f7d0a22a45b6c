"""The certificates that ``--tls-config`` names: MindSpore's ``config.json``, PKCS#12 or PEM files.

All that another node would refuse later is found here, before anything starts. No key is ever
written to a disk.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.spec.job_spec import UsageError
from worker_hooks.contract.env import CLIENT_PASSWORD, SERVER_PASSWORD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.x509 import Certificate, CertificateRevocationList

WARNING_DAYS = 90  # as MindSpore's
_REQUIRED = ("server_cert_path", "client_cert_path", "ca_cert_path")
_OTHERS = (
    *("crl_path", "cipher_list", "cert_expire_warning_time_in_day"),
    "cert_check_interval_in_hour",  # MindSpore looks again at certificates that are in use
)
_NEVER = ("!aNULL", "!eNULL", "!PSK", "!SRP")  # these know nobody, whatever the list says
_NEEDED = "--tls-config needs a package for certificates: pip install 'msrun[tls]'"


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


def tls_context(
    config: TlsConfig, environ: Mapping[str, str], say: Callable[[str], None], *, is_server: bool
) -> ssl.SSLContext:
    """For connections of which both sides show a certificate of the authority.

    Args:
        say: takes a sentence about what expires soon.
        is_server: this is the controller's node, which the others dial.

    Raises:
        UsageError: one of the files is of no use.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
    except ImportError as error:
        raise UsageError(_NEEDED) from error
    try:
        return _context(config, environ, say, is_server=is_server)
    except (ValueError, TypeError, OSError, UnsupportedAlgorithm) as error:
        raise UsageError(f"--tls-config: a certificate is of no use ({error})") from error


def _context(
    config: TlsConfig, environ: Mapping[str, str], say: Callable[[str], None], *, is_server: bool
) -> ssl.SSLContext:
    path = config.server_cert if is_server else config.client_cert
    own = _Identity.read(path, _password(environ, is_server=is_server))
    authorities = _certificates(config.ca_cert)
    crl = None if config.crl is None else _revocations(config.crl)
    _check(own, path, authorities, config, crl, say)
    kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    own.load_into(context, path)
    context.load_verify_locations(cadata=_pem(authorities))
    if crl is not None:
        _load_revocations(context, crl)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    _set_ciphers(context, config)
    return context


def _set_ciphers(context: ssl.SSLContext, config: TlsConfig) -> None:
    """Those of TLS 1.2; the three of TLS 1.3 are always there, Python cannot choose among them."""
    names = [name for name in config.ciphers.split(":") if name and not name.startswith("TLS_")]
    if not names:
        return
    try:
        context.set_ciphers(":".join((*names, *_NEVER)))
    except ssl.SSLError as error:
        raise UsageError(
            f"none of the ciphers of cipher_list is known here: {config.ciphers[:100]!r}"
        ) from error


def _password(environ: Mapping[str, str], *, is_server: bool) -> bytes | None:
    name = SERVER_PASSWORD if is_server else CLIENT_PASSWORD
    if file := environ.get(f"{name}_FILE"):
        try:
            return Path(file).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise UsageError(f"{name}_FILE={file} cannot be read ({error.strerror})") from error
    return os.fsencode(environ[name]) if environ.get(name) else None


def lacking_password(
    path: Path, environ: Mapping[str, str], *, is_server: bool
) -> tuple[str, Path] | None:
    """The variable of a password that this node needs and does not have, and the file of it.

    Args:
        path: of ``config.json``.
        environ: msrun's.
        is_server: the others dial this node.

    Raises:
        UsageError: ``config.json`` or the file of the password is of no use.
    """
    config = TlsConfig.read(path)
    file = config.server_cert if is_server else config.client_cert
    if _password(environ, is_server=is_server) is not None or not os.access(file, os.R_OK):
        return None
    is_locked = _is_locked(_bytes(file))
    return (SERVER_PASSWORD if is_server else CLIENT_PASSWORD, file) if is_locked else None


def _is_locked(data: bytes) -> bool:
    """Whether a file opens with a password only. One of no use does not open with one, either."""
    if b"-----BEGIN" in data:
        return b"ENCRYPTED" in data
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import pkcs12
    except ImportError:  # which is said later
        return False
    try:
        pkcs12.load_key_and_certificates(data, None)
    except (ValueError, TypeError) as error:
        return "password" in str(error).lower()
    except UnsupportedAlgorithm:
        return False
    return False


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
            names = f"{SERVER_PASSWORD} or {CLIENT_PASSWORD} (or their _FILE)"
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


def _load_revocations(context: ssl.SSLContext, crl: CertificateRevocationList) -> None:
    """That list alone: certificates in the same file would be taken for authorities."""
    from cryptography.hazmat.primitives.serialization import Encoding

    file = os.memfd_create("msrun-revocations", os.MFD_CLOEXEC)
    try:
        os.write(file, crl.public_bytes(Encoding.PEM))
        context.load_verify_locations(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


def _pem(certificates: Sequence[Certificate]) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return "".join(each.public_bytes(Encoding.PEM).decode() for each in certificates)


def _check(
    own: _Identity,
    path: Path,
    authorities: Sequence[Certificate],
    config: TlsConfig,
    crl: CertificateRevocationList | None,
    say: Callable[[str], None],
) -> None:
    """Raise UsageError for what the other side would refuse; say what expires soon."""
    certificate, now = own.certificate, datetime.now(UTC)
    issuers = [each for each in (*authorities, *own.chain) if _has_issued(each, certificate)]
    if not issuers:
        raise UsageError(f"the certificate {path} was not issued by {config.ca_cert}")
    # while an authority is renewed, the file has the old one as well, or the next one already
    begun = [each for each in issuers if each.not_valid_before_utc <= now]
    newest = max(begun or issuers, key=lambda each: each.not_valid_after_utc)
    named = [
        (f"the certificate {path}", certificate),
        (f"its authority {config.ca_cert}", newest),
    ]
    ends = [(what, each.not_valid_before_utc, each.not_valid_after_utc) for what, each in named]
    if crl is not None and crl.next_update_utc is not None:
        ends.append((f"the list {config.crl}", crl.last_update_utc, crl.next_update_utc))
    for what, begin, end in ends:
        if now < begin:
            raise UsageError(f"{what} is not valid before {begin:%Y-%m-%d %H:%M} UTC")
        if end < now:
            raise UsageError(f"{what} expired on {end:%Y-%m-%d %H:%M} UTC: renew it")
        if (left := (end - now).days) < config.warning_days:
            say(f"{what} expires in {left} days, on {end:%Y-%m-%d}")
    if crl is None:
        return
    if crl.issuer != certificate.issuer:
        raise UsageError(f"the list {config.crl} is not of the authority that has issued {path}")
    if crl.get_revoked_certificate_by_serial_number(certificate.serial_number):
        raise UsageError(f"the certificate {path} is revoked by {config.crl}")


def _has_issued(authority: Certificate, certificate: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
