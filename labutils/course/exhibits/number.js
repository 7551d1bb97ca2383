// Type, drag or flip the bits of a number: what do formats store of it? And what can a format hold
// whose bits are divided otherwise?
import { completed, describe, exponentOf, round } from "./formats.js";
import {
  button,
  chart,
  choice,
  layout,
  make,
  paragraph,
  powerOf2,
  short,
  slider,
  table,
  tick,
  whole,
} from "./shared.js";

const OWN = "your own";

// Sign, exponent and mantissa bits of a number that the format stores.
export function encode(stored, format) {
  const sign = stored < 0 || Object.is(stored, -0) ? "1" : "0";
  const field = (n, width) => n.toString(2).padStart(width, "0");
  if (Number.isNaN(stored)) {
    const mantissa = format.has_inf ? 2 ** (format.mantissa - 1) : 2 ** format.mantissa - 1;
    return "0" + "1".repeat(format.exponent) + field(mantissa, format.mantissa);
  }
  const size = Math.abs(stored);
  if (size === Infinity) return sign + "1".repeat(format.exponent) + field(0, format.mantissa);
  const exponent = Math.max(exponentOf(size), 1 - format.bias);
  const fraction = size / 2 ** exponent; // below 1: subnormal
  const biased = fraction < 1 ? 0 : exponent + format.bias;
  const mantissa = (fraction - (fraction < 1 ? 0 : 1)) * 2 ** format.mantissa;
  return sign + field(biased, format.exponent) + field(mantissa, format.mantissa);
}

export function decode(bits, format) {
  const sign = bits[0] === "1" ? -1 : 1;
  const exponent = parseInt(bits.slice(1, 1 + format.exponent), 2);
  const mantissa = parseInt(bits.slice(1 + format.exponent), 2);
  if (exponent === 2 ** format.exponent - 1) {
    if (format.has_inf) return mantissa ? NaN : sign * Infinity;
    if (mantissa === 2 ** format.mantissa - 1) return NaN;
  }
  if (exponent === 0) return sign * mantissa * format.min_subnormal;
  return sign * (1 + mantissa / 2 ** format.mantissa) * 2 ** (exponent - format.bias);
}

export function kindOf(stored, format) {
  if (Number.isNaN(stored)) return "NaN";
  if (!Number.isFinite(stored)) return "infinite";
  if (stored === 0) return "zero";
  return Math.abs(stored) < 2 ** (1 - format.bias) ? "subnormal" : "normal";
}

// The next number of a format away from 0 (by 1) or towards it (by -1); null where none is.
export function neighbour(stored, format, by) {
  if (!Number.isFinite(stored)) return null;
  const bits = encode(Math.abs(stored), format);
  const place = parseInt(bits.slice(1), 2) + by;
  if (place < 0) return -format.min_subnormal;
  const next = decode("0" + place.toString(2).padStart(bits.length - 1, "0"), format);
  return Number.isFinite(next) ? next : null;
}

