// Workers average their gradients: what do they send, how long does it take, what is rounded away?
import { completed, round } from "./formats.js";
import {
  chart,
  choice,
  jumps,
  layout,
  paragraph,
  short,
  slider,
  sum,
  superscript,
  table,
} from "./shared.js";

// In 10^9 bytes a second, in one direction. PCI Express: lanes × GT/s × 128/130 (PCI-SIG). Ethernet
// and InfiniBand: the speed in their names. NVLink: half of what NVIDIA publishes for both
// directions, 600 and 900 GB/s (nvidia.com/en-us/data-center/nvlink).
const PCIE = (16 * 128) / 130 / 8; // 16 lanes, per GT/s
const LINKS = {
  "10 Gbit/s Ethernet": 10 / 8,
  "100 Gbit/s Ethernet": 100 / 8,
  "PCI Express 4.0 × 16": 16 * PCIE,
  "InfiniBand NDR, 400 Gbit/s": 400 / 8,
  "PCI Express 5.0 × 16": 32 * PCIE,
  "NVLink 3 (A100)": 300,
  "NVLink 4 (H100)": 450,
};

const WORKERS = [2, 4, 8, 16, 32, 64];

// The gradients of all workers, a list each, from the bytes of float32 numbers in base64.
export function unpacked(text) {
  const elements = WORKERS.at(-1); // as many as workers
  const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(raw.buffer);
  const workers = [];
  for (let start = 0; start < raw.length; start += 4 * elements) {
    workers.push(Array.from({ length: elements }, (_, i) => view.getFloat32(start + 4 * i, true)));
  }
  return workers;
}

// What the workers' parts of one element sum to, each addition rounded.
function sumInRing(parts, start, format) {
  const n = parts.length;
  let total = parts[start];
  for (let hop = 1; hop < n; hop += 1) total = round(total + parts[(start + hop) % n], format);
  return total;
}

function sumInTree(parts, format) {
  const half = parts.length / 2;
  if (half < 1) return parts[0];
  const [left, right] = [parts.slice(0, half), parts.slice(half)];
  return round(sumInTree(left, format) + sumInTree(right, format), format);
}

// At which worker the sum of an element begins in a ring: the first of its parts are longer.
function startOf(i, elements, n) {
  const each = Math.floor(elements / n);
  const longer = elements % n;
  const inLonger = longer * (each + 1);
  return i < inLonger ? Math.floor(i / (each + 1)) : longer + Math.floor((i - inLonger) / each);
}

// The workers' gradients as the format stores them, after a multiplication.
export function cast(workers, format, scale) {
  return workers.map((row) => row.map((x) => round(Math.fround(x * scale), format)));
}

// The mean of the first n workers' `stored` gradients, as it comes out of the exchange. The number
// of workers is a power of two.
export function exchange(stored, n, format, order, scale) {
  const elements = stored[0].length;
  const parts = new Array(n);
  return stored[0].map((_, i) => {
    for (let worker = 0; worker < n; worker += 1) {
      parts[worker] = round(stored[worker][i] / n, format);
    }
    const total =
      order === "ring"
        ? sumInRing(parts, startOf(i, elements, n), format)
        : sumInTree(parts, format);
    return Math.fround(total / scale);
  });
}

// The mean of the first n workers' gradients, not rounded.
export function exactMean(workers, n) {
  return workers[0].map((_, i) => sum(workers.slice(0, n).map((row) => row[i])) / n);
}

// The error of a mean, relative to the norm of the exact one.
export function errorOf(mean, right) {
  const squares = sum(right.map((x, i) => (mean[i] - x) ** 2));
  return Math.sqrt(squares / sum(right.map((x) => x ** 2)));
}

export function sentBytes(n, parameters, format) {
  const bytes = (1 + format.exponent + format.mantissa) / 8;
  return ((2 * (n - 1)) / n) * parameters * bytes;
}

const asBytes = (x) => {
  const [unit, size] = x < 1e9 ? ["MB", 1e6] : x < 1e12 ? ["GB", 1e9] : ["TB", 1e12];
  return `${short(x / size, 3)} ${unit}`;
};
const asTime = (s) => (s < 1 ? `${short(1000 * s, 3)} ms` : `${short(s, 3)} s`);
const asCount = (x) => (x < 1e9 ? `${short(x / 1e6, 4)} million` : `${short(x / 1e9, 4)} billion`);
const asError = (x) => (Number.isFinite(x) ? short(x, 2) : "overflow");
const LOOKS = {
  FP32: { stroke: "#7b8794" },
  BF16: { stroke: "var(--green)", "stroke-dasharray": "6 4" },
  FP16: { stroke: "var(--purple)", "stroke-dasharray": "2 3" },
};

