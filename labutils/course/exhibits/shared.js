// What all exhibits are made of: numbers as text, elements, and a chart.

// ---- Numbers

export const MIB = 2 ** 20;
export const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);

// A number with at most so many significant digits: a long one as a power of ten.
export function short(x, digits = 4) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "−inf";
  const rounded = Number(x.toPrecision(digits));
  const size = Math.abs(rounded);
  const isLong = size >= 1e9 || (size && size < 1e-4);
  return (isLong ? rounded.toExponential() : `${rounded}`).replace("e+", "e").replaceAll("-", "−");
}

// never on two lines
export const percent = (share) => `${short(100 * share, 3)}\u00a0%`;
// with commas between thousands
export const whole = (n) => n.toLocaleString("en");

export function superscript(n) {
  return [...String(n)].map((sign) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? "⁻").join("");
}

export const powerOf2 = (n) => `2${superscript(n)}`;

// ---- Elements

// A new element: its tag, attributes (a function is a handler), and children.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// The same for a part of an SVG, whose only child is a text.
export function draw(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent?.append(element);
  return element;
}

export const paragraph = (...children) => make("p", {}, ...children);
export const button = (text, onclick) => make("button", { type: "button", onclick }, text);
export const details = (title, ...children) =>
  make("details", {}, make("summary", {}, title), ...children);

// A label and its control. A live region would repeat the value of every step, so it has none.
function labelled(label, control, ...after) {
  return make("label", {}, `${label} `, control, ...after);
}

// `show(position, text)` moves it; the text is what a reader sees and hears.
export function slider(label, { min, max, step = 1 }, onMove) {
  const input = make("input", { type: "range", min, max, step });
  const value = make("span", { class: "value", "aria-hidden": "true" });
  input.oninput = () => onMove(input.valueAsNumber);
  const show = (position, text) => {
    input.value = position;
    value.textContent = text;
    input.setAttribute("aria-valuetext", text);
  };
  const element = labelled(label, input, " ", value);
  return { element, show, limit: (highest) => (input.max = highest) };
}

// A list to choose from: `options` are [value, text].
export function choice(label, options, onChoose) {
  const items = options.map(([value, text]) => make("option", { value }, text));
  const select = make("select", { onchange: () => onChoose(select.value) }, ...items);
  return { element: labelled(label, select), show: (value) => (select.value = value) };
}

export function tick(label, onTick) {
  const input = make("input", { type: "checkbox" });
  input.onchange = () => onTick(input.checked);
  const element = make("label", {}, input, ` ${label}`);
  return { element, show: (isOn) => (input.checked = isOn) };
}

// Buttons that lead to places, [text, place]; `show` marks those where the reader is.
export function jumps(label, places, go) {
  const buttons = places.map(([text, place]) => button(text, () => go(place)));
  const spaced = buttons.flatMap((item) => [item, " "]);
  const element = make("p", { role: "group", "aria-label": label }, `${label} `, ...spaced);
  const show = (isHere) => {
    places.forEach(([, place], i) => buttons[i].setAttribute("aria-pressed", isHere(place)));
  };
  return { element, show };
}

// A table whose rows are lists of texts or elements. The first cell of each is its head.
// A cell is written only where it changes, so that a screen reader keeps its place.
export function table(heads) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = make("tbody");
  const rowOf = (cells) =>
    make("tr", {}, ...cells.map((_, i) => (i ? make("td") : make("th", { scope: "row" }))));
  const show = (rows, isMarked = () => false) => {
    while (body.rows.length > rows.length) body.lastChild.remove();
    rows.forEach((cells, i) => {
      const row = body.rows[i] ?? body.appendChild(rowOf(cells));
      row.classList.toggle("marked", isMarked(i));
      cells.forEach((cell, j) => {
        const old = cell instanceof Element ? row.cells[j].firstChild : row.cells[j].textContent;
        const content = cell instanceof Element ? cell : String(cell);
        if (old !== content) row.cells[j].replaceChildren(content);
      });
    });
  };
  const setHeads = (texts) => texts.forEach((text, i) => (head.cells[i].textContent = text));
  return { element: make("table", {}, make("thead", {}, head), body), show, setHeads };
}

// ---- Pictures

// What tells areas apart without colours: matplotlib's hatches, as paths in a square of 8.
const HATCHES = {
  "//": "M0 8L8 0",
  "\\\\": "M0 0L8 8",
  "..": "M2 2h2M6 6h2",
  "--": "M0 4h8",
  xx: "M0 0L8 8M0 8L8 0",
  oo: "M4 2v4M2 4h4",
};

