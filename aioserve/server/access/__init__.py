"""Which client may send what, over which connections: keys, their limits, origins, slow clients.

Knows requests and sockets; knows nothing about what handlers do.
"""
