// The little of Markdown that replies use, over the spans of their tokens: code, bold and headings.
// Gives a style to pieces of text and hides the marks; makes no element of what a model wrote.
// @ts-check

const RULES = [ // what is between the first and the last group, which are marks
  [/^(```[^\n]*\n)([^]*?)(\n```|(?![^]))/gm, "code"],
  [/(`)([^`\n]+)(`)/g, "code"],
  [/^(#{1,6} )(.+)($)/gm, "strong"],
  [/(\*\*)(?=\S)(.+?)(\*\*)/g, "strong"],
];

// [{from, to, kind}] of a text, `kind` is code, strong or mark; none reaches into another.
export function styles(text) {
  const found = [];
  const isFree = (from, to) => found.every((other) => to <= other.from || from >= other.to);
  for (const [pattern, kind] of RULES)
    for (const match of text.matchAll(pattern)) {
      const [all, before, inside, after] = match;
      const from = match.index, to = from + all.length;
      if (!isFree(from, to)) continue;
      const begin = from + before.length, end = begin + inside.length;
      found.push({ from, to: begin, kind: "mark" }, { from: begin, to: end, kind });
      if (after) found.push({ from: end, to, kind: "mark" });
    }
  return found.sort((a, b) => a.from - b.from);
}

// Cut the text of spans where a style begins or ends.
export function dress(spans) {
  const marked = styles(spans.map((span) => span.textContent).join(""));
  let at = 0;
  for (const span of spans) {
    const text = span.textContent, end = at + text.length;
    const here = marked.filter(({ from, to }) => from < end && to > at);
    if (here.length) {
      const edges = [...new Set([at, end, ...here.flatMap(({ from, to }) => [from, to])])];
      const inside = edges.filter((edge) => edge >= at && edge <= end).sort((a, b) => a - b);
      span.replaceChildren(...inside.slice(1).map((to, i) => {
        const piece = document.createElement("span");
        piece.textContent = text.slice(inside[i] - at, to - at);
        const style = here.find((one) => one.from <= inside[i] && one.to >= to);
        if (style) piece.className = `md-${style.kind}`;
        return piece;
      }));
    }
    at = end;
  }
}
