"""Certificates of an authority that lives as long as a test, in files as MindSpore's users have them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as of
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID

PASSWORD = "a pass word"
NOW = datetime.now(UTC)
PASSWORDS = {"MSRUN_SERVER_PASSWORD": PASSWORD, "MSRUN_CLIENT_PASSWORD": PASSWORD}


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path, name: str = "the job's authority") -> None:
        self.folder = folder
        self.name = named(name)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.serials: dict[str, int] = {}
        self.certificate = self._sign(self.name, self.key, 3650, is_authority=True)
        (folder / "ca.crt").write_bytes(self.certificate.public_bytes(of.Encoding.PEM))

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        days: float,
        since: float = -400,
        *,
        is_authority: bool,
    ) -> x509.Certificate:
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW + timedelta(days=since))
            .not_valid_after(NOW + timedelta(days=days))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        )
        if is_authority:
            use = x509.KeyUsage(*[False] * 5, True, True, False, False)
            made = made.add_extension(use, critical=True)
        return made.sign(self.key, hashes.SHA256())

    def renew(self, days: float = 3650, since: float = -1) -> None:
        """Another certificate of this authority, of the same key, beside those in its file."""
        made = self._sign(self.name, self.key, days, since, is_authority=True)
        with (self.folder / "ca.crt").open("ab") as file:
            file.write(made.public_bytes(of.Encoding.PEM))

    def issue(
        self, name: str, days: float = 365, since: float = -400, *, is_pem: bool = False
    ) -> Path:
        """A certificate with its key: NAME.p12, or NAME.pem."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(named(name), key, days, since, is_authority=False)
        self.serials[name] = certificate.serial_number
        locked = of.BestAvailableEncryption(PASSWORD.encode())
        if is_pem:
            path = self.folder / f"{name}.pem"
            text = key.private_bytes(of.Encoding.PEM, of.PrivateFormat.PKCS8, locked)
            path.write_bytes(text + certificate.public_bytes(of.Encoding.PEM))
            return path
        path = self.folder / f"{name}.p12"
        path.write_bytes(
            pkcs12.serialize_key_and_certificates(name.encode(), key, certificate, None, locked)
        )
        return path

    def revoke(self, *names: str, days: float = 30, since: float = -60) -> Path:
        """The list of what is revoked: crl.pem."""
        made = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.name)
            .last_update(NOW + timedelta(days=since))
            .next_update(NOW + timedelta(days=days))
        )
        for name in names:
            one = x509.RevokedCertificateBuilder().serial_number(self.serials[name])
            made = made.add_revoked_certificate(one.revocation_date(NOW).build())
        path = self.folder / "crl.pem"
        path.write_bytes(made.sign(self.key, hashes.SHA256()).public_bytes(of.Encoding.PEM))
        return path

    def config(self, **more: object) -> Path:
        """MindSpore's config.json, for ``server.p12`` and ``client.p12``."""
        content = {
            "server_cert_path": "server.p12",
            "client_cert_path": "client.p12",
            "ca_cert_path": "ca.crt",
            "crl_path": "",
            "cipher_list": "",
            "cert_expire_warning_time_in_day": 90,
        }
        path = self.folder / "config.json"
        path.write_text(json.dumps({**content, **more}))
        return path


def authority(folder: Path) -> Authority:
    """One with ``server.p12`` and ``client.p12``."""
    made = Authority(folder)
    made.issue("server")
    made.issue("client")
    return made
