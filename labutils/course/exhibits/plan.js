// Choose a model and its switches: which bytes, which cards, which milliseconds, which config?
import {
  chart,
  choice,
  details,
  EDGE,
  layout,
  make,
  MIB,
  paragraph,
  pattern,
  short,
  slider,
  sum,
  swatch,
  table,
  whole,
} from "./shared.js";

const LABELS = {
  model: "model",
  precision: "precision",
  seq_len: "tokens",
  gradient_checkpointing: "checkpointing",
  optimizer: "optimizer",
};
const GIB = 1024 * MIB;
const round = (x) => whole(Number(x.toPrecision(2)));
const keyOf = (setting, switches) => switches.map((name) => setting[name]).join("/");

// The value at a batch size, on straight lines through the points that are known.
export function between(row, batch, points) {
  if (!row) return 0;
  const right = Math.max(
    1,
    points.findIndex((point) => point >= batch),
  );
  const [x0, x1] = [points[right - 1], points[right]];
  return row[right - 1] + ((row[right] - row[right - 1]) * (batch - x0)) / (x1 - x0);
}

// {phase: bytes by category at its peak}, in the order of data.looks.
export function phases(data, setting, batch) {
  const update = data.update[keyOf(setting, data.standing)].MiB;
  const known = data.phases[keyOf(setting, data.shape)].MiB;
  const peaks = {};
  for (const phase of data.phase_names) {
    const varying =
      phase in known
        ? known[phase].map((row) => between(row, batch, data.points))
        : update.slice(data.n_fixed);
    peaks[phase] = [...update.slice(0, data.n_fixed), ...varying].map((mib) => mib * MIB);
  }
  return peaks;
}

// [phase, bytes] of the highest peak.
export function peak(peaks) {
  const totals = Object.entries(peaks).map(([phase, bytes]) => [phase, sum(bytes)]);
  return totals.reduce((highest, total) => (total[1] > highest[1] ? total : highest));
}

// The GiB of the smallest card on which it runs.
export function needed(data, setting, batch) {
  const [, bytes] = peak(phases(data, setting, batch));
  const share = data.phases[keyOf(setting, data.shape)].needed;
  return (bytes * share) / GIB + data.context_gib;
}

// The GiB that tensors may have at the peak on a card of `memory` GiB, which is `needed` turned
// around.
export function usable(data, setting, memory) {
  return (memory - data.context_gib) / data.phases[keyOf(setting, data.shape)].needed;
}

// Milliseconds on each card of data.timed, with their band; null without hardware.
// The host issues the work, the card computes it: the later of the two ends the step.
export function times(data, setting, batch) {
  const before = data.phases[keyOf(setting, data.shape)];
  const update = data.update[keyOf(setting, data.standing)];
  return before.ms.map((row, card) => {
    if (!row) return null;
    const busy = between(row, batch, data.points);
    // with a host that takes so many times as long
    const step = (slower) => {
      const computed = Math.max(busy, slower * before.host) + update.ms[card];
      return Math.max(computed, slower * (before.host + update.host));
    };
    const ms = step(1);
    const launches = 1 - (busy + update.ms[card]) / ms;
    const isWide = launches > data.launch_bound || batch === 1;
    const [below, above] = isWide ? data.bands.wide : data.bands.eager;
    const high = Math.max(ms * (1 + above), step(data.slow_host));
    return { ms, low: ms * (1 - below), high };
  });
}

export function yaml(data, setting, batch) {
  const size = { micro_batch_size: batch, tokens_per_step: batch * setting.seq_len };
  const changed = { ...data.changed, ...setting, ...size };
  const lines = data.config.map((line) => {
    const [key] = line.split(":");
    return key in changed ? `${key}: ${changed[key]}` : line;
  });
  return lines.join("\n") + "\n";
}

function gib(bytes) {
  if (bytes === 0) return "0";
  return bytes < 0.005 * GIB ? "< 0.01" : (bytes / GIB).toFixed(2);
}

