"""Settings of files and batches: where they are kept, and how much of what there may be."""

from typing import Annotated

from msgspec import Meta

from aioserve.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section, doc
from aioserve.errors import ConfigError


class BatchConfig(Section, frozen=True, kw_only=True):
    """Files and batches of clients: where they are kept, and limits."""

    batch_dir: Annotated[
        str | None,
        doc(
            "directory for files and batches; it turns on /v1/files and /v1/batches, and a server "
            "that starts again with it goes on with unfinished batches (default: off)"
        ),
    ] = None
    batch_concurrency: Annotated[
        PositiveInt, doc("most lines of batches that are with the engine at once")
    ] = 32
    max_batch_file_mib: Annotated[PositiveInt, doc("size limit of an uploaded file, in MiB")] = 200
    max_batch_lines: Annotated[PositiveInt, doc("most lines of a batch")] = 50_000
    max_batches: Annotated[
        PositiveInt,
        doc(
            "most unfinished batches of an API key, or of a server without keys; each process "
            "counts by itself, so that processes which share --batch-dir and take batches at the "
            "same moment may let in more: one for each further process"
        ),
    ] = 16
    max_batch_gib: Annotated[
        PositiveFloat,
        doc(
            "disk limit of --batch-dir in GiB; beyond it uploads and new batches are refused, and "
            "running batches wait"
        ),
    ] = 20.0
    max_batch_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        doc("share of --max-batch-gib that the files and batches of one API key may take"),
    ] = 0.5
    batch_file_days: Annotated[
        PositiveFloat, doc("days after which files, and batches that have ended, are deleted")
    ] = 30.0
    batch_fsync_seconds: Annotated[
        NonNegativeFloat,
        doc(
            "seconds of a batch's answers that a power failure may lose, so that these lines run "
            "again; 0: none. A crash of the process loses none"
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_dir is not None:
            return
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if (value := getattr(self, name)) != default:
                raise ConfigError(
                    f"batches.{name} is {value!r}, which has no effect: there is no "
                    "batches.batch_dir"
                )
