"""Certificates that were renewed are noticed once, also where files were replaced by a link's change."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.up.certificate_files import CertificateFiles


def test_a_file_that_was_replaced_is_noticed_once(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text("one")
    key.write_text("one")
    files = CertificateFiles((str(cert), str(key), None))
    assert not files.changed()
    fresh = tmp_path / "new.pem"
    fresh.write_text("two")
    fresh.replace(key)
    assert files.changed()
    assert not files.changed()


def test_a_file_that_is_missing_while_it_is_replaced_has_not_changed(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("one")
    files = CertificateFiles((str(cert),))
    cert.unlink()
    assert not files.changed()
    cert.write_text("another")
    assert files.changed()


def test_a_link_that_leads_elsewhere_is_noticed(tmp_path: Path) -> None:
    """As a mounted secret of Kubernetes is renewed."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("same length")
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "cert.pem"
    link.symlink_to("a")
    files = CertificateFiles((str(link),))
    link.unlink()
    link.symlink_to("b")
    assert files.changed()


def test_without_certificates_nothing_changes() -> None:
    assert not CertificateFiles((None, None)).changed()
