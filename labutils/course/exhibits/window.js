// One optimizer step of n micro-batches: which bytes come and go, and which stay? And, folded, what
// does one token weigh if the micro-batches are unequally long?
import {
  button,
  chart,
  CURSOR,
  EDGE,
  jumps,
  layout,
  make,
  MIB,
  paragraph,
  pattern,
  percent,
  player,
  short,
  slider,
  stack,
  sum,
  swatch,
  table,
} from "./shared.js";

const GRADIENTS = "gradients";
// Lengths of four sequences: those of section 2 of notebook 02, and equal ones.
const LENGTHS = [
  [50, 40, 30, 20],
  [64, 48, 56, 40],
  [64, 32, 16, 8],
  [64, 8, 32, 4],
  [40, 40, 40, 40],
];
const mib = (bytes) => (bytes / MIB).toFixed(1);
const totalOf = (frame) => sum(frame.bytes);
const highest = (frames) => Math.max(...frames.map(totalOf));

// Every moment of n micro-batches of m: its micro-batch, its phase, and bytes by category. Later
// micro-batches are like the second one. A part of the film has [standing bytes, bytes per
// sequence] for each moment and category.
export function frames(film, n, m) {
  const framesOf = (part, number) =>
    part.moments.map((moment) => ({
      number,
      phase: part.phase,
      bytes: moment.map(([standing, perSequence]) => standing + perSequence * m),
    }));
  const all = [];
  for (let i = 0; i < n; i += 1) {
    const parts = film.filter(({ micro_batch }) => micro_batch === Math.min(i, 1));
    all.push(...parts.flatMap((part) => framesOf(part, i + 1)));
  }
  const update = film.filter(({ micro_batch }) => micro_batch === null);
  return [...all, ...update.flatMap((part) => framesOf(part, null))];
}

// The frames of one batch of n · m sequences, as many as those of n micro-batches: each moment
// before the optimizer's lasts n times as long.
export function wholeFrames(film, n, m) {
  const stretched = (frame) => (frame.number === null ? [frame] : Array(n).fill(frame));
  return frames(film, 1, n * m).flatMap(stretched);
}

// What a target token weighs in each micro-batch, and the error of the mean of means.
export function weigh(lengths) {
  const targets = lengths.map((length) => length - 1);
  const all = sum(targets);
  const n = lengths.length;
  const shares = targets.map((count) => count / all);
  const norm = (vector) => Math.sqrt(sum(vector.map((x) => x * x)));
  const error = norm(shares.map((share) => 1 / n - share)) / norm(shares);
  return { targets, right: 1 / all, wrong: targets.map((count) => 1 / (n * count)), error };
}

// [first frame, label] of each micro-batch and of the optimizer.
function startsOf(all) {
  const isNew = (frame, i) => i === 0 || frame.number !== all[i - 1].number;
  return all.flatMap((frame, i) => (isNew(frame, i) ? [[i, frame.number ?? "step"]] : []));
}

