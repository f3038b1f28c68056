"""The prompt in which a decoder model is asked whether a document answers a query.

Knows Qwen3-Reranker's prompt, and files. Knows nothing about requests.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from aioserve.config import ScoringConfig
from aioserve.errors import ConfigError

_FIELD = re.compile(r"\{(query|document|instruction)\}")


class ScoreTemplate(msgspec.Struct, frozen=True):
    """A prompt with {query}, {document} and perhaps {instruction}; the labels that may follow it.

    The score is the probability of the second label among the two.
    """

    text: str
    labels: tuple[str, str] = ("no", "yes")
    evidence: str = ""  # what of a chat template shows that its model was trained for this prompt

    def render(self, query: str, document: str, instruction: str) -> str:
        """The prompt that asks whether the document answers the query."""
        given = {"query": query, "document": document, "instruction": instruction}
        return _FIELD.sub(lambda found: given[found[1]], self.text)


_QUERY = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
#: By the names of the setting. Qwen3-Reranker's is that of its model card.
TEMPLATES: Mapping[str, ScoreTemplate] = {
    "qwen3_reranker": ScoreTemplate(
        f"<|im_start|>system\n{_QUERY}<|im_end|>\n<|im_start|>user\n<Instruct>: {{instruction}}\n"
        "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n",
        evidence=_QUERY,
    ),
}


def score_template(settings: ScoringConfig, chat_template: str) -> ScoreTemplate | None:
    """The template that the settings name, with their labels; None if there is none. Raises
    `ConfigError` for a name that is no template, and for a file without {query} and {document}.
    """
    name = settings.score_template
    if name == "none":
        return None
    labels = [label.strip() for label in settings.score_labels.split(",")]
    if len(labels) != 2 or not all(labels) or labels[0] == labels[1]:
        raise ConfigError(
            f"scoring.score_labels must be two labels, as no,yes, got {settings.score_labels!r}"
        )
    if name == "auto":
        found = (each for each in TEMPLATES.values() if each.evidence in chat_template)
        template = next(found, None)
    else:
        template = TEMPLATES.get(name) or _read(name)
    if template is None:
        return None
    return msgspec.structs.replace(template, labels=(labels[0], labels[1]))


def _read(name: str) -> ScoreTemplate:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"scoring.score_template must be auto, none, {', '.join(TEMPLATES)} or a file, got "
            f"{name!r}: {error}"
        ) from error
    named = set(_FIELD.findall(text))
    if missing := sorted({"query", "document"} - named):
        raise ConfigError(
            f"scoring.score_template: the file {name} lacks "
            + " and ".join(f"{{{m}}}" for m in missing)
        )
    return ScoreTemplate(text)
