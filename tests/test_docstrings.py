"""The docstring of a function that returns something says so with a verb, or is a sentence."""

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