export function mount(root, data) {
  const workers = unpacked(data.gradients);
  const exact = WORKERS.map((n) => exactMean(workers, n));
  const formats = data.formats.map(completed);
  const start = { n: 8, format: "BF16", link: "PCI Express 4.0 × 16", order: "ring" };
  const state = { ...start, parameters: data.models.gpt2, power: 0 };
  const set = (changes) => {
    Object.assign(state, changes);
    show();
  };
  const count = slider("workers", { min: 1, max: 6 }, (power) => set({ n: 2 ** power }));
  const size = slider("parameters", { min: 6, max: 11.5, step: 0.01 }, (power) =>
    set({ parameters: Math.round(10 ** power) }),
  );
  const models = jumps("Jump to", Object.entries(data.models), (parameters) => set({ parameters }));
  const names = formats.map(({ name }) => [name, name]);
  const formatChoice = choice("sent in", names, (format) => set({ format }));
  const links = Object.entries(LINKS).map(([name, gb]) => [name, `${name}: ${short(gb, 3)} GB/s`]);
  const linkChoice = choice("link", links, (link) => set({ link }));
  const orders = ["ring", "tree"].map((order) => [order, order]);
  const orderChoice = choice("order of additions", orders, (order) => set({ order }));
  const power = slider("gradients multiplied by", { min: -30, max: 30 }, (power) => set({ power }));
  const sentence = paragraph();
  const rows = table(["sent in", "each sends", "least time", "error", "became 0", "inf, NaN"]);
  const picture = chart("error of the mean gradient over the number of workers", {
    height: 290,
    right: 100,
  });
  const errors = table(["workers", ...formats.map(({ name }) => name)]);

  let known = { key: "", results: {} }; // format → n → { error, zeros, beyond }
  function results() {
    const key = `${state.order} ${state.power}`;
    if (key === known.key) return known.results;
    const results = {};
    const scale = 2 ** state.power;
    for (const format of formats) {
      const stored = cast(workers, format, scale);
      results[format.name] = {};
      WORKERS.forEach((n, i) => {
        const mean = exchange(stored, n, format, state.order, scale);
        results[format.name][n] = {
          error: errorOf(mean, exact[i]),
          zeros: mean.filter((x) => x === 0).length,
          beyond: mean.filter((x) => !Number.isFinite(x)).length,
        };
      });
    }
    known = { key, results };
    return results;
  }

  const timeOf = (format) =>
    asTime(sentBytes(state.n, state.parameters, format) / (LINKS[state.link] * 1e9));

  function showSentence() {
    const format = formats.find(({ name }) => name === state.format);
    const { error, zeros, beyond } = results()[state.format][state.n];
    const hops = state.order === "ring" ? 2 * (state.n - 1) : 2 * Math.log2(state.n);
    const verdict = beyond
      ? `${beyond} of ${workers[0].length} means are inf or NaN.`
      : `The error of the mean gradient is ${asError(error)} of its norm.`;
    const lost = zeros ? ` ${zeros} of ${workers[0].length} means became 0.` : "";
    sentence.textContent =
      `${state.n} workers exchange ${asCount(state.parameters)} gradients in ${state.format}, in ` +
      `${hops} hops. Each sends ${asBytes(sentBytes(state.n, state.parameters, format))}. ` +
      `${state.link} needs at least ${timeOf(format)}. ${verdict}${lost}`;
  }

  function showChart() {
    const [low, high] = [-8, 0];
    const ticks = [-8, -6, -4, -2, 0].map((e) => [e, e ? `10${superscript(e)}` : "1"]);
    const counts = WORKERS.map((n) => [Math.log2(n), n]);
    picture.begin(
      { from: 0.7, to: 6.3, ticks: counts, title: "workers" },
      { from: low, to: high, ticks, title: "error of the mean gradient" },
    );
    picture.rule({ x: Math.log2(state.n) }, { "stroke-dasharray": "3 4" });
    const labels = formats.map(({ name }) => {
      const found = WORKERS.map((n) => [Math.log2(n), results()[name][n].error]);
      const finite = found.filter(([, error]) => Number.isFinite(error));
      const points = finite.map(([x, error]) => [
        x,
        Math.min(Math.max(Math.log10(error), low), high),
      ]);
      const isChosen = name === state.format;
      picture.line(points, { ...LOOKS[name], "stroke-width": isChosen ? 4 : 2 });
      for (const point of points) {
        picture.dot(...point, { fill: LOOKS[name].stroke, r: isChosen ? 5 : 3 });
      }
      const isWhole = points.length === found.length;
      return isWhole ? [points.at(-1)[1], name] : [high, `${name}: overflow`];
    });
    let room = Infinity; // below the label above
    for (const [y, name] of labels.sort((a, b) => b[0] - a[0])) {
      room = Math.min(y, room - 0.6);
      picture.text(6.3, room, name, { dx: 2 });
    }
  }

  function show() {
    count.show(Math.log2(state.n), `${state.n} workers`);
    size.show(Math.log10(state.parameters), asCount(state.parameters));
    models.show((parameters) => parameters === state.parameters);
    formatChoice.show(state.format);
    linkChoice.show(state.link);
    orderChoice.show(state.order);
    power.show(state.power, `2${superscript(state.power)}`);
    rows.show(
      formats.map((format) => {
        const { error, zeros, beyond } = results()[format.name][state.n];
        const bytes = asBytes(sentBytes(state.n, state.parameters, format));
        const counts = [zeros, beyond].map((n) => `${n} of ${workers[0].length}`);
        return [format.name, bytes, timeOf(format), asError(error), ...counts];
      }),
      (i) => formats[i].name === state.format,
    );
    errors.show(
      WORKERS.map((n) => [n, ...names.map(([name]) => asError(results()[name][n].error))]),
    );
    showSentence();
    showChart();
  }

  layout(root, data.say, {
    controls: [
      paragraph(count.element, formatChoice.element, orderChoice.element),
      paragraph(power.element),
    ],
    picture: [picture.svg, sentence],
    numbers: [rows.element, paragraph(size.element, linkChoice.element), models.element],
    folded: [
      ["The chart as a table", errors.element],
      [
        "How we know",
        "The sums are computed here, on 64 elements of the real gradients of 64 sequences " +
          "(gpt2-nano before training). The time counts bytes over the link's published speed, " +
          "and nothing else: real exchanges take longer.",
      ],
    ],
  });
  show();
  return () => sentence.textContent;
}
