"""Row values: tokens are guessed where the model is sure of itself, and nowhere else.

The runner tells the entropy of the distribution that each newest token was drawn from. Where it is
high, many tokens were about as likely, and guesses of what follows are seldom right; so none are
made. A simple form of AdaEDL (Agrawal et al., 2024), which stops drafts by the entropy of the model
that makes them.
"""

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
)


class ConfidentDraftsScheduler(BaseScheduler):
    """Decodes, then prompts in order of arrival; drafts where the model is sure of itself."""

    wants_row_values = ("entropy",)

    class Options(PolicyOptions):
        sure: PositiveFloat = 1.5  # nats of entropy up to which tokens are guessed

    def draft_length(self, request: Request) -> int | None:
        entropy = request.row_values.get("entropy")  # None: it has no token yet
        if entropy is not None and entropy > self.options.sure:
            return 0
        return None  # as many as pay

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():  # returns those that are half-way in their prompts
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