// A fill for an SVG with a colour and a hatch. No two on a page have the same id.
export function pattern(svg, colour, hatch) {
  const id = `hatch-${Math.random().toString(36).slice(2)}`;
  const size = { width: 8, height: 8 };
  const tile = draw(svg, "pattern", { id, ...size, patternUnits: "userSpaceOnUse" });
  draw(tile, "rect", { ...size, fill: colour });
  const lines = { d: HATCHES[hatch] ?? "M0 0", stroke: "white", "stroke-width": 1.5 };
  draw(tile, "path", lines);
  return `url(#${id})`;
}

// A small box with the look of an area, to stand before its name in a table.
export function swatch(colour, hatch) {
  const box = make("span", { class: "swatch" });
  const svg = draw(box, "svg", { viewBox: "0 0 18 12", "aria-hidden": "true" });
  draw(svg, "rect", { width: 18, height: 12, fill: pattern(svg, colour, hatch), ...EDGE });
  return box;
}

export const CURSOR = { "stroke-width": 1 }; // thin: the peak below it is seen
export const EDGE = { stroke: "currentColor", "stroke-width": 0.6 };

// Axes and what is drawn on them, in the units of the numbers. Each `begin` clears it and takes
// two axes: { from, to, ticks: [[value, text]], title }. They are drawn again only where they
// changed. A chart is 480 units wide.
export function chart(label, { height = 260, left = 44, right = 12, top = 28, bottom = 40 } = {}) {
  const width = 480;
  const svg = draw(null, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", label);
  const axes = draw(svg, "g");
  const marks = draw(svg, "g");
  let horizontal, vertical;
  const place = (value, { from, to }, start, end) =>
    start + ((end - start) * (value - from)) / (to - from);
  const x = (value) => place(value, horizontal, left, width - right);
  const y = (value) => place(value, vertical, height - bottom, top);
  const plain = { stroke: "currentColor" };

  function text(across, up, words, { dx = 0, dy = 4, anchor = "start", ...look } = {}) {
    const at = { x: x(across) + dx, y: y(up) + dy, "text-anchor": anchor };
    draw(marks, "text", { ...at, ...look }, words);
  }

  // A line through the whole chart, at one value of an axis: { x } or { y }.
  function rule(at, look = {}) {
    const [x1, x2] = "x" in at ? [x(at.x), x(at.x)] : [left, width - right];
    const [y1, y2] = "y" in at ? [y(at.y), y(at.y)] : [top, height - bottom];
    return draw(marks, "line", { x1, x2, y1, y2, ...plain, ...look });
  }

  // The one upright line that moves while the rest stays.
  let cursor = null;
  function point(at, look) {
    cursor?.remove();
    cursor = rule({ x: at }, look);
  }

  // A path through points; of a level or upright piece only one number is written.
  function through(points) {
    const pieces = points.map(([across, up], i) => {
      const [lastAcross, lastUp] = points[i - 1] ?? [];
      if (across === lastAcross) return `V${y(up).toFixed(2)}`;
      if (up === lastUp) return `H${x(across).toFixed(2)}`;
      return `${i ? "L" : "M"}${x(across).toFixed(2)} ${y(up).toFixed(2)}`;
    });
    return pieces.join("");
  }

  function line(points, look = {}) {
    draw(marks, "path", { d: through(points), fill: "none", ...plain, ...look });
  }

  function area(points, look) {
    draw(marks, "path", { d: `${through(points)}Z`, ...look });
  }

  // Boxes of one look, each [from, to] of both axes: as one path, which is drawn faster.
  function bars(boxes, look) {
    const paths = boxes.map(([[fromX, toX], [fromY, toY]]) => {
      const [x1, x2, y1, y2] = [x(fromX), x(toX), y(fromY), y(toY)].map((at) => at.toFixed(2));
      return `M${x1} ${y1}H${x2}V${y2}H${x1}Z`;
    });
    if (paths.length) draw(marks, "path", { d: paths.join(""), ...look });
  }

  const bar = (across, up, look) => bars([[across, up]], look);

  function dot(across, up, look = {}) {
    draw(marks, "circle", { cx: x(across), cy: y(up), r: 5, ...plain, ...look });
  }

  // A mark of a shape, whose corners are counted from its place.
  function mark(across, up, points, look) {
    const transform = `translate(${x(across)} ${y(up)})`;
    draw(marks, "polygon", { points, transform, ...plain, ...look });
  }

  let drawn = ""; // the axes that stand
  function begin(newHorizontal, newVertical) {
    [horizontal, vertical] = [newHorizontal, newVertical];
    marks.replaceChildren();
    const across = (horizontal.ticks ?? []).map(([value, words]) => [x(value), words]);
    const up = (vertical.ticks ?? []).map(([value, words]) => [y(value), words]);
    const titles = [horizontal.title ?? "", vertical.title ?? ""];
    const wanted = JSON.stringify([across, up, titles]);
    if (wanted === drawn) return;
    drawn = wanted;
    axes.replaceChildren();
    const middle = { "text-anchor": "middle" };
    const [x1, x2, bottomLine] = [left, width - right, height - bottom];
    for (const [at, words] of across) {
      draw(axes, "text", { x: at, y: bottomLine + 17, ...middle }, words);
    }
    for (const [at, words] of up) {
      draw(axes, "text", { x: left - 6, y: at + 4, "text-anchor": "end" }, words);
      draw(axes, "line", { x1, x2, y1: at, y2: at, ...plain, opacity: 0.15 });
    }
    draw(axes, "line", { x1, x2, y1: bottomLine, y2: bottomLine, ...plain });
    draw(axes, "text", { x: (x1 + x2) / 2, y: height - 4, ...middle }, titles[0]);
    draw(axes, "text", { x: 0, y: top - 14 }, titles[1]);
  }

  // Where a mouse or a finger on the picture points, in the units of the horizontal axis.
  function drag(onMove) {
    svg.classList.add("dragged");
    svg.onpointerdown = svg.onpointermove = (event) => {
      if (!event.buttons) return;
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) * width) / box.width;
      const share = Math.min(1, Math.max(0, (at - left) / (width - right - left)));
      onMove(horizontal.from + share * (horizontal.to - horizontal.from));
    };
  }

  return { svg, begin, text, rule, point, line, area, bar, bars, dot, mark, drag };
}