export function mount(root, data) {
  const { film, looks } = data;
  const gradients = looks.findIndex(([name]) => name === GRADIENTS);
  const state = { n: 4, m: 4 };
  let split = frames(film, state.n, state.m);
  const peakOf = () => split.findIndex((frame) => totalOf(frame) === highest(split));
  state.moment = peakOf();
  let whole = wholeFrames(film, state.n, state.m);
  let last = ""; // the sentence of the part that was used last

  const resize = (changes) => {
    const position = state.moment / split.length;
    Object.assign(state, changes);
    split = frames(film, state.n, state.m);
    whole = wholeFrames(film, state.n, state.m);
    state.moment = Math.min(Math.round(position * split.length), split.length - 1);
    showSizes();
    showMoment();
  };
  const go = (moment) => {
    state.moment = moment;
    showMoment();
  };
  const count = slider("micro-batches n", { min: 1, max: 8 }, (n) => resize({ n }));
  const size = slider("sequences in each, m", { min: 2, max: 16 }, (m) => resize({ m }));
  const isAtEnd = () => state.moment === split.length - 1;
  const play = player((isFirst) => go(isFirst ? 0 : state.moment + 1), isAtEnd, 80);
  const moment = slider("moment", { min: 0 }, (position) => {
    play.stop();
    go(position);
  });
  const panels = ["micro-batches", "the whole batch"].map((name) => {
    const picture = chart(`memory over one optimizer step: ${name}`, {
      height: 154,
      top: 24,
      bottom: 24,
    });
    const fills = looks.map(([, colour, hatch]) => pattern(picture.svg, colour, hatch));
    picture.drag((at) => {
      play.stop();
      go(Math.min(Math.floor(at), split.length - 1));
    });
    return { picture, fills };
  });
  const sentence = paragraph();
  const bytes = table(["at this moment, MiB", "", ""]);
  const swatches = looks.map(([name, colour, hatch]) =>
    make("span", {}, swatch(colour, hatch), name),
  );
  const peaks = paragraph();

  function showPanel({ picture, fills }, all, ceiling, title) {
    const ticks = startsOf(all);
    // on the common scale the labels of a low curve would lie on each other
    const isLow = highest(all) < 0.2 * ceiling;
    const levels = (isLow ? [highest(all)] : [0, highest(all)]).map((total) => [total, mib(total)]);
    picture.begin({ from: 0, to: all.length, ticks }, { from: 0, to: ceiling, ticks: levels });
    const book = all.map(({ bytes }) => bytes);
    stack(picture, book, fills);
    picture.text(0, ceiling, title, { dy: -8 });
  }

  const [splitName, wholeName] = [
    () => `${state.n} × ${state.m}`,
    () => `1 × ${state.n * state.m}`,
  ];

  // What changes with the sizes only.
  function showSizes() {
    const [ours, theirs] = [highest(split), highest(whole)];
    // by doublings, so that a dragged size is seen to grow
    const ceiling = 25 * MIB * 2 ** Math.ceil(Math.log2(Math.max(ours, theirs) / MIB / 25));
    showPanel(panels[0], split, ceiling, `${splitName()}, MiB`);
    showPanel(panels[1], whole, ceiling, `${wholeName()}, MiB`);
    count.show(state.n, state.n === 1 ? "1 micro-batch" : `${state.n} micro-batches`);
    size.show(state.m, `${state.m} sequences`);
    moment.limit(split.length - 1);
    bytes.setHeads(["at this moment, MiB", splitName(), wholeName()]);
    const alone = highest(frames(film, 1, state.m));
    peaks.textContent =
      state.n === 1
        ? `One micro-batch is the whole batch, with a peak of ${mib(ours)} MiB.`
        : `Peaks: ${splitName()}: ${mib(ours)} MiB, ${wholeName()}: ${mib(theirs)} MiB, ` +
          `1 × ${state.m}: ${mib(alone)} MiB. So ${splitName()} needs ${percent(ours / theirs)} ` +
          `of the peak of the whole batch, and ${percent(ours / alone)} of that of one ` +
          "micro-batch alone.";
  }

  function showMoment() {
    const [now, other] = [split[state.moment], whole[state.moment]];
    moment.show(state.moment, `${state.moment + 1} of ${split.length}`);
    for (const { picture } of panels) picture.point(state.moment + 0.5, CURSOR);
    const where =
      now.number === null
        ? "The optimizer updates the weights"
        : `Micro-batch ${now.number} of ${state.n}, ${now.phase} phase`;
    const stays =
      now.number > 1
        ? `The gradients of earlier micro-batches stay: ${mib(now.bytes[gradients])} MiB. `
        : "";
    last = sentence.textContent =
      `${where}: ${mib(totalOf(now))} MiB. ${stays}At the same time the whole batch is in its ` +
      `${other.phase} phase, with ${mib(totalOf(other))} MiB.`;
    const rows = swatches.map((title, k) => [title, mib(now.bytes[k]), mib(other.bytes[k])]);
    bytes.show([...rows, ["together", mib(totalOf(now)), mib(totalOf(other))]]);
  }

  // To the first moment of the next phase, or of this one or the one before it.
  function jump(way) {
    const key = ({ number, phase }) => `${number} ${phase}`;
    const isNew = (frame, i) => i === 0 || key(frame) !== key(split[i - 1]);
    const starts = [...split.keys()].filter((i) => isNew(split[i], i));
    const target =
      way > 0 ? starts.find((i) => i > state.moment) : starts.findLast((i) => i < state.moment);
    if (target !== undefined) go(target);
  }

  const lengths = [...LENGTHS[0]];
  const sliders = lengths.map((_, i) =>
    slider(`tokens of sequence ${i + 1}`, { min: 2, max: 64 }, (length) => {
      lengths[i] = length;
      showWeights();
    }),
  );
  const cases = LENGTHS.map((numbers) => [numbers.join(", "), numbers]);
  const examples = jumps("Lengths:", cases, (numbers) => {
    lengths.splice(0, lengths.length, ...numbers);
    showWeights();
  });
  const weights = chart("the weight of a target token in each micro-batch", {
    height: 156,
    left: 66,
    top: 26,
    bottom: 24,
  });
  const wrongFill = pattern(weights.svg, "var(--vermilion)", "//");
  const tokens = table(["micro-batch", "targets", "correct", "by mean of means", "ratio"]);
  const error = paragraph();

  function showWeights() {
    const weighed = weigh(lengths);
    const { targets, right, wrong } = weighed;
    sliders.forEach((control, i) => control.show(lengths[i], `${lengths[i]} tokens`));
    examples.show((numbers) => String(numbers) === String(lengths));
    const largest = Math.max(right, ...wrong);
    const ticks = wrong.map((_, i) => [i + 0.5, `micro-batch ${i + 1}`]);
    const levels = [0, largest].map((weight) => [weight, percent(weight)]);
    weights.begin({ from: 0, to: wrong.length, ticks }, { from: 0, to: largest, ticks: levels });
    weights.text(0, largest, "weight of a token. Grey: correct; hatched: mean of means", {
      dy: -10,
    });
    wrong.forEach((weight, i) => {
      weights.bar([i + 0.15, i + 0.48], [0, right], { fill: "#7b8794", ...EDGE });
      weights.bar([i + 0.52, i + 0.85], [0, weight], { fill: wrongFill, ...EDGE });
    });
    tokens.show(
      targets.map((targets, i) => {
        const ratio = short(wrong[i] / right, 3);
        return [i + 1, targets, percent(right), percent(wrong[i]), ratio];
      }),
    );
    last = error.textContent =
      weighed.error < 1e-12
        ? "All micro-batches have equally many targets, so the mean of means is right."
        : `The gradient of the mean of means is off by ${percent(weighed.error)}. This holds if ` +
          "the mean gradients of the micro-batches are equally long and point in unrelated " +
          "directions.";
  }

  layout(root, data.say, {
    controls: [
      paragraph(count.element, size.element),
      paragraph(
        play.element,
        " ",
        button("previous phase", () => jump(-1)),
        " ",
        button("next phase", () => jump(1)),
        " ",
        button("to the peak", () => go(peakOf())),
      ),
      paragraph(moment.element),
    ],
    picture: [...panels.map(({ picture }) => picture.svg), sentence],
    numbers: [bytes.element, peaks],
    folded: [
      [
        "Unequal lengths: what one token weighs",
        paragraph("Four micro-batches have one sequence each. Its first token is not a target."),
        paragraph(...sliders.map(({ element }) => element)),
        examples.element,
        weights.svg,
        tokens.element,
        error,
      ],
      [
        "How we know",
        "Predicted by the ledger for gpt2-nano in float32 on a CPU, with sequences of 64 tokens. " +
          "The time axis is a sketch. The areas lie in the order of the table, the first one at " +
          "the bottom.",
      ],
    ],
  });
  showWeights();
  showSizes();
  showMoment();
  return () => last;
}
