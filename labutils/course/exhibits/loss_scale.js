// A factor at the loss moves all gradients: which of them can FP16 hold? And how does a scaler find
// such a factor?
import { completed, round } from "./formats.js";
import {
  button,
  chart,
  choice,
  layout,
  paragraph,
  percent,
  player,
  powerOf2,
  short,
  slider,
  sum,
  table,
  whole,
} from "./shared.js";

const FATES = ["zero", "subnormal", "normal", "inf"];
const NAMES = { zero: "becomes 0", subnormal: "subnormal", normal: "normal", inf: "inf" };
const FILLS = {
  zero: "var(--vermilion)",
  subnormal: "var(--orange)",
  normal: "var(--blue)",
  inf: "var(--purple)",
};
const LARGEST_POWER = 30;

export function fateOf(x, format) {
  const stored = Math.abs(round(x, format));
  if (stored === 0) return "zero";
  if (stored === Infinity) return "inf";
  return stored < 2 ** (1 - format.bias) ? "subnormal" : "normal";
}

// How many gradients have each fate, times 2^power. An octave [2^e, 2^(e+1)) is [e, counts of its
// parts]: exactly 2^e, up to where rounding goes up to the smallest normal number, up to where it
// goes beyond the largest, and the rest. One number inside a part stands for all of them.
export function count({ octaves, format }, power) {
  const eps = 2 ** -format.mantissa;
  const middles = [1, 1.5 - eps / 2, 2 - eps, 2 - eps / 2];
  const counts = { zero: 0, subnormal: 0, normal: 0, inf: 0 };
  for (const [e, ...numbers] of octaves) {
    numbers.forEach((n, i) => {
      counts[fateOf(middles[i] * 2 ** (e + power), format)] += n;
    });
  }
  return counts;
}

// GradScaler's rule for a run: halve and skip after inf, double after enough clean steps.
export function walk(largest, scale, interval, format) {
  let clean = 0;
  return largest.map((size) => {
    const before = scale;
    const stored = round(size * scale, format);
    const skipped = !Number.isFinite(stored);
    clean = skipped ? 0 : clean + 1;
    const grew = clean === interval;
    if (skipped) scale = Math.fround(scale / 2);
    if (grew) {
      if (Number.isFinite(Math.fround(scale * 2))) scale *= 2;
      clean = 0;
    }
    return { size, before, stored, skipped, grew, clean, after: scale };
  });
}

