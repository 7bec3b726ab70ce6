"""The simulated provider as an ASGI app: which path is answered by what."""

from starlette.applications import Starlette
from starlette.routing import Route

from proxy.simulator import audio, catalog, files
from proxy.simulator.chat import chat
from proxy.simulator.completions import completions
from proxy.simulator.embeddings import embeddings
from proxy.simulator.exchange import Endpoint, Handler
from proxy.simulator.record import Options, Simulator
from proxy.simulator.responses import responses

__all__ = ["Options", "Simulator", "create"]

_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/moderations", catalog.moderations),
    ("POST", "/v1/audio/transcriptions", audio.transcriptions),
    ("POST", "/v1/audio/speech", audio.speech),
    ("GET", "/v1/models", catalog.models),
    ("GET", "/v1/models/{id:path}", catalog.model),
    ("POST", "/v1/files", files.upload),
    ("GET", "/v1/files", files.listing),
    ("GET", "/v1/files/{id}", files.retrieve),
    ("DELETE", "/v1/files/{id}", files.delete),
    ("GET", "/v1/files/{id}/content", files.content),
)
_ANY_METHOD = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create(options: Options | None = None) -> Starlette:
    """Build the provider; its state is ``app.state.simulator``, a `Simulator`."""
    simulator = Simulator(options or Options())
    routes = [
        Route(path, Endpoint(simulator=simulator, handler=handler), methods=[method])
        for method, path, handler in _ROUTES
    ]
    summary = Endpoint(simulator=simulator, handler=catalog.requests, open=True)
    nowhere = Endpoint(simulator=simulator, handler=catalog.nowhere)
    routes.append(Route("/sim/requests", summary, methods=["GET"]))
    routes.append(Route("/{rest:path}", nowhere, methods=_ANY_METHOD))
    app = Starlette(routes=routes)
    app.state.simulator = simulator
    return app
