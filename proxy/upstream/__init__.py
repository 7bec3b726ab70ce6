"""The upstream side: the only package that knows httpx. A transport, where to send, and what passes through."""