export function mount(root, page) {
  const data = { ...page, format: completed(page.format) };
  const { format, largest } = data;
  const total = sum(data.octaves.flatMap(([, ...numbers]) => numbers));
  let overflow = 0; // the first power at which a gradient is inf
  while (overflow <= LARGEST_POWER && count(data, overflow).inf === 0) overflow += 1;

  const state = { power: 10, first: 24, interval: 5, taken: 7 };
  let last = ""; // the sentence of the part that was used last
  const scale = slider("loss scale", { min: 0, max: LARGEST_POWER }, (power) => {
    state.power = power;
    showGradients();
  });
  const histogram = chart("gradients times the scale, over powers of two", { left: 12, top: 26 });
  const sentence = paragraph();
  const fates = table(["in FP16 it", "gradients", "share"]);

  const walkFrom = (changes) => {
    Object.assign(state, changes);
    state.taken = Math.min(state.taken, largest.length);
    showWalk();
  };
  const first = slider("first scale", { min: 0, max: LARGEST_POWER }, (power) =>
    walkFrom({ first: power }),
  );
  const interval = choice(
    "the scale doubles after",
    [2, 5, 10, 2000].map((n) => [n, `${n} clean steps`]),
    (n) => walkFrom({ interval: Number(n) }),
  );
  const next = button("next step", () => walkFrom({ taken: state.taken + 1 }));
  const isAtEnd = () => state.taken === largest.length;
  const play = player(
    (isFirst) => walkFrom({ taken: isFirst ? 1 : state.taken + 1 }),
    isAtEnd,
    400,
  );
  const end = button("to the end", () => walkFrom({ taken: largest.length }));
  const again = button("start again", () => {
    play.stop();
    walkFrom({ taken: 0 });
  });
  const event = paragraph();
  const path = chart("the loss scale of each step; a cross is a skipped step", { height: 210 });
  const steps = table(["step", "scale", "largest gradient", "times the scale", "is", "new scale"]);

  function showHistogram(power) {
    const [from, to] = [-60, 24];
    const sizes = data.octaves.map(([e, ...numbers]) => [e, sum(numbers)]);
    const ticks = [-60, -48, -36, -24, -12, 0, 12, 24].map((e) => [e, powerOf2(e)]);
    const tallest = Math.max(...sizes.map(([, n]) => n));
    const title = "size of a gradient, times the scale";
    histogram.begin({ from, to, ticks, title }, { from: 0, to: 1.05 * tallest });
    const lowest = 1 - format.bias - format.mantissa;
    const bounds = [from, lowest - 1, 1 - format.bias, format.bias + 1, to];
    FATES.forEach((fate, i) => {
      const span = [bounds[i], bounds[i + 1]];
      histogram.bar(span, [0, 1.05 * tallest], { fill: FILLS[fate], opacity: 0.18 });
      const middle = (span[0] + span[1]) / 2;
      histogram.text(middle, 1.05 * tallest, NAMES[fate], { anchor: "middle", dy: -8 });
      if (i) histogram.rule({ x: span[0] }, { "stroke-dasharray": "4 3" });
    });
    const boxes = { zero: [], subnormal: [], normal: [], inf: [] };
    for (const [e, n] of sizes) {
      const at = Math.min(Math.max(e + power, from), to - 1);
      const height = Math.max(n, tallest / 100);
      boxes[fateOf(1.5 * 2 ** (e + power), format)].push([
        [at + 0.1, at + 0.9],
        [0, height],
      ]);
    }
    for (const fate of FATES) {
      histogram.bars(boxes[fate], { fill: FILLS[fate] });
    }
  }

  function showGradients() {
    const { power } = state;
    const counts = count(data, power);
    scale.show(power, `${powerOf2(power)} = ${whole(2 ** power)}`);
    showHistogram(power);
    fates.show(
      FATES.map((fate) => [NAMES[fate], whole(counts[fate]), percent(counts[fate] / total)]),
    );
    const beyond = counts.inf
      ? `${whole(counts.inf)} become${counts.inf === 1 ? "s" : ""} inf. A scaler would skip this step.`
      : "none becomes inf.";
    const limit =
      overflow <= LARGEST_POWER ? `The largest becomes inf from S = ${powerOf2(overflow)} on.` : "";
    last = sentence.textContent =
      `At S = ${powerOf2(power)}, ${percent(counts.zero / total)} of ${whole(total)} gradients ` +
      `become 0, and ${beyond} ${limit}`;
  }

  const scaleOf = (factor) => powerOf2(Math.log2(factor));

  function sentenceOf(step) {
    const head =
      `Step ${state.taken} of ${largest.length}: the largest gradient is ${short(step.size, 3)}. ` +
      `Times ${scaleOf(step.before)} it is ${short(step.stored, 5)} in FP16.`;
    if (step.skipped) {
      return `${head} The step is skipped, and the scale is halved to ${scaleOf(step.after)}.`;
    }
    if (step.grew) {
      return (
        `${head} The step is taken. It is clean step ${state.interval} of ${state.interval}: ` +
        `the scale is doubled to ${scaleOf(step.after)}.`
      );
    }
    return `${head} The step is taken. It is clean step ${step.clean} of ${state.interval}.`;
  }

  function showPath(seen) {
    const powers = seen.flatMap(({ before, after }) => [before, after]).map(Math.log2);
    const low = Math.min(state.first, ...powers) - 1;
    const high = Math.max(state.first, ...powers) + 1;
    const every = Math.max(1, Math.ceil((high - low) / 7));
    const ticks = [];
    for (let e = high - 1; e > low; e -= every) ticks.push([e, powerOf2(e)]);
    const counts = largest.map((_, i) => i + 1).filter((i) => i % 5 === 0);
    path.begin(
      { from: 0, to: largest.length, ticks: counts.map((i) => [i - 0.5, i]), title: "step" },
      { from: low, to: high, ticks, title: "scale; ✗: the step is skipped" },
    );
    const line = seen.flatMap(({ before }, i) => [
      [i, Math.log2(before)],
      [i + 1, Math.log2(before)],
    ]);
    path.line(line, { stroke: "var(--blue)", "stroke-width": 3 });
    seen.forEach(({ before, skipped }, i) => {
      const look = { anchor: "middle", dy: 6, style: "font-weight: 700; font-size: 17px" };
      if (skipped) path.text(i + 0.5, Math.log2(before), "✗", look);
    });
  }

  function showWalk() {
    const all = walk(largest, 2 ** state.first, state.interval, format);
    const seen = all.slice(0, state.taken);
    const skips = seen.filter(({ skipped }) => skipped).length;
    first.show(state.first, powerOf2(state.first));
    interval.show(state.interval);
    event.textContent = seen.length
      ? `${sentenceOf(seen.at(-1))} Skipped so far: ${skips} of ${state.taken}.`
      : `No step yet. The scale is ${powerOf2(state.first)}.`;
    last = event.textContent;
    showPath(seen);
    const rowOf = (step, i) => {
      const verdict = step.skipped ? "skipped" : "taken";
      const product = short(step.stored, 5);
      const size = short(step.size, 3);
      return [i + 1, scaleOf(step.before), size, product, verdict, scaleOf(step.after)];
    };
    steps.show(seen.map(rowOf));
    next.disabled = end.disabled = state.taken === largest.length;
  }

  layout(root, page.say, {
    controls: [paragraph(scale.element)],
    picture: [histogram.svg],
    numbers: [sentence, fates.element],
    folded: [
      [
        "Which one?",
        "The largest scale at which no gradient becomes inf: one step below that limit.",
      ],
    ],
  });
  layout(root, "And who chooses the scale? Let the scaler walk.", {
    controls: [
      paragraph(first.element, interval.element),
      paragraph(play.element, " ", next, " ", end, " ", again),
    ],
    picture: [path.svg],
    numbers: [event],
    folded: [
      ["All steps so far, as a table", steps.element],
      [
        "How we know",
        "A run in FP32 has recorded the largest weight gradient of each of its steps. Each step " +
          "multiplies it by the scale, and applies the rule of GradScaler.",
      ],
    ],
  });
  showWalk();
  showGradients();
  return () => last;
}
