"""A provider on a real socket and the real OpenAI client."""

from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette

from proxy.simulator.app import Simulator, create
from proxy.simulator.server import Serving, serve


@pytest.fixture
def app() -> Starlette:
    return create()


@pytest.fixture
def simulator(app: Starlette) -> Simulator:
    found = app.state.simulator
    assert isinstance(found, Simulator)
    return found


@pytest.fixture
async def server(app: Starlette) -> AsyncIterator[Serving]:
    async with serve(app) as running:
        yield running


@pytest.fixture
async def client(server: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.base_url, api_key="key-one", max_retries=0) as connected:
        yield connected
