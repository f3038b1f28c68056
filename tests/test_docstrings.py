"""Docstrings of functions that return something begin with a verb, those of classes with a noun."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("aioserve/**/*.py"), *ROOT.glob("policies/**/*.py")])

#: First words that are no verbs. Of questions none is a sentence here; others may begin one.
QUESTIONS = frozenset(["How", "What", "When", "Where", "Whether", "Which", "Why"])
NOUNS = frozenset(
    [
        *("A", "All", "An", "Another", "Both", "Bytes", "Each", "Every", "Its", "Most", "Names"),
        *("Number", "One", "Requests", "Rows", "Seconds", "Settings", "Some", "Steps", "The"),
        *("These", "This", "Those", "Tokens", "Two", "Values"),
    ]
)
#: Words by which a sentence is known, if they come before a word that begins another clause.
VERBS = frozenset(
    [
        *(
            "are",
            "asks",
            "begin",
            "begins",
            "can",
            "come",
            "comes",
            "count",
            "counts",
            "do",
            "does",
        ),
        *("end", "ends", "follow", "follows", "get", "gets", "give", "gives", "go", "goes", "had"),
        *("has", "have", "hold", "holds", "is", "keep", "keeps", "know", "knows", "let", "lets"),
        *("lose", "loses", "make", "makes", "may", "must", "need", "needs", "read", "reads", "run"),
        *("runs", "say", "says", "see", "sees", "stay", "stays", "take", "takes", "wait", "waits"),
        *("was", "were", "will", "would"),
    ]
)
CLAUSES = frozenset(
    [
        *("after", "as", "before", "behind", "beside", "besides", "by", "for", "from", "how", "if"),
        *("than", "that", "to", "under", "unless", "until", "what", "when", "where", "whether"),
        *("which", "while", "who", "whose", "why", "with"),
    ]
)
RETURN_NOTHING = {"None", "NoReturn", "Never"}


def is_sentence(docstring: str) -> bool:
    """Whether the first sentence has a verb of its own."""
    first = re.split(r"[.;:](?:\s|$)", docstring)[0]
    for word in re.findall(r"[\w'`]+|,", first)[1:]:
        if word in CLAUSES or word == ",":
            return False
        if word in VERBS:
            return True
    return False


def test_docstrings_of_functions_that_return_something_begin_with_a_verb() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.returns:
                continue
            kinds = [ast.unparse(decorator) for decorator in node.decorator_list]
            docstring = " ".join((ast.get_docstring(node) or "-").split())
            if (
                any(re.search("property|contextmanager|fixture", kind) for kind in kinds)
                or ast.unparse(node.returns) in RETURN_NOTHING
            ):
                continue
            word = docstring.split()[0].strip(".,:;`")
            if word in QUESTIONS or (word in NOUNS and not is_sentence(docstring)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert found == []


#: First words of a class's docstring that are no noun and no article: the docstring of a class says
#: what it is. A word that ends in s before an article or a pronoun is a verb.
NO_NOUNS = QUESTIONS | frozenset(
    [
        *(
            "As",
            "At",
            "Around",
            "Behind",
            "Beside",
            "Between",
            "By",
            "For",
            "From",
            "In",
            "Of",
            "On",
        ),
        *("Since", "To", "Up", "With", "Without", "Nor", "There", "Those", "These", "It"),
        *("Answered", "Called", "Decided", "Done", "Known", "Made", "Moved", "Told", "Used"),
    ]
)
OBJECTS = frozenset(
    [
        *("a", "all", "an", "another", "any", "both", "each", "every", "how", "it", "its", "no"),
        *("one", "requests", "some", "the", "their", "them", "these", "this", "two", "what"),
        *("which",),
    ]
)
#: Classes whose docstrings are descriptions in the OpenAPI document, which keeps its words.
IN_THE_DOCUMENT = frozenset(
    [
        *("About", "BatchError", "BatchErrors", "CompletionTokensDetails", "EngineState"),
        *("ErrorInfo", "Events", "ExpiresAfter", "FinishReason", "Frame", "FunctionCall"),
        *("ImageURL", "InputDetails", "InputItem", "MessageDelta", "OutputConfig"),
        *("OutputDetails", "PromptTokensDetails", "Ready", "ReasoningConfig", "RequestCounts"),
        *("Snapshot", "Source", "Stands", "Stop", "Thinking", "ToolChoice"),
    ]
)


def is_no_noun(docstring: str) -> bool:
    """Whether it begins with a question, a preposition, a participle or a verb."""
    word, _, rest = docstring.partition(" ")
    is_verb = word.endswith("s") and word not in ("This", "Its") and word[:1].isupper()
    return word.strip(".,:;`") in NO_NOUNS or (is_verb and rest.split(" ")[0].lower() in OBJECTS)


def test_docstrings_of_classes_begin_with_an_article_or_a_noun() -> None:
    """Errors may be told by a sentence, commands by what they have done."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or node.name in IN_THE_DOCUMENT:
                continue
            bases = " ".join(map(ast.unparse, node.bases))
            if node.name.endswith("Error") or "Command" in bases:
                continue
            docstring = " ".join((ast.get_docstring(node) or "-").split())
            if is_no_noun(docstring):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert found == []
