"""What a server that is not ours was measured to do, request by request; and a profile from it."""