export function parse(text) {
  const plain = text.trim().toLowerCase().replaceAll("−", "-");
  if (/^[+-]?inf(inity)?$/.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
  return plain === "" ? NaN : Number(plain);
}

export function mount(root, data) {
  const formats = data.formats.map(completed);
  const { value: first, number_format } = data.start;
  const text = Object.is(first, -0) ? "-0" : String(first);
  const state = { text, name: number_format, own: describe(4, 3, true) };
  const set = (changes) => {
    Object.assign(state, changes);
    show();
  };
  const formatOf = (name) => formats.find((format) => format.name === name) ?? state.own;
  const divide = (changes) => {
    const { exponent, mantissa, has_inf } = { ...formatOf(state.name), ...changes };
    set({ name: OWN, own: { name: OWN, ...describe(exponent, mantissa, has_inf) } });
  };

  const value = make("input", { type: "text", size: 18, inputmode: "decimal" });
  value.oninput = () => set({ text: value.value });
  const size = slider("size", { min: -150, max: 130, step: 0.125 }, (position) => {
    const sign = parse(state.text) < 0 ? -1 : 1;
    set({ text: String(sign * 2 ** position) });
  });
  const names = [...formats.map(({ name }) => name), OWN];
  const select = choice(
    "format",
    names.map((name) => [name, name]),
    (name) => (name === OWN ? divide({}) : set({ name })),
  );
  const exponent = slider("exponent bits", { min: 2, max: 8 }, (n) => divide({ exponent: n }));
  const mantissa = slider("mantissa bits", { min: 1, max: 23 }, (n) => divide({ mantissa: n }));
  const hasInf = tick("all exponent bits 1 mean inf or NaN", (isOn) => divide({ has_inf: isOn }));
  const fields = make("p", { class: "bits" });
  const bits = make("p", {
    class: "bits",
    role: "group",
    "aria-label": "bits; press one to flip it",
  });
  const picture = chart("the value between its neighbours", {
    height: 84,
    left: 20,
    top: 12,
    bottom: 34,
  });
  const sentence = paragraph();
  const facts = paragraph();
  const rows = table(["format", "stored value", "error", "relative error", "kind"]);

  function showBits(x, format) {
    const text = encode(round(x, format), format);
    const kinds = [...text].map((_, i) => {
      if (i === 0) return "sign";
      return i <= format.exponent ? "exponent" : "mantissa";
    });
    const widths = [
      ["±", 1],
      ["exponent", format.exponent],
      ["mantissa", format.mantissa],
    ];
    const fieldOf = ([name, n]) => make("span", { style: `flex: ${n}; text-align: center` }, name);
    fields.replaceChildren(...widths.map(fieldOf));
    while (bits.children.length > text.length) bits.lastChild.remove();
    kinds.forEach((kind, i) => {
      const cell = bits.children[i] ?? bits.appendChild(button("", () => flip(i)));
      cell.textContent = text[i];
      cell.className = `bit ${kind}`;
      cell.setAttribute("aria-label", `${kind} bit ${i}: ${text[i]}`);
    });
  }

  function flip(i) {
    const text = [...bits.children].map((cell) => cell.textContent);
    text[i] = text[i] === "1" ? "0" : "1";
    const x = decode(text.join(""), formatOf(state.name));
    set({ text: Number.isFinite(x) ? String(x) : short(x) });
  }

  function showLine(x, format) {
    const stored = round(x, format);
    picture.svg.style.visibility = Number.isFinite(stored) ? "" : "hidden"; // its room stays
    if (!Number.isFinite(stored)) return;
    const sign = stored < 0 ? -1 : 1;
    const middle = Math.abs(stored);
    const around = [neighbour(stored, format, -1), neighbour(stored, format, 1)];
    const gap = Math.max(...around.map((y) => (y === null ? 0 : Math.abs(y - middle))));
    const shown = [around[0], middle, around[1]].filter((y) => y !== null);
    const ticks = shown.map((y) => [(sign * (y - middle)) / gap, short(sign * y, 9)]);
    picture.begin({ from: -1.5, to: 1.5, ticks }, { from: 0, to: 1 });
    for (const [at] of ticks) picture.rule({ x: at }, { opacity: 0.4 });
    const at = (sign * (Math.abs(x) - middle)) / gap;
    if (!(Math.abs(at) <= 1)) {
      const [words, anchor] = at > 0 ? ["value →", "end"] : ["← value", "start"];
      return picture.text(1.5 * Math.sign(at), 0.6, words, { anchor, dy: 0 });
    }
    picture.mark(at, 0, "0,0 -7,-14 7,-14", { fill: "var(--vermilion)" });
    picture.text(at, 0.6, "value", { anchor: "middle", dy: 0 });
  }

  function showFacts(format) {
    const { bias, max, min_normal, min_subnormal, eps, span } = describe(
      format.exponent,
      format.mantissa,
      format.has_inf,
    );
    const n = 1 + format.exponent + format.mantissa;
    facts.textContent =
      `1 sign + ${format.exponent} exponent + ${format.mantissa} mantissa = ${n} bits. ` +
      `Largest: ${short(max, 6)}. Smallest normal: ${short(min_normal, 6)} ` +
      `(${powerOf2(1 - bias)}). Smallest subnormal: ${short(min_subnormal, 6)} ` +
      `(${powerOf2(Math.log2(min_subnormal))}). It reaches over ${short(span, 3)} powers of two. ` +
      `From 1 to 2 it makes ${whole(1 / eps)} steps of ${powerOf2(-format.mantissa)}.`;
  }

  function rowOf(x, format) {
    const stored = round(x, format);
    const error = stored === x ? 0 : stored - x;
    const relative = x ? Math.abs(error / x) : 0;
    return [format.name, short(stored, 9), short(error), short(relative), kindOf(stored, format)];
  }

  let good = first; // the last value that was a number
  function show() {
    const parsed = parse(state.text);
    const isTypo = Number.isNaN(parsed) && !/^\s*[+−-]?nan\s*$/i.test(state.text);
    const x = isTypo ? good : (good = parsed);
    value.setAttribute("aria-invalid", isTypo);
    const format = formatOf(state.name);
    const stored = round(x, format);
    if (value.value !== state.text) value.value = state.text;
    const power = Math.log2(Math.abs(x));
    size.show(power, Number.isFinite(power) ? `2 to the power ${short(power)}` : "no power of two");
    select.show(state.name);
    exponent.show(format.exponent, format.exponent);
    mantissa.show(format.mantissa, format.mantissa);
    hasInf.show(format.has_inf);
    showBits(x, format);
    showLine(x, format);
    showFacts(format);
    const isOwn = state.name === OWN;
    const shown = isOwn ? [...formats, state.own] : formats;
    rows.show(
      shown.map((row) => rowOf(x, row)),
      (i) => shown[i] === format,
    );
    const name = isOwn ? "Your format" : state.name;
    sentence.textContent = isTypo
      ? `This is no number; ${short(x, 9)} is still shown. Write one such as 1.5 (with a point) or 1e-5, or inf, or nan.`
      : `${name} stores ${short(stored, 9)}: ${kindOf(stored, format)}.`;
  }

  layout(root, data.say, {
    controls: [
      paragraph(make("label", {}, "value ", value), select.element),
      paragraph(size.element),
    ],
    picture: [fields, bits, picture.svg, sentence],
    numbers: [rows.element, facts],
    folded: [["Divide the bits otherwise", exponent.element, mantissa.element, hasInf.element]],
  });
  show();
  return () => sentence.textContent;
}
