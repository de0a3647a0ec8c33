"""Which web pages may call from a browser: none, unless the options name their origins.

Stands outside of the keys: a browser asks for leave without one, and a page can read why it was refused.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jaxserve.config import ServerConfig


def allow_origins(app: ASGIApp, options: ServerConfig) -> ASGIApp:
    """`app`, open to the pages that `options` names."""
    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=("X-Request-Id", "Retry-After"),
    )
