"""Pinning a prefix: the first tokens of some clients' prompts stay cached while they are unused.

Cached blocks that no request uses are evicted, oldest first. `kv_cache.refresh` makes a prefix the
newest again, so all other cached blocks are evicted before it. It reserves nothing: when a running
request needs the last block, it gets it.
"""

from typing import Any

from aioserve.scheduler import BaseScheduler, PolicyOptions, PositiveInt, Request, SchedulerOutput


class PinnedPrefixScheduler(BaseScheduler):
    """Order of arrival; the prompts' beginnings of some clients are kept."""

    class Options(PolicyOptions):
        users: list[str] = []  # noqa: RUF012 - whose prompts; each client has one pinned prefix
        num_tokens: PositiveInt = 1024  # of the prompt, from its start

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pinned: dict[str, Request] = {}  # the latest of each client

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.pinned.values():
            self.kv_cache.refresh(request, self.options.num_tokens)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
            if request.user in self.options.users:
                self.pinned[request.user] = request
        return step.output()
