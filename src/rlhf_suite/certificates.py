"""The certificates that HTTPS servers are checked against, and the message about a server that fails this check."""

from __future__ import annotations

import ssl
from functools import cache


@cache
def certificates() -> ssl.SSLContext:
    """Return the certificates that servers are checked against, read once: httpx reads them again for every client,
    which takes longer than a short request."""
    import httpx

    return httpx.create_ssl_context()


def certificate_problem(error: BaseException) -> str | None:
    """Return why the certificate of a server was refused, and the remedy; None if the request failed for another
    reason. Libraries raise errors of their own from that of the check."""
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "Name the PEM file of its certificate authority in the environment variable SSL_CERT_FILE"
        if "mismatch" in error.verify_message:
            remedy = "Use a host name that the certificate contains"
        return f"the certificate of the server is not trusted ({error.verify_message}). {remedy}"
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else (error.__cause__ or error.__context__,)
    problems = (certificate_problem(cause) for cause in inner if cause is not None)
    return next(filter(None, problems), None)
