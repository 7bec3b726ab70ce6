"""A simulated provider: OpenAI's API over real sockets, with a prompt cache accounted for by published rules.

An independent witness: imports nothing from the rest of the proxy.

    server      a real socket; can reset connections     app         which path is answered by what
    exchange    one request and response on the wire     record      options, every request, totals
    chat completions responses embeddings audio files catalog        the endpoints
    accounting  cache rules, hits and prices             prompt      request to token ids (tokens: text to ids)
    answers     the deterministic reply (schema: JSON)   faults      what goes wrong when asked for
    validity    what OpenAI would refuse (refusal: how)  multipart, shape   reading forms and JSON

``with serve(create(Options(rules=VLLM))) as server`` gives ``server.base_url``.
"""
