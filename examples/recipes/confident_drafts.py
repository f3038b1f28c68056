"""Row values: in a full batch, tokens are drafted only where the model is certain.

The runner returns the entropy of the distribution from which each newest token was sampled. Where
it is high, many tokens were about equally likely, and drafts are right less often. So when more
than `free` requests run, and wrong drafts cost other requests time, none are made there. This is a
simple form of AdaEDL (Agrawal et al., 2024), which stops drafts by the entropy of the draft model.
"""

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
)


class ConfidentDraftsScheduler(BaseScheduler):
    """Decodes, then prompts in order of arrival; drafts where the model is sure of itself."""

    wants_row_values = ("entropy",)

    class Options(PolicyOptions):
        sure: PositiveFloat = 1.5  # nats of entropy up to which tokens are guessed
        free: PositiveInt = 4  # running requests up to which all guesses are welcome

    def draft_length(self, request: Request) -> int | None:
        entropy = request.row_values.get("entropy", 0.0)  # there is none before the first token
        if len(self.running) > self.options.free and entropy > self.options.sure:
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
