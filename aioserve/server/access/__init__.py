"""Who may ask for what, and over which connections: keys, their limits, origins, slow clients.

Knows requests and sockets; knows nothing about what handlers do.
"""