export function mount(root, data) {
  const { micro_batch_size, ...setting } = data.start;
  const state = { setting, batch: micro_batch_size };
  const names = data.looks.map(([name]) => name);
  const switches = Object.entries(data.switches).map(([key, values]) => {
    const options = values.map((value) => [value, value]);
    const control = choice(LABELS[key], options, (text) => {
      state.setting[key] = values.find((value) => String(value) === text);
      show();
    });
    return { key, ...control };
  });
  const batch = slider("micro-batch", { min: 1, max: data.points.at(-1) }, (n) => {
    state.batch = n;
    show();
  });
  const picture = chart("GiB at the peak of each phase", { height: 250, left: 124, bottom: 40 });
  const fills = data.looks.map(([, colour, hatch]) => pattern(picture.svg, colour, hatch));
  const own = make("input", { type: "number", min: 1, max: 999, step: "any" });
  own.value = 16;
  own.oninput = () => show();
  const chips = paragraph();
  const sentence = paragraph();
  const bytesTable = table(["GiB at the peak of", ...data.phase_names]);
  const swatches = data.looks.map(([name, colour, hatch]) =>
    make("span", {}, swatch(colour, hatch), name),
  );
  const verdict = paragraph();
  const cards = table(["GPU", "one step takes", "tokens/s"]);
  const file = make("pre", { tabindex: 0, role: "group", "aria-label": "config" });
  const folded = details("The config: save it as configs/my_plan.yaml", file);
  folded.ontoggle = showFile;

  function showBars(peaks, highest) {
    // the first one at the top
    const phases = [...data.phase_names].reverse();
    const ticks = phases.map((phase, i) => [i + 0.5, `${phase} ${gib(sum(peaks[phase]))}`]);
    // the card stays in the picture, so that a longer bar nears it
    const room = usable(data, state.setting, own.valueAsNumber) * GIB;
    const reach = 1.15 * Math.max(highest, Math.min(3 * highest, room > 0 ? room : 0));
    const unit = 10 ** Math.floor(Math.log10(reach / GIB));
    const every = reach / GIB < 2 * unit ? unit / 2 : unit;
    const marks = Array.from({ length: 1 + reach / GIB / every }, (_, i) => i * every);
    const across = { ticks: marks.map((at) => [at * GIB, short(at)]), title: "GiB" };
    picture.begin({ from: 0, to: reach, ...across }, { from: 0, to: phases.length, ticks });
    const ends = phases.map(() => 0);
    fills.forEach((fill, i) => {
      const boxes = [];
      phases.forEach((phase, row) => {
        const bytes = peaks[phase][i];
        const across = [ends[row], ends[row] + bytes];
        if (bytes) boxes.push([across, [row + 0.2, row + 0.8]]);
        ends[row] += bytes;
      });
      picture.bars(boxes, { fill, ...EDGE });
    });
    if (room > 0) {
      const at = Math.min(room, reach);
      if (room < reach) picture.rule({ x: at }, { stroke: "var(--vermilion)", "stroke-width": 3 });
      const above = at < reach / 2 ? { dx: 5, dy: -6 } : { dx: -5, dy: -6, anchor: "end" };
      const words = `room on your card: ${gib(room)}${room < reach ? "" : " →"}`;
      picture.text(at, phases.length, words, above);
    }
  }

  function showCards() {
    const { setting, batch } = state;
    const least = needed(data, setting, batch);
    const holding = data.cards.filter(([, memory]) => memory >= least);
    const names = holding.sort(([, a], [, b]) => a - b).map(([name]) => name);
    const answer = names.length
      ? `The smallest that hold it: ${names.slice(0, 3).join(", ")}.`
      : "No card here holds it.";
    const size = own.valueAsNumber;
    const isSize = size >= 1 && size <= 999;
    own.setAttribute("aria-invalid", !isSize);
    const mine = isSize
      ? `On yours it ${size >= least ? "fits" : "does not fit"}.`
      : "Write its GiB, as 15.5.";
    verdict.textContent =
      `The run needs a card of ${(Math.ceil(10 * least) / 10).toFixed(1)} GiB, with gaps and CUDA's memory. ` +
      `${mine} ${answer}`;
    // by size: do all cards of this size hold it?
    const holds = {};
    for (const [, memory] of data.cards) {
      const gib = Math.ceil(memory);
      holds[gib] = memory >= least && holds[gib] !== false;
    }
    const sizes = (isIn) =>
      Object.keys(holds)
        .filter((size) => holds[size] === isIn)
        .join(", ");
    chips.textContent = `GiB that hold it: ${sizes(true) || "–"}. Too small: ${sizes(false) || "–"}.`;
    const results = times(data, setting, batch);
    cards.show(
      data.timed.map((name, i) => {
        const memory = data.cards.find(([card]) => card === name)[1];
        const title = `${name}, ${memory} GiB`;
        if (!results[i]) return [title, `no ${setting.precision} hardware`, "–"];
        if (memory < least) return [title, "too small", "–"];
        const { ms, low, high } = results[i];
        const rate = (1000 * batch * setting.seq_len) / ms;
        return [title, `${round(ms)} ms (${round(low)} to ${round(high)})`, round(rate)];
      }),
    );
  }

  function show() {
    const peaks = phases(data, state.setting, state.batch);
    const [phase, bytes] = peak(peaks);
    for (const { key, show } of switches) show(state.setting[key]);
    batch.show(state.batch, state.batch === 1 ? "1 sequence" : `${state.batch} sequences`);
    showBars(peaks, bytes);
    const largest = peaks[phase].indexOf(Math.max(...peaks[phase]));
    const share = Math.round((100 * peaks[phase][largest]) / bytes);
    sentence.textContent =
      `The peak ▲: ${gib(bytes)} GiB, in the ${phase} phase. ` +
      `The largest part is ${names[largest]}: ${share} %.`;
    const marked = data.phase_names.map((name) => (name === phase ? `${name}\u00a0▲` : name));
    bytesTable.setHeads(["GiB at the peak of", ...marked]);
    const cells = (of) => data.phase_names.map((name) => gib(of(peaks[name])));
    const rows = swatches.map((title, i) => [title, ...cells((bytes) => bytes[i])]);
    bytesTable.show([...rows, ["sum", ...cells(sum)]]);
    showCards();
    showFile();
  }

  function showFile() {
    if (folded.open) file.textContent = yaml(data, state.setting, state.batch);
  }

  layout(root, data.say, {
    controls: [
      paragraph(...switches.map(({ element }) => element)),
      paragraph(batch.element, make("label", {}, "my card has ", own, " GiB")),
    ],
    picture: [picture.svg, sentence, verdict, chips],
    numbers: [bytesTable.element, cards.element],
    folded: [
      [
        "How we know",
        "All is predicted, bytes as on an A100; a step is one micro-batch, without dropout. Other " +
          "batches than 1, 8 and 64 lie on straight lines between. Tests find peaks up to 6 % off, " +
          "cards 12 %, times 8 %. Equal times: the host sets them. FP16 needs as many bytes as BF16, which a T4 emulates.",
      ],
    ],
  });
  root.append(folded);
  show();
  return () => `${sentence.textContent} ${verdict.textContent}`;
}
