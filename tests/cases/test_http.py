"""x"""
from tests.cases.conftest import Start, Upstream, chat, user


async def test_probe(start: Start, upstream: Upstream) -> None:
    """x."""
    strata = await start()
    r = await strata.post(chat(user("hi"), stream=True))
    print(r.status_code, r.headers.raw, r.content, upstream.seen)
    m = await strata.metrics()
    print(m.total("strata_input_tokens_total"))
    assert 0
