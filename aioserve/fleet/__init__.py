"""Several engines as one: child processes, workers, routers, autoscalers, Ray Serve."""
