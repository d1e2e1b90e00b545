"""Starting a scoring server: what it may be reached from, its certificate, and the model that it loads."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from opd.config import Dtype
from opd.errors import ConfigError

TOKEN_VARIABLE = "OPD_TEACHER_TOKEN"
GRACE_SECONDS = 10
"""How long requests that are being answered may take after the server is told to stop."""


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """What the user asked of `opd teacher serve`."""

    model: str
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 8100
    """0 = any free one."""
    device: str = "auto"
    dtype: str = "auto"
    max_batch_tokens: int = 8192
    max_queue_tokens: int = 262_144
    max_tokens: int = 65_536
    max_topk: int = 1024
    prefix_cache_tokens: int = 8192
    """Prompt tokens whose keys and values are remembered."""
    insecure: bool = False
    tls_certificate: Path | None = None
    tls_key: Path | None = None


def serve(request: ServeRequest, announce: Callable[[str], None]) -> None:
    """Serves the model until SIGINT or SIGTERM; `announce` is told the URL when the server answers.

    Raises ConfigError for an address that anyone could reach without a token, for certificates that cannot be read and for
    a port that is taken, all before the model is loaded.
    """
    token = os.environ.get(TOKEN_VARIABLE) or None
    _check_installed()
    _check_reachable(request, token)
    _check_certificates(request)
    _check_dtype(request)
    listener = _listen(request.host, request.port)
    try:
        _serve_on(listener, request, token, announce)
    finally:
        listener.close()


def _serve_on(
    listener: socket.socket, request: ServeRequest, token: str | None, announce: Callable[[str], None]
) -> None:
    import uvicorn

    from opd.memory import keep_freed_memory
    from opd.teachers.scoring import ScoringModel
    from opd.teachers.server import ScoringServer, ServerSettings

    model = ScoringModel(
        request.model,
        request.revision,
        request.device,
        request.dtype,
        prefix_cache_tokens=request.prefix_cache_tokens,
    )
    if model.device.type == "cpu":
        keep_freed_memory()
    server = ScoringServer(
        model,
        ServerSettings(
            max_batch_tokens=request.max_batch_tokens,
            max_queue_tokens=request.max_queue_tokens,
            max_tokens=request.max_tokens,
            max_topk=request.max_topk,
            token=token,
        ),
    )
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_certfile=request.tls_certificate,
        ssl_keyfile=request.tls_key,
        server_header=False,
    )
    host, port = listener.getsockname()[:2]
    scheme = "https" if request.tls_certificate else "http"
    announce(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    # uvicorn raises the signal again when it is done, for whoever had it before; being told to stop is no failure here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        server.batcher.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Requests that come while the model is loading wait instead of being refused.
        listener.listen(128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on.",
            where="--host, --port",
            why=getattr(error, "strerror", None) or str(error),
            fix="choose another --port (0 = any free one)",
        ) from error
    return listener


def _check_installed() -> None:
    if missing := [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise ConfigError(
            f"The server needs {', '.join(missing)}.", where="opd teacher serve", fix="pip install 'opd[server]'"
        )


def _check_reachable(request: ServeRequest, token: str | None) -> None:
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds characters that a header cannot carry.",
            fix="use printable ASCII without spaces, such as the output of: openssl rand -hex 32",
        )
    if token is None and not request.insecure and not is_loopback(request.host):
        raise ConfigError(
            f"Listening on {request.host} needs a token, because other machines can reach it.",
            where="--host",
            fix=f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32) here and for the clients, "
            "or say --insecure in a network that you trust",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_certificates(request: ServeRequest) -> None:
    if (request.tls_certificate is None) != (request.tls_key is None):
        raise ConfigError(
            "TLS needs a certificate and its key.", where="--tls-certificate, --tls-key", fix="name both PEM files"
        )
    if request.tls_certificate is None or request.tls_key is None:
        return
    import ssl

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(request.tls_certificate, request.tls_key)
    except OSError as error:
        raise ConfigError(
            "The certificate and its key cannot be used.",
            where=f"{request.tls_certificate}, {request.tls_key}",
            why=error.strerror or str(error),
            fix="name the PEM files of a certificate and of the key that belongs to it, without a passphrase",
        ) from error


def _check_dtype(request: ServeRequest) -> None:
    if request.dtype not in get_args(Dtype):
        raise ConfigError(f"--dtype is {request.dtype}; it is one of {', '.join(get_args(Dtype))}.")