export const DIAMOND = "0,-9 9,0 0,9 -9,0";

// Areas over each other: `book` has a moment's bytes of each area, and `fills` their looks.
export function stack(picture, book, fills) {
  const steps = (levels) => {
    return levels.flatMap((level, i) => [
      [i, level],
      [i + 1, level],
    ]);
  };
  let below = book.map(() => 0);
  fills.forEach((fill, k) => {
    const above = below.map((level, i) => level + book[i][k]);
    picture.area([...steps(above), ...steps(below).reverse()], { fill, ...EDGE });
    below = above;
  });
}

// ---- A page

// What to do, in large type; controls; the picture, with its numbers beside it where there is room;
// and what only some want to know, folded: [title, elements].
export function layout(root, say, { controls, picture, numbers, folded = [] }) {
  root.append(
    make("p", { class: "say" }, say),
    ...controls,
    make("div", { class: "sides" }, make("div", {}, ...picture), make("div", {}, ...numbers)),
    ...folded.map(([title, ...elements]) => details(title, ...elements)),
  );
}

// A button that goes on by itself until the end, or until it is pressed again. Pressed at the end it
// starts anew: `step(true)`.
export function player(show, isAtEnd, ms = 160) {
  let timer = null; // 0 once it was stopped: untouched, it begins at the beginning
  const step = (isFirst) => {
    const card = element.closest(".play");
    card.style.minHeight = getComputedStyle(card).height; // else what is below would jump
    show(isFirst);
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    element.textContent = "▶ play";
  };
  const end = () => {
    stop();
    // so that a screen reader hears where it has ended
    element.dispatchEvent(new Event("change", { bubbles: true }));
  };
  const element = button("▶ play", () => {
    if (timer) return stop();
    element.textContent = "❚❚ pause";
    step(timer === null || isAtEnd());
    timer = setInterval(() => (isAtEnd() ? end() : step(false)), ms);
  });
  element.className = "first-choice";
  return { element, stop };
}

// Bring every still to life. `mount` returns a function for its sentence, announced when a control
// is set, not at a slider's steps. Without lmSuppressShortcuts JupyterLab takes the arrow keys.
export function start(name, mount, data, style) {
  for (const root of document.querySelectorAll(`[data-exhibit="${name}"]:not([data-live])`)) {
    root.setAttribute("data-live", "");
    root.replaceChildren(make("style", {}, style));
    root.addEventListener("focusin", ({ target }) => (target.dataset.lmSuppressShortcuts = ""));
    const sentence = mount(root, data);
    const status = make("p", { role: "status", class: "unseen" });
    root.append(status);
    root.addEventListener("change", () => (status.textContent = sentence()));
    root.addEventListener("click", (event) => {
      if (event.target.closest("button")) status.textContent = sentence();
    });
  }
}
