"""The wire structs of files and batches, as OpenAI has them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aioserve.server.protocol import RequestPart

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Text64 = Annotated[str, Meta(min_length=1, max_length=64)]
Text512 = Annotated[str, Meta(max_length=512)]
#: An hour to 30 days, as at OpenAI.
LifeSeconds = Annotated[int, Meta(ge=3600, le=2_592_000)]

# What clients send


class FileForm(RequestPart, kw_only=True, omit_defaults=True):
    """The form of POST /v1/files: a file of requests, one JSON object a line."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    expires_after_anchor: Literal["created_at"] | None = msgspec.field(
        name="expires_after[anchor]", default=None
    )
    expires_after_seconds: LifeSeconds | None = msgspec.field(
        name="expires_after[seconds]", default=None
    )


class ExpiresAfter(RequestPart, kw_only=True, omit_defaults=True):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    seconds: LifeSeconds


class BatchRequest(RequestPart, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/batches: which file is run, on which route, within what time."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,3}[smhd]$")]
    metadata: Annotated[dict[Text64, Text512], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class FilesPage(RequestPart, kw_only=True, omit_defaults=True):
    """The query of GET /v1/files: which page, in which order, of which purpose."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class BatchesPage(RequestPart, kw_only=True, omit_defaults=True):
    """The query of GET /v1/batches: which page, and how long it is."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


# What they get


class FileObject(msgspec.Struct, kw_only=True):
    """A file that is kept here."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int  # seconds since 1970, as all times here
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """One page of a list of files, as OpenAI's API has it."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    """The response of DELETE /v1/files/{id}: the file is no longer kept."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(msgspec.Struct, kw_only=True):
    """What is wrong with a line of the input, or with all of it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """What is wrong with the lines of an input, for which its batch has failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    """How many lines a batch has, and how many were answered, or have failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch: a file of requests, and how far they are."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the batch changes any more."""
        return self.status in ("failed", "completed", "expired", "cancelled")


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches, the newest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


# A line of a batch's input, and of its output


class Line(RequestPart, kw_only=True):
    """A request of a batch: one line of its input."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct, kw_only=True):
    """The answer of the route to a line: its status and its body."""

    status_code: int
    request_id: str
    body: Any


class LineError(msgspec.Struct, kw_only=True):
    """The reason for which a line was not run."""

    code: str
    message: str


class LineResult(msgspec.Struct, kw_only=True):
    """A line of the output or error file of a batch."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None
