"""Settings of images and videos: where they may come from, and their memory."""

from typing import Annotated

from msgspec import Meta

from aioserve.config.section import PositiveFloat, PositiveInt, Section, doc


class ImageConfig(Section, frozen=True, kw_only=True):
    """Images and videos for a model that reads them: what a request may bring by HTTP, whether
    images are fetched, and what both may take of memory.
    """

    max_images: Annotated[PositiveInt, doc("most images in one request")] = 16
    max_video_frames: Annotated[
        PositiveInt, doc("most frames of all videos together in one request")
    ] = 128
    max_image_mib: Annotated[
        PositiveInt,
        doc("size limit in MiB of a request's images and frames together, as sent or fetched"),
    ] = 16
    max_image_megapixels: Annotated[
        int,
        doc(
            "size limit in megapixels of a request's images and frames together; checked before "
            "decoding",
            ge=1,
            le=170,
        ),
    ] = 64
    image_urls: Annotated[
        bool,
        doc("fetch images from public http and https URLs; otherwise images must be data: URLs"),
    ] = False
    image_domain: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^\s/:@]+$")], ...],
        doc(
            "domain that images may be fetched from, subdomains included; repeatable (default: any)"
        ),
    ] = ()
    image_timeout: Annotated[PositiveFloat, doc("seconds in which an image must be fetched")] = 10.0
    image_memory_gib: Annotated[
        PositiveFloat,
        doc(
            "memory limit in GiB for prepared images and videos of waiting and running requests; "
            "beyond it requests are refused with 429"
        ),
    ] = 4.0
