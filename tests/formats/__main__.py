"""Round trips over public chat templates: `make test-formats`; writes docs/chat-templates.md.

`python -m tests.formats NAME...` tries the templates with these words in their names alone, and
says what became of each reply.
"""

import sys

from tests.formats.page import PAGE, Row, render
from tests.formats.public_templates import VERSION, public_templates
from tests.formats.round_trip import ALIKE, RoundTrips, Trip


def main(names: list[str]) -> int:
    """Returns how many templates a format reads otherwise than they were written, but for those in
    `KNOWN`, which are to blame.
    """
    rows = []
    for name, source in public_templates().items():
        if names and not any(each.lower() in name.lower() for each in names):
            continue
        rows.append(tried(name, source, is_told=bool(names)))
        print(*rows[-1], sep="\t", flush=True)
    failed = [row.template for row in rows if row.is_wrong]
    if failed:
        print(f"{len(failed)} are otherwise than expected: {', '.join(failed)}")
    if not names:
        PAGE.write_text(render(rows, VERSION))
        print(f"wrote {PAGE}")
    return len(failed)


def tried(name: str, source: str, is_told: bool = False) -> Row:
    """The row of one template; what became of its replies is printed if `is_told`."""
    trips = RoundTrips(source)
    try:
        outcomes = trips.all()
    finally:
        trips.close()
    if is_told:
        print(f"{name}: {trips.choice.why}")
        for trip in outcomes:
            tell(trip)
    return Row.of(name, trips.choice, outcomes)


def tell(trip: Trip) -> None:
    written = f" (written {trip.written})"
    print(f"  {trip.name}: {trip.problem or 'ok'}{written} {trip.note}")
    if trip.turn is not None and (trip.problem or trip.written != ALIKE):
        print(f"    {trip.turn.prompt_end[-40:]!r} + {trip.turn.text!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
