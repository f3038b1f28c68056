"""All claims by name, in the order of the page."""

from collections.abc import Mapping

from aioserve.lab.reproduce.claims import (
    continuum,
    hrrn,
    lmetric,
    mc_sf,
    preble,
    qoserve,
    sarathi,
    shortest_prefill,
    victims,
    watermark,
)
from aioserve.lab.reproduce.claims.claim import Claim

CLAIMS: Mapping[str, Claim] = {
    module.CLAIM.name: module.CLAIM
    for module in (
        sarathi,
        mc_sf,
        hrrn,
        shortest_prefill,
        watermark,
        victims,
        qoserve,
        continuum,
        lmetric,
        preble,
    )
}
