"""Settings of the shadow, a second policy that follows the live traffic."""

from typing import Annotated, Any

import msgspec

from aioserve.config.section import Section, doc


class ShadowConfig(Section, frozen=True, kw_only=True):
    """A second policy that is evaluated on the live traffic, without tensors."""

    shadow_policy: Annotated[
        str | None, doc("shadow policy: evaluated on live traffic, decides nothing (default: none)")
    ] = None
    shadow_options: Annotated[dict[str, Any], doc("options of the shadow policy")] = msgspec.field(
        default_factory=dict
    )
    shadow_max_share: Annotated[
        float,
        doc("largest share of the event loop's time that the shadow policy may take", gt=0, le=1),
    ] = 0.05
