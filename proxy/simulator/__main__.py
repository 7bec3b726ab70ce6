"""``python -m proxy.simulator``: the provider in a process of its own, for the demo and the benchmarks."""

import argparse
import logging

from proxy.simulator.accounting import OPENAI, VLLM
from proxy.simulator.app import create
from proxy.simulator.record import Options
from proxy.simulator.server import run

_RULES = {rules.name: rules for rules in (OPENAI, VLLM)}


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m proxy.simulator", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--rules", choices=sorted(_RULES), default=OPENAI.name)
    parser.add_argument("--first-token-seconds", type=float, default=0.0)
    parser.add_argument("--seconds-per-uncached-token", type=float, default=0.0)
    parser.add_argument("--event-seconds", type=float, default=0.0)
    parser.add_argument("--reply-words", type=int, default=40)
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = Options(
        rules=_RULES[chosen.rules],
        first_token_seconds=chosen.first_token_seconds,
        seconds_per_uncached_token=chosen.seconds_per_uncached_token,
        event_seconds=chosen.event_seconds,
        reply_words=chosen.reply_words,
        keep_bodies=False,
    )
    run(create(options), host=chosen.host, port=chosen.port)


main()
