"""The HTTP server: OpenAI-compatible endpoints in front of one `AsyncEngine`.

`app` builds and runs it; `protocol` holds the wire structs, which `aioserve.client` shares.
Nothing is imported here, so that a client does not load the server.
"""
